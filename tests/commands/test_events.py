"""`metrics.jsonl`, `summary.json` and `halt.json`: whole lines, JSON that everybody reads, nothing stale."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from pathlib import Path

import pytest

from andon.run.records.events import Recorder, event, read


def record(folder: Path, *said: dict[str, object]) -> None:
    recorder = Recorder(folder)
    for each in said:
        recorder.emit(each)
    recorder.close()
    assert recorder.failure is None


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    record(tmp_path, event("step", step=1, loss=math.nan, parts=[math.inf, {"deep": -math.inf}, 2.5]))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    said = json.loads(line, parse_constant=refuse)
    assert (said["loss"], said["parts"]) == (None, [None, {"deep": None}, 2.5])


def test_a_line_that_a_kill_cut_short_is_removed_before_the_next_one(tmp_path: Path) -> None:
    record(tmp_path, event("step", step=1))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"event": "step", "st')
    assert [said["step"] for said in read(tmp_path / "metrics.jsonl")] == [1]
    record(tmp_path, event("step", step=2))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_only_the_end_of_a_large_file_is_read_for_its_last_line(tmp_path: Path) -> None:
    with open(tmp_path / "metrics.jsonl", "wb") as file:
        file.truncate(256 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"event": "step", "st' + b"x" * 200_000)
    tracemalloc.start()
    record(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "metrics.jsonl").stat().st_size == (256 << 20) + 1 and peak < 1 << 20


def test_a_link_in_place_of_a_file_is_refused_and_its_target_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("without an end of line")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        Recorder(tmp_path)
    assert (tmp_path / "precious").read_text() == "without an end of line"


def test_the_end_of_a_run_is_a_file_of_its_own(tmp_path: Path) -> None:
    record(tmp_path, event("done", step=5, loss=1.5), event("halt", step=6, cause="a drill"))
    assert json.loads((tmp_path / "summary.json").read_text()) == {"step": 5, "loss": 1.5}
    assert json.loads((tmp_path / "halt.json").read_text()) == {"step": 6, "cause": "a drill"}
    assert [said["event"] for said in read(tmp_path / "metrics.jsonl")] == ["done", "halt"]


def test_an_event_has_its_kind_and_the_time(tmp_path: Path) -> None:
    said = event("note", text="hello")
    assert said["event"] == "note" and said["text"] == "hello"
    assert abs(said["time"] - (tmp_path.stat().st_mtime)) < 3600
