"""Under torchrun: PyTorch's launcher starts the ranks, Andon finds them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.runs import SMALL, environment, summary, train


def test_torchrun_trains_over_gloo_to_the_same_answer(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "andon", "train", *SMALL, "--run.dir=under-torchrun"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = summary(tmp_path / "under-torchrun")
    alone = train(cwd=tmp_path)
    assert (found["transport"], found["workers"]) == ("torch", 2)
    assert found["weights_blake3"] == alone["weights_blake3"]
