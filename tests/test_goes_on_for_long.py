"""The run that goes on, for long: hundreds of kills of workers, of coordinators and of a script's workers."""

from __future__ import annotations

import os
import random
import signal
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from andon.checkpoint.manifest import read as manifest
from andon.control.quarantine import SETTLED
from tests.group_harness import busy
from tests.runs import SMALL, andon, events, finish, start, summary, train, wait_for_step, workers_of
from tests.test_goes_on import EVEN, OFF, TWICE, members_of, run_of, steps_after, wait_for

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]
SEED = int(os.environ.get("ANDON_SOAK_SEED", "1"))
COUNT = int(os.environ.get("ANDON_SOAK_COUNT") or "200")
EXAMPLES = Path(__file__).parent.parent / "examples"


def kill_again_and_again(cwd: Path, kills: int, seed: int, *options: str) -> tuple[dict[str, Any], list[float]]:
    """Kill a random worker at random moments, then let the run end: its summary, and the seconds without a step."""
    chance, gaps = random.Random(seed), []
    process = run_of(cwd, *options, executed=True)
    for _ in range(kills):
        time.sleep(chance.uniform(0.1, 2.0))
        wait_for(process, lambda: len(members_of(process, cwd / "run")) > 1)
        if not (workers := members_of(process, cwd / "run")):
            break  # it has come to its end
        at = time.time()
        chance.choice(workers).kill()
        wait_for(process, lambda at=at: steps_after(cwd / "run", at), 10.0)
        gaps += [event["time"] - at for event in steps_after(cwd / "run", at)[:1]]
        # Whoever is killed again and again before it has done ten steps would be quarantined.
        wait_for(process, lambda at=at: steps_after(cwd / "run", at)[SETTLED:])
    output = finish(process)
    assert process.returncode == 0, output
    code, said = andon("audit", "run", cwd=cwd)
    assert code == 0, said
    print(f"{len(gaps)} kills: median {statistics.median(gaps):.2f} s, worst {max(gaps):.2f} s; {said}")
    return summary(cwd / "run"), gaps


@pytest.mark.parametrize(
    ("transport", "zero", "share"),
    [("shm", OFF, 1.0), ("star", OFF, 1.0), ("ring", TWICE, 1.0), ("shm", EVEN, 0.25)],
    ids=["shm", "star", "ring", "shm-without-replicas"],
)
def test_many_kills_never_change_the_answer(tmp_path: Path, transport: str, zero: list[str], share: float) -> None:
    kills = max(1, int(COUNT * share))
    options = [f"--train.steps={60 * kills + 100}", "--eval.every=100", "--checkpoint.every=20", *zero]
    whole = train(*options, "--optim.schedule=constant", cwd=tmp_path, name="whole")
    found, gaps = kill_again_and_again(tmp_path, kills, SEED, "--workers=4", f"--group.transport={transport}", *options)
    if transport != "ring":  # its order of addition depends on its size
        assert found["weights_blake3"] == whole["weights_blake3"]
    assert max(gaps) < 10.0 * busy()


@pytest.mark.parametrize("transport", ["ring", "star"])
def test_many_kills_of_the_coordinator_never_change_the_answer(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANDON_TOKEN", "the token of the tests")
    kills, folder, chance = max(1, COUNT // 4), tmp_path / "run", random.Random(SEED)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    settings = ["--optim.schedule=constant", "--eval.every=0", *OFF]
    options = ["--workers=2", f"--group.transport={transport}", "--train.steps=1000000", "--checkpoint.every=50"]
    command = ["coordinator", *SMALL, *options, *settings, "--run.dir=run", f"--bind={address}"]
    with open(tmp_path / "log", "w") as log:
        coordinator = start(*command, cwd=tmp_path, executed=True, output=log)
        workers = [start("worker", address, cwd=tmp_path, executed=True, output=log) for _ in range(2)]
        wait_for_step(folder, 3, coordinator)
        gaps = []
        for _ in range(kills):
            time.sleep(chance.uniform(0.2, 2.0))
            coordinator.kill()
            coordinator.wait()
            time.sleep(chance.uniform(0.0, 5.0))
            at = time.time()
            coordinator = start(*command, cwd=tmp_path, executed=True, output=log)
            wait_for(coordinator, lambda at=at: steps_after(folder, at), 30.0)
            gaps.append(time.time() - at)
        coordinator.send_signal(signal.SIGINT)
        assert [worker.wait(60) for worker in workers] == [4, 4] and coordinator.wait(60) == 4
    step = events(folder, "stopped")[-1]["step"]
    code, said = andon("audit", "run", cwd=tmp_path)
    assert code == 0 and f"{step:,} steps are committed, none missing and none twice" in said, said
    train(f"--train.steps={step}", *settings, cwd=tmp_path, name="whole")
    whole, found = (manifest(tmp_path / name / "checkpoints" / f"checkpoint-{step}") for name in ("whole", "run"))
    assert whole.units == found.units
    print(
        f"{kills} kills of the coordinator: a step again after {statistics.median(gaps):.1f} s, worst {max(gaps):.1f} s"
    )


def test_the_cnn_with_many_kills_gives_the_undisturbed_digest(tmp_path: Path) -> None:
    kills, steps, chance = max(1, COUNT // 10), str(30 * COUNT), random.Random(SEED)
    code, output = andon("run", "--workers=1", str(EXAMPLES / "cnn.py"), steps, cwd=tmp_path)
    assert code == 0, output
    digest = output.split()[-1]
    process = start("run", "--workers=3", str(EXAMPLES / "cnn.py"), steps, cwd=tmp_path, executed=True)

    def settled() -> list[psutil.Process]:
        age = 5.0 * busy()
        return [each for each in workers_of(process) if time.time() - each.create_time() > age]

    for _ in range(kills):
        wait_for(process, lambda: len(settled()) > 1)
        if process.poll() is None:
            chance.choice(settled()).kill()
            time.sleep(chance.uniform(0.2, 2.0))
    output = finish(process) + "".join(path.read_text() for path in (tmp_path / "runs" / "cnn" / "logs").iterdir())
    assert process.returncode == 0 and f"weights {digest}" in output, output
    print(f"{kills} kills, digest {digest[:16]}")
