"""What portable numerics cost here: one worker's forward and backward with portable and with native kernels, in turn.

Each kind of kernels needs a process of its own, because torch chooses once. `python -m andon.bench.numerics PRESET` is
such a process: for every line on its standard input it computes once and prints the seconds.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO

from andon.bench.kit.report import show
from andon.numerics import AVX2, Numerics, kernels

TOKENS = 512


def main(presets: Sequence[str], repetitions: int, as_json: bool) -> None:
    """Print what portable kernels cost for some models."""
    rows = []
    for preset in presets:
        portable, native = measure(preset, repetitions)
        cost = statistics.median(a / b for a, b in zip(portable, native, strict=True)) - 1
        rows.append(
            {
                "preset": preset,
                "portable_ms": 1e3 * statistics.median(portable),
                "native_ms": 1e3 * statistics.median(native),
                "cost_percent": round(100 * cost, 1),
            }
        )
    show(f"forward and backward of {TOKENS} tokens on one core", rows, as_json)


def cost(preset: str = "tiny", repetitions: int = 9) -> str:
    """What portable numerics cost on this machine, in words."""
    portable, native = measure(preset, repetitions)
    percent = 100 * (statistics.median(a / b for a, b in zip(portable, native, strict=True)) - 1)
    if percent < 2:
        return f"portable costs nothing here ({percent:+.0f}% against native, measured on {preset})"
    return f"portable costs {percent:.0f}% of the speed here against native, measured on {preset}"


def measure(preset: str, repetitions: int) -> tuple[list[float], list[float]]:
    """The seconds of each turn, with portable and with native kernels; the first turns do not count."""
    turns: tuple[list[float], list[float]] = ([], [])
    with _process(preset, "portable") as portable, _process(preset, "native") as native:
        for turn in range(repetitions + 2):
            for times, (ask, answer) in zip(turns, (portable, native), strict=True):
                ask.write("go\n")
                ask.flush()
                seconds = float(answer.readline())
                if turn > 1:
                    times.append(seconds)
    return turns


@contextlib.contextmanager
def _process(preset: str, numerics: Numerics) -> Iterator[tuple[IO[str], IO[str]]]:
    inherited = {name: value for name, value in os.environ.items() if name not in AVX2}
    with subprocess.Popen(
        [sys.executable, "-m", "andon.bench.numerics", preset],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**inherited, **kernels(numerics), "OMP_NUM_THREADS": "1"},
        text=True,
    ) as process:
        assert process.stdin and process.stdout
        try:
            yield process.stdin, process.stdout
        finally:
            process.kill()


def _compute(preset: str) -> None:
    import torch

    from andon.bench.ranks.train import RandomBatches, initialised
    from andon.model.shape import SHAPES

    torch.set_num_threads(1)
    model = initialised(SHAPES[preset])
    x, y = (torch.from_numpy(each) for each in RandomBatches(SHAPES[preset], TOKENS, seed=1)(1, 0))
    for _ in sys.stdin:
        started = time.perf_counter()
        model(x, y).backward()
        model.zero_grad(set_to_none=True)
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    _compute(sys.argv[1])
