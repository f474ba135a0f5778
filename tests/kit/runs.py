"""Running the real command line in a temporary folder."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from tests.kit import prefork

SMALL = [
    *("--model.vocab=300", "--model.hidden=32", "--model.layers=2", "--model.heads=2", "--model.kv_heads=1"),
    *("--model.intermediate=48", "--train.context=32", "--train.micro_batch=2", "--train.slots=4"),
    *("--train.steps=6", "--data.stories=300", "--eval.windows=8", "--eval.stories=4"),
    *("--eval.sample_every=0", "--optim.warmup=2", "--group.timeout=20", "--device=cpu"),
]
"""A model small enough that a run takes a moment."""
NOTHING: Mapping[str, str] = {}


def soak(*values: Any) -> Any:
    """A case that only the long version of a test tries."""
    return pytest.param(*values, marks=pytest.mark.soak)


def environment(cwd: Path) -> dict[str, str]:
    """The test's own cache, and no terminal."""
    return {**os.environ, "XDG_CACHE_HOME": str(cwd / "cache"), "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}


def start(
    *arguments: str, cwd: Path, executed: bool = False, output: int | IO[str] = subprocess.PIPE
) -> subprocess.Popen[str]:
    """Start `andon …` in a folder: forked from a process that has torch loaded, or really `executed`."""
    return launch([sys.executable, "-m", "andon", *arguments], cwd, executed, output)


def launch(
    command: list[str],
    cwd: Path,
    executed: bool = False,
    output: int | IO[str] = subprocess.PIPE,
    machine: tuple[str, str] | None = None,
    more: Mapping[str, str] = NOTHING,
) -> subprocess.Popen[str]:
    """Start a command that is ended with the test; `more` is added to its environment."""
    make = subprocess.Popen if executed else partial(prefork.popen, machine=machine)
    process: subprocess.Popen[str] = make(
        command,
        cwd=cwd,
        env={**environment(cwd), **more},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # as in a terminal of its own, so that a test can press Ctrl-C there
    )
    _started.append(process)
    return process


def ctrl_c(process: subprocess.Popen[str]) -> None:
    """What a terminal does: the signal goes to the whole foreground group."""
    os.killpg(process.pid, signal.SIGINT)


_started: list[subprocess.Popen[str]] = []


def end_started() -> None:
    """End every process that is still running, and its children."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def andon(*arguments: str, cwd: Path, timeout: float = 100, executed: bool = False) -> tuple[int, str]:
    """Run `andon …` to its end: exit code and output."""
    return outcome(start(*arguments, cwd=cwd, executed=executed), timeout)


def outcome(started: subprocess.Popen[str], timeout: float = 100) -> tuple[int, str]:
    """Wait for the end of a process: exit code and output."""
    with started as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, output


def train(
    *arguments: str, cwd: Path, name: str = "run", executed: bool = False, timeout: float = 100
) -> dict[str, Any]:
    """A small training run that must succeed: its summary."""
    code, output = andon("train", *SMALL, f"--run.dir={name}", *arguments, cwd=cwd, executed=executed, timeout=timeout)
    assert code == 0, output
    return summary(cwd / name)


def summary(folder: Path) -> dict[str, Any]:
    """The summary of a run."""
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


_read: dict[tuple[Path, int], tuple[int, list[dict[str, Any]]]] = {}


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind; what was read before is not read again, as runs under test need the cores."""
    path = folder / "metrics.jsonl"
    with open(path, "rb") as file:
        key = path, os.fstat(file.fileno()).st_ino
        start, found = _read.get(key, (0, []))
        if start > os.fstat(file.fileno()).st_size:
            start, found = 0, []
        file.seek(start)
        lines = file.read()
    lines = lines[: lines.rfind(b"\n") + 1]
    found += map(json.loads, lines.splitlines())
    _read[key] = start + len(lines), found
    return [event for event in found if event["event"] == kind]


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str], deadline: float = 60) -> None:
    """Wait until a run has done a step (or has ended)."""
    until = time.monotonic() + deadline
    while time.monotonic() < until and process.poll() is None:
        if any(event["step"] >= step for event in events_so_far(folder)):
            return
        time.sleep(0.01)
    assert process.poll() is not None, f"no step {step} within {deadline} s"


def events_so_far(folder: Path) -> list[dict[str, Any]]:
    return events(folder, "step") if (folder / "metrics.jsonl").exists() else []


def workers_of(process: subprocess.Popen[str], place: str = "") -> list[psutil.Process]:
    """The workers of `andon train` or `andon run`, or only that of one place, by place."""
    found = {}
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                name = child.name()
                if name.startswith("andon-rank-") and place in ("", name.rpartition("-")[2]):
                    found[int(name.rpartition("-")[2])] = child
    return [found[each] for each in sorted(found)]


def read_terminal(descriptor: int) -> str:
    """What a pseudo-terminal shows next; nothing after its process has ended."""
    return read_bytes(descriptor).decode(errors="replace")


def read_bytes(descriptor: int) -> bytes:
    ready, _, _ = select.select([descriptor], [], [], 0.2)
    try:
        return os.read(descriptor, 1 << 16) if ready else b""
    except OSError:
        return b""


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    """The addresses at which a process and its children listen."""
    found: list[tuple[str, int]] = []
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            known = [one for one in each.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            found += [(str(one.laddr[0]), int(one.laddr[1])) for one in known]
    return found


def finish(process: subprocess.Popen[str], timeout: float = 90) -> str:
    output, _ = process.communicate(timeout=timeout)
    return output
