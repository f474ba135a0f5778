"""`andon bench train`: Andon's step against PyTorch's DistributedDataParallel over Gloo, in one run.

A row is one batch size: tokens per second of Andon with all checks, of the same step without them, and of DDP
with the same model, batch and threads; the ratios; the share of a step that each phase takes (`exchange`:
what is left of it after backward), and how much of the exchange was hidden behind backward. Medians over
steps that take turns; the slowest rank counts.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from andon.bench.ranks import run_ranks

TOKENS = (64, 512, 4096)


@dataclass
class Row:
    """One number of tokens per worker and step."""

    tokens: int
    ranks: int
    andon_tokens_per_s: float
    unchecked_tokens_per_s: float
    ddp_tokens_per_s: float
    ratio: float
    checks_cost: float
    hidden: float
    phases: dict[str, float]


def run(preset: str, ranks: int, tokens: list[int], repetitions: int, transport: str) -> list[Row]:
    """Measure; one row per batch size."""
    task = {"preset": preset, "tokens": tokens, "repetitions": repetitions, "transport": transport}
    by_rank = run_ranks("andon.bench.train_rank", ranks, task)
    return [_row(count, [results[str(count)] for results in by_rank]) for count in tokens]


def _row(tokens: int, by_rank: list[dict[str, Any]]) -> Row:
    ranks = len(by_rank)
    seconds = {
        name: [max(turn) for turn in zip(*(result["seconds"][name] for result in by_rank), strict=True)]
        for name in by_rank[0]["seconds"]
    }
    median = {name: statistics.median(values) for name, values in seconds.items()}
    # Turn by turn, so that a slow moment of the machine counts on both sides of a ratio.
    ratio = statistics.median(a / b for a, b in zip(seconds["ddp"], seconds["andon"], strict=True))
    checks = statistics.median(a / b for a, b in zip(seconds["andon"], seconds["unchecked"], strict=True)) - 1
    steps = [phase for result in by_rank for phase in result["phases"]]
    phases = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    exchange = phases.pop("all_exchange")
    total = sum(phases.values())
    return Row(
        tokens=tokens,
        ranks=ranks,
        andon_tokens_per_s=ranks * tokens / median["andon"],
        unchecked_tokens_per_s=ranks * tokens / median["unchecked"],
        ddp_tokens_per_s=ranks * tokens / median["ddp"],
        ratio=ratio,
        checks_cost=checks,
        hidden=max(0.0, 1 - phases["exchange"] / exchange),
        phases={name: value / total for name, value in phases.items()},
    )


def main(preset: str, ranks: int, tokens: list[int], repetitions: int, transport: str, as_json: bool) -> None:
    """Measure and print: a table for people, or one JSON row per line for scripts."""
    rows = run(preset, ranks, tokens, repetitions, transport)
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)))
        return
    table = Table(title=f"{preset}, {ranks} workers, one thread each, {transport}, against DDP over Gloo")
    for heading in ("tokens a worker", "Andon tok/s", "DDP tok/s", "× DDP", "checks cost", "exchange hidden"):
        table.add_column(heading, justify="right")
    for row in rows:
        rates = (f"{row.andon_tokens_per_s:,.0f}", f"{row.ddp_tokens_per_s:,.0f}", f"{row.ratio:.2f}")
        table.add_row(str(row.tokens), *rates, f"{row.checks_cost:.1%}", f"{row.hidden:.0%}")
    console = Console()
    console.print(table)
    for row in rows:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in row.phases.items())
        console.print(f"{row.tokens} tokens: {shares}")
