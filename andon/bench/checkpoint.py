"""`andon bench checkpoint`: what a save costs training, measured in one run with its peers.

*Stall* is how long the step loop waits for a save: the request, and the rest of the snapshot before the next exchange.
It is compared with one plain copy of the whole state (weights and AdamW's moments) in memory, and with the stall of
`torch.distributed.checkpoint.async_save` (Gloo, one rank) for the same state. *Slow-down* compares the steps during a
save with the steps before it; on a GPU, where the host does not wait for a step, they say more than the stall.
Throughput is that of a save on an idle machine, compared with plain writes of the same
number of bytes and fsync. Figures are medians over rounds of the slowest rank in each.
"""

import json
import operator
import statistics
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from andon.bench.kit.processes import run_ranks
from andon.bench.kit.report import ratio, slowest


def summarize(by_rank: list[dict[str, list[float]]]) -> dict[str, float]:
    """Seconds, GB/s and ratios: medians over the rounds of the slowest rank in each."""
    rounds = slowest(by_rank)
    size = rounds["bytes"][0]
    median = {name: statistics.median(values) for name, values in rounds.items()}

    def over(above: str, below: str) -> float:
        return ratio(rounds[above], rounds[below])

    return {
        "state_gb": size / 1e9,
        "copy_s": median["copy"],
        "stall_s": median["stall"],
        "async_save_stall_s": median["async_stall"],
        "stall_copies": over("stall", "copy"),
        "async_save_stall_copies": over("async_stall", "copy"),
        "stall_over_async_save": over("stall", "async_stall"),
        "step_s": median["step"],
        "longer_by_s": statistics.median(map(operator.sub, rounds["step_snapshot"], rounds["step"])),
        "step_with_snapshot": over("step_snapshot", "step"),
        "step_while_writing": over("step_writing", "step"),
        "step_while_async_save_writes": over("step_async", "step"),
        "save_beside_training_s": median["save"],
        "write_gb_s": size / median["idle_save"] / 1e9,
        "dd_gb_s": size / median["dd"] / 1e9,
        "hash_gb_s": median["hash_gb_s"],
    }


def main(preset: str, device: str, ranks: int, tokens: int, repetitions: int, folder: Path, as_json: bool) -> None:
    """Measure on the disk of a folder, and print a table or JSON."""
    with tempfile.TemporaryDirectory(prefix=".andon-bench-", dir=folder) as place:
        task = {"preset": preset, "device": device, "tokens": tokens, "repetitions": repetitions, "folder": place}
        found = summarize(run_ranks("andon.bench.ranks.checkpoint", ranks, task))
    if as_json:
        print(json.dumps({"preset": preset, "device": device, "ranks": ranks, **found}))
        return
    who = "one GPU" if device == "cuda" else f"{ranks} workers"
    table = Table("", "seconds", "in copies", title=f"{preset} with optimizer state, {found['state_gb']:.2f} GB, {who}")
    table.add_row("one plain copy of the state", f"{found['copy_s']:.3f}", "1.00")
    for name, key in (("a save", "stall"), ("async_save", "async_save_stall")):
        table.add_row(f"stall of {name}", f"{found[f'{key}_s']:.3f}", f"{found[f'{key}_copies']:.2f}")
    console = Console()
    console.print(table)
    console.print(
        "stall: {stall_over_async_save:.3f} × that of async_save\n"
        "step {step_s:.3f} s; with the snapshot × {step_with_snapshot:.3f}, {longer_by_s:.3f} s longer\n"
        "while a save is written × {step_while_writing:.3f}, while async_save writes "
        "× {step_while_async_save_writes:.3f}; on disk after {save_beside_training_s:.1f} s\n"
        "a save by itself {write_gb_s:.2f} GB/s, dd with fsync {dd_gb_s:.2f} GB/s, hashing {hash_gb_s:.2f} GB/s".format(
            **found
        )
    )
