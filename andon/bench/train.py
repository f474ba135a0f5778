"""`andon bench train`: Andon's step against what PyTorch has of it over Gloo, interleaved in one run.

A row is one batch size. Against DistributedDataParallel with the same model, batch and threads: tokens per second, what
the checks cost (the same step without them), the share of a step that each phase takes (`exchange`: what is left of it
after backward), and how much of the exchange was hidden behind backward. With `--zero`: a step with ZeRO `even` against
plain data parallel, and AdamW on this rank's share with the gather of the weights against `ZeroRedundancyOptimizer` (of
its two ways to keep parameters, the faster counts). Medians over turns; the slowest rank counts. Ratios are medians of
the ratios of each turn, so that a slow moment counts on both sides.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from andon.bench.ranks import run_ranks

Seconds = dict[str, list[float]]
"""Seconds of each turn by name, of the slowest rank."""
Phases = dict[str, float]
"""Median milliseconds by phase."""


@dataclass
class TrainRow:
    """One number of tokens per worker and step, against DDP."""

    HEADINGS: ClassVar = ("Andon tok/s", "DDP tok/s", "× DDP", "checks cost", "exchange hidden")
    tokens: int
    ranks: int
    andon_tokens_per_s: float
    unchecked_tokens_per_s: float
    ddp_tokens_per_s: float
    ratio: float
    checks_cost: float
    hidden: float
    phases: dict[str, float]

    @classmethod
    def of(cls, tokens: int, ranks: int, seconds: Seconds, phases: Phases) -> TrainRow:
        """From the seconds of Andon's step with and without checks, and of DDP's."""
        rate = {name: ranks * tokens / statistics.median(each) for name, each in seconds.items()}
        exchange = phases.pop("all_exchange")
        return cls(
            tokens=tokens,
            ranks=ranks,
            andon_tokens_per_s=rate["andon"],
            unchecked_tokens_per_s=rate["other"],
            ddp_tokens_per_s=rate["ddp"],
            ratio=_ratio(seconds["ddp"], seconds["andon"]),
            checks_cost=_ratio(seconds["andon"], seconds["other"]) - 1,
            hidden=max(0.0, 1 - phases["exchange"] / exchange),
            phases={name: value / sum(phases.values()) for name, value in phases.items()},
        )

    def cells(self) -> tuple[str, ...]:
        """The row as a person reads it."""
        rates = f"{self.andon_tokens_per_s:,.0f}", f"{self.ddp_tokens_per_s:,.0f}", f"{self.ratio:.2f}"
        return *rates, f"{self.checks_cost:.1%}", f"{self.hidden:.0%}"


@dataclass
class ZeroRow:
    """One number of tokens per worker and step; `ratio` is ZeRO's step over the plain one."""

    HEADINGS: ClassVar = ("plain step", "ZeRO step", "ratio", "update", "torch's update", "× torch")
    tokens: int
    ranks: int
    plain_step_s: float
    zero_step_s: float
    ratio: float
    update_s: float
    torch_update_s: float
    torch_bucket_view: bool
    update_speedup: float

    @classmethod
    def of(cls, tokens: int, ranks: int, seconds: Seconds, phases: Phases) -> ZeroRow:
        """From the seconds of Andon's step with and without ZeRO, and of torch's updates."""
        median = {name: statistics.median(each) for name, each in seconds.items()}
        fastest = min(("torch", "torch_bucket_view"), key=median.__getitem__)
        update = phases["optimizer"] / 1e3
        return cls(
            tokens=tokens,
            ranks=ranks,
            plain_step_s=median["other"],
            zero_step_s=median["andon"],
            ratio=_ratio(seconds["andon"], seconds["other"]),
            update_s=update,
            torch_update_s=median[fastest],
            torch_bucket_view=fastest == "torch_bucket_view",
            update_speedup=median[fastest] / update,
        )

    def cells(self) -> tuple[str, ...]:
        """The row as a person reads it."""
        pairs = (self.plain_step_s, self.zero_step_s), (self.update_s, self.torch_update_s)
        steps, updates = ([f"{1000 * each:.1f} ms" for each in pair] for pair in pairs)
        return *steps, f"{self.ratio:.2f}", *updates, f"{self.update_speedup:.2f}"


def main(
    preset: str, ranks: int, tokens: list[int], repetitions: int, transport: str, zero: bool, as_json: bool
) -> None:
    """Measure and print: a table for people, or one JSON row per line for scripts."""
    task = {"preset": preset, "tokens": tokens, "repetitions": repetitions, "transport": transport, "zero": zero}
    by_rank = run_ranks("andon.bench.train_rank", ranks, task)
    row = ZeroRow.of if zero else TrainRow.of
    rows = [row(count, ranks, *_slowest([each[str(count)] for each in by_rank])) for count in tokens]
    if as_json:
        for each in rows:
            print(json.dumps(asdict(each)))
        return
    against = "ZeRO even against plain" if zero else "against DDP over Gloo"
    table = Table(title=f"{preset}, {ranks} workers, one thread each, {transport}, {against}")
    for heading in ("tokens a worker", *rows[0].HEADINGS):
        table.add_column(heading, justify="right")
    for each in rows:
        table.add_row(str(each.tokens), *each.cells())
    console = Console()
    console.print(table)
    for each in rows:
        if isinstance(each, TrainRow):
            shares = ", ".join(f"{name} {share:.0%}" for name, share in each.phases.items())
            console.print(f"{each.tokens} tokens: {shares}")


def _slowest(by_rank: list[dict[str, Any]]) -> tuple[Seconds, Phases]:
    """The seconds of the slowest rank in each turn, and the median of each phase over turns and ranks."""
    seconds = {
        name: [max(turn) for turn in zip(*(each["seconds"][name] for each in by_rank), strict=True)]
        for name in by_rank[0]["seconds"]
    }
    steps = [phases for each in by_rank for phases in each["phases"]]
    return seconds, {name: statistics.median(step[name] for step in steps) for name in steps[0]}


def _ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
