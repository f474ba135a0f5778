"""The worker processes of a run on this machine: started, waited for, and killed at the end."""

import contextlib
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from andon.control.coordinator import POLL, Coordinator
from andon.errors import EXIT_HALTED, EXIT_PEER_LOST, EXIT_STOPPED, EXIT_USER_ERROR, worst

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


class Process(Protocol):
    """A worker's process."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Its exit code, if somebody knows it already."""
        ...

    def wait(self) -> int:
        """Wait for its end; its exit code."""
        ...

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        ...


Start = Callable[[int, Path], Process]
"""Starts the worker of a place, which writes to a log."""


def execute(command: Command, threads: int, log: Path) -> Process:
    """Start a worker in a process of its own."""
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
    """The worker processes of a run; they have ended when the context is left. Where the run goes on without a worker,
    it is started again, as long as the coordinator lets it in and not more than `restarts` times in all."""

    def __init__(self, start: Start, logs: Path, restarts: int = 0) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._start_process, self._logs, self._restarts = start, logs, restarts
        self.wanted = 0
        self.wishes: Callable[[], int | None] = lambda: None
        """How many workers are wanted from now on, if that has changed."""
        self._exits: queue.SimpleQueue[tuple[int, Process, int]] = queue.SimpleQueue()
        self.first_failed: int | None = None
        self.first_failure = "A worker"
        self._followed = False
        """Whether the first one failed only because another did."""
        self.first_signal = ""
        """Which signal killed a worker, if one did."""
        self.was_quit = False
        """Whether they were killed because a person wanted that."""
        self.processes: dict[int, Process] = {}
        self._threads: dict[int, threading.Thread] = {}

    def start(self, count: int) -> None:
        """Start the first `count` workers."""
        self.wanted = count
        for place in range(count):
            self._start(place)

    def _resize(self, wanted: int, coordinator: Coordinator) -> None:
        coordinator.resize(wanted)
        self.wanted = wanted
        for place in range(wanted):
            if place not in self.processes or self.processes[place].poll() is not None:
                self._start(place)

    def _start(self, place: int) -> None:
        process = self._start_process(place, log_of(self._logs, place))
        self.processes[place] = process
        self._threads[place] = threading.Thread(target=self._wait_for_exit, args=[place, process], daemon=True)
        self._threads[place].start()

    def _wait_for_exit(self, place: int, process: Process) -> None:
        self._exits.put((place, process, process.wait()))

    def wait(self, coordinator: Coordinator) -> int:
        """Wait for all workers; once one has failed or all have left, the rest get `GRACE` seconds to end."""
        codes: dict[int, int] = {}
        succession, until = coordinator.succession, math.inf
        while len(codes) < len(self.processes):
            if coordinator.begun and not succession.over and (wanted := self.wishes()):
                self._resize(wanted, coordinator)
                codes = {place: code for place, code in codes.items() if place >= wanted}
            goes_on = succession.goes_on if coordinator.begun else None
            failed = worst(codes.values()) not in (0, EXIT_STOPPED)
            if until == math.inf and ((failed and not goes_on) or coordinator.all_left):
                until = time.monotonic() + GRACE
                if goes_on:
                    self._kill(but=succession.processes)  # those that came too late
            alive = len(self.processes) - len(codes)
            if goes_on and not succession.over and alive < min(goes_on.least, self.wanted):
                coordinator.end(f"{len(codes)} of {len(self.processes)} workers are lost, and not started again")
            try:
                place, process, code = self._exits.get(timeout=POLL)
            except queue.Empty:
                if time.monotonic() < until:
                    continue
                return worst([*codes.values(), *coordinator.codes] or [EXIT_USER_ERROR])
            if process is self.processes[place] and not self._comes_back(place, code, coordinator):
                codes[place] = self._exit_code(place, code)
        return self._of_members(coordinator) if succession.goes_on and coordinator.codes else worst(codes.values())

    def _exit_code(self, place: int, code: int) -> int:
        """What the end of a worker means for the run; the first failure is kept."""
        if code not in (0, EXIT_STOPPED) and (self.first_failed is None or self._followed):
            self._followed = code == EXIT_PEER_LOST
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            killed = f", killed by {signal.Signals(-code).name}{hint}," if code < 0 else ""
            self.first_signal = f"Rank {place} was{killed.strip(',')}" if killed else ""
            self.first_failed, self.first_failure = place, f"Rank {place}{killed}"
        return _of_run(code)

    def _of_members(self, coordinator: Coordinator) -> int:
        """The worst exit code of the last generation: those who were lost on the way do not count."""
        last = [each for each in self.processes.values() if each.pid in coordinator.succession.processes]
        return worst([*coordinator.codes, *(_of_run(code) for each in last if (code := each.returncode or 0) >= 0)])

    def _comes_back(self, place: int, code: int, coordinator: Coordinator) -> bool:
        """Start a lost worker again, if the run goes on without it meanwhile."""
        if code in (0, EXIT_STOPPED, EXIT_HALTED) or self.was_quit or place >= self.wanted:
            return False
        if not coordinator.may_return((socket.gethostname()[:64], place), self.processes[place].pid):
            return False
        if self._restarts <= 0:
            coordinator.note(f"Worker {place} is not started again: that was done as often as --restarts allows")
            return False
        self._restarts -= 1
        coordinator.note(f"Worker {place} is started again")
        self._start(place)
        return True

    def quit(self) -> None:
        """A person wants the run to end at once: kill all workers."""
        self.was_quit = True
        self._kill()

    def _kill(self, but: Collection[int] = ()) -> None:
        """Kill all workers, except some processes."""
        for process in list(self.processes.values()):
            if process.pid not in but:
                process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        until = time.monotonic() + GRACE
        for thread in self._threads.values():  # a process that hangs in a disk cannot be killed and is left behind
            thread.join(max(0.0, until - time.monotonic()))


def _of_run(code: int) -> int:
    """What the exit code of a worker's process means for the run's."""
    return EXIT_USER_ERROR if code < 0 or code == EXIT_PEER_LOST else code
