"""`make compare BEFORE=COMMIT`: what this tree's training step costs against that of another commit, in one run.

Both trees train the same, each with `andon train` in a process group of its own. They take turns of a few seconds:
one is stopped (SIGSTOP) while the other runs. Of each turn the time between its first and its last step counts, so
what a signal cut in two does not. Everything that training does is in it: ledger, events and control plane.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests import ROOT
from tests.board.test_board import board, get, listens
from tests.kit.runs import ctrl_c, environment, events

SETTINGS = [
    *("--workers=2", "--threads=1", "--train.steps=1000000", "--data.stories=2000", "--eval.every=0"),
    *("--checkpoint.every=0", "--eval.sample_every=0", "--device=cpu", "--optim.warmup=10"),
]
FIRST_STEPS = 180.0
"""Seconds until both trees must have trained their first steps."""


class Tree:
    """One tree's training, which runs only in its turns."""

    def __init__(self, name: str, source: Path, cwd: Path, settings: list[str]) -> None:
        self.name, self.folder = name, cwd / "run"
        command = [sys.executable, "-m", "andon", "train", *SETTINGS, *settings, "--run.dir=run"]
        around = {**environment(cwd), "PYTHONPATH": str(source)}
        self.output = cwd / "output"
        self.board: psutil.Process | None = None
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(command, cwd=cwd, env=around, stdout=output, stderr=output, process_group=0)

    def steps(self) -> list[float]:
        """When each step ended."""
        return (
            [each["time"] for each in events(self.folder, "step")] if (self.folder / "metrics.jsonl").exists() else []
        )

    def wait_for(self, steps: int) -> None:
        deadline = time.monotonic() + FIRST_STEPS
        while len(self.steps()) < steps:
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{self.name} does not train:\n{self.output.read_text()[-2000:]}")
            time.sleep(0.1)

    def watch(self, viewers: int, stack: ExitStack) -> None:
        """Open the board of this run, with so many viewers; it runs only in the same turns."""
        url = stack.enter_context(board(self.folder, "--bind=127.0.0.1:0"))
        port = urlsplit(url).port
        (self.board,) = [each for each in psutil.Process().children(recursive=True) if listens(each, port)]
        (run,) = json.loads(get(url, "/api/runs")[2])
        cursor = json.loads(get(url, f"/api/runs/{run['key']}")[2])["cursor"]
        for _ in range(viewers):
            connection = stack.enter_context(closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)))
            connection.request("GET", f"/api/runs/{run['key']}/stream?after={cursor}")

    def processes(self) -> list[psutil.Process]:
        """The command, its workers, and the board. Workers may lead groups of their own."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True), *([self.board] if self.board and self.board.is_running() else [])]

    def signal(self, number: signal.Signals) -> None:
        for each in self.processes():
            os.kill(each.pid, number)

    def turn(self, seconds: float) -> float | None:
        """Run for so long: seconds of a step, if two ended."""
        began = time.time()
        self.signal(signal.SIGCONT)
        time.sleep(seconds)
        self.signal(signal.SIGSTOP)
        ended = [moment for moment in self.steps() if moment > began]
        return (ended[-1] - ended[0]) / (len(ended) - 1) if len(ended) > 1 else None

    def cpu_seconds(self) -> float:
        return sum(sum(each.cpu_times()[:2]) for each in self.processes())

    def end(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            ctrl_c(self.process)  # type: ignore[arg-type]
            self.process.wait(60)


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The source of a commit, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit, "andon"], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def compare(now: Tree, before: Tree, pairs: int, seconds: float) -> None:
    """Let both take turns; print how their steps compare."""
    both = (now, before)
    for tree in both:
        tree.wait_for(3)
        tree.signal(signal.SIGSTOP)
    cpu, steps = [tree.cpu_seconds() for tree in both], [len(tree.steps()) for tree in both]
    times: list[tuple[float, float]] = []
    for number in range(pairs):
        order = both if number % 2 else both[::-1]
        turns = {tree.name: tree.turn(seconds) for tree in order}
        first, second = (turns[tree.name] for tree in both)
        if first and second:
            times.append((first, second))
    if not times:
        sys.exit(f"No turn of {seconds:g} s had two steps: give --seconds more")
    ratios = [a / b for a, b in times]
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    spent = [
        (tree.cpu_seconds() - had) / max(1, len(tree.steps()) - done)
        for tree, had, done in zip(both, cpu, steps, strict=True)
    ]
    for index, tree in enumerate(both):
        step = statistics.median(pair[index] for pair in times)
        print(f"{tree.name}: {1e3 * step:.1f} ms a step in the median, {1e3 * spent[index]:.1f} ms of CPU time")
    print(f"ratio of step times: median of {len(times)} pairs {statistics.median(ratios):.4f}", end="")
    print(f" (95% {medians[50]:.4f} to {medians[-51]:.4f}); ratio of CPU times {spent[0] / spent[1]:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.compare", description=__doc__)
    parser.add_argument("before", help="the commit to compare with")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn")
    parser.add_argument(
        "--now", action="append", default=[], help="a setting that only this tree knows, --now=--KEY=VALUE"
    )
    parser.add_argument("--watch", type=int, metavar="VIEWERS", help="with this tree's board and so many viewers")
    options, settings = parser.parse_known_args()
    with checkout(options.before) as source, ExitStack() as stack:
        trees = []
        for name, root, more in (("this tree", ROOT, options.now), (options.before, source, [])):
            cwd = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            trees.append(Tree(name, root, cwd, [*settings, *more]))
            stack.callback(trees[-1].end)
        now, before = trees
        if options.watch is not None:
            now.wait_for(1)
            now.watch(options.watch, stack)
        compare(now, before, options.pairs, options.seconds)
        now.signal(signal.SIGCONT)  # a board that is stopped does not end


if __name__ == "__main__":
    main()
