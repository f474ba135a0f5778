"""Which process trains in a run's folder, and `andon resize`, which only a live run obeys."""

import fcntl
from pathlib import Path

import psutil
from rich.console import Console

from andon.errors import UserError
from andon.run.records.folder import read_mark
from andon.run.records.resize import request_workers


def holder_of(run: Path) -> int | None:
    """The id of the process of this machine that trains in a folder; None if there is none."""
    pid = read_mark(run).partition(" ")[0]
    try:
        process = psutil.Process(int(pid))
        return process.pid if str((run / ".lock").resolve()) in {file.path for file in process.open_files()} else None
    except psutil.AccessDenied:
        return int(pid)
    except (ValueError, psutil.NoSuchProcess):
        return None


def has_ended(run: Path) -> bool:
    """Whether no process, also of another machine, has locked a run's folder; False if that cannot be seen."""
    if holder_of(run) is not None:
        return False
    try:
        with open(run / ".lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    except OSError:
        return False


def resize(run: Path, workers: int, console: Console) -> None:
    """`andon resize`: change the number of workers of a live run."""
    if has_ended(run):
        remedy = f"Start it with --workers {workers}: it resumes with any number"
        raise UserError(f"{run} is not live", "No process holds its lock", remedy)
    request_workers(run, workers)
    text = f"{run} continues with {workers} workers after its current step"
    console.print(f"{text}; if it has a coordinator, start more with `andon worker`", soft_wrap=True, markup=False)
