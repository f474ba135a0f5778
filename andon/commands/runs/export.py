"""`andon export`: a run's metrics.jsonl as CSV, or for TensorBoard and Weights & Biases.

Metrics have the names that users of these tools expect: `train/loss`, `val/loss`, … Each step appears once; of a step
that was done again after a resume, the last values count.
"""

import csv
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from andon.board.text import number
from andon.errors import UserError
from andon.run.records.events import Event, read_events

TRAIN = {name: f"train/{name}" for name in ("loss", "accuracy", "grad_norm", "lr", "tokens_per_s")}
EVAL = {name: f"val/{name}" for name in ("loss", "accuracy", "bits_per_byte", "valid_share")}


@dataclass
class Row:
    """The metrics of one step."""

    time: float
    values: dict[str, float] = field(default_factory=dict)


def rows(folder: Path) -> dict[int, Row]:
    """Read every step of a run, in order."""
    found: dict[int, Row] = {}
    for event in read_events(folder):
        _add(found, event)
    if not found:
        raise UserError(f"{folder} has no step yet", "The run has not begun", "Wait for its first step")
    tokens = 0.0
    for row in found.values():
        tokens += row.values.pop("tokens", 0.0)
        row.values["train/tokens"] = tokens
    return found


def _add(found: dict[int, Row], event: Event) -> None:
    kind, step = event["event"], event.get("step")
    if kind not in ("start", "step", "eval") or not isinstance(step, int):
        return
    while found and next(reversed(found)) > step - (kind == "step"):
        found.popitem()
    if kind == "step":
        times = {name: f"time/{name}" for name in event if name.endswith("_ms") and name != "rank_ms"}
        found[step] = Row(number(event.get("time")), _numbers(event, TRAIN | times | {"tokens": "tokens"}))
    elif kind == "eval":
        found.setdefault(step, Row(number(event.get("time")))).values.update(_numbers(event, EVAL))


def _numbers(event: Event, names: dict[str, str]) -> dict[str, float]:
    """The numbers of an event under their new names; null, which stands for a value that is not finite, becomes NaN."""
    return {new: number(event[old]) for old, new in names.items() if old in event}


def to_csv(folder: Path, output: Path | None) -> Path:
    """Write one line per step; a field is empty where a step has no such number."""
    output, found = output or folder / "metrics.csv", rows(folder)
    names = list(dict.fromkeys(name for row in found.values() for name in row.values))
    with open(output, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "time", *names])
        for step, row in found.items():
            writer.writerow([step, row.time, *(row.values.get(name, "") for name in names)])
    return output


def to_tensorboard(folder: Path, output: Path | None) -> Path:
    """Write an event file for `tensorboard --logdir`."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise _missing("tensorboard") from None
    output, found = output or folder / "tensorboard", rows(folder)
    for old in output.glob("events.out.tfevents.*"):  # TensorBoard would show an earlier export as well
        with suppress(OSError):
            old.unlink()
    writer = EventFileWriter(str(output))
    for step, row in found.items():
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        writer.add_event(Record(wall_time=row.time, step=step, summary=Summary(value=values)))
    writer.close()
    return output


def to_wandb(folder: Path, output: Path | None, online: bool) -> Path:
    """Write a run of Weights & Biases: offline, for `wandb sync`, or uploaded at once."""
    try:
        import wandb
    except ImportError:
        raise _missing("wandb") from None
    from andon.config.load import load_run

    found = rows(folder)
    output = output or folder
    config: dict[str, Any] = {}
    with suppress(UserError):
        config = load_run(folder / "config.yaml").model_dump(mode="json", exclude={"run", "data"})
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
    mode: Any = "online" if online else "offline"
    with wandb.init(
        project="andon", name=folder.resolve().name, dir=output, mode=mode, config=config, settings=settings
    ) as run:
        for step, row in found.items():
            run.log({**row.values, "_timestamp": row.time}, step=step)
        return Path(run.dir).parent


def export(folder: Path, kind: str, output: Path | None, online: bool, console: Console) -> None:
    """`andon export`: write a run for another tool, and print the path."""
    writers: dict[str, Callable[[Path, Path | None], Path]]
    writers = {"csv": to_csv, "tensorboard": to_tensorboard, "wandb": partial(to_wandb, online=online)}
    if kind not in writers:
        raise UserError(f"There is no format {kind!r}", f"Formats: {', '.join(writers)}", "Choose one of these")
    if online and kind != "wandb":
        raise UserError(f"--online does not go with {kind}", "Only wandb uploads a run", "Use --to wandb")
    began = time.monotonic()
    try:
        place = writers[kind](folder, output)
    except OSError as error:
        remedy = "Choose another --output"
        raise UserError(f"{output or folder} cannot be written", str(error.strerror or error), remedy) from None
    console.print(f"{place}   ({time.monotonic() - began:.1f} s)", soft_wrap=True, markup=False)
    if kind == "tensorboard" or (kind == "wandb" and not online):
        command = "tensorboard --logdir" if kind == "tensorboard" else "wandb sync"
        console.print(f"  {command} {place}", soft_wrap=True, markup=False)


def _missing(extra: str) -> UserError:
    return UserError(f"This needs {extra}", "It is an optional part of Andon", f"pip install 'andon[{extra}]'")
