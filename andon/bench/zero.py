"""`andon bench train --zero`: what ZeRO costs a step, and its update against PyTorch's own, in one run.

A row is one batch size: seconds of a whole step with all checks, under plain data parallel and under ZeRO
`even`, and seconds of AdamW on this rank's share with the gather of the weights, against
`ZeroRedundancyOptimizer` over Gloo with the same model (fused AdamW; of its two ways to keep parameters, the
faster counts). Medians over turns; the slowest rank counts.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from andon.bench.ranks import run_ranks


@dataclass
class Row:
    """One number of tokens per worker and step; `ratio` is ZeRO's step over the plain one."""

    tokens: int
    ranks: int
    plain_step_s: float
    zero_step_s: float
    ratio: float
    update_s: float
    torch_update_s: float
    torch_bucket_view: bool
    update_speedup: float


def main(preset: str, ranks: int, tokens: list[int], repetitions: int, transport: str, as_json: bool) -> None:
    """Measure and print: a table for people, or one JSON row per line for scripts."""
    task = {"preset": preset, "tokens": tokens, "repetitions": repetitions, "transport": transport}
    by_rank = run_ranks("andon.bench.zero_rank", ranks, task)
    rows = [_row(count, [results[str(count)] for results in by_rank]) for count in tokens]
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)))
        return
    table = Table(title=f"{preset}, {ranks} workers, one thread each, {transport}, ZeRO even")
    headings = ("tokens a worker", "plain step", "ZeRO step", "ratio", "update", "torch's update", "× torch")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        seconds = (row.plain_step_s, row.zero_step_s), (row.update_s, row.torch_update_s)
        steps, updates = ([f"{1000 * each:.1f} ms" for each in pair] for pair in seconds)
        table.add_row(str(row.tokens), *steps, f"{row.ratio:.2f}", *updates, f"{row.update_speedup:.2f}")
    Console().print(table)


def _row(tokens: int, by_rank: list[dict[str, list[float]]]) -> Row:
    turns = {
        name: [max(turn) for turn in zip(*(result[name] for result in by_rank), strict=True)]
        for name in by_rank[0]
    }
    median = {name: statistics.median(values) for name, values in turns.items()}
    fastest = min(("torch", "torch_bucket_view"), key=lambda name: median[name])
    return Row(
        tokens=tokens,
        ranks=len(by_rank),
        plain_step_s=median["plain"],
        zero_step_s=median["zero"],
        ratio=_turn_by_turn(turns["zero"], turns["plain"]),
        update_s=median["update"],
        torch_update_s=median[fastest],
        torch_bucket_view=fastest == "torch_bucket_view",
        update_speedup=_turn_by_turn(turns[fastest], turns["update"]),
    )


def _turn_by_turn(over: list[float], under: list[float]) -> float:
    """The median ratio, so that a slow moment of the machine counts on both sides."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
