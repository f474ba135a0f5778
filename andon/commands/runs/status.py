"""`andon status`, `andon stop` and `andon plot`: what runs there are, ending one, and its loss without a browser."""

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from andon.board.app import is_run
from andon.board.history import History
from andon.board.text import plain
from andon.errors import UserError
from andon.run.records.folder import read_mark
from andon.run.screen.terminal import human_count


def runs_in(folders: list[Path]) -> list[Path]:
    """The runs that are named, and those in the folders that are named."""
    found = []
    for folder in folders:
        if not folder.is_dir():
            remedy = "Name the folder of a run, or one that holds runs"
            raise UserError(f"There is no folder {folder}", "A run's folder holds metrics.jsonl", remedy)
        found += [folder] if is_run(folder) else sorted(filter(is_run, folder.glob("*")))
    return found


def holder_of(run: Path) -> int | None:
    """The process that trains in a folder on this machine; None if nobody does."""
    pid = read_mark(run).partition(" ")[0]
    try:
        process = psutil.Process(int(pid))
        return process.pid if str((run / ".lock").resolve()) in {file.path for file in process.open_files()} else None
    except psutil.AccessDenied:
        return int(pid)
    except (ValueError, psutil.NoSuchProcess):
        return None


def planned_steps(run: Path) -> int | None:
    """The steps of the whole run, as its configuration has them."""
    try:
        return int(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["train"]["steps"])
    except (OSError, yaml.YAMLError, ValueError, TypeError, KeyError):
        return None


def glance(run: Path) -> dict[str, Any]:
    """Where a run is."""
    history = History(run / "metrics.jsonl")
    history.read_end()
    story, pid = history.story, holder_of(run)
    state = story.state_now()
    state = "running" if pid and state in ("silent", "waiting") else state
    loss, speed = story.last.get("loss"), story.last.get("tokens_per_s")
    steps = story.facts.get("steps") or planned_steps(run)
    fields = {"run": str(run), "state": state, "pid": pid, "step": story.step, "steps": steps, "loss": loss}
    shown: dict[str, Any] = plain({**fields, "tokens_per_s": speed, "last_event": story.time})
    return shown


def status(folders: list[Path], as_json: bool, console: Console) -> None:
    """`andon status`: one line for each run."""
    found = [glance(run) for run in runs_in(folders)]
    if as_json:
        for row in found:
            print(json.dumps(row))
        return
    if not found:
        console.print("There is no run here yet. `andon demo` starts one.")
        return
    table = Table(
        "run",
        "state",
        *(Column(name, justify="right") for name in ("step", "loss", "tokens/s", "last event")),
        box=None,
    )
    styles = {"running": "green", "halted": "bold red", "silent": "yellow"}
    for row in found:
        of = f" of {row['steps']:,}" if isinstance(row["steps"], int) else ""
        loss = f"{row['loss']:.4f}" if isinstance(row["loss"], float) else "–"
        speed = human_count(row["tokens_per_s"]) if isinstance(row["tokens_per_s"], float) else "–"
        state = f"[{styles.get(row['state'], 'none')}]{row['state']}[/]" + (f" ({row['pid']})" if row["pid"] else "")
        table.add_row(escape(row["run"]), state, f"{row['step']:,}{of}", loss, speed, _ago(row["last_event"]))
    console.print(table)


def _ago(moment: float) -> str:
    seconds = max(0, round(time.time() - moment))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def stop(run: Path, wait: float, console: Console) -> None:
    """`andon stop`: let a run save after its step and leave, as Ctrl-C does."""
    pid = holder_of(run)
    if pid is None:
        remedy = "`andon status` shows what runs here; a run of another machine is stopped there"
        raise UserError(f"Nobody trains in {run}", "No process of this machine holds its lock", remedy)
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
        raise UserError(f"{run} has not stopped yet", f"It was asked {wait:.0f} s ago and may be saving", remedy)
    console.print(f"{run} stopped at step {glance(run)['step']:,}. The same command resumes.", markup=False)


def plot(run: Path, output: Path | None, key: str, console: Console) -> None:
    """`andon plot`: a column of the metrics in the terminal, or as a picture."""
    from andon.board.history import COLUMNS
    from andon.commands.runs.plot import draw_png, draw_text

    if key not in COLUMNS:
        raise UserError(f"There is no curve {key!r}", f"Curves: {', '.join(COLUMNS)}", "Choose one of these")
    if not is_run(run):
        raise UserError(f"{run} is not a run", "It has no metrics.jsonl", "Name the folder of a run")
    history = History(run / "metrics.jsonl")
    history.advance()
    steps, values = history.steps, history.column(key)
    known = [math.isfinite(value) for value in values.tolist()]
    if not any(known):
        raise UserError(f"{run} has no {key} yet", "No step has one", "Wait for the first step")
    place = {"loss": 1, "accuracy": 4}.get(key)
    evals = [(each[0], each[place]) for each in history.story.evals if place and each[place] == each[place]]
    title = f"{plain(run.name or str(run))} · {key}"
    if output is None:
        draw_text(console, title, steps[known], values[known])
    else:
        draw_png(output, title, (steps[known], values[known]), evals)
        console.print(str(output), markup=False, soft_wrap=True)
