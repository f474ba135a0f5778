"""Several machines, each a network namespace: they find each other, and a machine that falls silent is named."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.kit.group_harness import busy
from tests.kit.network import Host, Weather, network
from tests.kit.runs import SMALL, events, events_so_far, soak, summary, train, wait_for_step

STEPS = ["--train.steps=8"]
TOKEN = {"ANDON_TOKEN": "the token of the tests"}
SECONDS = float(os.environ.get("ANDON_SOAK_COUNT") or "600")


def end(process: subprocess.Popen[str], timeout: float = 60) -> str:
    return process.communicate(timeout=timeout * busy())[0]


def ended_well(*processes: subprocess.Popen[str]) -> bool:
    outputs = [end(process) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    return True


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> str:
    digest: str = train(*STEPS, cwd=tmp_path_factory.mktemp("alone"))["weights_blake3"]
    return digest


def coordinate(host: Host, cwd: Path, *options: str) -> subprocess.Popen[str]:
    return host.start("coordinator", *SMALL, *STEPS, "--run.dir=run", *options, cwd=cwd, more=TOKEN)


@pytest.mark.parametrize(
    ("transport", "suffix"), [("ring", "6"), soak("star", ""), soak("torch", ""), soak("torch", "6")]
)
def test_two_machines_find_each_other_by_name_alone(tmp_path: Path, answer: str, transport: str, suffix: str) -> None:
    """Nobody names an interface, a port or a rank; two of the coordinator's interfaces lead nowhere, the worker beside
    it comes over loopback, the other one over IPv4 or IPv6 and from an empty folder, before there is a coordinator."""
    away = tmp_path / "away"
    away.mkdir()
    with network("alpha", "beta") as hosts:
        hosts["alpha"].add_interface("dead0", "10.78.0.1/24")
        hosts["alpha"].add_interface("down0", "10.79.0.1/24", up=False)
        began = time.monotonic()
        far = hosts["beta"].start("worker", f"alpha{suffix}", cwd=away, more=TOKEN)
        coordinator = coordinate(hosts["alpha"], tmp_path, "--workers=2", f"--group.transport={transport}")
        near = hosts["alpha"].start("worker", "localhost", cwd=tmp_path, more=TOKEN)
        wait_for_step(tmp_path / "run", 1, coordinator)
        print(f"{transport}: first step after {time.monotonic() - began:.1f} s")
        assert ended_well(far, near, coordinator)
    assert summary(tmp_path / "run")["weights_blake3"] == answer


def test_the_page_about_machines_is_followed_to_the_first_step_within_30_seconds(tmp_path: Path) -> None:
    """Its commands alone, on two machines with nothing but the texts on one of them."""
    page = (ROOT / "docs" / "machines.md").read_text()
    lines = [line.split() for line in re.findall(r"^(?:andon (?:coordinator|worker)|scp) .*", page, re.M)]
    coordinate, work_near, copy, work_far = lines
    home, away = tmp_path / "home", tmp_path / "away"
    (home / "my-texts").mkdir(parents=True)
    away.mkdir()
    (home / "my-texts" / "one.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    with network("alpha", "beta") as hosts:
        began = time.monotonic()
        coordinator = hosts["alpha"].start(*coordinate[1:], *SMALL, *STEPS, cwd=home, executed=True)
        near = hosts["alpha"].start(*work_near[1:], cwd=home, executed=True)
        source = copy[1].removeprefix("alpha:")
        while not (home / source).exists():
            assert coordinator.poll() is None, end(coordinator)
            time.sleep(0.05)
        shutil.copy(home / source, away / "token")
        far = hosts["beta"].start(*work_far[1:], cwd=away, executed=True)
        wait_for_step(home / "runs" / "default", 1, coordinator)
        seconds = time.monotonic() - began
        print(f"first step after {seconds:.1f} s")
        assert seconds < 30.0 * busy()
        assert ended_well(near, far, coordinator)


@pytest.mark.parametrize("transport", ["ring", soak("star")])
def test_a_run_goes_on_without_a_machine_that_falls_silent_within_six_seconds(tmp_path: Path, transport: str) -> None:
    options = ["--workers=3", f"--group.transport={transport}", "--train.steps=100000", "--zero.policy=off"]
    with network("alpha", "beta", "gamma") as hosts:
        coordinator = coordinate(hosts["alpha"], tmp_path, *options)
        workers = {name: hosts[name].start("worker", "alpha", cwd=tmp_path, more=TOKEN) for name in hosts}
        wait_for_step(tmp_path / "run", 2, coordinator)
        hosts["gamma"].cut()
        began = time.time()
        while not (found := events(tmp_path / "run", "generation")) and time.time() - began < 30:
            time.sleep(0.02)
        (lost,), (generation,) = events(tmp_path / "run", "lost"), found
        assert lost["host"] == "gamma" and generation["workers"] == 2
        assert generation["time"] - began < 6.5 * busy(), (lost, generation)
        wait_for_step(tmp_path / "run", generation["step"] + 2, coordinator)
        hosts["gamma"].mend()
        output = end(workers["gamma"], 40)
        assert workers["gamma"].returncode == 1 and "refused" in output and "Traceback" not in output, output
        coordinator.send_signal(signal.SIGINT)
        assert all(end(workers[name], 20) and workers[name].returncode == 4 for name in ("alpha", "beta"))
        assert end(coordinator, 20) and coordinator.returncode == 4


def train_over_a_bad_network(tmp_path: Path, transport: str, seconds: float) -> None:
    options = ["--workers=2", f"--group.transport={transport}", "--train.steps=100000", "--checkpoint.every=0"]
    with network("alpha", "beta", weather=Weather(delay=0.1, jitter=0.03, loss=0.01)) as hosts:
        coordinator = coordinate(hosts["alpha"], tmp_path, *options)
        workers = [host.start("worker", "alpha", cwd=tmp_path, more=TOKEN) for host in hosts.values()]
        wait_for_step(tmp_path / "run", 1, coordinator, 120)
        began, steps = time.monotonic(), 1
        while time.monotonic() < began + seconds or steps < 2:
            assert all(process.poll() is None for process in (coordinator, *workers))
            assert time.monotonic() < began + seconds + 60
            time.sleep(0.1)
            steps = len(events_so_far(tmp_path / "run"))
        print(f"{steps} steps in {time.monotonic() - began:.0f} s, no false alarm")


def test_delay_and_loss_are_no_death(tmp_path: Path) -> None:
    train_over_a_bad_network(tmp_path, "ring", 4.0)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", ["ring", "star", "torch"])
def test_delay_and_loss_are_no_death_for_long(tmp_path: Path, transport: str) -> None:
    train_over_a_bad_network(tmp_path, transport, SECONDS)


@pytest.mark.parametrize("transport", [soak("star"), soak("ring"), soak("torch")])
def test_torchrun_on_two_machines_gives_the_answer(tmp_path: Path, answer: str, transport: str) -> None:
    with network("alpha", "beta") as hosts:
        processes = []
        for number, host in enumerate(hosts.values()):
            folder = tmp_path / host.name
            folder.mkdir()
            launcher = ["--nnodes=2", f"--node-rank={number}", "--nproc-per-node=1", "--master-addr=alpha"]
            command = [sys.executable, "-m", "torch.distributed.run", *launcher, "--master-port=29500", "-m", "andon"]
            options = ["train", *SMALL, *STEPS, "--run.dir=run", f"--group.transport={transport}"]
            processes.append(host.popen(*command, *options, cwd=folder, more=TOKEN))
        assert ended_well(*processes)  # loading torch four times takes its time
    assert summary(tmp_path / "alpha" / "run")["weights_blake3"] == answer
