"""The board reads metrics.jsonl alone: one curve through resumes, everything once, then only what is new."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from andon.board.feed import Feed
from andon.board.history import History, parse
from andon.board.prometheus import exposition
from andon.board.serve import background_board
from andon.board.text import plain
from tests.kit.runs import start

NOW = 1.7e9
TOKEN = "a-token-for-the-tests-of-the-board"


def event(kind: str, after: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "time": NOW + after, **fields}


def step(number: int, loss: float | None = None, **fields: Any) -> dict[str, Any]:
    values = {"loss": 1 / number if loss is None else loss, "tokens": 10, "tokens_per_s": 100.0, "lr": 0.1}
    return event("step", 0.1 * number, step=number, **values, grad_norm=2.0, **fields)


def begin(at: int = 0, workers: int = 2, after: float = 0.0) -> list[dict[str, Any]]:
    joined = [event("worker", after, rank=rank, host="here", pid=1) for rank in range(workers)]
    return [*joined, event("start", after, step=at, transport="shm", floor=0.3, workers=workers, steps=100)]


def write(folder: Path, events: list[dict[str, Any]], mode: str = "w") -> Path:
    folder.mkdir(exist_ok=True)
    with open(folder / "metrics.jsonl", mode) as file:
        file.writelines(json.dumps(each) + "\n" for each in events)
    return folder


def opened(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Feed(folder, "key").everything())
    return found


def test_after_a_resume_the_curve_is_one_and_steps_done_again_are_shown_as_such(tmp_path: Path) -> None:
    events = [*begin(), *(step(n) for n in range(1, 11)), *begin(6, after=5), *(step(n, 9.0) for n in range(7, 9))]
    found = opened(write(tmp_path / "run", events))
    assert found["curve"]["step"] == list(range(1, 9)) and found["curve"]["loss"][5:] == [0.166667, 9.0, 9.0]
    (again,) = found["redone"]
    assert again["step"] == [6, 7, 8, 9, 10] and again["loss"][1] == 0.142857
    assert [span["how"] for span in found["lanes"][0]["spans"]] == ["killed", ""]
    assert found["lanes"][0]["spans"][0]["end"] == NOW + 1.0 and found["lanes"][0]["spans"][1]["start"] == NOW + 5
    assert [each["why"] for each in found["generations"]] == ["started", "resumed after step 6"]


def test_a_lost_worker_leaves_a_gap_in_its_lane_and_another_takes_its_seat(tmp_path: Path) -> None:
    lost = event("lost", 1.5, rank=1, host="here", why="killed", text="rank 1 on here is lost")
    folder = write(tmp_path / "run", [*begin(workers=3), *(step(n) for n in range(1, 11)), lost])
    feed = Feed(folder, "key")

    def lamps() -> list[tuple[int, str]]:
        return [(worker.rank, worker.lamp) for worker in feed.history.story.lamps("running")]

    assert lamps() == [(0, "running"), (1, "lost"), (2, "running")]
    fewer = event("generation", 1.6, generation=1, step=10, workers=2, joined=0, lost_state=False)
    write(folder, [fewer, step(11)], "a")
    feed.advance()
    assert lamps() == [(0, "running"), (1, "lost"), (1, "running")]  # the ranks close the gap
    more = event("generation", 3.1, generation=2, step=11, workers=3, joined=1, lost_state=False)
    write(folder, [event("worker", 3.0, rank=2, host="there"), more, step(12)], "a")
    feed.advance()
    sections = feed.sections()
    assert lamps() == [(0, "running"), (2, "running"), (1, "running")] and sections["workers"][1]["host"] == "there"
    spans = [(span["start"], span["end"], span["how"]) for span in sections["lanes"][1]["spans"]]
    assert spans == [(NOW, NOW + 1.5, "lost"), (NOW + 3.1, None, "")]
    told = [(each["generation"], each["workers"], each["why"]) for each in sections["generations"]]
    assert told == [(0, 3, "started"), (1, 2, "rank 1 was lost"), (2, 3, "1 joined")]
    smaller = event("generation", 4.1, generation=3, step=12, workers=2, joined=0, lost_state=False)
    write(folder, [smaller], "a")  # by `andon resize`: the last rank is told to leave
    feed.advance()
    assert lamps() == [(0, "running"), (2, "stopped"), (1, "running")]
    sections = feed.sections()
    assert sections["generations"][-1]["why"] == "1 left" and sections["status"]["workers"] == 2
    assert sections["lanes"][1]["spans"][-1]["how"] == "released"
    write(folder, [*begin(11, workers=2, after=20), step(12)], "a")  # killed, and resumed with two
    feed.advance()
    assert lamps() == [(0, "running"), (1, "running")] and feed.history.steps.tolist() == list(range(1, 13))


def test_a_halt_lights_the_lamp_of_who_pulled_the_cord(tmp_path: Path) -> None:
    finding = {"rank": 1, "host": "here", "kind": "NaN", "samples": [4], "slot": 0, "parameter": "w"}
    halt = event("halt", step=3, committed=2, cause="bad", findings=[finding], sound=True, texts={"4": "text"})
    found = opened(write(tmp_path / "run", [*begin(), step(1), step(2), halt]))
    assert [worker["lamp"] for worker in found["workers"]] == ["stopped", "cord"]
    assert found["status"]["state"] == "halted" and found["halt"]["texts"] == {"4": "text"}
    named = event("halt", step=3, committed=2, cause="rank 0 holds other bits", findings=[], sound=False)
    found = opened(write(tmp_path / "run", [*begin(), step(1), named]))
    assert [worker["lamp"] for worker in found["workers"]] == ["cord", "stopped"]


def test_the_worker_that_the_others_wait_for_is_slow(tmp_path: Path) -> None:
    times = {"forward": [10.0, 10.0, 30.0], "backward": [20.0, 20.0, 40.0], "exchange": [40.0, 40.0, 0.1]}
    feed = Feed(write(tmp_path / "run", [*begin(workers=3), *(step(n, rank_ms=times) for n in range(1, 9))]), "key")
    lamps = feed.history.story.lamps("running")
    assert [worker.lamp for worker in lamps] == ["running", "running", "slow"] and "2.3 ×" in lamps[2].detail
    assert json.loads(feed.everything())["strip"][-1] == [7, times]


def test_a_run_that_says_nothing_is_silent_and_a_finished_one_is_not(tmp_path: Path) -> None:
    events = [*begin(), *(step(n) for n in range(1, 9))]
    assert opened(write(tmp_path / "run", events))["status"]["state"] == "silent"
    done = event("done", 9.0, step=8, samples=["the end"])
    found = opened(write(tmp_path / "run", [*events, done]))
    assert found["status"]["state"] == "done" and found["samples"][-1]["text"] == "the end"


def test_what_is_no_event_and_what_is_unknown_does_no_harm(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [*begin(), step(1), event("from_the_future", anything=[1]), step(2)])
    strange = [b"not json", b"[1, 2]", b"{}", b'{"event": 3}', b'{"event": "step"}', b'{"event": "halt"}', b"\xff\xfe"]
    strange += [
        b'{"event": "step", "step": 1e999, "loss": "x"}',
        b"[" * 5000,
        b'{"event": "eval", "loss": ' + b"9" * 5000,
    ]
    strange += [b'{"event": "lost", "rank": -1}', b'{"event": "worker", "rank": 99999999999, "host": 7}']
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b"\n".join([*strange, json.dumps(step(3)).encode(), b'{"event": "step", "st']))
    found = opened(folder)
    assert found["curve"]["step"][-1] == 3


@pytest.mark.parametrize("field", ["loss", "tokens", "step", "mfu"])
@pytest.mark.parametrize("wrong", ["1e-e5", "1.5.5", "1e999", "-", "9" * 40, "0." + "1" * 27 + "e-5", "01"])
def test_a_damaged_number_among_many_steps_breaks_no_run(tmp_path: Path, field: str, wrong: str) -> None:
    events = [*begin(), *(step(n, 0.5, mfu=0.25) for n in range(1, 1001))]
    lines = (write(tmp_path / "run", events) / "metrics.jsonl").read_text().splitlines()
    lines[500] = json.dumps(events[500] | {field: "here"}).replace('"here"', wrong)
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    feed = Feed(tmp_path / "run", "key")
    whole = History(tmp_path / "run" / "metrics.jsonl")
    whole._add(parse([line.encode() for line in lines]))
    for name in ("loss", "mfu"):
        np.testing.assert_array_equal(feed.history.column(name), whole.column(name))
    np.testing.assert_array_equal(feed.history.steps, whole.steps)
    assert feed.history.story.tokens == whole.story.tokens > 4000
    assert "andon_step" in exposition([feed]) and json.loads(feed.everything())


def test_a_large_file_opens_with_some_of_its_steps_and_all_other_events_and_is_then_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("andon.board.history.LARGE_BYTES", 1)
    monkeypatch.setattr("andon.board.history.PARSED_AT_ONCE", 100)
    monkeypatch.setattr("andon.board.history.CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr("andon.board.history.BULK_LINES", 100)
    monkeypatch.setattr("andon.board.feed.PAGE_FIRST_SECONDS", 0.0)
    times = {"forward": [1.0, 1.0]}
    steps = [step(n, 50.0 if n == 3333 else None, rank_ms=times) for n in range(1, 6001)]
    for number in range(4000, 5000):
        steps[number]["mfu"] = 0.25 + number / 10**5
        steps[number + 1000]["accuracy"] = number / 10**4
    steps[4500]["skipped"] = "a bad gradient"
    steps[3000:3000] = [event("eval", step=3000, loss=0.5, bits_per_byte=0.1), event("stopped", step=3000)]
    steps[2000:2000] = begin(1900, after=200)
    folder = write(tmp_path / "run", [*begin(), *steps])
    feed = Feed(folder, "key")
    assert 50 <= feed.history.count <= 250 and feed.history.strip[-1][0] == 5999
    assert feed.history.story.evals[0][0] == 3000 and len(feed.history.story.generations) == 2
    until = time.monotonic() + 20
    while feed.history.stride > 1 and time.monotonic() < until:
        time.sleep(0.01)
        feed.advance()
    whole = History(folder / "metrics.jsonl")
    whole._add(json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    for name in ("loss", "lr", "grad_norm", "tokens_per_s", "mfu", "accuracy"):
        np.testing.assert_array_equal(feed.history.column(name), whole.column(name))
    assert np.nanmax(whole.column("mfu")) == 0.29999 and np.nanmax(whole.column("accuracy")) == 0.4999
    assert feed.history.story.skipped == 1
    assert feed.history.story.tokens == whole.story.tokens == 60_000 and feed.history.redone == whole.redone
    shown = json.loads(feed.everything())
    assert len(shown["curve"]["step"]) == 900 and max(shown["curve"]["loss_high"]) == 50.0
    assert feed.since("0.0") is None  # a page with the first version loads again


def test_a_delta_has_only_what_is_new(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [*begin(), *(step(n) for n in range(1, 501)), event("sample", step=1, text="a")])
    feed = Feed(folder, "key")
    cursor = json.loads(feed.everything())["cursor"]
    feed.advance()
    assert feed.since(cursor) == []
    write(folder, [step(501), step(502)], "a")
    feed.advance()
    ((_, text),) = feed.since(cursor) or []
    delta = json.loads(text)
    assert delta["rows"]["step"] == [501, 502] and set(delta) == {"rows", "status"} and len(text) < 600
    write(folder, [*begin(400), step(401, 7.0)], "a")
    feed.advance()
    last = json.loads((feed.since(cursor) or [])[-1][1])
    assert last["cut"] == 400 and last["rows"]["loss"] == [7.0] and last["redone"]


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [*begin(), step(1), step(2)])
    feed = Feed(folder, "key")
    cursor = json.loads(feed.everything())["cursor"]
    (folder / "metrics.jsonl").unlink()
    write(folder, [*begin(), step(1)])
    feed.advance()
    assert feed.since(cursor) is None and feed.history.count == 1


def test_marks_and_control_characters_are_spelled_out() -> None:
    hostile = "\x1b[31m\u202egnp.exe\u2066\x00<script>\ud800"
    assert plain({hostile: [hostile]}) == {(text := r"\x1b[31m\u202egnp.exe\u2066\x00<script>\ud800"): [text]}
    assert plain(float("nan")) is None and len(plain("x" * 10_000)) == 4001


def board(folder: Path, *arguments: str) -> contextlib.AbstractContextManager[str]:
    """A board that serves a folder; gives its address."""
    return board_of(["board", str(folder), *arguments], folder.parent)


@contextlib.contextmanager
def board_of(arguments: list[str], cwd: Path) -> Iterator[str]:
    """A board that serves; gives its address."""
    process = start(*arguments, cwd=cwd)
    assert process.stdout
    line = ""
    while not line.startswith("Board: "):
        line = process.stdout.readline()
        assert line, "the board ended"
    yield line.split()[1]
    process.terminate()
    process.wait(10)


def get(url: str, path: str, **headers: str) -> tuple[int, http.client.HTTPMessage, str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def listens(process: psutil.Process, port: int | None) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(one.laddr and one.laddr[1] == port for one in process.net_connections("tcp"))
    return False


def test_the_page_is_small_comes_from_one_place_and_answers_only_to_this_machine(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [*begin(), step(1)])
    with board(folder, "--bind=127.0.0.1:0") as url:
        status, headers, page = get(url, "/")
        assert status == 200 and "default-src 'none'" in headers["Content-Security-Policy"]
        paths = ["/uplot.css", "/board.css", "/uplot.js", "/board.js", "/charts.js", "/panels.js"]
        parts = [page, *(get(url, path)[2] for path in paths)]
        assert sum(len(part.encode()) for part in parts) <= 150_000
        assert not any(
            f"{scheme}//" in part.replace("http://www.w3.org", "")
            for part in (page, *parts[4:])
            for scheme in ("http:", "https:")
        )
        (run,) = json.loads(get(url, "/api/runs")[2])
        assert get(url, f"/api/runs/{run['key']}")[0] == 200 and get(url, "/api/runs/none")[0] == 404
        assert get(url, f"/api/runs/{run['key']}/curve?from=a&to=2")[0] == 400
        assert get(url, "/api/runs", Host="evil.example")[0] == 421  # a rebound name
        assert get(url, "/../../etc/passwd")[0] == 404 and get(url, "/metrics.jsonl")[0] == 404


def test_off_loopback_nothing_is_readable_without_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANDON_TOKEN", TOKEN)
    folder = write(tmp_path / "run", [*begin(), step(1)])
    with board(folder, "--bind=0.0.0.0:0") as url:
        for path in ("/api/runs", "/metrics", "/board.js", "/api/runs/x/stream", "/nothing"):
            assert get(url, path)[0] == 401
            assert get(url, path, Authorization=f"Bearer {TOKEN}x")[0] == 401
        assert get(url, "/")[0] == 303 and "token" in get(url, "/login")[2]
        assert get(url, "/api/runs", Authorization=f"Bearer {TOKEN}")[0] == 200
        port = urlsplit(url).port
        for typed, works in (("wrong-token-wrong-token", False), (TOKEN, True)):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            with contextlib.closing(connection):
                form = {"Content-Type": "application/x-www-form-urlencoded"}
                connection.request("POST", "/login", f"token={typed}", form)
                answer = connection.getresponse()
                cookie = (answer.headers["Set-Cookie"] or "").partition(";")[0]
                assert bool(cookie) == works and TOKEN not in cookie and answer.status == 303
        assert get(url, "/api/runs", Cookie=cookie)[0] == 200
        forged = cookie[:-1] + ("1" if cookie.endswith("0") else "0")
        assert get(url, "/api/runs", Cookie=forged)[0] == 401


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has all of 127.0.0.0/8")
def test_another_loopback_address_answers_with_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANDON_TOKEN", TOKEN)
    with board(write(tmp_path / "run", [*begin(), step(1)]), "--bind=127.0.0.2:0") as url:
        request = urllib.request.Request(f"{url}api/runs", headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert len(json.load(answer)) == 1


def test_prometheus_reads_where_every_run_is(tmp_path: Path) -> None:
    events = [*begin(), *(step(n) for n in range(1, 5)), event("eval", step=4, loss=0.75), event("checkpoint", step=4)]
    write(tmp_path / 'a "quoted\\ name', [*events, event("lost", rank=1, host="h")])
    write(tmp_path / "b", [*begin(), step(1)])
    with board(tmp_path, "--bind=127.0.0.1:0") as url:
        families = list(text_string_to_metric_families(get(url, "/metrics")[2]))
    values = {
        (sample.name, sample.labels["run"], sample.labels.get("rank") or sample.labels.get("state")): sample.value
        for family in families
        for sample in family.samples
    }
    name = 'a "quoted\\ name'
    assert values["andon_train_loss", name, None] == 0.25 and values["andon_val_loss", name, None] == 0.75
    assert values["andon_step", "b", None] == 1 and values["andon_tokens_total", name, None] == 40
    assert values["andon_worker_up", name, "1"] == 0 and values["andon_checkpoint_step", name, None] == 4
    assert values["andon_state", name, "silent"] == 1


def test_a_run_goes_on_without_a_board_that_cannot_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("andon.board.serve.LOOPBACK", "203.0.113.1")  # not an address of this machine
    said: list[str] = []
    with background_board(tmp_path, said.append):
        pass
    assert said[0].startswith("No board for this run: ")


def test_the_board_of_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    process = start("board", str(tmp_path / "nothing"), cwd=tmp_path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and len(output.splitlines()) == 3 and "nothing" in output
