"""Another user of the same machine: reads no secret, joins no run, opens none of its memory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from andon.control.token import token_of_run
from andon.transport.base import GroupError
from andon.transport.keys import LinkKeys
from andon.transport.tcp.connect import connect
from andon.transport.tcp.frames import Hello
from tests.kit.runs import SMALL, events_so_far, listening, soak, start, wait_for_step, workers_of

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
NOBODY = 65534
GUESS = "a guess at the token"


def as_nobody(work: Callable[[], list[str]]) -> list[str]:
    """What a function answers when another user calls it, in a process of its own."""
    "".encode("idna")  # Python loads this codec for the first address, from files that may not be nobody's to read
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pid = os.fork()
        if not pid:
            try:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                theirs.sendall(json.dumps(work()).encode())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        theirs.close()
        answer = b"".join(iter(lambda: ours.recv(1 << 16), b""))
        os.waitpid(pid, 0)
    found: list[str] = json.loads(answer)
    return found


def intrusions(ports: set[tuple[str, int]], processes: list[int]) -> list[str]:
    """What a stranger tries that succeeds."""
    succeeded = []
    for address in ports:
        for rank, size, channel in ((0, 0, "control"), (0, 2, "data"), (1, 2, "data")):
            key = LinkKeys.derive(GUESS.encode(), rank, 2).of(1 - rank) if size else GUESS.encode()
            try:
                connect(address, 1 - rank, Hello(rank, size, 0, channel), key, 0.5).close()
                succeeded.append(f"rank {rank} for {channel} at {address}")
            except (GroupError, OSError):
                pass
    for pid in processes:
        for name in ("fd", "mem", "map_files", "environ"):
            try:
                path = Path(f"/proc/{pid}/{name}")
                _ = list(path.iterdir()) if path.is_dir() else path.read_bytes()
                succeeded.append(str(path))
            except OSError:
                pass
    return succeeded


@pytest.mark.parametrize("transport", ["torch", soak("shm"), soak("star"), soak("ring")])
def test_another_user_joins_no_run_and_opens_none_of_its_memory(tmp_path: Path, transport: str) -> None:
    options = ["--workers=2", "--train.steps=100000", f"--group.transport={transport}", "--run.dir=run"]
    process = start("train", *SMALL, *options, cwd=tmp_path)
    wait_for_step(tmp_path / "run", 2, process)
    family = [psutil.Process(process.pid), *workers_of(process)]
    ports = set(listening(family[0]))
    assert ports
    assert as_nobody(lambda: intrusions(ports, [each.pid for each in family])) == []
    before = events_so_far(tmp_path / "run")[-1]["step"]
    wait_for_step(tmp_path / "run", before + 5, process)
    assert process.poll() is None


def test_another_user_cannot_read_the_token_of_a_run_or_of_its_workers(tmp_path: Path) -> None:
    token_of_run(tmp_path)
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.getuid() and path != Path("/") and path != Path("/tmp"):
            path.chmod(0o755)
    options = ["--workers=1", "--train.steps=100000", "--run.dir=run"]
    process = start("train", *SMALL, *options, cwd=tmp_path, executed=True)
    wait_for_step(tmp_path / "run", 2, process)
    worker = workers_of(process)[0].pid
    script = f"cat {tmp_path}/token /proc/{process.pid}/environ /proc/{worker}/environ"
    done = subprocess.run(["sh", "-c", script], user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True)
    assert done.returncode != 0 and done.stdout == b"" and done.stderr.count(b"Permission denied") == 3, done
