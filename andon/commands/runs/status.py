"""`andon status`, `andon stop` and `andon plot`: list runs, end one, draw one of its curves."""

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from andon.board.history import COLUMNS, History, end_of, is_run, runs_in
from andon.board.text import plain
from andon.commands.runs.live import has_ended, holder_of
from andon.commands.runs.plot import draw_png, draw_text
from andon.errors import UserError
from andon.run.screen.terminal import human_age, human_count


def named_runs(folders: list[Path]) -> list[Path]:
    """The runs that a user has named, each by its folder or by a folder that contains it."""
    for folder in folders:
        if not folder.is_dir():
            remedy = "Name the folder of a run, or one that contains runs"
            raise UserError(f"There is no folder {folder}", "A run's folder contains metrics.jsonl", remedy)
    return runs_in(folders)


def planned_steps(run: Path) -> int | None:
    """The number of steps in a run's configuration; None if it cannot be read."""
    try:
        return int(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["train"]["steps"])
    except (OSError, yaml.YAMLError, ValueError, TypeError, KeyError):
        return None


def glance(run: Path) -> dict[str, Any]:
    """State, step, loss and speed of a run, from the end of its metrics."""
    story, pid = end_of(run), holder_of(run)
    state = story.state_now()
    if state in ("running", "silent", "waiting"):
        state = "running" if pid else "ended" if has_ended(run) else state
    loss, speed = story.last.get("loss"), story.last.get("tokens_per_s")
    steps = story.facts.get("steps") or planned_steps(run)
    fields = {"run": str(run), "state": state, "pid": pid, "step": story.step, "steps": steps, "loss": loss}
    row: dict[str, Any] = plain({**fields, "tokens_per_s": speed, "last_event": story.time})
    return row


def status(folders: list[Path], as_json: bool, console: Console) -> None:
    """`andon status`: one line for each run."""
    found = [glance(run) for run in named_runs(folders)]
    if as_json:
        for row in found:
            print(json.dumps(row))
        return
    if not found:
        console.print("There is no run here yet. `andon demo` starts one.")
        return
    numbers = [Column(name, justify="right") for name in ("step", "loss", "tokens/s", "last event")]
    table = Table("run", "state", *numbers, box=None)
    styles = {"running": "green", "halted": "bold red", "silent": "yellow", "ended": "yellow"}
    for row in found:
        of = f" of {row['steps']:,}" if isinstance(row["steps"], int) else ""
        loss = f"{row['loss']:.4f}" if isinstance(row["loss"], float) else "–"
        speed = human_count(row["tokens_per_s"]) if isinstance(row["tokens_per_s"], float) else "–"
        state = f"[{styles.get(row['state'], 'none')}]{row['state']}[/]" + (f" ({row['pid']})" if row["pid"] else "")
        age = f"{human_age(time.time() - row['last_event'])} ago"
        table.add_row(escape(row["run"]), state, f"{row['step']:,}{of}", loss, speed, age)
    console.print(table)


def stop(run: Path, wait: float, console: Console) -> None:
    """`andon stop`: signal a run to save after its step and end, as Ctrl-C does, and wait for that."""
    pid = holder_of(run)
    if pid is None:
        remedy = "`andon status` lists the runs; stop a run of another machine on that machine"
        raise UserError(f"No run is live in {run}", "No process of this machine holds its lock", remedy)
    try:
        os.kill(pid, signal.SIGTERM)
    except PermissionError:
        raise UserError(f"{run} cannot be stopped", f"Process {pid} is another user's", f"sudo kill {pid}") from None
    except ProcessLookupError:
        raise UserError(f"{run} cannot be stopped", f"Process {pid} is in another container", "Stop it there") from None
    until = time.monotonic() + wait
    while holder_of(run) == pid and time.monotonic() < until:
        time.sleep(0.05)
    if holder_of(run) == pid:
        remedy = f"Wait, or end it at once: kill {pid}"
        raise UserError(f"{run} has not stopped yet", f"It was signalled {wait:.0f} s ago and may be saving", remedy)
    step = f" at step {glance(run)['step']:,}" if is_run(run) else ""  # a script's run has no metrics.jsonl
    console.print(f"{run} stopped{step}. The same command resumes it, without --resume none", markup=False)


def plot(run: Path, output: Path | None, key: str, console: Console) -> None:
    """`andon plot`: draw a curve in the terminal, or as a PNG."""
    if key not in COLUMNS:
        raise UserError(f"There is no curve {key!r}", f"Curves: {', '.join(COLUMNS)}", "Choose one of these")
    if output and output.suffix.lower() not in ("", ".png"):
        raise UserError(f"{output} is not a PNG file", "No other format is written", f"-o {output.with_suffix('.png')}")
    if not is_run(run):
        raise UserError(f"{run} is not a run", "It has no metrics.jsonl", "Name the folder of a run")
    history = History(run / "metrics.jsonl")
    history.advance()
    steps, values = history.steps, history.column(key)
    known = [math.isfinite(value) for value in values.tolist()]
    if not any(known):
        raise UserError(f"{run} has no {key} yet", "No step has recorded it", "Wait for the first step")
    place = {"loss": 1, "accuracy": 4}.get(key)
    evals = [(each[0], each[place]) for each in history.story.evals if place and each[place] == each[place]]
    title = f"{plain(run.name or str(run))} · {key}"
    if output is None:
        draw_text(console, title, steps[known], values[known])
    else:
        draw_png(output, title, (steps[known], values[known]), evals)
        console.print(str(output), markup=False, soft_wrap=True)
