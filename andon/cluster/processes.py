"""The worker processes of a run on this machine: started, waited for, and killed at the end."""

import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

from andon.cluster.coordinator import POLL, Coordinator
from andon.cluster.worker import EXIT_HALTED, EXIT_USER_ERROR
from andon.config.schema import Config

GRACE = 15.0  # seconds that the other workers get to notice that one has failed


class Workers:
    """The worker processes of a run; they have ended when the context is left."""

    def __init__(self, config: Config, address: tuple[str, int], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._exits: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.first_failure = "A worker"
        ranks = range(config.workers)
        self.processes = [self._start(config, address, rank, log) for rank in ranks]
        self._threads = [threading.Thread(target=self._wait_for_exit, args=[rank], daemon=True) for rank in ranks]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _start(config: Config, address: tuple[str, int], rank: int, log: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": str(config.threads), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "andon.cluster.worker", address[0], str(address[1]), str(rank)]
        with open(str(log).format(rank=rank), "ab") as output:
            # In its own session: Ctrl-C reaches only the launcher, which asks the workers to save first.
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
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
                hint = " (out of memory?)" if code == -signal.SIGKILL else ""
                killed = f", killed by {signal.Signals(-code).name}{hint}," if code < 0 else ""
                self.first_failure = f"Rank {rank}{killed}"
            if code and (worst == 0 or code == EXIT_HALTED):
                worst = code if code > 0 else EXIT_USER_ERROR
        return worst

    def kill(self) -> None:
        """Kill all workers."""
        for process in self.processes:
            process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        until = time.monotonic() + GRACE
        for thread in self._threads:  # a process that hangs in a disk cannot be killed and is left behind
            thread.join(max(0.0, until - time.monotonic()))
