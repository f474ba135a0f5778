"""The launcher's work before the workers start: check the model, tokenize the samples, show the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Column, Table

from andon.config.finetune import FinetuneConfig
from andon.errors import UserError
from andon.finetune.base import Base
from andon.finetune.samples.sample_set import SampleBatches, steps_of
from andon.finetune.samples.tokenize import prepare_samples
from andon.run.plan import cost_of_a_loss

if TYPE_CHECKING:
    from andon.finetune.size import Sizes


def resolve_steps(config: FinetuneConfig, console: Console) -> FinetuneConfig:
    """Fill in the number of steps, the context that the model allows, and the absolute path of the model's folder."""
    base = Base(config.model)
    samples = prepare_samples(config, base)
    base.check_task(samples.task)
    if SampleBatches(samples, config).training < 1:
        cause = f"There are {len(samples)} samples"
        raise UserError("There is nothing to train on", cause, "Give more samples, or --data.validation 0")
    if cut := samples.meta["cut"]:
        longest = samples.meta["context"]
        console.print(f"{cut:,} samples were longer than {longest:,} tokens and are cut", style="yellow")
    train = config.train.model_copy(update={"steps": steps_of(config, samples), "context": samples.meta["context"]})
    return config.model_copy(update={"train": train, "model": str(base.folder)})


def sizes_of(config: FinetuneConfig) -> Sizes:
    """The sizes of a run whose steps are known; this imports torch."""
    from andon.finetune.size import Sizes

    base = Base(config.model)
    return Sizes(config, base, prepare_samples(config, base))


def show_plan(console: Console, config: FinetuneConfig) -> None:
    """Print the plan of a run whose steps are known."""
    base = Base(config.model)
    samples, train, lora = prepare_samples(config, base), config.train, config.lora
    held_out = SampleBatches(samples, config).held_out
    table = Table.grid(Column(style="bold"), "", padding=(0, 2))
    table.add_row("model", escape(f"{config.model} · {base.architecture}"))
    targets = ", ".join(lora.targets) or "every linear layer but the last"
    adapters = f"adapters of rank {lora.rank}, alpha {lora.alpha:g}, on {targets}" if lora.rank else "all weights"
    table.add_row("trained", escape(adapters))
    kinds = f"{len(samples.labels)} classes" if samples.labels else samples.columns
    data = f"{', '.join(config.data.files)} · {len(samples):,} samples, {kinds}, {held_out:,} held out"
    table.add_row("data", escape(data))
    batch = f"{train.slots} slots × {train.micro_batch} samples, up to {train.context} tokens each"
    table.add_row("step", f"{train.slots * train.micro_batch:,} samples = {batch}")
    table.add_row("run", f"{train.steps:,} steps · seed {config.seed}")
    shared = f"{config.workers} × {config.threads} thread{'s' if config.threads > 1 else ''}"
    table.add_row("workers", f"{shared} · transport {config.group.transport} · device {config.device}")
    table.add_row("a loss", cost_of_a_loss(config))
    table.add_row("folder", escape(str(config.run.dir)))
    panel = Panel(table, title="[bold]Andon[/] · the plan", title_align="left", expand=False)
    console.print(panel if console.is_terminal else table)
