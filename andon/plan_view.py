"""What a person sees of a plan: the short form before a run, and `andon plan` with all it could be."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from andon.config import Config
from andon.plan import Change, Memory, Plan, changes, human_bytes, human_count, make_plan


def main(config: Config, as_json: bool, console: Console) -> None:
    """`andon plan`: the plan, then what each setting would change."""
    config = config.on_this_machine()
    plan, others = make_plan(config), list(changes(config))
    if as_json:
        now = {"workers": config.workers, "transport": config.group.transport, **plan.to_json()}
        rows = [{"keys": change.keys, **change.plan.to_json()} for change in others]
        print(json.dumps({**now, "changes": rows}))
        return
    show_plan(console, config)
    console.print(_changes_table(config, plan, others))
    console.print(
        "Memory is the peak of a step, shared memory divided among those who share it (PSS), and what a save "
        "copies aside (on rank 0, which copies the weights as well). Traffic is what a rank sends in a step; "
        "in shared memory, what it moves between its own memory and others'.",
        style="dim",
    )


def show_plan(console: Console, config: Config) -> None:
    """The plan, before torch is loaded."""
    plan, train, shape = make_plan(config), config.train, config.shape
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    width = f"{shape.layers} blocks of width {shape.hidden}"
    table.add_row("model", f"{config.model.preset} · {human_count(plan.parameters)} parameters · {width}")
    table.add_row(
        "data", f"{escape(', '.join(config.data.corpus))} · tokenizer {escape(config.data.tokenizer)}"
    )
    batch = f"{train.slots} slots × {train.micro_batch} windows × {train.context} tokens"
    table.add_row("step", f"{plan.tokens_per_step:,} tokens = {batch}")
    table.add_row("run", f"{train.steps:,} steps · {human_count(plan.tokens)} tokens · seed {config.seed}")
    shared = f"{config.workers} × {config.threads} thread{'s' if config.threads > 1 else ''}"
    table.add_row("workers", f"{shared} · transport {config.group.transport} · device {config.device}")
    table.add_row("memory", f"about {human_bytes(plan.memory.total)} a worker: {_parts(plan.memory)}")
    if plan.sent:
        table.add_row("traffic", f"{human_bytes(plan.sent)} a step and rank")
    table.add_row("folder", escape(str(config.run.dir)))
    if console.is_terminal:
        console.print(Panel(table, title="[bold]Andon[/] · the plan", title_align="left", expand=False))
    else:
        console.print(table)


def _parts(memory: Memory) -> str:
    named = [
        ("torch and Andon", memory.program),
        ("weights", memory.weights),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
        ("exchange", memory.exchange),
        ("copies for a save", memory.snapshot + memory.weights_snapshot),
    ]
    return ", ".join(f"{name} {human_bytes(count)}" for name, count in named if count)


def _changes_table(config: Config, plan: Plan, others: list[Change]) -> Table:
    table = Table(title="What other settings would change", title_justify="left")
    table.add_column("setting")
    for heading in ("memory a worker", "all workers", "sent a step and rank"):
        table.add_column(heading, justify="right")
    table.add_row("as it is", *_figures(plan, config.workers), style="bold")
    for change in others:
        workers = change.keys.get("workers", config.workers)
        table.add_row(_options(config, change.keys), *_figures(change.plan, workers))
    return table


def _figures(plan: Plan, workers: int) -> tuple[str, str, str]:
    memory, sent = plan.memory, human_bytes(plan.sent) if plan.sent else "–"
    return human_bytes(memory.total), human_bytes(memory.of_all(workers)), sent


def _options(config: Config, keys: dict[str, Any]) -> str:
    """The options that make a change, without those that are as they were."""
    before = config.model_dump()

    def is_new(key: str) -> bool:
        section, _, name = key.rpartition(".")
        return bool((before[section] if section else before)[name] != keys[key])

    return " ".join(f"--{key} {value}" for key, value in keys.items() if is_new(key))
