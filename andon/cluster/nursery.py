"""Forks the workers of `andon train` from one process that has loaded torch.

Loading torch takes seconds of a core, for every worker and again for every one that replaces a lost one. The *nursery*
loads it once: what it forks is ready in a moment, and shares its pages. It computes nothing and starts no thread, so
that its children can do both. The launcher asks through the nursery's standard input, a socket, with the worker's
arguments as JSON, its log and a socket for the answers: the worker's process (a pidfd), and later its exit code. The
nursery ends when the launcher does; workers that outlive it go on.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from andon.cluster.worker import main as work
from andon.errors import UserError
from andon.machine import name_process

ANYTHING = 1 << 16  # bytes of a request
LOADED = ("andon.cluster.session", "andon.transport.shm.group", "numpy.random", "tokenizers")  # for every kind of run
START_SECONDS = 120.0  # that loading torch may take, from a slow disk


class Child:
    """A worker that a nursery has forked; as a `subprocess.Popen` to whoever waits for it."""

    def __init__(self, pid: int, descriptor: int, answers: socket.socket) -> None:
        self.pid, self._descriptor, self._answers = pid, descriptor, answers
        self.returncode: int | None = None
        self._turn = threading.Lock()

    def poll(self) -> int | None:
        """Its exit code, once somebody has waited for it."""
        return self.returncode

    def wait(self) -> int:
        """Wait for its end: its exit code, or that of a killed process if its nursery is gone and cannot tell."""
        select.select([self._descriptor], [], [])
        with self._answers:
            code = int(self._answers.recv(ANYTHING) or -signal.SIGKILL)
        with self._turn:
            os.close(self._descriptor)
            self.returncode = code
        return code

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        with self._turn, contextlib.suppress(ProcessLookupError):
            if self.returncode is None:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)


class Nursery:
    """Starts the workers of one run; a nursery that has died is replaced."""

    def __init__(self, environment: Mapping[str, str], libraries: Sequence[str], log: Path) -> None:
        """`environment` is that of the workers, besides the launcher's; `libraries` are modules that they need."""
        self._environment, self._libraries, self._log = environment, libraries, log
        self._open()

    def start(self, arguments: Sequence[str], log: Path) -> Child:
        """Fork a worker, which writes to a log."""
        if self._process.poll() is not None:
            self.close()
            self._open()
        ours, theirs = socket.socketpair()
        with theirs, open(log, "ab") as output, contextlib.suppress(OSError):  # whoever reads the answer learns of it
            socket.send_fds(self._requests, [json.dumps(arguments).encode()], [output.fileno(), theirs.fileno()])
        ours.settimeout(START_SECONDS)
        try:
            pid, descriptors, _, _ = socket.recv_fds(ours, ANYTHING, 1)
            ours.settimeout(None)
            return Child(int(pid), descriptors[0], ours)
        except (OSError, ValueError):
            ours.close()
            cause = "The process that starts workers has ended, or does not answer"
            raise UserError("A worker cannot be started", cause, f"Look at {self._log}") from None

    def _open(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "andon.cluster.nursery", *self._libraries]
        environment = os.environ | self._environment
        with theirs, open(self._log, "ab") as output:
            # In its own session: Ctrl-C reaches only the launcher, which asks the workers to save first.
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=output, stderr=output, env=environment, start_new_session=True
            )

    def close(self) -> None:
        """End the nursery, but not what it has forked."""
        self._requests.close()
        self._process.kill()
        self._process.wait()


def serve(requests: socket.socket) -> tuple[list[str], int] | None:
    """Fork until the launcher is gone; in a forked process, the worker's arguments and its log."""
    children: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for descriptor in select.select([requests.fileno(), *children], [], [])[0]:
            if descriptor != requests.fileno():
                _tell_end(descriptor, *children.pop(descriptor))
                continue
            request, descriptors, _, _ = socket.recv_fds(requests, ANYTHING, 2)
            if not request:
                return None
            log, answers = descriptors[0], socket.socket(fileno=descriptors[1])
            if not (pid := os.fork()):
                answers.close()
                for known, (_, other) in children.items():
                    os.close(known)
                    other.close()
                return json.loads(request), log
            os.close(log)
            child = os.pidfd_open(pid)
            children[child] = pid, answers
            with contextlib.suppress(OSError):
                socket.send_fds(answers, [str(pid).encode()], [child])


def _tell_end(descriptor: int, pid: int, answers: socket.socket) -> None:
    os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with answers, contextlib.suppress(OSError):
        answers.sendall(str(code).encode())


def _redirect(log: int) -> None:
    """No input, and output to a log."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, log, log)):
        os.dup2(descriptor, number)
    os.close(nothing)
    os.close(log)


def main(libraries: Sequence[str]) -> int:
    """Load torch and libraries, and fork; in a forked process, work."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in handlers:  # a batch system signals every process; the launcher ends this one
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(Exception):  # a worker that cannot load it says why
        for module in (*LOADED, *libraries):
            importlib.import_module(module)
    gc.freeze()
    forked = serve(socket.socket(fileno=os.dup(0)))
    if forked is None:
        return 0
    arguments, log = forked
    os.setsid()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    _redirect(log)
    name_process(f"andon-rank-{arguments[-1]}")
    return work(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
