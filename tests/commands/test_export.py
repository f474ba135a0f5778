"""What is exported is read by the tools themselves, with the right numbers and no step twice."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from andon.commands.runs.export import rows
from tests.board.test_board import begin, event, step, write
from tests.kit.runs import andon

LAST = {1: 1.0, 2: 0.5, 3: 0.25, 4: 0.75}


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file, which is a log as LevelDB writes it: blocks with pieces of (crc, length, kind)."""
    block, whole, at = 32 << 10, b"", 7
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was killed at step 5 and resumed after step 2."""
    first = [*begin(), *(step(n, 9.0) for n in (3, 4, 5)), event("eval", step=4, loss=8.0, bits_per_byte=2.0)]
    first[3:3] = [step(1, 1.0), step(2, 0.5)]
    again = [*begin(2), step(3, 0.25), step(4, 0.75), event("eval", step=4, loss=0.5, bits_per_byte=0.125)]
    return write(tmp_path / "run", [*first, *again])


def exported(run: Path, kind: str) -> None:
    code, output = andon("export", str(run), "--to", kind, cwd=run.parent)
    assert code == 0 and str(run) in output, output


def test_csv_has_each_step_once(run: Path) -> None:
    exported(run, "csv")
    with open(run / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {int(row["step"]): float(row["train/loss"]) for row in rows} == LAST
    assert [row["val/loss"] for row in rows] == ["", "", "", "0.5"] and rows[-1]["train/tokens"] == "40.0"


def test_tensorboard_reads_each_step_once(run: Path) -> None:
    exported(run, "tensorboard")
    exported(run, "tensorboard")  # a second time replaces the first
    reader = EventAccumulator(str(run / "tensorboard"))
    reader.Reload()
    assert {each.step: each.value for each in reader.Scalars("train/loss")} == LAST
    assert len(reader.Scalars("train/loss")) == 4 and reader.Scalars("val/loss")[0].value == 0.5
    assert reader.Scalars("train/lr")[0].wall_time == pytest.approx(1.7e9 + 0.1)


def test_wandb_reads_each_step_once_offline(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    exported(run, "wandb")
    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    losses: dict[int, Any] = {}
    for data in wandb_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            step_number = record.history.step.num if record.history.HasField("step") else int(items["_step"])
            assert step_number not in losses
            losses[step_number] = float(items["train/loss"])
    assert losses == LAST


def test_a_long_run_is_exported_in_linear_time(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [*begin(), *(step(number) for number in range(1, 30_001))])
    began = time.process_time()
    assert list(rows(run)) == list(range(1, 30_001))
    assert time.process_time() - began < 5  # it takes 0.5 s, and 12 s if each step looks at all earlier ones


@pytest.mark.parametrize("line", ["\0\0", "7", '{"time": 1}'])
def test_a_damaged_line_is_named(run: Path, line: str) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("".join(f"{each}\n" for each in [*lines[:2], line, *lines[2:]]))
    code, output = andon("export", str(run), cwd=run.parent)
    assert code == 1 and f"Line 3 of {run / 'metrics.jsonl'} is damaged" in output, output
    assert len(output.splitlines()) == 3


def test_an_unknown_format_a_folder_without_a_run_and_an_upload_of_csv_are_errors(run: Path) -> None:
    for arguments in (
        ["export", str(run), "--to", "excel"],
        ["export", str(run.parent)],
        ["export", str(run), "--online"],
    ):
        code, output = andon(*arguments, cwd=run.parent)
        assert code == 1 and len(output.splitlines()) == 3
