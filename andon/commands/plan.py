"""`andon plan`: memory and traffic of a run, and what other settings would change."""

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
    """`andon plan`: the plan, then what each setting would change."""
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
    figures = [Column(name, justify="right") for name in ("memory a worker", "all workers", "sent a step and rank")]
    table = Table("setting", *figures, title="What other settings would change", title_justify="left")
    table.add_row("as it is", *_figures(plan, config.workers), style="bold")
    for keys, other in others:
        table.add_row(_options(config, keys), *_figures(other, keys.get("workers", config.workers)))
    console.print(table)
    if config.numerics == "portable" and has_avx2():
        console.print(f"Numerics: {cost()}; --numerics native takes the fastest kernels.", style="dim")
    console.print(
        "Memory is the peak of a step, with shared memory divided among its users (PSS), plus the snapshot "
        "of a save (on rank 0, which also copies the weights). Traffic is what a rank sends in a step; in "
        "shared memory, what it moves between its own memory and that of others.",
        style="dim",
    )


def _figures(plan: Plan, workers: int) -> tuple[str, str, str]:
    memory, sent = plan.memory, human_bytes(plan.sent) if plan.sent else "–"
    return human_bytes(memory.total), human_bytes(memory.of_all(workers)), sent


def _options(config: RunSettings, keys: dict[str, Any]) -> str:
    """The options that differ from the configuration."""
    new = [(key, value) for key, value in keys.items() if attrgetter(key)(config) != value]
    return " ".join(f"--{key} {value}" for key, value in new)
