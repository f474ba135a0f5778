"""The worker processes of a run on this machine: starts them, waits for them, and kills them at the end."""

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
from pathlib import Path
from typing import Protocol, Self

from andon.control.coordinator import POLL_SECONDS, Coordinator
from andon.errors import EXIT_HALTED, EXIT_PEER_LOST, EXIT_STOPPED, EXIT_USER_ERROR, worst

GRACE_SECONDS = 15.0  # time for the other workers to notice that one has failed
EXIT_SECONDS = 1.0  # time for the process of a lost worker to end by itself, with its own exit code


def log_of(folder: Path, rank: int) -> Path:
    """The path of a worker's log."""
    return folder / f"rank-{rank}.log"


class Process(Protocol):
    """A worker's process."""

    pid: int
    returncode: int | None
    """Set when `wait` has returned."""

    def wait(self) -> int:
        """Wait for its end; returns its exit code."""

    def kill(self) -> None:
        """Kill it, if it has not ended."""


Start = Callable[[int, Path], Process]
"""Starts the worker with this number, which writes to this log."""


def execute(arguments: Sequence[str], environment: Mapping[str, str], log: Path | None) -> Process:
    """Start a worker as a new Python process; without a log its output is the launcher's."""
    env, nothing = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}, subprocess.DEVNULL
    with open(log, "ab") if log else contextlib.nullcontext() as output:
        # In its own session: Ctrl-C reaches only the launcher, which asks the workers to save first.
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, stdin=nothing, stdout=output, stderr=output, env=env, start_new_session=True)


class Workers:
    """The worker processes of a run, by number; they have ended when the context is left. In a run that goes on without
    a lost worker, the worker is started again if the coordinator admits it, at most `restarts` times in all."""

    def __init__(self, start: Start, logs: Path, restarts: int) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._start_process, self._logs, self._restarts_left = start, logs, restarts
        self.wanted = 0
        self.new_size: Callable[[], int | None] = lambda: None
        """Returns the number of workers that are wanted, if it has changed."""
        self._exits: queue.SimpleQueue[tuple[int, Process, int]] = queue.SimpleQueue()
        self.first_failed: int | None = None
        self.first_failure = "A worker"
        self._followed = False
        """Whether the first failure only followed from that of another worker."""
        self.first_signal = ""
        """Which signal killed a worker, if one did."""
        self.was_quit = False
        """Whether the user has ended them at once."""
        self.processes: dict[int, Process] = {}
        self._late: set[int] = set()
        """The process ids of workers that came too late to take part, and were killed."""
        self._lost: set[int] = set()
        """The process ids of workers that were killed because the run goes on without them."""
        self._threads: dict[int, threading.Thread] = {}

    def start(self, count: int) -> None:
        """Start the first `count` workers."""
        self.wanted = count
        for number in range(count):
            self._start(number)

    def _resize(self, wanted: int, coordinator: Coordinator) -> None:
        coordinator.resize(wanted)
        self.wanted = wanted
        for number in range(wanted):
            if number not in self.processes or self.processes[number].returncode is not None:
                self._start(number)

    def _start(self, number: int) -> None:
        process = self._start_process(number, log_of(self._logs, number))
        self.processes[number] = process
        self._threads[number] = threading.Thread(target=self._wait_for_exit, args=[number, process], daemon=True)
        self._threads[number].start()

    def _wait_for_exit(self, number: int, process: Process) -> None:
        self._exits.put((number, process, process.wait()))

    def wait(self, coordinator: Coordinator) -> int:
        """Wait for all workers; once one has failed or all have left, the others get `GRACE_SECONDS` to end."""
        codes: dict[int, int] = {}
        succession, until = coordinator.succession, math.inf
        while len(codes) < len(self.processes):
            if coordinator.begun and not succession.over and (wanted := self.new_size()):
                self._resize(wanted, coordinator)
                codes = {number: code for number, code in codes.items() if number >= wanted}
            goes_on = coordinator.begun and succession.goes_on.possible
            if goes_on:
                self._kill_lost(coordinator)
            failed = worst(codes.values()) not in (0, EXIT_STOPPED)
            if until == math.inf and ((failed and not goes_on) or coordinator.all_left):
                until = time.monotonic() + GRACE_SECONDS
                if goes_on:
                    self._kill_late(succession.processes)
            alive = len(self.processes) - len(codes)
            if goes_on and not succession.over and alive < min(succession.goes_on.least, self.wanted):
                coordinator.end(f"{len(codes)} of {len(self.processes)} workers are lost, and not started again")
            try:
                number, process, code = self._exits.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if time.monotonic() < until:
                    continue
                return worst([*codes.values(), *coordinator.codes] or [EXIT_USER_ERROR])
            if code < 0 and process.pid in self._lost:
                code = EXIT_PEER_LOST
            if process.pid in self._late:
                codes[number] = 0
            elif process is self.processes[number] and not self._restart(number, code, coordinator):
                codes[number] = self._exit_code(number, code, process.pid in succession.processes)
        return worst((self._codes_of_members(coordinator) if succession.goes_on.possible else []) or codes.values())

    def _exit_code(self, number: int, code: int, is_member: bool) -> int:
        """Translate the exit code of a worker for the run, and remember the first failure.

        A worker that lost a peer, or was refused because the run ends, only follows another one."""
        follows = code == EXIT_PEER_LOST or not is_member
        if code not in (0, EXIT_STOPPED) and (self.first_failed is None or (self._followed and not follows)):
            self._followed = follows
            self.first_failed, self.first_failure = number, f"Rank {number}"
            if code < 0:
                hint = " (out of memory?)" if code == -signal.SIGKILL else ""
                killed = f"killed by {signal.Signals(-code).name}{hint}"
                self.first_signal, self.first_failure = f"Rank {number} was {killed}", f"Rank {number}, {killed},"
        return _run_code(code)

    def _codes_of_members(self, coordinator: Coordinator) -> list[int]:
        """The exit codes of the last generation, reported or seen; workers that were lost or refused do not count."""
        last = [each for each in self.processes.values() if each.pid in coordinator.succession.processes]
        return [*coordinator.codes, *(_run_code(code) for each in last if (code := each.returncode or 0) >= 0)]

    def _restart(self, number: int, code: int, coordinator: Coordinator) -> bool:
        """Start a lost worker again, if the run goes on; returns whether it did."""
        if code in (0, EXIT_STOPPED, EXIT_HALTED) or self.was_quit or number >= self.wanted:
            return False
        if not coordinator.may_return((socket.gethostname()[:64], number), self.processes[number].pid):
            return False
        if self._restarts_left <= 0:
            coordinator.note(f"Worker {number} is not started again: the limit of --restarts is reached")
            return False
        self._restarts_left -= 1
        coordinator.note(f"Worker {number} is started again")
        self._start(number)
        return True

    def quit(self, *_: object) -> None:
        """Kill all workers, because the user wants the run to end at once; a signal handler."""
        if not self.processes:
            raise KeyboardInterrupt
        self.was_quit = True
        self._kill()

    def _kill(self) -> None:
        """Kill all workers."""
        for process in list(self.processes.values()):
            process.kill()

    def _kill_lost(self, coordinator: Coordinator) -> None:
        """Kill workers that the run goes on without, such as stopped ones: a new process takes their place."""
        host, before = socket.gethostname()[:64], time.monotonic() - EXIT_SECONDS
        for number, process in self.processes.items():
            lost_since = coordinator.lost_since.get(((host, number), process.pid), math.inf)
            if process.returncode is None and lost_since < before:
                self._lost.add(process.pid)
                process.kill()

    def _kill_late(self, members: Collection[int]) -> None:
        """Kill workers that were started again, but have not joined the last generation."""
        for process in self.processes.values():
            if process.pid not in members and process.returncode is None:
                self._late.add(process.pid)
                process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        until = time.monotonic() + GRACE_SECONDS
        for thread in self._threads.values():  # a process that hangs in a disk access cannot be killed
            thread.join(max(0.0, until - time.monotonic()))


def _run_code(code: int) -> int:
    """The run's exit code for that of a worker's process."""
    return EXIT_USER_ERROR if code < 0 or code == EXIT_PEER_LOST else code
