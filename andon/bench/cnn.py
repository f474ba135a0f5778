"""`andon bench cnn`: the step of a user's script with Andon's Python interface against DDP over Gloo, in one run."""

import statistics
from collections.abc import Sequence

from andon.bench.kit.processes import run_ranks
from andon.bench.kit.report import ratio, show, slowest

STEPS = 10  # in a turn


def main(ranks: int, images: Sequence[int], repetitions: int, transport: str, as_json: bool) -> None:
    """Measure, and print one row for each number of images per worker and step."""
    task = {"images": list(images), "repetitions": repetitions, "transport": transport, "steps": STEPS}
    by_rank = run_ranks("andon.bench.ranks.cnn", ranks, task)
    rows = []
    for count in images:
        seconds = slowest([each[str(count)] for each in by_rank])
        rows.append(
            {
                "images": count,
                "ranks": ranks,
                "andon_ms": 1e3 * statistics.median(seconds["andon"]),
                "ddp_ms": 1e3 * statistics.median(seconds["ddp"]),
                "ratio": ratio(seconds["ddp"], seconds["andon"]),
            }
        )
    show(f"a small CNN, {ranks} workers, one thread each, {transport}, against DDP over Gloo", rows, as_json)
