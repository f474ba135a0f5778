"""`andon bench train`: Andon's step against PyTorch over Gloo; all take turns in one run.

The peer is DistributedDataParallel with the same model, batch and threads. A row is one batch size: tokens per second,
the cost of the checks (against the same step without them), the share of each phase (`exchange` is the part of the
exchange after backward), and the share of the exchange that was hidden behind backward. With `--zero` it compares a
step with ZeRO `even` with plain data parallel, and AdamW and gather with `ZeroRedundancyOptimizer` (the faster of its
two ways to keep parameters). Figures are medians over turns of the slowest rank; ratios are medians of the ratios of
each turn, so that a slow moment of the machine affects both sides.
"""

from __future__ import annotations

import statistics
from typing import Any

from andon.bench.kit.processes import run_ranks
from andon.bench.kit.report import Turns, ratio, show, slowest


def train_row(tokens: int, ranks: int, seconds: Turns, phases: dict[str, float]) -> dict[str, Any]:
    """Andon's step with checks, and without (`other`), against DDP's; phases become shares of the step."""
    rate = {name: ranks * tokens / statistics.median(each) for name, each in seconds.items()}
    exchange, whole = phases.pop("all_exchange"), sum(phases.values())
    return {
        "tokens": tokens,
        "ranks": ranks,
        "andon_tokens_per_s": rate["andon"],
        "unchecked_tokens_per_s": rate["other"],
        "ddp_tokens_per_s": rate["ddp"],
        "ratio": ratio(seconds["ddp"], seconds["andon"]),
        "checks_cost": ratio(seconds["andon"], seconds["other"]) - 1,
        "hidden": max(0.0, 1 - phases["exchange"] / exchange),
        "phases": {name: value / whole for name, value in phases.items()},
    }


def zero_row(tokens: int, ranks: int, seconds: Turns, phases: dict[str, float]) -> dict[str, Any]:
    """Andon's step with ZeRO, and without (`other`); its update against torch's."""
    median = {name: statistics.median(each) for name, each in seconds.items()}
    fastest = min(("torch", "torch_bucket_view"), key=median.__getitem__)
    update = phases["optimizer"] / 1e3
    return {
        "tokens": tokens,
        "ranks": ranks,
        "plain_step_s": median["other"],
        "zero_step_s": median["andon"],
        "ratio": ratio(seconds["andon"], seconds["other"]),
        "update_s": update,
        "torch_update_s": median[fastest],
        "torch_bucket_view": fastest == "torch_bucket_view",
        "update_speedup": median[fastest] / update,
    }


def main(
    preset: str, ranks: int, tokens: list[int], repetitions: int, transport: str, zero: bool, as_json: bool
) -> None:
    """Measure, and print one row for each batch size."""
    task = {"preset": preset, "tokens": tokens, "repetitions": repetitions, "transport": transport, "zero": zero}
    by_rank = run_ranks("andon.bench.ranks.train", ranks, task)
    rows = []
    for count in tokens:
        measured = [each[str(count)] for each in by_rank]
        steps = [phases for each in measured for phases in each["phases"]]
        medians = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
        seconds = slowest([each["seconds"] for each in measured])
        rows.append((zero_row if zero else train_row)(count, ranks, seconds, medians))
    against = "ZeRO even against plain" if zero else "against DDP over Gloo"
    notes = [
        f"{row['tokens']} tokens: " + ", ".join(f"{name} {share:.0%}" for name, share in row["phases"].items())
        for row in rows
        if "phases" in row
    ]
    show(f"{preset}, {ranks} workers, one thread each, {transport}, {against}", rows, as_json, notes)
