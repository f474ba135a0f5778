"""Viewers get what is new, each once, whatever happens to a file or to other viewers; and what that costs."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from urllib.parse import urlsplit

import psutil
import pytest

from andon.board.app import Board
from andon.board.feed import Feed
from andon.board.prometheus import exposition
from andon.board.story import Worker
from tests.board.test_board import begin, board, get, listens, step, write


def test_viewers_get_new_events_as_they_are_written(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [*begin(), step(1)])
    with board(folder, "--bind=127.0.0.1:0") as url:
        (run,) = json.loads(get(url, "/api/runs")[2])
        cursor = json.loads(get(url, f"/api/runs/{run['key']}")[2])["cursor"]
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port, timeout=20)
        with contextlib.closing(connection):
            connection.request("GET", f"/api/runs/{run['key']}/stream?after={cursor}")
            answer = connection.getresponse()
            write(folder, [step(2, 0.125)], "a")
            lines = [answer.readline().decode() for _ in range(3)]
    assert lines[0].startswith("id: 0.1") and json.loads(lines[1].removeprefix("data: "))["rows"]["loss"] == [0.125]


@pytest.mark.parametrize("read", [lambda feed: feed.curve(0, 9, 10), lambda feed: feed.since("0.0")])
def test_a_viewer_reads_no_history_that_is_changing(tmp_path: Path, read: Callable[[Feed], object]) -> None:
    feed = Feed(write(tmp_path / "run", [*begin(), step(1)]), "key")
    changing, go_on = Event(), Event()

    def change() -> None:
        changing.set()
        assert go_on.wait(20)

    feed.history.advance = change  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        advanced = pool.submit(feed.advance)
        assert changing.wait(20)
        found = pool.submit(read, feed)
        with pytest.raises(TimeoutError):
            found.result(0.2)
        go_on.set()
        advanced.result(20)
        assert found.result(20) is not None


def test_no_history_changes_while_prometheus_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(write(tmp_path / "run", [*begin(), step(1)]), "key")
    reading, go_on = Event(), Event()

    def lamps(state: str) -> list[Worker]:
        if not reading.is_set():
            reading.set()
            assert go_on.wait(20)
        return []

    monkeypatch.setattr(feed, "advance", lambda: None)
    monkeypatch.setattr(feed.history.story, "lamps", lamps)
    with ThreadPoolExecutor(2) as pool:
        text = pool.submit(exposition, [feed])
        assert reading.wait(20)
        advanced = pool.submit(Feed.advance, feed)
        with pytest.raises(TimeoutError):
            advanced.result(0.2)
        go_on.set()
        advanced.result(20)
        assert "andon_step" in text.result(20)


def test_viewers_get_what_follows_an_error_and_what_others_have_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("andon.board.app.TICK_SECONDS", 0.05)
    folder = write(tmp_path / "run", [*begin(), step(1)])

    async def watch() -> list[str]:
        served = Board([folder])
        (key,) = served.runs()
        feed = await served.feed(key)
        assert feed
        advance, failures = feed.advance, [RuntimeError("a line that nobody has thought of")]

        def fail_once() -> None:
            if failures:
                raise failures.pop()
            advance()

        monkeypatch.setattr(feed, "advance", fail_once)
        write(folder, [step(2)], "a")
        async with asyncio.timeout(10), contextlib.aclosing(served.deltas(feed, "0.0")) as stream:
            found = [await anext(stream)]
            write(folder, [step(3)], "a")
            advance()
            return [*found, await anext(stream)]

    assert [text.split("\n")[0] for text in asyncio.run(watch())] == ["id: 0.1", "id: 0.2"]
    assert "a line that nobody has thought of" in caplog.text


def test_a_viewer_of_a_file_that_is_replaced_loads_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [*begin(), step(1)])

    async def watch() -> list[str]:
        served = Board([folder])
        (key,) = served.runs()
        feed = await served.feed(key)
        assert feed
        for number in (2, 3):
            write(folder, [step(number)], "a")
            feed.advance()
        async with asyncio.timeout(10), contextlib.aclosing(served.deltas(feed, "0.0")) as stream:
            found = [await anext(stream)]
            (folder / "metrics.jsonl").unlink()
            write(folder, [*begin(), step(1)])
            feed.advance()  # the viewer has not received step 3 yet
            return [*found, await anext(stream), await anext(stream)]

    found = asyncio.run(watch())
    assert [text.split("\n")[0] for text in found] == ["id: 0.1", "id: 0.2", "event: reload"]


@pytest.mark.soak
@pytest.mark.parametrize("viewers", [1, 10])
def test_watching_a_run_costs_less_than_half_a_percent_of_the_machine(tmp_path: Path, viewers: int) -> None:
    """Seven steps a second of eight workers; what the board's process takes, as a share of all cores."""
    times = {name: [61.5] * 8 for name in ("forward", "backward", "fingerprint", "exchange", "optimizer", "save")}
    folder = write(tmp_path / "run", [*begin(workers=8), *(step(n, rank_ms=times) for n in range(1, 1001))])
    with board(folder, "--bind=127.0.0.1:0") as url, contextlib.ExitStack() as stack:
        (run,) = json.loads(get(url, "/api/runs")[2])
        cursor = json.loads(get(url, f"/api/runs/{run['key']}")[2])["cursor"]
        for _ in range(viewers):
            connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port, timeout=60)
            stack.enter_context(contextlib.closing(connection))
            connection.request("GET", f"/api/runs/{run['key']}/stream?after={cursor}")
        (server,) = [each for each in psutil.Process().children(recursive=True) if listens(each, urlsplit(url).port)]
        time.sleep(2)
        before, began = server.cpu_times(), time.monotonic()
        for number in range(1001, 1211):
            write(folder, [step(number, rank_ms=times)], "a")
            time.sleep(1 / 7)
        after, seconds = server.cpu_times(), time.monotonic() - began
    taken = (after.user + after.system - before.user - before.system) / seconds / (os.cpu_count() or 1)
    print(f"{viewers} viewers: {taken:.2%} of the machine")
    assert taken < 0.005
