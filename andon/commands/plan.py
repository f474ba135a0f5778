"""`andon plan`: memory and traffic of a run, and how other settings would change them."""

import json
from operator import attrgetter
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from andon.bench.numerics import cost
from andon.cluster import kinds
from andon.config.schema import RunSettings
from andon.numerics import has_avx2
from andon.run.plan import Plan, changes, cost_of_a_loss
from andon.run.screen.terminal import human_bytes


def main(config: RunSettings, as_json: bool, console: Console) -> None:
    """Print the plan, then a row for each setting that would change it."""
    config = kinds.resolve_steps(config.on_this_machine(), Console(quiet=True) if as_json else console)
    make = kinds.planner(config)
    plan, others = make(config), changes(config, make)
    if as_json:
        now = {
            "workers": config.workers,
            "transport": config.group.transport,
            **plan.to_json(),
            "a_loss": cost_of_a_loss(config, make),
        }
        rows = [{"keys": keys, **other.to_json()} for keys, other in others]
        print(json.dumps({**now, "changes": rows}))
        return
    kinds.show_plan(console, config)
    figures = [Column(name, justify="right") for name in ("memory per worker", "all workers", "sent per step and rank")]
    table = Table("setting", *figures, title="What other settings would change", title_justify="left")
    table.add_row("as it is", *_figures(plan, config.workers), style="bold")
    for keys, other in others:
        table.add_row(_options(config, keys), *_figures(other, keys.get("workers", config.workers)))
    console.print(table)
    if config.numerics == "portable" and has_avx2():
        console.print(f"Numerics: {cost()}; --numerics native takes the fastest kernels.", style="dim")
    console.print(
        "Memory is the peak during a step (PSS: shared memory is divided among its users) plus the snapshot of a "
        "save, on rank 0, which also copies the weights. Traffic is the bytes that a rank sends per step; over shared "
        "memory, the bytes that it moves between its own memory and that of other ranks.",
        style="dim",
    )


def _figures(plan: Plan, workers: int) -> tuple[str, str, str]:
    memory, sent = plan.memory, human_bytes(plan.sent) if plan.sent else "–"
    return human_bytes(memory.total), human_bytes(memory.of_all(workers)), sent


def _options(config: RunSettings, keys: dict[str, Any]) -> str:
    """The options that differ from the configuration, as they are typed."""
    new = [(key, value) for key, value in keys.items() if attrgetter(key)(config) != value]
    return " ".join(f"--{key} {value}" for key, value in new)
