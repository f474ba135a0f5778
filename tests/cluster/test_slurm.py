"""A real SLURM on this machine, made for the test: the job script of `andon launch slurm` trains, and goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests import ROOT
from tests.kit.runs import SMALL, andon, environment, events, summary, train

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),  # SLURM lets a requeued job wait for two minutes
    pytest.mark.skipif(os.getuid() != 0, reason="SLURM's daemons run as root"),
    pytest.mark.skipif(not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))), reason="there is no SLURM here"),
]
OPTIONS = [*SMALL, "--train.steps=1200", "--checkpoint.every=30", "--workers=2", "--run.dir=run"]
CONF = """
ClusterName=one
SlurmctldHost={host}
SlurmctldPort={port}
SlurmdPort={next_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmUser=root
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=5
MinJobAge=2
SchedulerParameters=requeue_delay=1
NodeName={host} CPUs=8 CoresPerSocket=8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
SlurmdParameters=config_overrides
"""


def squeue(slurm: dict[str, str]) -> bytes:
    """The jobs that SLURM has."""
    return subprocess.run(["squeue", "-h"], env=slurm, capture_output=True).stdout


def until(done: Callable[[], bool], what: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"no {what} within {seconds:.0f} s"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which `sbatch` finds a cluster of this machine alone."""
    folder = tmp_path_factory.mktemp("slurm")
    for path in (folder, *folder.parents):
        if path.is_relative_to("/tmp/pytest-of-root"):
            path.chmod(0o755)  # munged wants to trust the way to its socket
    for name in ("spool", "state"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o600)
    host = subprocess.run(["hostname", "-s"], capture_output=True, text=True, check=True).stdout.strip()
    conf = CONF.format(host=host, folder=folder, port=26817, next_port=26818)
    (folder / "slurm.conf").write_text(conf)
    variables = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    munge = ["munged", "-F", "-f", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key"]
    munge += [f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
    daemons = []
    try:
        for command in (munge, ["slurmctld", "-D", "-c"], ["slurmd", "-D"]):
            daemons.append(subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL))
            time.sleep(1.0)

        def idle() -> bool:
            states = subprocess.run(["sinfo", "-h", "-o", "%t"], env=variables, capture_output=True, text=True)
            return states.stdout.strip() == "idle"

        until(idle, "idle node")
        yield variables
    finally:
        subprocess.run(["scancel", "--user=root"], env=variables)

        until(lambda: not squeue(variables), "empty queue")
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(20)


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> str:
    digest: str = train(*OPTIONS[len(SMALL) :], cwd=tmp_path_factory.mktemp("alone"))["weights_blake3"]
    return digest


def submit(cwd: Path, slurm: dict[str, str]) -> str:
    """Submit the job of `andon launch slurm`; gives its id."""
    code, script = andon("launch", "slurm", *OPTIONS, cwd=cwd)
    assert code == 0, script
    (cwd / "job.sh").write_text(script)
    tools = f"{Path(sys.executable).parent}:{slurm['PATH']}"
    variables = {**environment(cwd), **slurm, "PATH": tools, "PYTHONPATH": str(ROOT)}
    command = ["sbatch", "--parsable", "-o", "job.out", "job.sh"]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=True).stdout.strip()


def ended(cwd: Path, answer: str) -> str:
    """Wait for the summary; gives what the job printed."""
    until((cwd / "run" / "summary.json").exists, "summary", 480)
    assert summary(cwd / "run")["weights_blake3"] == answer
    return (cwd / "job.out").read_text()


def test_a_job_gives_the_answer(tmp_path: Path, slurm: dict[str, str], answer: str) -> None:
    submit(tmp_path, slurm)
    assert "Resuming" not in ended(tmp_path, answer)
    until(lambda: not squeue(slurm), "empty queue", 30)
    assert "error" not in (tmp_path / "job.out").read_text()


def test_a_requeued_job_goes_on(tmp_path: Path, slurm: dict[str, str], answer: str) -> None:
    job = submit(tmp_path, slurm)
    until((tmp_path / "run" / "checkpoints" / "checkpoint-30").exists, "checkpoint")
    subprocess.run(["scontrol", "requeue", job], env=slurm, check=True)
    assert "Resuming" in ended(tmp_path, answer)


def test_a_job_goes_on_after_a_killed_task(tmp_path: Path, slurm: dict[str, str], answer: str) -> None:
    """The others go on, and the task starts its worker again."""
    submit(tmp_path, slurm)
    until((tmp_path / "run" / "checkpoints" / "checkpoint-30").exists, "checkpoint")
    tasks = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = process.info["cmdline"] or []
        if process.info["cwd"] == str(tmp_path) and "worker" in words and "srun" not in words[0]:
            tasks.append(process.pid)
    os.kill(max(tasks), signal.SIGKILL)
    assert "Resuming" not in ended(tmp_path, answer)
    assert [each["workers"] for each in events(tmp_path / "run", "generation")] == [1, 2]
