"""What a user sees before a run: its plan, its corpus, and whether it fits this machine."""

import os
from collections.abc import Iterator
from dataclasses import asdict

import psutil
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Column, Table

from andon.config.schema import Config, RunSettings
from andon.machine import computes_on_gpu
from andon.run.plan import Memory, cost_of_a_loss, make_plan
from andon.run.screen.terminal import counted, human_bytes, human_count

MANY_EPOCHS = 20  # more get a warning


def show_plan(console: Console, config: Config) -> None:
    """Print the plan of a run."""
    plan, train, shape = make_plan(config), config.train, config.shape
    table = Table.grid(Column(style="bold"), "", padding=(0, 2))
    width = f"{shape.layers} blocks of width {shape.hidden}"
    table.add_row("model", f"{escape(config.model_name)} · {human_count(plan.parameters)} parameters · {width}")
    table.add_row("data", f"{escape(', '.join(config.data.corpus))} · tokenizer {escape(config.data.tokenizer)}")
    batch = f"{train.slots} slots × {train.micro_batch} windows × {train.context} tokens"
    table.add_row("step", f"{plan.tokens_per_step:,} tokens = {batch}")
    table.add_row("run", f"{train.steps:,} steps · {human_count(plan.tokens)} tokens · seed {config.seed}")
    shared = f"{config.workers} × {counted(config.threads, 'thread')}"
    table.add_row("workers", f"{shared} · transport {config.group.transport} · device {config.device}")
    table.add_row("memory", f"about {human_bytes(plan.memory.total)} a worker: {_parts(plan.memory)}")
    if plan.sent:
        table.add_row("traffic", f"{human_bytes(plan.sent)} a step and rank")
    table.add_row("a loss", cost_of_a_loss(config, make_plan))
    table.add_row("folder", escape(str(config.run.dir)))
    panel = Panel(table, title="[bold]Andon[/] · the plan", title_align="left", expand=False)
    console.print(panel if console.is_terminal else table)


def show_corpus_plan(console: Console, config: Config, documents: int, tokens: int) -> None:
    """Print the size of the corpus, and how often the run reads it."""
    windows = max(0, (tokens - 1) // config.train.context)
    held_out = windows // max(2, round(1 / config.data.validation)) if config.data.validation and windows > 1 else 0
    read = config.train.steps * config.train.slots * config.train.micro_batch
    epochs = read / max(1, windows - held_out)
    text = f"corpus  {counted(documents, 'document')} · {human_count(tokens)} tokens · {counted(windows, 'window')}"
    console.print(f"{text}, {held_out:,} held out · {epochs:,.{2 if epochs < 1 else 1}f} epochs", soft_wrap=True)
    if windows and epochs > MANY_EPOCHS:
        console.print(f"Each window is read {epochs:.0f} times: more text, or fewer --train.steps", style="yellow")


def machine_notes(config: RunSettings) -> Iterator[str]:
    """Notes if a run does not fit this machine, or leaves much of it idle."""
    busy = config.workers * config.threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if computes_on_gpu(config.device):
        return
    # The memory of fine-tuning is known only after torch is loaded: `andon plan --finetune` shows it.
    needed = make_plan(config).memory.of_all(config.workers) if isinstance(config, Config) else 0
    if needed > (free := psutil.virtual_memory().available):
        remedy = "`andon plan` shows which settings take less"
        yield f"Memory: all workers need {human_bytes(needed)}, and {human_bytes(free)} are free here; {remedy}"
    if busy > cores:
        shared = f"{config.workers} × {config.threads} threads share {cores} cores"
        yield f"Cores: {shared}, which is slower than one thread on each"
    elif 2 * busy <= cores:
        more = f"--workers {min(cores, config.train.slots)} or --threads {cores // config.workers}"
        yield f"Cores: {cores - busy} of {cores} stay idle; try {more}"


def _parts(memory: Memory) -> str:
    parts = asdict(memory)
    copies, on_host = parts.pop("snapshot") + parts.pop("weights_snapshot"), parts.pop("on_host")
    named = {"torch and Andon": parts.pop("program"), **parts, "copies for a save": copies}
    text = ", ".join(f"{name} {human_bytes(count)}" for name, count in named.items() if count)
    return f"{text}; on the host {human_bytes(on_host)} of copies for a save" if on_host else text
