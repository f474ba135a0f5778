"""The run that goes on: workers are killed and come back, and the answer is that of the undisturbed run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from andon.checkpoint.disk.manifest import read as manifest
from tests.kit.group_harness import busy
from tests.kit.runs import SMALL, andon, ctrl_c, events, finish, soak, start, train, wait_for_step, workers_of

UNTIMED = [option for option in SMALL if "timeout" not in option]
"""Nobody configures a timeout."""
OFF, EVEN, TWICE = ["--zero.policy=off"], ["--zero.policy=even"], ["--zero.policy=even", "--zero.replicas=2"]


def members_of(process: subprocess.Popen[str], folder: Path) -> list[psutil.Process]:
    """The workers that have a rank."""
    pids = {event["pid"] for event in events(folder, "worker")}
    return [worker for worker in workers_of(process) if worker.pid in pids]


def fork_server_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The process from which workers are forked."""
    found = workers_of(process)[0].parent()
    assert found
    return found


def run_of(
    cwd: Path, *options: str, executed: bool = False, output: int | IO[str] = subprocess.PIPE
) -> subprocess.Popen[str]:
    """A run that has done a few steps."""
    always = ["--run.dir=run", "--restarts=10000", "--optim.schedule=constant"]
    process = start("train", *UNTIMED, *always, *options, cwd=cwd, executed=executed, output=output)
    wait_for_step(cwd / "run", 3, process)
    return process


def stop(process: subprocess.Popen[str], folder: Path) -> tuple[int, str]:
    """Ctrl-C: the step at which the run has saved, and its output."""
    ctrl_c(process)
    output = finish(process)
    assert process.returncode == 4, output
    return events(folder, "stopped")[-1]["step"], output


def assert_undisturbed(cwd: Path, step: int, *options: str) -> None:
    """The checkpoint of a step is that of a run in which nothing happened."""
    train(f"--train.steps={step}", "--optim.schedule=constant", *options, cwd=cwd, name="whole")
    whole, found = (manifest(cwd / name / "checkpoints" / f"checkpoint-{step}") for name in ("whole", "run"))
    assert whole.units == found.units
    code, said = andon("audit", "run", cwd=cwd)
    assert code == 0 and f"{step} steps are committed, none missing and none twice" in said, said


def steps_after(folder: Path, moment: float) -> list[dict[str, Any]]:
    return [event for event in events(folder, "step") if event["time"] > moment]


def wait_for(process: subprocess.Popen[str], there: Any, seconds: float = 60.0) -> None:
    """Wait until something is there, or the run has ended."""
    until = time.monotonic() + seconds * busy()
    while not there() and process.poll() is None:
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)


def wait_for_generation(folder: Path, process: subprocess.Popen[str], workers: int, count: int = 1) -> None:
    """Wait until generations with so many workers have begun so often."""
    wait_for(process, lambda: sum(each["workers"] == workers for each in events(folder, "generation")) >= count)


def wait_for_newest(folder: Path, process: subprocess.Popen[str], workers: int) -> None:
    """Wait until the newest generation has so many workers."""
    wait_for(process, lambda: [each["workers"] for each in events(folder, "generation")][-1:] == [workers])


@pytest.mark.parametrize(
    ("transport", "zero"),
    [("shm", OFF), ("shm", TWICE), ("star", OFF), ("ring", OFF)],
    ids=["off", "twice", "star", "ring"],
)
def test_a_killed_worker_comes_back_and_the_answer_stays(tmp_path: Path, transport: str, zero: list[str]) -> None:
    workers = 2 if transport == "ring" else 3  # so that a ring adds in the one order
    options = ["--train.steps=100000", "--eval.every=50", "--checkpoint.every=30", *zero]
    folder, process = (
        tmp_path / "run",
        run_of(tmp_path, f"--workers={workers}", f"--group.transport={transport}", *options),
    )
    members_of(process, folder)[0].kill()
    wait_for_generation(folder, process, workers)  # at once, if the new one comes before the others have parted
    at = time.time()
    wait_for(process, lambda: steps_after(folder, at)[3:])
    step, output = stop(process, folder)
    assert "was lost" in output and "1 of them new" in output, output
    assert [event["step"] for event in events(folder, "step")] == list(range(1, step + 1))
    assert_undisturbed(tmp_path, step, *zero)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_worker_may_be_killed_before_the_first_step(tmp_path: Path, resumed: bool) -> None:
    folder, options = tmp_path / "run", ["--workers=3", "--train.steps=100000", "--checkpoint.every=5", *OFF]
    if resumed:
        stop(run_of(tmp_path, *options), folder)
    before = len(events(folder, "worker")) if resumed else 0
    process = start("train", *SMALL, "--run.dir=run", "--optim.schedule=constant", *options, cwd=tmp_path)
    wait_for(process, lambda: (folder / "metrics.jsonl").exists() and len(events(folder, "worker")) == before + 3)
    os.kill(events(folder, "worker")[-1]["pid"], signal.SIGKILL)
    wait_for_generation(folder, process, 3)
    at = time.time()
    wait_for(process, lambda: steps_after(folder, at)[3:])
    step, _ = stop(process, folder)
    assert_undisturbed(tmp_path, step, *OFF)


def test_without_replicas_all_go_back_to_the_newest_checkpoint(tmp_path: Path) -> None:
    folder, process = (
        tmp_path / "run",
        run_of(tmp_path, "--workers=2", "--train.steps=100000", "--checkpoint.every=5", *EVEN),
    )
    wait_for(process, lambda: events(folder, "checkpoint"))
    members_of(process, folder)[0].kill()
    wait_for(process, lambda: events(folder, "generation"))
    at = time.time()
    wait_for(process, lambda: steps_after(folder, at)[3:])
    step, output = stop(process, folder)
    assert "from the checkpoint of step" in output, output
    assert_undisturbed(tmp_path, step)
    assert "went back to a checkpoint once" in andon("audit", "run", cwd=tmp_path)[1]


def test_steps_that_are_done_again_without_a_checkpoint_are_saved_again(tmp_path: Path) -> None:
    options = ("--workers=2", "--train.steps=100000", "--checkpoint.every=60", *EVEN)
    folder, process = tmp_path / "run", run_of(tmp_path, *options)
    wait_for(process, lambda: events(folder, "checkpoint"))
    shutil.rmtree(folder / "checkpoints")
    members_of(process, folder)[0].kill()
    wait_for(process, lambda: len(events(folder, "checkpoint")) > 1)
    stop(process, folder)
    assert [event["step"] for event in events(folder, "checkpoint")][:2] == [60, 60]


def test_a_worker_that_was_alone_is_started_again_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    folder, process = tmp_path / "run", run_of(tmp_path, "--train.steps=100000", "--checkpoint.every=5")
    wait_for(process, lambda: events(folder, "checkpoint"))
    members_of(process, folder)[0].kill()
    wait_for_generation(folder, process, 1)
    step, output = stop(process, folder)
    assert "Going on with 1 worker" in output, output
    assert_undisturbed(tmp_path, step)


def test_a_worker_that_dies_again_and_again_is_quarantined(tmp_path: Path) -> None:
    long = ["--workers=2", "--train.steps=100000", "--eval.every=0"]
    process = run_of(tmp_path, *long, *OFF)
    killed: list[psutil.Process] = []
    for _ in range(3):  # each as soon as it is there
        wait_for(process, lambda: [each for each in workers_of(process, "1") if each not in killed])
        killed.extend(each for each in workers_of(process, "1") if each not in killed)
        killed[-1].kill()
    wait_for(process, lambda: "is quarantined" in str(events(tmp_path / "run", "note")))
    at = time.time()
    wait_for(process, lambda: steps_after(tmp_path / "run", at)[5:])
    assert workers_of(process, "0") and not workers_of(process, "1")
    ctrl_c(process)
    output = finish(process)
    assert process.returncode == 4, output


def test_workers_outlive_the_process_that_forked_them_and_others_are_forked_by_another(tmp_path: Path) -> None:
    folder, process = tmp_path / "run", run_of(tmp_path, "--workers=2", "--train.steps=100000", "--eval.every=0", *OFF)
    workers, fork_server = workers_of(process), fork_server_of(process)
    fork_server.kill()
    at = time.time()
    wait_for(process, lambda: steps_after(folder, at)[3:])
    assert not events(folder, "generation"), "nobody is lost with it"
    workers[0].kill()
    wait_for_generation(folder, process, 2)
    assert fork_server_of(process) != fork_server
    stop(process, folder)


def test_a_run_goes_on_with_another_server_when_that_of_its_star_dies(tmp_path: Path) -> None:
    options = ["--workers=2", "--group.transport=star", "--train.steps=100000", "--eval.every=0", *OFF]
    folder, process = tmp_path / "run", run_of(tmp_path, *options)
    (server,) = {*psutil.Process(process.pid).children()} - {fork_server_of(process)}
    server.kill()
    wait_for_generation(folder, process, 2)
    at = time.time()
    wait_for(process, lambda: steps_after(folder, at)[3:])
    step, _ = stop(process, folder)
    assert not events(folder, "lost"), "no worker is lost with it"
    assert_undisturbed(tmp_path, step, *OFF)


def test_a_worker_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    folder, process = tmp_path / "run", run_of(tmp_path, "--workers=2", "--train.steps=100000", "--eval.every=0", *OFF)
    stopped = members_of(process, folder)[0]
    stopped.suspend()
    wait_for_generation(folder, process, 2)
    assert not stopped.is_running()
    step, output = stop(process, folder)
    assert "is started again" in output, output
    assert_undisturbed(tmp_path, step, *OFF)


def test_a_run_with_fewer_workers_than_it_needs_waits_for_more(tmp_path: Path) -> None:
    folder, options = tmp_path / "run", ["--workers=2", "--min_workers=2", "--train.steps=100000", "--eval.every=0"]
    process = run_of(tmp_path, *options, *OFF)
    os.kill(fork_server_of(process).pid, signal.SIGSTOP)
    members_of(process, folder)[0].kill()
    wait_for(process, lambda: "Waiting for workers: 1 of at least 2" in str(events(folder, "note")))
    os.kill(fork_server_of(process).pid, signal.SIGCONT)
    wait_for_generation(folder, process, 2)
    assert all(event["workers"] == 2 for event in events(folder, "generation"))
    stop(process, folder)


SAVES, SAVES_NEVER = ["--checkpoint.every=1", "--checkpoint.keep=1"], ["--checkpoint.every=0"]


@pytest.mark.parametrize(
    ("transport", "zero", "saves"),
    [
        *(("auto", OFF, SAVES), ("shm", EVEN, SAVES_NEVER), ("star", TWICE, SAVES)),
        *(soak("shm", zero, SAVES) for zero in (OFF, EVEN, TWICE)),
        *(soak("shm", zero, SAVES_NEVER) for zero in (OFF, TWICE)),
        *(soak("star", zero, SAVES) for zero in (OFF, EVEN)),
        *(soak("star", zero, SAVES_NEVER) for zero in (OFF, EVEN, TWICE)),
    ],
)
def test_a_run_grows_and_shrinks_while_it_goes_on(
    tmp_path: Path, transport: str, zero: list[str], saves: list[str]
) -> None:
    folder, options = tmp_path / "run", [f"--group.transport={transport}", "--train.steps=100000", *zero]
    process = run_of(tmp_path, "--workers=1", *saves, *options)
    for workers in (4, 2):
        code, said = andon("resize", "run", str(workers), cwd=tmp_path)
        assert code == 0, said
        wait_for_newest(folder, process, workers)
        at = time.time()
        wait_for(process, lambda at=at: steps_after(folder, at)[3:])
    code, said = andon("resize", "run", "9", cwd=tmp_path)
    assert code == 1 and "cannot go on with 9 workers" in said, said
    step, _ = stop(process, folder)
    steps = [event["step"] for event in events(folder, "step")]
    assert steps == list(range(1, step + 1)), "nothing is done twice"
    assert_undisturbed(tmp_path, step, *zero)
