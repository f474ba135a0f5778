"""The run that goes on, for long: kills of workers, of coordinators and of a script's workers, partitions, resizing.

Each test prints its figures (`pytest -s`); ANDON_SOAK_SEED and ANDON_SOAK_COUNT say which moments, and how many.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from andon.checkpoint.disk.manifest import read as manifest
from andon.control.generations.quarantine import SOUND_AFTER_STEPS
from tests import ROOT
from tests.kit.group_harness import busy
from tests.kit.network import network
from tests.kit.runs import andon, ctrl_c, events, finish, start, train, wait_for_step, workers_of
from tests.membership.test_goes_on import (
    EVEN,
    OFF,
    TWICE,
    UNTIMED,
    members_of,
    run_of,
    steps_after,
    wait_for,
    wait_for_newest,
)
from tests.membership.test_scripts_go_on import assert_ended_alike, script_that_dies, undisturbed_script

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]
SEED = int(os.environ.get("ANDON_SOAK_SEED", "1"))
COUNT = int(os.environ.get("ANDON_SOAK_COUNT") or "200")
EXAMPLES = ROOT / "examples"
HANG = 10.0  # seconds
LONG = 1800.0  # seconds that a whole run may take
TOKEN = "the token of the tests"


def figures(name: str, seconds: Sequence[float]) -> str:
    """Median and worst, as the tests print them."""
    return f"{name}: median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s" if seconds else f"no {name}"


@dataclass
class Kills:
    """What came of kills, in seconds."""

    until_next_step: list[float] = field(default_factory=list)
    """From the kill."""
    until_slots: list[float] = field(default_factory=list)
    """From the start of a replacement's process until a step has ended in which it has slots."""


def kill_again_and_again(cwd: Path, kills: int, seed: int, *options: str) -> Kills:
    """Kill a random worker at random moments, so many times, then stop the run: what came of the kills."""
    chance, found, folder = random.Random(seed), Kills(), cwd / "run"
    with open(cwd / "output", "w") as output:  # it would fill a pipe, and then wait for a reader
        process = run_of(cwd, "--train.steps=1000000", *options, executed=True, output=output)
    for _ in range(kills):
        time.sleep(chance.uniform(0.1, 2.0))
        wait_for(process, lambda: len(members_of(process, folder)) > 1)
        at = time.time()
        chance.choice(members_of(process, folder)).kill()
        wait_for(process, lambda at=at: steps_after(folder, at), 2 * HANG)
        found.until_next_step.append(steps_after(folder, at)[0]["time"] - at)
        # Whoever is killed again and again before it has done ten steps would be quarantined.
        wait_for(process, lambda at=at: new_workers(folder, at) and steps_after(folder, at)[SOUND_AFTER_STEPS:])
        wait_for(process, lambda at=at: steps_after(folder, new_workers(folder, at)[-1]["time"]))
        found.until_slots += [seconds_until_slots(folder, worker) for worker in new_workers(folder, at)]
    ctrl_c(process)
    assert process.wait(LONG) == 4, (cwd / "output").read_text()[-2000:]
    gaps = figures("from the kill to the next committed step", found.until_next_step)
    slots = figures("from a replacement's start to its first step", found.until_slots)
    hangs = sum(gap > HANG for gap in found.until_next_step)
    print(f"{len(found.until_next_step)} kills, seed {seed}, {hangs} hangs; {gaps}; {slots}")
    return found


def new_workers(folder: Path, moment: float) -> list[dict[str, Any]]:
    return [event for event in events(folder, "worker") if event["time"] > moment]


def seconds_until_slots(folder: Path, worker: dict[str, Any]) -> float:
    """From the start of a worker's process until the end of its first step."""
    return float(steps_after(folder, worker["time"])[0]["time"] - psutil.Process(worker["pid"]).create_time())


@pytest.mark.parametrize(
    ("transport", "zero", "share"),
    [("shm", TWICE, 1.0), ("star", TWICE, 1.0), ("ring", TWICE, 1.0), ("shm", EVEN, 0.25)],
    ids=["shm", "star", "ring", "shm-without-replicas"],
)
def test_many_kills_never_change_the_answer(tmp_path: Path, transport: str, zero: list[str], share: float) -> None:
    settings = ["--eval.every=100", "--checkpoint.every=20", *zero]
    kills = max(1, int(COUNT * share))
    seconds = kill_again_and_again(tmp_path, kills, SEED, "--workers=4", f"--group.transport={transport}", *settings)
    if transport == "ring":  # its order of addition depends on its size
        code, said = andon("audit", "run", cwd=tmp_path)
        assert code == 0, said
        print(said)
    else:
        assert_same_as_undisturbed(tmp_path, "--optim.schedule=constant", *settings)
    assert max(seconds.until_next_step) < HANG * busy() and max(seconds.until_slots) < HANG * busy()


def assert_same_as_undisturbed(cwd: Path, *settings: str) -> None:
    """A run that was stopped has every step once, and its checkpoint is that of a run in which nothing happened."""
    step = events(cwd / "run", "stopped")[-1]["step"]
    code, said = andon("audit", "run", cwd=cwd)
    assert code == 0 and f"{step:,} steps are committed, none missing and none twice" in said, said
    train(f"--train.steps={step}", *settings, cwd=cwd, name="whole", timeout=LONG)
    whole, found = (manifest(cwd / name / "checkpoints" / f"checkpoint-{step}") for name in ("whole", "run"))
    assert whole.units == found.units
    print(f"the undisturbed digest after {step:,} steps; audit: {said.strip()}")


SETTINGS = ["--optim.schedule=constant", "--eval.every=0", *OFF]


@pytest.mark.parametrize("transport", ["ring", "star"])
def test_many_kills_of_the_coordinator_never_change_the_answer(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANDON_TOKEN", TOKEN)
    kills, folder, chance = max(1, COUNT // 4), tmp_path / "run", random.Random(SEED)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    options = ["--workers=2", f"--group.transport={transport}", "--train.steps=1000000", "--checkpoint.every=50"]
    command = ["coordinator", *UNTIMED, *options, *SETTINGS, "--run.dir=run", f"--bind={address}"]
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
    print(f"{transport}: {kills} kills of the coordinator, seed {SEED}; {figures('from its start to a step', gaps)}")
    assert_same_as_undisturbed(tmp_path, *SETTINGS)
    assert max(gaps) < HANG * busy()


@pytest.mark.parametrize("transport", ["ring", "star"])
def test_many_partitions_never_change_the_answer(tmp_path: Path, transport: str) -> None:
    """A coordinator and two workers, each on a machine of its own; one of them falls silent for 1 to 10 s."""
    cuts, folder, chance = max(1, COUNT // 4), tmp_path / "run", random.Random(SEED)
    options = ["--workers=2", f"--group.transport={transport}", "--train.steps=1000000", "--checkpoint.every=50"]
    workers: dict[str, subprocess.Popen[str]] = {}
    gaps, joined = [], 0
    with network("alpha", "beta", "gamma") as hosts, open(tmp_path / "log", "w") as log:
        around: dict[str, Any] = {"cwd": tmp_path, "output": log, "more": {"ANDON_TOKEN": TOKEN}}
        coordinator = hosts["alpha"].start("coordinator", *UNTIMED, *options, *SETTINGS, "--run.dir=run", **around)

        def start_lost() -> int:
            """Start workers again that have ended, as a scheduler does; how many."""
            lost = [name for name in ("beta", "gamma") if name not in workers or workers[name].poll() is not None]
            for name in lost:
                workers[name] = hosts[name].start("worker", "alpha", **around)
            return len(lost)

        def are_both_back() -> bool:
            """Whether both train. A worker that the other has gone on without is told so, and ends."""
            nonlocal joined
            joined += start_lost()
            generations = events(folder, "generation")
            return not generations or generations[-1]["workers"] == 2

        start_lost()
        wait_for_step(folder, 3, coordinator)
        for _ in range(cuts):
            time.sleep(chance.uniform(0.2, 1.0))
            host = hosts[chance.choice(sorted(hosts))]
            host.cut()
            time.sleep(chance.uniform(1.0, 10.0))
            at = time.time()
            host.mend()
            wait_for(coordinator, lambda at=at: steps_after(folder, at)[3:], 60.0)
            gaps.append(steps_after(folder, at)[0]["time"] - at)
            wait_for(coordinator, are_both_back, 60.0)
            # Whoever is lost again and again before it has done ten steps would be quarantined.
            settled = time.time()
            wait_for(coordinator, lambda at=settled: steps_after(folder, at)[SOUND_AFTER_STEPS:])
        coordinator.send_signal(signal.SIGINT)
        assert [worker.wait(60) for worker in workers.values()] == [4, 4] and coordinator.wait(60) == 4
    said = figures("from a partition's end to a step", gaps)
    print(f"{transport}: {cuts} partitions, seed {SEED}, {joined} workers started again; {said}")
    assert_same_as_undisturbed(tmp_path, *SETTINGS)
    assert max(gaps) < HANG * busy()


def test_the_cnn_with_many_kills_gives_the_undisturbed_digest(tmp_path: Path) -> None:
    kills, steps, chance = max(1, COUNT // 10), str(30 * COUNT), random.Random(SEED)
    code, output = andon("run", "--workers=1", str(EXAMPLES / "cnn.py"), steps, cwd=tmp_path, timeout=LONG)
    assert code == 0, output
    digest = output.split()[-1]
    process = start("run", "--workers=3", str(EXAMPLES / "cnn.py"), steps, cwd=tmp_path, executed=True)

    def settled() -> list[psutil.Process]:
        age = 5.0 * busy()
        return [each for each in workers_of(process) if time.time() - each.create_time() > age]

    killed = 0
    for _ in range(kills):
        wait_for(process, lambda: len(settled()) > 1)
        if process.poll() is None:
            chance.choice(settled()).kill()
            killed += 1
            time.sleep(chance.uniform(0.2, 2.0))
    output = finish(process, LONG) + "".join(
        path.read_text() for path in (tmp_path / "runs" / "cnn" / "logs").iterdir()
    )
    assert process.returncode == 0 and f"weights {digest}" in output, output
    print(f"{killed} kills of the CNN's workers, seed {SEED}: the undisturbed digest {digest[:16]}")
    assert killed == kills, "the script ended before all kills: it needs more steps"


@pytest.mark.parametrize("transport", ["shm", "star"])
def test_tokens_per_second_follow_the_number_of_workers_within_two_steps(tmp_path: Path, transport: str) -> None:
    large = ["--model.hidden=256", "--model.intermediate=768", "--train.context=128", "--train.slots=8"]
    options = [f"--group.transport={transport}", "--train.steps=100000", "--eval.every=0", *OFF, *large]
    folder, process = tmp_path / "run", run_of(tmp_path, "--workers=1", *options)
    wait_for(process, lambda: len(events(folder, "step")) > 12)
    alone = statistics.median(event["tokens_per_s"] for event in events(folder, "step")[2:])
    for workers in (4, 2):
        assert andon("resize", "run", str(workers), cwd=tmp_path)[0] == 0
        wait_for_newest(folder, process, workers)
        at = events(folder, "generation")[-1]["time"]
        wait_for(process, lambda at=at: steps_after(folder, at)[20:])
        after = [event["tokens_per_s"] for event in steps_after(folder, at)]
        steady = statistics.median(after[5:])
        print(f"{transport}, 1 → {workers}: {alone:,.0f} → {steady:,.0f} tokens/s; first steps {after[:4]}")
        assert max(after[:3]) > 0.8 * steady  # the third step: two have passed since
    process.kill()


IN_A_STEP = ("fingerprint", "exchange", "optimizer")


@pytest.mark.parametrize("zero", ["off", "even"])
@pytest.mark.parametrize("place", [*IN_A_STEP, "snapshot", "write", "wrote"])
def test_a_script_ends_alike_wherever_a_worker_dies(tmp_path: Path, place: str, zero: str) -> None:
    alone, command, deaths = tmp_path / "alone", ["run", "--workers=3", "mine.py", "30", zero, "0"], 0
    undisturbed_script(alone, 30)
    for rank in range(3):
        for step in (21 if place in IN_A_STEP else 20, 22, 30):  # in step 21 the save of step 10 is complete
            run = tmp_path / f"{rank}-{step}"
            script_that_dies(run, place, step, rank)
            code, output = andon(*command, cwd=run)
            deaths += (run / "died").exists()  # some ranks have no part in a save, and step 22 is not saved
            assert code == 0, output
            assert_ended_alike(run, alone, 30)
    assert deaths == 9 if place in IN_A_STEP else deaths >= 2
