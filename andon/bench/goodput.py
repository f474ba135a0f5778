"""`andon bench goodput`: how much of a run's undisturbed speed is left while its workers are killed again and again.

`andon train` and a plain PyTorch script (`andon.bench.ranks.goodput`: DistributedDataParallel, which torchrun restarts
from the newest checkpoint) train the same model, one after the other, under the same schedule of kills. Each run has
several rounds. A round begins with one undisturbed period. In each period after it a random worker gets SIGKILL at a
random moment of the first half; the round ends when a step has followed the last kill. A step that is repeated from a
checkpoint counts once. *Goodput* is tokens/s under kills divided by tokens/s of the undisturbed periods.
"""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from andon.bench.kit.report import show
from andon.errors import UserError
from andon.numerics import kernels

PRESET, SLOTS, WINDOWS = "tiny", 8, 4
SAVE_EVERY = 20  # steps, in both
ROUNDS = 5
WARM_UP = 3  # steps
PATIENCE = 120.0  # seconds without a step that are an error
POLL_SECONDS = 0.05
ENDLESS = 10**9
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, ranks that torchrun has restarted read the addresses of earlier ranks (pytorch issue 135712)."""


@dataclass
class Part:
    """Totals of all undisturbed periods, or of all periods with kills."""

    steps: int = 0
    seconds: float = 0.0
    kills: int = 0
    longest_pause: float = 0.0


@dataclass
class Training:
    """A running command that writes its steps, and the process ids of its workers, as JSON lines."""

    process: subprocess.Popen[bytes]
    file: Path
    times: list[float] = field(default_factory=list)
    """When each step ended."""
    steps: list[int] = field(default_factory=list)
    """The number of each step; steps repeated from a checkpoint appear again."""
    _workers: set[int] = field(default_factory=set)
    _read: int = 0

    def read_new(self) -> None:
        """Read the lines that were written since the last call."""
        if self.process.poll() is not None:
            raise UserError("The run has ended", f"Exit code {self.process.returncode}", f"Look at {self.file.parent}")
        if not self.file.exists():
            return
        with open(self.file, "rb") as file:
            file.seek(self._read)
            lines = file.read()
        self._read += lines.rfind(b"\n") + 1
        for line in lines[: lines.rfind(b"\n") + 1].splitlines():
            event = json.loads(line)
            if event["event"] == "step":
                self.times.append(event["time"])
                self.steps.append(event["step"])
            elif event["event"] == "worker":
                self._workers.add(event["pid"])

    def wait_until(self, moment: float, steps: int = 0) -> None:
        """Wait until `moment`, and until `steps` steps have been read in all."""
        until = time.time() + PATIENCE
        while time.time() < moment or len(self.times) < steps:
            self.read_new()
            if time.time() > max(until, moment):
                raise UserError("The run makes no progress", f"No step for {PATIENCE:.0f} s", f"Look at {self.file}")
            time.sleep(POLL_SECONDS)

    def kill_one(self, chance: random.Random) -> None:
        """Send SIGKILL to a random worker."""
        self.read_new()
        family = psutil.Process(self.process.pid).children(recursive=True)
        workers = [child for child in family if child.pid in self._workers]
        if not workers:
            raise UserError("There is no worker to kill", "All workers have ended", f"Look at {self.file.parent}")
        chance.choice(workers).kill()

    def measure(self, part: Part, begun: int) -> int:
        """Add the steps after index `begun` to a total; returns the index of the newest step."""
        now = len(self.times) - 1
        part.steps += self.steps[now] - self.steps[begun]
        part.seconds += self.times[now] - self.times[begun]
        pauses = [after - before for before, after in zip(self.times[begun:now], self.times[begun + 1 :], strict=False)]
        part.longest_pause = max([part.longest_pause, *pauses])
        return now


@contextlib.contextmanager
def started(command: Sequence[str], folder: Path, file: str) -> Iterator[Training]:
    """Start a command in a folder; kills it and its children at the end."""
    environment = os.environ | kernels("portable") | {"OMP_NUM_THREADS": "1", **OWN_STORE}
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield Training(process, folder / file)
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        for each in [psutil.Process(process.pid), *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
        psutil.wait_procs(family)


def disturb(training: Training, every: float, kills: int, seed: int) -> tuple[Part, Part]:
    """Do the rounds, with `kills` kills in all; returns the totals without and with kills."""
    chance, calm, disturbed = random.Random(seed), Part(), Part()
    training.wait_until(0.0, WARM_UP)
    for number in range(min(ROUNDS, kills)):
        begun = len(training.times) - 1
        training.wait_until(time.time() + every, begun + 2)
        begun = training.measure(calm, begun)
        for _ in range(kills // ROUNDS + (number < kills % ROUNDS)):
            period = time.time() + every
            training.wait_until(time.time() + chance.uniform(0.0, every / 2))
            training.kill_one(chance)
            disturbed.kills += 1
            training.read_new()
            training.wait_until(period, len(training.times) + 1)
        training.measure(disturbed, begun)
    return calm, disturbed


def commands(workers: int) -> dict[str, tuple[list[str], str]]:
    """The command of each system, and the file to which it writes its steps."""
    options = (
        f"--workers={workers} --run.dir=run --restarts={ENDLESS} --model.preset={PRESET} --zero.policy=off "
        f"--train.steps={ENDLESS} --train.slots={SLOTS} --train.micro_batch={WINDOWS} --optim.schedule=constant "
        "--data.stories=1000 --data.tokenizer=bytes "  # the text does not matter for the speed
        f"--eval.every=0 --eval.sample_every=0 --checkpoint.every={SAVE_EVERY} --device=cpu"
    )
    andon = ["-m", "andon", "train", *options.split()]
    task = json.dumps({"preset": PRESET, "windows": SLOTS * WINDOWS // workers, "save_every": SAVE_EVERY})
    restarted = ["--standalone", f"--nproc-per-node={workers}", f"--max-restarts={ENDLESS}"]
    torchrun = ["-m", "torch.distributed.run", *restarted, "-m", "andon.bench.ranks", "andon.bench.ranks.goodput", task]
    return {"andon": (andon, "run/metrics.jsonl"), "torchrun": (torchrun, "metrics.jsonl")}


def main(workers: int, every: float, minutes: float, seed: int, as_json: bool) -> None:
    """Measure both systems, and print a row for each."""
    if SLOTS % workers:
        cause = f"A step has {SLOTS} slots, and DDP needs equal shares"
        raise UserError(f"{workers} workers cannot be compared", cause, "Give --workers 1, 2, 4 or 8")
    kills = max(1, round(60 * minutes / every))
    rows: list[dict[str, Any]] = []
    for system, (command, file) in commands(workers).items():
        folder = Path(tempfile.mkdtemp(prefix="andon-goodput-"))
        with started(command, folder, file) as training:
            calm, disturbed = disturb(training, every, kills, seed)
        shutil.rmtree(folder)  # after an error it stays, for inspection
        rows.append({"system": system, **_row(calm, disturbed)})
    title = f"{PRESET}, {workers} workers, one SIGKILL every {every:g} s, a checkpoint every {SAVE_EVERY} steps"
    show(title, rows, as_json, ["goodput: tokens/s under kills divided by the undisturbed tokens/s of the same run"])


def _row(calm: Part, disturbed: Part) -> dict[str, Any]:
    from andon.model.shape import SHAPES

    tokens = SLOTS * WINDOWS * SHAPES[PRESET].context
    undisturbed, killed = (tokens * part.steps / part.seconds for part in (calm, disturbed))
    return {
        "kills": disturbed.kills,
        "undisturbed": undisturbed,
        "tokens_per_s": killed,
        "goodput": killed / undisturbed,
        "lost_s_per_kill": (1 - killed / undisturbed) * disturbed.seconds / disturbed.kills,
        "longest_pause_s": disturbed.longest_pause,
    }
