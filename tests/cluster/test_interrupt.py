"""Interruptions: kill -9 at any moment, Ctrl-C, and the same command again."""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from andon.checkpoint.disk.listing import checkpoint_path
from andon.checkpoint.disk.manifest import verify
from andon.transport.registry import TRANSPORTS
from tests.kit.runs import (
    SMALL,
    ctrl_c,
    events,
    events_so_far,
    finish,
    start,
    summary,
    train,
    wait_for_step,
    workers_of,
)

SEED = int(os.environ.get("ANDON_SOAK_SEED", "1"))
COUNT = int(os.environ.get("ANDON_SOAK_COUNT") or "60")
RUN = [*SMALL, "--train.steps=40", "--checkpoint.every=2", "--workers=2", "--run.dir=run"]


def wait_for_new_steps(folder: Path, count: int, process: subprocess.Popen[str], before: int) -> None:
    """Wait until a run that had done `before` steps has done so many more (or has ended)."""
    while process.poll() is None and len(events_so_far(folder)) < before + count:
        time.sleep(0.01)


def start_long_run(cwd: Path, *options: str) -> subprocess.Popen[str]:
    """A run that would never end, once it has done a few steps."""
    process = start("train", *SMALL, "--train.steps=100000", "--workers=2", "--run.dir=run", *options, cwd=cwd)
    wait_for_step(cwd / "run", 3, process)
    return process


@pytest.mark.parametrize("transport", ["shm", "star"])
def test_ctrl_c_saves_once_and_leaves_and_the_same_command_goes_on(tmp_path: Path, transport: str) -> None:
    whole = train("--train.steps=40", cwd=tmp_path, name="whole")
    options = ["--train.steps=40", "--workers=2", f"--group.transport={transport}", "--checkpoint.every=0"]
    command = ["train", *SMALL, *options, "--run.dir=run"]
    process = start(*command, "--resume=none", cwd=tmp_path)
    wait_for_step(tmp_path / "run", 3, process)
    ctrl_c(process)
    output = finish(process)
    resume = f"Resume from there: {shlex.join(['andon', *command])}\n"
    assert process.returncode == 4 and "Stopped and saved at step" in output and resume in output, output
    (stopped,) = events(tmp_path / "run", "stopped")
    assert 3 <= stopped["step"] < 40
    assert not (tmp_path / "run" / "summary.json").exists()
    process = start(*command, cwd=tmp_path)
    output = finish(process)
    assert process.returncode == 0, output
    assert summary(tmp_path / "run")["weights_blake3"] == whole["weights_blake3"]


def test_ctrl_c_before_the_workers_have_joined_is_not_lost(tmp_path: Path) -> None:
    train("--train.steps=1", cwd=tmp_path, name="warm")  # so that the data is prepared
    process = start("train", *SMALL, "--train.steps=100000", "--workers=2", "--run.dir=run", cwd=tmp_path)
    until = time.monotonic() + 30
    while sum(os.getsid(worker.pid) == worker.pid for worker in workers_of(process)) < 2:
        assert time.monotonic() < until  # until both are out of the terminal's reach
    ctrl_c(process)
    output = finish(process)
    stopped = ("Stopped before the first step", "Stopped and saved at step 1.")  # as they joined before it came, or not
    assert process.returncode == 4 and any(each in output for each in stopped), output


@pytest.mark.parametrize("transport", ["shm", "star"])
def test_sigterm_to_every_process_at_once_saves_and_leaves(tmp_path: Path, transport: str) -> None:
    process = start_long_run(tmp_path, f"--group.transport={transport}", "--checkpoint.every=0")
    everyone = psutil.Process(process.pid).children(recursive=True)
    assert len(everyone) == 3 + TRANSPORTS[transport].needs_server  # workers, what forks them, the gradient server
    for each in everyone:
        each.terminate()
    process.terminate()
    output = finish(process)
    assert process.returncode == 4 and "Stopped and saved at step" in output, output
    (stopped,) = events(tmp_path / "run", "stopped")
    verify(checkpoint_path(tmp_path / "run" / "checkpoints", stopped["step"]))


def test_two_signals_at_the_same_moment_are_heard(tmp_path: Path) -> None:
    process = start_long_run(tmp_path)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode in (4, 1) and "Ctrl-C again quits" in output, output


def test_sigterm_to_one_worker_stops_all_of_them(tmp_path: Path) -> None:
    process = start_long_run(tmp_path)
    workers_of(process)[1].terminate()
    output = finish(process)
    assert process.returncode == 4 and "Stopped and saved at step" in output, output


@pytest.mark.parametrize("transport", ["shm", "star"])
def test_a_closed_terminal_saves_and_leaves(tmp_path: Path, transport: str) -> None:
    process = start_long_run(tmp_path, f"--group.transport={transport}", "--checkpoint.every=0")
    for each in psutil.Process(process.pid).children(recursive=True):
        each.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)  # the shell sends one, and the system another
    output = finish(process)
    assert process.returncode == 4 and "Stopped and saved at step" in output, output
    (stopped,) = events(tmp_path / "run", "stopped")
    verify(checkpoint_path(tmp_path / "run" / "checkpoints", stopped["step"]))


def test_under_nohup_a_closed_terminal_changes_nothing() -> None:
    script = """
import os, signal
from andon.cluster.signals import save_on_signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
save_on_signal(lambda: print("saves"))
os.kill(os.getpid(), signal.SIGHUP)
print("goes on")
os.kill(os.getpid(), signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert done.stdout.split("\n") == ["goes on", "saves", ""], done


def test_a_second_ctrl_c_quits_at_once_and_leaves_no_process(tmp_path: Path) -> None:
    process = start_long_run(tmp_path)
    workers = workers_of(process)
    for worker in workers:
        worker.suspend()  # so that the first one cannot be obeyed
    ctrl_c(process)
    assert process.stdout is not None
    while "Ctrl-C again quits" not in process.stdout.readline():
        assert process.poll() is None
    ctrl_c(process)
    output = finish(process)
    assert process.returncode == 1 and "A second Ctrl-C" in output, output
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


def test_a_second_ctrl_c_kills_a_worker_that_is_being_killed() -> None:
    script = """
import os, signal, socket
from andon.cluster.fork_server import Child
pid = os.fork()
signal.alarm(10)  # a deadlock ends
if not pid:
    signal.pause()
child, send = Child(pid, os.pidfd_open(pid), socket.socketpair()[0]), signal.pidfd_send_signal

def interrupted(*arguments):
    signal.pidfd_send_signal = send
    signal.raise_signal(signal.SIGINT)
    send(*arguments)

signal.signal(signal.SIGINT, lambda *_: child.kill())
signal.pidfd_send_signal = interrupted
child.kill()
print(os.WTERMSIG(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{signal.SIGKILL:d}\n", done


def test_workers_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    process = start_long_run(tmp_path)
    workers = workers_of(process)
    assert len(workers) == 2
    process.kill()
    finish(process)
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive


def test_a_killed_worker_ends_a_run_over_torch_with_a_reason(tmp_path: Path) -> None:
    process = start_long_run(tmp_path, "--group.transport=torch")
    workers_of(process)[1].kill()
    output = finish(process)
    assert process.returncode == 1 and "ank 1 on" in output and "was lost" in output, output


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    command = ["train", *SMALL, "--train.steps=100000", "--run.dir=run"]
    process = start(*command, cwd=tmp_path)
    wait_for_step(tmp_path / "run", 1, process)
    second = start(*command, cwd=tmp_path)
    output = finish(second)
    assert second.returncode == 1 and f"Process {process.pid} is training there" in output, output
    ctrl_c(process)
    finish(process)


def kill_and_go_on(folder: Path, rounds: int, seed: int) -> None:
    """Kill a run at random moments, launcher or one worker, always start it again, and look at its end."""
    whole = train(*RUN[len(SMALL) : -1], cwd=folder, name="whole")
    chance = random.Random(seed)
    kills = 0
    while kills < rounds:
        before = len(events_so_far(folder / "run"))
        process = start("train", *RUN, cwd=folder)
        wait_for_new_steps(folder / "run", chance.randrange(0, 6), process, before)
        time.sleep(chance.random() * 0.05)  # any moment: inside a step, a save, a rename
        victims = [process.pid, *(worker.pid for worker in workers_of(process))]
        if process.poll() is None:
            os.kill(chance.choice(victims), signal.SIGKILL)
            kills += 1
        finish(process)
        if (folder / "run" / "summary.json").exists():
            assert summary(folder / "run")["weights_blake3"] == whole["weights_blake3"]
            (folder / "run").rename(folder / f"finished-{kills}")
    process = start("train", *RUN, cwd=folder)
    output = finish(process)
    assert process.returncode == 0, output
    assert summary(folder / "run")["weights_blake3"] == whole["weights_blake3"]


@pytest.mark.timeout(240)
def test_kill_9_at_random_moments_never_changes_the_answer(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, rounds=3, seed=SEED)


@pytest.mark.soak
def test_kill_9_at_many_random_moments_never_changes_the_answer(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, rounds=COUNT, seed=SEED)
