"""How much memory the workers of a real run take."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from tests.kit.runs import end_started, start, workers_of

QUIET = [
    *("--eval.every=0", "--eval.sample_every=0", "--checkpoint.every=0", "--device=cpu", "--data.stories=2000"),
    *("--train.steps=100000", "--run.dir=run"),
]
LIBRARIES = 96 << 20
"""The most bytes of libraries that count: the kernel maps up to 136 MB of them, by the size of the folios in its page
cache, and the process uses no more of them then."""


def peak_memory(*options: str, cwd: Path, steps: int = 5, least: float = 0.0, deadline: float = 150) -> float:
    """The most that all workers, and what forks them, hold at one moment of the first steps, in bytes of PSS. Looks at
    up to three times as many steps while it has not seen `least`: on a busy machine few looks fall into a peak.

    Pages of libraries count once for the workers, whoever else on this machine has the same ones in use.
    """
    process = start("train", *QUIET, *options, cwd=cwd, executed=True)
    peak, until = 0.0, time.monotonic() + deadline
    while (done := _steps_done(cwd / "run")) < steps or (peak < least and done < 3 * steps):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, f"{steps} steps took more than {deadline} s"
        workers = workers_of(process)
        found = [_held(each) for each in (*workers, *(worker.parent() for worker in workers[:1])) if each]
        if found:
            peak = max(peak, sum(own for own, _ in found) + max(libraries for _, libraries in found))
        time.sleep(0.02)
    end_started()
    return peak


def _steps_done(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count('"event": "step"') if metrics.exists() else 0


def _held(worker: psutil.Process) -> tuple[int, int]:
    """A process's PSS without libraries, and the libraries' pages that it uses."""
    try:
        lines = Path(f"/proc/{worker.pid}/smaps_rollup").read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    own = kilobytes["Pss_Anon"] + kilobytes["Pss_Shmem"]
    return 1024 * own, min(1024 * (kilobytes["Shared_Clean"] + kilobytes["Private_Clean"]), LIBRARIES)
