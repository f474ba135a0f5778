"""How much memory the workers of a real run take."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from tests.runs import end_started, start

QUIET = [
    *(
        "--eval.every=0",
        "--eval.sample_every=0",
        "--checkpoint.every=0",
        "--device=cpu",
        "--data.stories=2000",
    ),
    *("--train.steps=100000", "--run.dir=run"),
]


def peak_memory(*options: str, cwd: Path, steps: int = 5, deadline: float = 150) -> float:
    """The most that all workers together hold at one moment of the first steps, in bytes of PSS."""
    process, peak, until = start("train", *options, *QUIET, cwd=cwd), 0.0, time.monotonic() + deadline
    while _steps_done(cwd / "run") < steps:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, f"{steps} steps took more than {deadline} s"
        peak = max(peak, sum(_pss(child) for child in psutil.Process(process.pid).children()))
        time.sleep(0.02)
    end_started()
    return peak


def _steps_done(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count('"event": "step"') if metrics.exists() else 0


def _pss(worker: psutil.Process) -> float:
    try:
        if "andon.cluster.worker" not in worker.cmdline():
            return 0.0
        return float(worker.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return 0.0
