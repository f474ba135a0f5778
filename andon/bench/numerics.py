"""What numerics cost here: one worker's forward and backward with portable, compatible and native kernels, in turn.

Each kind of kernels needs a separate process, because torch chooses once. `python -m andon.bench.numerics PRESET` is
such a process: for every line on its standard input it computes once and prints the seconds.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from andon.bench.kit.report import show
from andon.numerics import AVX2, Numerics, kernels

TOKENS = 512


def main(presets: Sequence[str], repetitions: int, as_json: bool) -> None:
    """Print what portable and compatible kernels cost for some models."""
    rows = []
    for preset in presets:
        seconds = measure(preset, repetitions, ("portable", "compatible", "native"))
        rows.append(
            {
                "preset": preset,
                **{f"{kind}_ms": 1e3 * statistics.median(turns) for kind, turns in seconds.items()},
                **{f"{kind}_cost_percent": round(_percent(seconds, kind), 1) for kind in ("portable", "compatible")},
            }
        )
    show(f"forward and backward of {TOKENS} tokens on one core", rows, as_json)


def cost(preset: str = "tiny", repetitions: int = 9) -> str:
    """What portable numerics cost on this machine, in words."""
    percent = _percent(measure(preset, repetitions, ("portable", "native")), "portable")
    if percent < 2:
        return f"portable costs nothing here ({percent:+.0f}% against native, measured on {preset})"
    return f"portable costs {percent:.0f}% of the speed here against native, measured on {preset}"


def measure(preset: str, repetitions: int, kinds: Sequence[Numerics]) -> dict[Numerics, list[float]]:
    """The seconds of each turn with each kind of kernels; the first two turns do not count."""
    seconds: dict[Numerics, list[float]] = {kind: [] for kind in kinds}
    with contextlib.ExitStack() as stack:
        processes = {kind: stack.enter_context(_process(preset, kind)) for kind in kinds}
        for turn in range(repetitions + 2):
            for kind, (ask, answer) in processes.items():
                ask.write("go\n")
                ask.flush()
                took = float(answer.readline())
                if turn > 1:
                    seconds[kind].append(took)
    return seconds


def _percent(seconds: Mapping[Numerics, Sequence[float]], kind: Numerics) -> float:
    """How much longer a turn takes than with native kernels."""
    return 100 * (statistics.median(a / b for a, b in zip(seconds[kind], seconds["native"], strict=True)) - 1)


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
