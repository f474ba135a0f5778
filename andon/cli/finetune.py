"""`andon finetune` and `andon merge`: one function per command, which parses and makes one call."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from andon.cli.arguments import ANY_KEY, EXIT_CODES, Resume, Samples, launch, new_app, tuning_configuration, use_kernels

finetune_app = new_app()


@finetune_app.command(context_settings=ANY_KEY, epilog=EXIT_CODES)
def finetune(
    model: Annotated[str, typer.Argument(help="Folder of a Hugging Face model.")],
    data: Samples,
    resume: Resume = "auto",
) -> None:
    """Fine-tune a Hugging Face model with LoRA adapters.

    --lora.rank 0 trains all weights instead. A sample is a row with text and label, prompt and completion, or messages.
    The result is an adapter in PEFT's format in the run's folder, runs/finetune unless --run.dir names another. Every
    key of the configuration is an option; `andon config show --finetune` lists all of them. Those used most:

    \b
    --workers N              worker processes on this machine
    --lora.rank R            rank of the adapters
    --lora.targets NAMES     layers that get adapters, such as q_proj,v_proj
    --train.epochs N         passes over the data
    """
    sys.exit(launch(tuning_configuration([model, *data]), resume))


@finetune_app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(help="Folder of an adapter.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write. Default: `merged` next to the adapter.")] = None,
) -> None:
    """Write a model with its adapter merged into the weights."""
    use_kernels()
    from andon.finetune.result import merge as run

    typer.echo(f"The merged model is in {run(adapter, out)}")
