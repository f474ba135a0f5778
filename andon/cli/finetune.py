"""`andon finetune` and `andon merge`: one function per command, which parses and makes one call."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from andon.cli.arguments import ANY, EXIT_CODES, Resume, launch, new_app, tuning_configuration, use_kernels

finetune_app = new_app()


@finetune_app.command(context_settings=ANY, epilog=EXIT_CODES)
def finetune(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder of a Hugging Face model.")],
    resume: Resume = "auto",
) -> None:
    """Fine-tune MODEL on DATA… (.jsonl or .parquet) with LoRA adapters, or all weights with --lora.rank 0.

    Rows have text and label, prompt and completion, or messages. The result is an adapter in PEFT's format in the
    run's folder, runs/finetune unless --run.dir says otherwise. Every key is an option (`andon config show --finetune`
    lists them): --workers 2 --lora.rank 16 --lora.targets q_proj,v_proj --train.epochs 2
    """
    sys.exit(launch(tuning_configuration([model, *context.args]), resume))


@finetune_app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(help="The folder of an adapter.")],
    out: Annotated[Path | None, typer.Option(help="The new folder; default: `merged` beside the adapter.")] = None,
) -> None:
    """Write the model of an adapter with the adapter merged into its weights."""
    use_kernels()
    from andon.finetune.result import merge as run

    typer.echo(f"The merged model is in {run(adapter, out)}")
