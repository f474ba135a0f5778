"""`andon bench checkpoint`: what a save costs training, in one run with what it is measured against.

*Stall* is how long the step loop waits for a save: the request, and what is left of the snapshot before the next
exchange. It is set against one plain copy of the whole state (weights and AdamW's moments) from memory to memory, and
against the stall of `torch.distributed.checkpoint.async_save` (Gloo, one rank) for the same state. *Slow-down* is the
time of the steps during a save against the steps before it. Throughput is that of a save with nothing else to do,
against plain writes of as many bytes with fsync. Rounds take turns; medians count, and the slowest rank.
"""

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from andon.bench.ranks import run_ranks


@dataclass
class Result:
    """Seconds, GB/s and ratios."""

    preset: str
    ranks: int
    state_gb: float
    copy_s: float
    stall_s: float
    async_save_stall_s: float
    stall_copies: float
    async_save_stall_copies: float
    stall_over_async_save: float
    step_s: float
    step_with_snapshot: float
    step_while_writing: float
    step_while_async_save_writes: float
    save_beside_training_s: float
    write_gb_s: float
    dd_gb_s: float
    hash_gb_s: float


def run(preset: str, ranks: int, tokens: int, repetitions: int, folder: Path) -> Result:
    """Measure on the disk of a folder."""
    with tempfile.TemporaryDirectory(prefix=".andon-bench-", dir=folder) as place:
        task = {"preset": preset, "tokens": tokens, "repetitions": repetitions, "folder": place}
        by_rank = run_ranks("andon.bench.checkpoint_rank", ranks, task)
    return _result(preset, by_rank)


def _result(preset: str, by_rank: list[dict[str, Any]]) -> Result:
    rounds = [dict(zip(by_rank[0], turn, strict=True)) for turn in _rounds(by_rank)]
    size = by_rank[0]["bytes"][0]

    def median(name: str) -> float:
        return statistics.median(each[name] for each in rounds)

    def ratio(above: str, below: str) -> float:
        # Round by round, so that a slow moment of the machine counts on both sides.
        return statistics.median(each[above] / each[below] for each in rounds)

    return Result(
        preset=preset,
        ranks=len(by_rank),
        state_gb=size / 1e9,
        copy_s=median("copy"),
        stall_s=median("stall"),
        async_save_stall_s=median("async_stall"),
        stall_copies=ratio("stall", "copy"),
        async_save_stall_copies=ratio("async_stall", "copy"),
        stall_over_async_save=ratio("stall", "async_stall"),
        step_s=median("step"),
        step_with_snapshot=ratio("step_snapshot", "step"),
        step_while_writing=ratio("step_writing", "step"),
        step_while_async_save_writes=ratio("step_async", "step"),
        save_beside_training_s=median("save"),
        write_gb_s=size / median("idle_save") / 1e9,
        dd_gb_s=size / median("dd") / 1e9,
        hash_gb_s=median("hash_gb_s"),
    )


def _rounds(by_rank: list[dict[str, list[float]]]) -> list[list[float]]:
    """Round by round the values of the slowest rank."""
    columns = [[max(turn) for turn in zip(*(each[name] for each in by_rank), strict=True)] for name in by_rank[0]]
    return [list(values) for values in zip(*columns, strict=True)]


def main(preset: str, ranks: int, tokens: int, repetitions: int, folder: Path, as_json: bool) -> None:
    """Measure and print: a table for people, or JSON for scripts."""
    result = run(preset, ranks, tokens, repetitions, folder)
    if as_json:
        print(json.dumps(asdict(result)))
        return
    title = f"{preset} with optimizer state, {result.state_gb:.2f} GB, {ranks} workers"
    table = Table("", "seconds", "in copies", title=title)
    table.add_row("one plain copy of the state", f"{result.copy_s:.3f}", "1.00")
    table.add_row("stall of a save", f"{result.stall_s:.3f}", f"{result.stall_copies:.2f}")
    theirs = (f"{result.async_save_stall_s:.3f}", f"{result.async_save_stall_copies:.2f}")
    table.add_row("stall of async_save", *theirs)
    console = Console()
    console.print(table)
    console.print(f"stall: {result.stall_over_async_save:.3f} × that of async_save")
    console.print(
        f"step {result.step_s:.2f} s; during the snapshot × {result.step_with_snapshot:.2f}, while a save is "
        f"written × {result.step_while_writing:.2f}, while async_save writes × "
        f"{result.step_while_async_save_writes:.2f}; on disk after {result.save_beside_training_s:.1f} s"
    )
    console.print(
        f"a save by itself {result.write_gb_s:.2f} GB/s, dd with fsync {result.dd_gb_s:.2f} GB/s, "
        f"hashing {result.hash_gb_s:.2f} GB/s"
    )
