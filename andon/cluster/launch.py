"""Starting a run on this machine: plan, data, a coordinator, one process per worker, and a clean end."""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from andon.cluster.coordinator import BLINK, Coordinator
from andon.cluster.star_process import star_process
from andon.cluster.worker import EXIT_HALTED, EXIT_USER_ERROR
from andon.config.load import load
from andon.config.schema import Config
from andon.data.token_set import TokenSet
from andon.errors import UserError
from andon.run.display import Display, show_error, show_plan
from andon.run.events import Emit, Event, Recorder, event
from andon.run.folder import RunFolder, read_mark
from andon.run.prepare import prepare_tokens
from andon.transport.base import TRANSPORTS

GRACE = 15.0  # seconds that the other workers get to notice that one has failed


def train(config: Config, resume: str, console: Console) -> int:
    """`andon train` on this machine; gives the exit code."""
    config = absolute(config).on_this_machine()
    with run_folder(config, resume, console) as (folder, checkpoint):
        return _run(config, prepare_tokens(config, console), folder, checkpoint, console)


def train_demo(overrides: Mapping[str, Any], console: Console) -> int:
    """`andon demo`: the tiny preset on the built-in stories; a finished demo is moved aside, not repeated."""
    demo = {"run.dir": "runs/demo", "workers": min(2, os.cpu_count() or 1)}
    config = absolute(load(None, {**demo, **overrides}))
    finished = (config.run.dir / "summary.json").exists()
    return train(config, "none" if finished else "auto", console)


@contextlib.contextmanager
def run_folder(config: Config, resume: str, console: Console) -> Iterator[tuple[RunFolder, Path | None]]:
    """Show the plan and hold the run's folder; gives it and the checkpoint to go on from."""
    show_plan(console, config)
    folder = RunFolder(config.run.dir)
    folder.take()
    try:
        if resume == "none" and (aside := folder.move_aside()):
            console.print(f"The earlier run is now in {aside}", style="dim")
            folder.release()
            folder.take()
        yield folder, folder.resume_from(resume)
    except OSError as error:
        where = f" at {error.filename}" if error.filename else ""
        raise UserError(
            f"The run's folder {config.run.dir} cannot be used",
            f"{error.strerror}{where}",
            "Choose another --run.dir",
        ) from error
    finally:
        folder.release()


def recording(config: Config, folder: RunFolder, recorder: Recorder) -> Emit:
    """Record events; with the first of training, the earlier end of the run is forgotten."""

    def emit(said: Event) -> None:
        if said["event"] == "start":
            folder.begin(config)
        recorder.emit(said)

    return emit


def serve(config: Config, bind: tuple[str, int], console: Console) -> int:
    """`andon coordinator`: wait for workers started elsewhere and see them through; gives the exit code."""
    config = absolute(config).with_transport("star")
    with run_folder(config, "auto", console) as (folder, checkpoint):
        return _run(config, prepare_tokens(config, console), folder, checkpoint, console, bind)


def _run(
    config: Config,
    tokens: TokenSet,
    folder: RunFolder,
    checkpoint: Path | None,
    console: Console,
    bind: tuple[str, int] | None = None,
) -> int:
    """Coordinate a run: start its workers here, or with `bind` wait for those started elsewhere."""
    display = Display(console, config)
    log = config.run.dir / "logs" / "rank-{rank}.log"
    with contextlib.ExitStack() as stack:
        stack.callback(display.close)
        recorder = stack.enter_context(contextlib.closing(Recorder(folder.folder, display, hold=folder.hold)))
        server = None
        if TRANSPORTS[config.group.transport].needs_server:
            host = bind[0] if bind else "127.0.0.1"
            server = stack.enter_context(star_process(host, config.workers, config.group.timeout))
        plan = {
            "config": config.model_dump(mode="json"),
            "data": tokens.digest,
            "folder_mark": read_mark(folder.folder),
            "tokens": str(tokens.folder),
            "resume": str(checkpoint) if checkpoint else None,
            "log": str(log.parent),
            "server": server,
        }
        emit = recording(config, folder, recorder)
        for note in folder.notes:
            emit(event("note", text=note))
        coordinator = Coordinator(plan, config.workers, emit, bind or ("127.0.0.1", 0))
        stack.enter_context(contextlib.closing(coordinator))
        if bind:
            host, port = coordinator.address
            host = socket.gethostname() if host in ("0.0.0.0", "::") else host
            console.print(f"Waiting for {config.workers} workers: andon worker {host}:{port}", soft_wrap=True)
            stack.enter_context(_interrupts(console, coordinator, []))
            code = coordinator.wait()
        else:
            started: list[Workers] = []
            stack.enter_context(_interrupts(console, coordinator, started))
            workers = stack.enter_context(Workers(config, coordinator.address, log))
            started.append(workers)
            code = workers.wait(coordinator)
    failures = coordinator.failures + ([recorder.failure] if recorder.failure else [])
    if failures:
        show_error(console, failures[0])
        return code if code == EXIT_HALTED else EXIT_USER_ERROR
    if code not in (0, EXIT_HALTED):
        raise UserError(
            f"{workers.first_failure if not bind else 'A worker'} ended the run",
            "It gave no reason",
            f"Look at {log.parent}",
        )
    return code


class Workers:
    """The worker processes of a run; leaving the context leaves none behind."""

    def __init__(self, config: Config, address: tuple[str, int], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._exits: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.first_failure = "A worker"
        self.processes = [self._start(config, address, rank, log) for rank in range(config.workers)]
        self._threads = [
            threading.Thread(target=self._watch, args=[rank], daemon=True) for rank in range(config.workers)
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _start(config: Config, address: tuple[str, int], rank: int, log: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": str(config.threads), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "andon.cluster.worker", address[0], str(address[1]), str(rank)]
        with open(str(log).format(rank=rank), "ab") as output:
            # A session of its own: Ctrl-C reaches the launcher alone, which asks the workers to save first.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    def _watch(self, rank: int) -> None:
        self._exits.put((rank, self.processes[rank].wait()))

    def wait(self, coordinator: Coordinator) -> int:
        """Wait for all; once one has failed or all have said goodbye, they have a while to end."""
        worst, ended, until = 0, 0, math.inf
        while ended < len(self.processes):
            if until == math.inf and (worst or coordinator.all_left):
                until = time.monotonic() + GRACE
            try:
                # A wait without an end would not let signals through that come together.
                rank, code = self._exits.get(timeout=BLINK)
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
        """End all workers at once."""
        for process in self.processes:
            process.kill()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        until = time.monotonic() + GRACE
        for thread in self._threads:  # what hangs in a disk cannot be killed: it is left behind
            thread.join(max(0.0, until - time.monotonic()))


def _signal_name(number: int) -> str:
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    return f"{signal.Signals(number).name}{hint}"


def absolute(config: Config) -> Config:
    """The configuration with a run folder that means the same from everywhere."""
    run = config.run.model_copy(update={"dir": config.run.dir.expanduser().resolve()})
    return config.model_copy(update={"run": run})


@contextlib.contextmanager
def _interrupts(console: Console, coordinator: Coordinator, workers: list[Workers]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM saves and leaves; a second one quits."""
    seen = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            console.print("Saving after this step, then leaving. Once more quits at once.", style="yellow")
            coordinator.stop()
        elif workers:
            workers[0].kill()
        else:
            raise KeyboardInterrupt

    with _handling(signal.SIGINT, handle), _handling(signal.SIGTERM, handle):
        yield


@contextlib.contextmanager
def _handling(number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
