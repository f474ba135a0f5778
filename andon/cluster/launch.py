"""Starting a run on this machine: plan, data, a coordinator, one process per worker, and a clean end."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from andon.cluster.coordinator import Coordinator
from andon.cluster.prepare import prepare_tokens
from andon.cluster.run_folder import RunFolder
from andon.cluster.worker import EXIT_HALTED, EXIT_USER_ERROR
from andon.config import Config, load
from andon.data.tokens import TokenSet
from andon.display import Display, show_error, show_plan
from andon.errors import UserError
from andon.metrics import Recorder

GRACE = 15.0  # seconds that the other workers get to notice that one has failed


def train(config: Config, resume: str, console: Console) -> int:
    """`andon train` on this machine; gives the exit code."""
    show_plan(console, config)
    folder = RunFolder(config.run.dir)
    folder.take()
    try:
        if resume == "none" and (aside := folder.move_aside()):
            console.print(f"The earlier run is now in {aside}", style="dim")
            folder.release()
            folder.take()
        checkpoint = folder.resume_from(resume)
        tokens = prepare_tokens(config, console)
        folder.write_config(config)
        return _run(config, tokens, checkpoint, console)
    finally:
        folder.release()


def train_demo(overrides: Mapping[str, Any], console: Console) -> int:
    """`andon demo`: the tiny preset on the built-in stories; a finished demo is moved aside, not repeated."""
    demo = {"run.dir": "runs/demo", "workers": min(2, os.cpu_count() or 1)}
    config = load(None, {**demo, **overrides})
    finished = (config.run.dir / "summary.json").exists()
    return train(config, "none" if finished else "auto", console)


def _run(config: Config, tokens: TokenSet, checkpoint: Path | None, console: Console) -> int:
    display = Display(console, config)
    recorder = Recorder(config.run.dir, display)
    log = config.run.dir / "logs" / "rank-{rank}.log"
    welcome = {
        "config": config.model_dump(mode="json"),
        "tokens": str(tokens.folder),
        "resume": str(checkpoint) if checkpoint else None,
        "log": str(log),
    }
    coordinator = Coordinator(welcome, config.workers, recorder.emit)
    try:
        with Workers(config, coordinator.address, log) as workers, _interrupts(console, coordinator, workers):
            code = workers.wait()
    finally:
        coordinator.close()
        display.close()
        recorder.close()
    if coordinator.failures:
        show_error(console, coordinator.failures[0])
    elif code not in (0, EXIT_HALTED):
        raise UserError(f"A worker ended with code {code}", "It gave no reason", f"Look at {log.parent}")
    return code


class Workers:
    """The worker processes of a run; leaving the context leaves none behind."""

    def __init__(self, config: Config, address: tuple[str, int], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._exits: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.processes = [self._start(config, address, rank, log) for rank in range(config.workers)]
        self._threads = [threading.Thread(target=self._watch, args=[process]) for process in self.processes]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _start(config: Config, address: tuple[str, int], rank: int, log: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": str(config.threads), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "andon.cluster.worker", address[0], str(address[1]), str(rank)]
        with open(str(log).format(rank=rank), "wb") as output:
            # A session of its own: Ctrl-C reaches the launcher alone, which asks the workers to save first.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        self._exits.put(process.wait())

    def wait(self) -> int:
        """Wait for all; once one has failed, the rest have a while to stop by themselves."""
        worst = 0
        for _ in self.processes:
            try:
                code = self._exits.get(timeout=GRACE if worst else None)
            except queue.Empty:
                break
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
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def _interrupts(console: Console, coordinator: Coordinator, workers: Workers) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM saves and leaves; a second one quits."""
    seen = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            console.print("Saving after this step, then leaving. Once more quits at once.", style="yellow")
            coordinator.stop()
        else:
            workers.kill()

    with _handling(signal.SIGINT, handle), _handling(signal.SIGTERM, handle):
        yield


@contextlib.contextmanager
def _handling(number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
