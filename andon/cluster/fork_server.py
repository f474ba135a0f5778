"""The fork server: one process that has loaded torch and forks the workers of `andon train`.

Loading torch takes seconds of processor time, for every worker and for every replacement of a lost one. The fork server
loads it once: a forked worker is ready in a moment and shares its memory pages. The fork server computes nothing and
starts no thread, so that its children can do both.

The launcher sends requests through a socket, the fork server's standard input: the worker's arguments as JSON, its log
and a socket for the replies. The replies are the worker's process (a pidfd), and later its exit code. The fork server
ends when the launcher does; its workers survive it.
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

MAX_MESSAGE_BYTES = 1 << 16
PRELOADED = ("andon.cluster.session", "andon.transport.shm.group", "numpy.random", "tokenizers")  # every kind of run
START_SECONDS = 120.0  # loading torch from a slow disk may take this long


class Child:
    """A forked worker, with the part of `subprocess.Popen` that the launcher uses."""

    def __init__(self, pid: int, descriptor: int, replies: socket.socket) -> None:
        self.pid, self._descriptor, self._replies = pid, descriptor, replies
        self.returncode: int | None = None
        self._lock = threading.RLock()  # a signal handler may kill it, also while the same thread does

    def wait(self) -> int:
        """Wait for its end and return its exit code; that of a killed process if the fork server is gone."""
        select.select([self._descriptor], [], [])
        with self._replies:
            code = int(self._replies.recv(MAX_MESSAGE_BYTES) or -signal.SIGKILL)
        with self._lock:
            os.close(self._descriptor)
            self.returncode = code
        return code

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self.returncode is None:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)


class ForkServer:
    """Starts the workers of one run; a fork server that has died is replaced."""

    def __init__(self, environment: Mapping[str, str], libraries: Sequence[str], log: Path) -> None:
        """`environment` is added to the launcher's for the workers; `libraries` are modules that they need."""
        self._environment, self._libraries, self._log = environment, libraries, log
        self._open()

    def start(self, arguments: Sequence[str], log: Path) -> Child:
        """Fork a worker that writes to `log`."""
        if self._process.poll() is not None:
            self.close()
            self._open()
        ours, theirs = socket.socketpair()
        with theirs, open(log, "ab") as output, contextlib.suppress(OSError):  # then no reply arrives below
            socket.send_fds(self._requests, [json.dumps(arguments).encode()], [output.fileno(), theirs.fileno()])
        ours.settimeout(START_SECONDS)
        try:
            pid, descriptors, _, _ = socket.recv_fds(ours, MAX_MESSAGE_BYTES, 1)
            ours.settimeout(None)
            return Child(int(pid), descriptors[0], ours)
        except (OSError, ValueError):
            ours.close()
            cause = "The process that forks the workers has ended, or does not answer"
            raise UserError("A worker cannot be started", cause, f"Look at {self._log}") from None

    def _open(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "andon.cluster.fork_server", *self._libraries]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **self._environment}
        with theirs, open(self._log, "ab") as output:
            # In its own session: Ctrl-C reaches only the launcher, which asks the workers to save first.
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=output, stderr=output, env=environment, start_new_session=True
            )

    def close(self) -> None:
        """End the fork server, but not its workers."""
        self._requests.close()
        self._process.kill()
        self._process.wait()


def serve(requests: socket.socket) -> tuple[list[str], int] | None:
    """Fork until the launcher is gone, then return None; in a forked process return the worker's arguments and log."""
    children: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for descriptor in select.select([requests.fileno(), *children], [], [])[0]:
            if descriptor != requests.fileno():
                _report_exit(descriptor, *children.pop(descriptor))
                continue
            request, descriptors, _, _ = socket.recv_fds(requests, MAX_MESSAGE_BYTES, 2)
            if not request:
                return None
            log, replies = descriptors[0], socket.socket(fileno=descriptors[1])
            if not (pid := os.fork()):
                replies.close()
                for known, (_, other) in children.items():
                    os.close(known)
                    other.close()
                return json.loads(request), log
            os.close(log)
            child = os.pidfd_open(pid)
            children[child] = pid, replies
            with contextlib.suppress(OSError):
                socket.send_fds(replies, [str(pid).encode()], [child])


def _report_exit(descriptor: int, pid: int, replies: socket.socket) -> None:
    os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with replies, contextlib.suppress(OSError):
        replies.sendall(str(code).encode())


def _redirect(log: int) -> None:
    """Read from nothing and write to a log."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, log, log)):
        os.dup2(descriptor, number)
    os.close(nothing)
    os.close(log)


def main(libraries: Sequence[str]) -> int:
    """Load torch and `libraries`, then fork; in a forked process, be the worker."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in handlers:  # a batch system signals every process; the launcher ends this one
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(Exception):  # the worker imports it again and reports the error
        for module in (*PRELOADED, *libraries):
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
