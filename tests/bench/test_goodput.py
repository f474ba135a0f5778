"""`andon bench goodput`: what it counts, on a run that is none: a process that pretends to train."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from andon.bench.goodput import Part, Training, disturb, main, started
from andon.errors import UserError

PRETENDER = """
import json, subprocess, time
step = 0
while True:
    worker = subprocess.Popen(["sleep", "100"])
    with open("metrics", "a") as file:
        def write(**fields):
            print(json.dumps({**fields, "time": time.time()}), file=file, flush=True)
        write(event="worker", pid=worker.pid)
        while worker.poll() is None:
            step += 1
            write(event="step", step=step)
            time.sleep(0.01)
    step -= step % 20
    time.sleep(0.5)
"""


def test_kills_cost_the_pause_and_the_steps_that_are_done_again(tmp_path: Path) -> None:
    with started(["-c", PRETENDER], tmp_path, "metrics") as training:
        family = psutil.Process(training.process.pid)
        calm, disturbed = disturb(training, every=1.2, kills=2, seed=1)
        workers = family.children()
    assert disturbed.kills == 2 and disturbed.longest_pause > 0.5 > calm.longest_pause
    ratio = (disturbed.steps / disturbed.seconds) / (calm.steps / calm.seconds)
    assert 0.3 < ratio < 0.65, (calm, disturbed)
    assert not any(worker.is_running() for worker in workers), "nobody is left"


def test_a_step_that_is_done_again_counts_once(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        training = Training(process, tmp_path / "metrics")
        steps = [1, 2, 3, 4, 3, 4, 5]
        lines = [f'{{"event": "step", "step": {step}, "time": {time}}}\n' for time, step in enumerate(steps)]
        (tmp_path / "metrics").write_text("".join(lines) + '{"event": "st')
        training.read_new()
        part = Part()
        assert training.measure(part, 0) == 6
        process.kill()
    assert (part.steps, part.seconds, part.longest_pause) == (4, 6.0, 1.0)
    with pytest.raises(UserError, match="The run has ended"):
        training.read_new()


def test_workers_that_cannot_share_the_work_evenly_are_refused() -> None:
    with pytest.raises(UserError, match="3 workers cannot be compared"):
        main(workers=3, every=60.0, minutes=10.0, seed=1, as_json=False)
