"""The child processes of a run: its workers and, for `star`, the server that sums gradients."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from andon.cluster.coordinator import POLL, Coordinator
from andon.cluster.worker import EXIT_HALTED, EXIT_USER_ERROR
from andon.config.schema import Config
from andon.errors import UserError

GRACE = 15.0  # seconds that the other workers get to notice that one has failed


class Workers:
    """The worker processes of a run; they have ended when the context is left."""

    def __init__(self, config: Config, address: tuple[str, int], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._exits: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.first_failure = "A worker"
        self.processes = [self._start(config, address, rank, log) for rank in range(config.workers)]
        self._threads = [
            threading.Thread(target=self._wait_for_exit, args=[rank], daemon=True)
            for rank in range(config.workers)
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _start(config: Config, address: tuple[str, int], rank: int, log: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": str(config.threads), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "andon.cluster.worker", address[0], str(address[1]), str(rank)]
        with open(str(log).format(rank=rank), "ab") as output:
            # In its own session: Ctrl-C reaches only the launcher, which asks the workers to save first.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    def _wait_for_exit(self, rank: int) -> None:
        self._exits.put((rank, self.processes[rank].wait()))

    def wait(self, coordinator: Coordinator) -> int:
        """Wait for all workers; once one has failed or all have left, the rest get `GRACE` seconds to end."""
        worst, ended, until = 0, 0, math.inf
        while ended < len(self.processes):
            if until == math.inf and (worst or coordinator.all_left):
                until = time.monotonic() + GRACE
            try:
                rank, code = self._exits.get(timeout=POLL)
            except queue.Empty:
                if time.monotonic() < until:
                    continue
                return worst or max(coordinator.codes.values(), default=EXIT_USER_ERROR)
            ended += 1
            if code and not worst:
                self.first_failure = f"Rank {rank}" + (
                    f", killed by {_signal_name(-code)}," if code < 0 else ""
                )
            if code and (worst == 0 or code == EXIT_HALTED):
                worst = code if code > 0 else EXIT_USER_ERROR
        return worst

    def kill(self) -> None:
        """Kill all workers."""
        for process in self.processes:
            process.kill()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        until = time.monotonic() + GRACE
        for thread in self._threads:  # a process that hangs in a disk cannot be killed and is left behind
            thread.join(max(0.0, until - time.monotonic()))


def _signal_name(number: int) -> str:
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    return f"{signal.Signals(number).name}{hint}"


@contextlib.contextmanager
def star_server(config: Config, host: str) -> Iterator[tuple[str, int, str] | None]:
    """For `star`, the server process for as long as the run lasts; gives its host, port and token."""
    if config.group.transport != "star":
        yield None
        return
    settings = config.group
    arguments = [host, str(config.workers), str(settings.timeout), settings.wire]
    process = subprocess.Popen(
        [sys.executable, "-m", "andon.cluster.star_process", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    token = secrets.token_hex(16)
    try:
        print(token, file=process.stdin, flush=True)
        address = process.stdout.readline().split()
        if len(address) != 2:
            raise UserError(
                "The server of the star did not start",
                f"Its process ended with exit code {process.wait()}",
                "Try --group.transport ring",
            )
        yield address[0], int(address[1]), token
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
