"""The ledger and its audit: each step once, and nothing that is wrong passes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from andon.control.generations.quarantine import SOUND_AFTER_STEPS, STRIKES, Quarantine
from andon.control.generations.succession import GoesOn, Succession
from andon.control.link import FROM_WORKER, ControlLink
from andon.control.members import Phase, Worker
from andon.control.token import Credentials
from andon.run.records.chain import Chain
from andon.run.records.events import Event, read
from andon.run.records.folder import RunFolder
from andon.run.records.ledger import FILE, Ledger, check_record
from tests.kit.runs import SMALL, andon, train


def record(step: int, generation: int = 0) -> dict[str, Any]:
    return {"step": step, "generation": generation, "shares": [0, 4], "samples": [1, 2, 3, 4]}


def test_reports_of_several_ranks_become_one_chain() -> None:
    chain = Chain()
    found = [each for step in (1, 1, 3, 2, 2, 4) for each in chain.add(step, step)]
    assert found == [1, 2, 3, 4] and chain.step == 4


def test_a_return_to_a_checkpoint_counts_once_for_each_generation() -> None:
    chain = Chain()
    assert list(chain.add(1, 1)) == [1] and list(chain.add(3, 3)) == []
    assert chain.cut(4, 1, 0) and not chain.cut(4, 1, 0)
    assert list(chain.add(1, "again")) == ["again"] and list(chain.add(2, 2)) == [2] and chain.step == 2


def test_a_ledger_goes_on_where_a_resumed_run_starts(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 0)
    ledger.begin(0, ["here"])
    for step in (1, 2, 3):
        ledger.commit(record(step))
    ledger.close()
    with open(tmp_path / FILE, "ab") as file:
        file.write(b'{"step": 4, "gen')  # a kill has cut it short
    again = Ledger(tmp_path, 2)
    assert again.generation == 0 and again.hosts == ["here"] and again.chain.step == 3
    again.start()
    again.begin(1, ["here"])
    again.commit(record(3, generation=1))
    again.close()
    lines = list(read(tmp_path / FILE))
    assert [line.get("step", line.get("back")) for line in lines] == [None, 1, 2, 3, 2, None, 3]


def test_a_line_whose_sync_failed_is_written_once_and_synced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, synced = [OSError(5, "Input/output error")], list[int]()

    def sync(descriptor: int) -> None:
        if failures:
            raise failures.pop()
        synced.append(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    ledger = Ledger(tmp_path, 0)
    ledger.begin(0, ["here"])
    ledger.commit(record(1))
    ledger.close()
    assert len(synced) == 1 and [line.get("step") for line in read(tmp_path / FILE)] == [None, 1]


def test_a_ledger_whose_folder_is_removed_goes_on_in_a_new_file_unless_another_run_has_the_folder(
    tmp_path: Path,
) -> None:
    mine, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    with closing(mine), closing(other):
        mine.take()
        ledger = Ledger(mine.folder, 0)
        ledger.begin(0, ["here"])
        shutil.rmtree(mine.folder)
        mine.hold()
        ledger.commit(record(1))
        ledger.close()
        assert ledger.failure is None and [line.get("step") for line in read(mine.folder / FILE)] == [1]
        again = Ledger(mine.folder, 1)
        shutil.rmtree(mine.folder)
        other.take()
        again.commit(record(2))
        again.close()
        assert again.failure and "is not locked by this run any more" in again.failure.cause
        assert not (other.folder / FILE).exists()


def test_a_ledger_that_cannot_be_written_takes_little_memory_and_has_no_gap_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("andon.run.records.lines.MAX_WAITING_BYTES", 1000)
    monkeypatch.setattr("andon.run.records.lines.RETRY_SECONDS", 0.01)
    ledger, path = Ledger(tmp_path, 0), tmp_path / FILE
    path.unlink()
    path.mkdir()
    for step in range(1, 101):
        ledger.commit(record(step))
    assert ledger.failure
    path.rmdir()
    until = time.monotonic() + 10
    while not path.is_file() or not path.read_bytes():  # all that waited is written at once
        assert time.monotonic() < until
        time.sleep(0.01)
    ledger.commit(record(101))
    ledger.close()
    steps = [line["step"] for line in read(path)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) < 30


@pytest.mark.parametrize(
    "wrong",
    [
        7,
        {},
        {**record(1), "more": 1},
        {**record(1), "step": -1},
        {**record(1), "step": "1"},
        {**record(1), "shares": [0] * 100},
        {**record(1), "samples": [1.5]},
        {**record(1), "samples": "text"},
    ],
)
def test_what_is_no_record_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="a record"):
        check_record(wrong, 4)


def test_three_losses_in_a_row_are_too_many_and_steps_in_between_are_forgiven() -> None:
    quarantine, place = Quarantine(), ("host", 1)
    for _ in range(10):
        assert not quarantine.strike(place, SOUND_AFTER_STEPS) and place not in quarantine
    assert [quarantine.strike(place) for _ in range(STRIKES)] == [False, True, False]
    assert place in quarantine and ("host", 2) not in quarantine


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit")
    train(cwd=folder)
    return folder


def drop(lines: list[dict[str, Any]]) -> None:
    del lines[3]


def twice(lines: list[dict[str, Any]]) -> None:
    lines.insert(3, lines[3])


def other_samples(lines: list[dict[str, Any]]) -> None:
    lines[3]["samples"][2] += 1


def missing_slot(lines: list[dict[str, Any]]) -> None:
    lines[3]["shares"] = [0, 3]


def early_generation(lines: list[dict[str, Any]]) -> None:
    lines[3]["generation"] = 9


def cut_short(lines: list[dict[str, Any]]) -> None:
    del lines[-1]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (drop, "step 4 follows step 2"),
        (twice, "step 3 follows step 3"),
        (other_samples, "slot 2 of step 3 was computed from the wrong samples"),
        (missing_slot, "the slots of step 3 are not all computed once"),
        (early_generation, "generation 9, which has not begun"),
        (cut_short, "The ledger ends at step 5, summary.json says 6"),
    ],
)
def test_an_audit_names_what_is_wrong(trained: Path, spoil: Callable[[list[dict[str, Any]]], None], said: str) -> None:
    path = trained / "run" / FILE
    before = path.read_text()
    lines = [json.loads(line) for line in before.splitlines()]
    spoil(lines)
    try:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        code, output = andon("audit", "run", cwd=trained)
    finally:
        path.write_text(before)
    assert code == 1 and said in output and "Traceback" not in output, output


@pytest.mark.parametrize(
    "line", [b"\0" * 60, b'"text"', b'{"step": "4", "generation": 0}', b'{"generation": 0, "step"']
)
def test_a_damaged_ledger_is_named_with_the_command_that_lets_the_run_resume(
    trained: Path, tmp_path: Path, line: bytes
) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    path = tmp_path / "run" / FILE
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:3], line, *lines[4:]]))
    command = ["train", *SMALL, "--run.dir=run", "--train.steps=8"]
    code, output = andon(*command, cwd=tmp_path)
    assert code == 1 and f"Line 4 of {path} is damaged" in output and "Traceback" not in output, output
    assert len(output.splitlines()[-3:]) == 3 and f"sed -i 4d {path}" in output
    subprocess.run(["sed", "-i", "4d", str(path)], check=True)
    code, output = andon(*command, cwd=tmp_path)
    assert code == 0, output
    code, output = andon("audit", "run", cwd=tmp_path)
    assert code == 1 and "step 4 follows step 2" in output, output


def test_an_audit_names_a_damaged_line(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    with open(tmp_path / "run" / FILE, "ab") as file:
        file.write(b"not json\n")
    code, output = andon("audit", "run", cwd=tmp_path)
    assert code == 1 and f"Line 8 of run/{FILE} is damaged" in output and len(output.splitlines()) == 3, output


def test_a_run_from_a_checkpoint_of_another_one_is_sound(trained: Path) -> None:
    options = ["--resume=run/checkpoints/checkpoint-6", "--train.steps=9"]
    train(*options, cwd=trained, name="other")
    code, output = andon("audit", "other", cwd=trained)
    assert code == 0 and "3 steps are committed" in output and "each of their 24 samples" in output, output


def test_an_audit_of_a_sound_run_says_what_it_proves(trained: Path) -> None:
    code, output = andon("audit", "run", cwd=trained)
    assert code == 0 and "6 steps are committed" in output and "each of their 48 samples" in output, output


def test_a_worker_that_says_twice_that_it_has_left_leaves_one_generation(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        link = ControlLink(server.accept()[0], FROM_WORKER)
        ledger, said = Ledger(tmp_path, 0), list[Event]()
        credentials = Credentials("the token of the tests")
        succession = Succession(1, GoesOn(1, 60.0, ledger), credentials, said.append, wake=lambda: None)
        worker = Worker(link, Phase.WAITING, "here")
        succession.ready(worker)
        for _ in range(2):  # once more when its coordinator is back, which may have heard it before
            succession.on_message(worker, {"kind": "part", "generation": 0, "why": "somebody joins", "lost": None})
        assert ledger.generation == 1 and succession.generations.members == [worker]
        ledger.close()
        link.close()
