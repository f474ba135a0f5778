"""The worker processes of a run on this machine: started, waited for, and killed at the end."""

import contextlib
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from andon.control.coordinator import POLL, Coordinator
from andon.errors import EXIT_STOPPED, EXIT_USER_ERROR, worst

GRACE = 15.0  # seconds that the other workers get to notice that one has failed


@dataclass(frozen=True)
class Command:
    """What a worker runs with this Python, and its environment besides the launcher's."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    shown: bool = False
    """Whether its output goes to the launcher's, and not to its log."""


def log_of(folder: Path, rank: int) -> Path:
    """The log of a worker."""
    return folder / f"rank-{rank}.log"


def _start(command: Command, threads: int, log: Path) -> subprocess.Popen[bytes]:
    own = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", **command.environment}
    with contextlib.ExitStack() as stack:
        output = None if command.shown else stack.enter_context(open(log, "ab"))
        # In its own session: Ctrl-C reaches only the launcher, which asks the workers to save first.
        return subprocess.Popen(
            [sys.executable, *command.arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | own,
            start_new_session=True,
        )


class Workers:
    """The worker processes of a run; they have ended when the context is left."""

    def __init__(self, commands: Sequence[Command], threads: int, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._exits: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.first_failed: int | None = None
        self.first_failure = "A worker"
        self.first_signal = ""
        """Which signal killed a worker, if one did."""
        self.was_quit = False
        """Whether they were killed because a person wanted that."""
        ranks = range(len(commands))
        self.processes = [_start(command, threads, log_of(logs, rank)) for rank, command in enumerate(commands)]
        self._threads = [threading.Thread(target=self._wait_for_exit, args=[rank], daemon=True) for rank in ranks]
        for thread in self._threads:
            thread.start()

    def _wait_for_exit(self, rank: int) -> None:
        self._exits.put((rank, self.processes[rank].wait()))

    def wait(self, coordinator: Coordinator) -> int:
        """Wait for all workers; once one has failed or all have left, the rest get `GRACE` seconds to end."""
        codes: list[int] = []
        until = math.inf
        while len(codes) < len(self.processes):
            if until == math.inf and (worst(codes) not in (0, EXIT_STOPPED) or coordinator.all_left):
                until = time.monotonic() + GRACE
            try:
                rank, code = self._exits.get(timeout=POLL)
            except queue.Empty:
                if time.monotonic() < until:
                    continue
                return worst([*codes, *coordinator.codes.values()] or [EXIT_USER_ERROR])
            if code not in (0, EXIT_STOPPED) and self.first_failed is None:
                hint = " (out of memory?)" if code == -signal.SIGKILL else ""
                killed = f", killed by {signal.Signals(-code).name}{hint}," if code < 0 else ""
                self.first_signal = f"Rank {rank} was{killed.strip(',')}" if killed else ""
                self.first_failed, self.first_failure = rank, f"Rank {rank}{killed}"
            codes.append(code if code >= 0 else EXIT_USER_ERROR)
        return worst(codes)

    def quit(self) -> None:
        """A person wants the run to end at once: kill all workers."""
        self.was_quit = True
        self._kill()

    def _kill(self) -> None:
        """Kill all workers."""
        for process in self.processes:
            process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        until = time.monotonic() + GRACE
        for thread in self._threads:  # a process that hangs in a disk cannot be killed and is left behind
            thread.join(max(0.0, until - time.monotonic()))
