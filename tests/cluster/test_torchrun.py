"""Under torchrun: PyTorch's launcher starts the ranks, Andon finds them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from tests.kit.runs import SMALL, environment, summary, train

COMMAND = "torchrun --nproc-per-node 2 -m andon train"
STANDALONE = {"PET_STANDALONE": "1"}
"""torchrun takes a free port, so that several can run beside each other."""


def test_torchrun_trains_over_gloo_to_the_same_answer(tmp_path: Path) -> None:
    command = [*shlex.split(f"{Path(sys.executable).parent}/{COMMAND}"), *SMALL, "--run.dir=under-torchrun"]
    variables = {**environment(tmp_path), **STANDALONE}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = summary(tmp_path / "under-torchrun")
    alone = train(cwd=tmp_path)
    assert (found["transport"], found["workers"]) == ("torch", 2)
    assert found["weights_blake3"] == alone["weights_blake3"]
