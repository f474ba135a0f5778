"""A running `andon gradient-server`, and what its workers send."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.kit.runs import end_started, events, start
from tests.protocol2.plain_peers import SECONDS, PlainWorker


class Server:
    """A running `andon gradient-server`."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        assert process.stdout
        self.process, self.folder = process, folder
        line = process.stdout.readline()
        found = re.search(r"Listening at 127\.0\.0\.1:(\d+) ", line)
        assert found, line
        self.address = ("127.0.0.1", int(found[1]))

    def join(self, count: int) -> list[PlainWorker]:
        return [PlainWorker(self.address, f"plain-{number}") for number in range(count)]

    def finish(self) -> tuple[int, str]:
        """Wait for its end: exit code and the rest of its output."""
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output

    def wait_for(self, kind: str, deadline: float = SECONDS) -> float:
        """The time of the first event of a kind."""
        until = time.monotonic() + deadline
        while time.monotonic() < until:
            if (self.folder / "metrics.jsonl").exists() and (found := events(self.folder, kind)):
                return float(found[0]["time"])
            time.sleep(0.005)
        raise AssertionError(f"no {kind} event within {deadline} s")


@contextmanager
def serving(cwd: Path, *options: str) -> Iterator[Server]:
    """A running server, which records in `run`."""
    process = start("gradient-server", "--bind=127.0.0.1:0", "--run.dir=run", *options, cwd=cwd)
    try:
        yield Server(process, cwd / "run")
    finally:
        end_started()


@contextmanager
def gradient_server(cwd: Path, workers: int, *options: str, name: str = "server") -> Iterator[Server]:
    """A running server for a number of workers."""
    arguments = ("--bind=127.0.0.1:0", f"--workers={workers}", f"--run.dir={name}", *options)
    try:
        yield Server(start("gradient-server", *arguments, cwd=cwd), cwd / name)
    finally:
        end_started()


def over(address: tuple[str, int]) -> list[str]:
    """The options of a run whose workers join a server."""
    return ["--group.transport=protocol2", f"--group.server={address[0]}:{address[1]}"]


def vectors(workers: int, length: int, seed: int = 0) -> list[npt.NDArray[np.float32]]:
    """A gradient for each worker, with values that show the order of addition, −0.0, and denormals."""
    made = []
    for number in range(workers):
        dice = np.random.default_rng([seed, number])
        vector = dice.standard_normal(length, np.float32) * np.float32(10) ** dice.integers(-4, 4)
        vector[: max(1, length // 100)] = -0.0
        vector[-1:] = np.float32(1e-44)
        made.append(vector.astype(np.float32))
    return made


def everyone(workers: list[PlainWorker], work: Callable[[PlainWorker], None]) -> None:
    """Have all workers do the same at once."""
    with ThreadPoolExecutor(len(workers)) as pool:
        for done in [pool.submit(work, worker) for worker in workers]:
            done.result(600)
