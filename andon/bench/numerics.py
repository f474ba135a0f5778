"""`andon bench numerics`: forward and backward of one worker with portable, compatible and native kernels,
in turn.

torch chooses its kernels once, so each kind needs its own process, `python -m andon.bench.numerics PRESET`. For every
line on its standard input it computes once and prints the seconds.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO

from andon.bench.kit.report import ratio, show
from andon.errors import UserError
from andon.numerics import AVX2, Numerics, kernels

TOKENS = 512
WARM_UP = 2  # turns


def main(presets: Sequence[str], repetitions: int, as_json: bool) -> None:
    """Measure, and print one row for each model."""
    rows = []
    for preset in presets:
        seconds = measure(preset, repetitions, ("portable", "compatible", "native"))
        rows.append(
            {
                "preset": preset,
                **{f"{kind}_ms": 1e3 * statistics.median(turns) for kind, turns in seconds.items()},
                **{
                    f"{kind}_cost_percent": round(100 * (ratio(seconds[kind], seconds["native"]) - 1), 1)
                    for kind in ("portable", "compatible")
                },
            }
        )
    show(f"forward and backward of {TOKENS} tokens on one core", rows, as_json)


def cost(preset: str = "tiny", repetitions: int = 9) -> str:
    """Measure what portable kernels cost on this machine; returns a sentence."""
    seconds = measure(preset, repetitions, ("portable", "native"))
    percent = 100 * (ratio(seconds["portable"], seconds["native"]) - 1)
    if percent < 2:
        return f"portable costs nothing here ({percent:+.0f}% against native, measured on {preset})"
    return f"portable costs {percent:.0f}% of the speed here against native, measured on {preset}"


def measure(preset: str, repetitions: int, kinds: Sequence[Numerics]) -> dict[str, list[float]]:
    """Seconds of each turn after the warm-up, with each kind of kernels."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with contextlib.ExitStack() as stack:
        processes = {kind: stack.enter_context(_process(preset, kind)) for kind in kinds}
        for turn in range(WARM_UP + repetitions):
            for kind, (stdin, stdout) in processes.items():
                stdin.write("go\n")
                stdin.flush()
                line = stdout.readline()
                if not line:
                    cause = "The process that computes with them has ended"
                    raise UserError(f"{kind} kernels cannot be measured", cause, "Try --numerics portable")
                if turn >= WARM_UP:
                    seconds[kind].append(float(line))
    return seconds


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
