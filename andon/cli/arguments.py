"""What the commands share: options, and what their arguments mean. Heavy imports are local."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from andon.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from andon.config.finetune import FinetuneConfig
    from andon.config.schema import Config, RunSettings
    from andon.numerics import Numerics
    from andon.transport.tcp.entrance.tls import Tls

EXIT_CODES = "Exit codes: 0 done, 1 user error, 2 usage, 3 halted, 4 stopped and saved."
ANY = {"allow_extra_args": True, "ignore_unknown_options": True}
new_app = partial(
    typer.Typer, no_args_is_help=True, rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False
)
Resume = Annotated[str, typer.Option(help="auto: the newest good checkpoint of the run; none: a new run; or a path.")]
Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint folder.")]
Preset = Annotated[str, typer.Option(help="The model.")]
Workers = Annotated[int, typer.Option(min=1, help="Workers.")]
TlsCert = Annotated[str, typer.Option(help="PEM certificate of this process; turns TLS on.")]
TlsKey = Annotated[str, typer.Option(help="PEM key of that certificate.")]
TlsCa = Annotated[str, typer.Option(help="PEM certificate of the authority that peers' certificates come from.")]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG.yaml | CORPUS]", help="What to train on; and --KEY VALUE, in any order."),
]
Finetune = Annotated[bool, typer.Option("--finetune", help="MODEL DATA… and the keys of `andon finetune`.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
Checkpoints = Annotated[Path, typer.Argument(help="A run, its folder of checkpoints, or one checkpoint.")]


def configuration(arguments: list[str]) -> Config:
    """The configuration of a pretraining run that a command line asks for."""
    from andon.config.load import load, parse_arguments

    paths, overrides = parse_arguments(arguments)
    files = [path for path in paths if path.endswith((".yaml", ".yml"))]
    corpus = [path for path in paths if path not in files]
    if len(files) > 1 or (files and corpus):
        raise UserError(
            f"{' '.join(paths)} is more than one configuration",
            "A configuration names its own corpus",
            "Give one CONFIG.yaml, or only paths of text; --data.corpus overrides the corpus",
        )
    return load(Path(files[0]) if files else None, {"data.corpus": corpus, **overrides} if corpus else overrides)


def tuning_configuration(arguments: list[str], values: Mapping[str, Any] | None = None) -> FinetuneConfig:
    """The configuration of a fine-tuning run: of MODEL DATA… and options, or of a file's values and options."""
    from andon.config.finetune import FinetuneConfig
    from andon.config.load import merge, parse_arguments, validate

    paths, overrides = parse_arguments(arguments, FinetuneConfig)
    if values is None:
        model, *files = paths or ["MODEL"]
        if not files and "data.files" not in overrides:
            remedy = f"`andon finetune {model} samples.jsonl`"
            raise UserError("There is no data", "`andon finetune` takes a model and files of samples", remedy)
        overrides = {"model": model, **({"data.files": files} if files else {}), **overrides}
    return validate(merge(values or {}, overrides, FinetuneConfig), FinetuneConfig)


def run_configuration(arguments: list[str], finetune: bool = False) -> RunSettings:
    """The configuration of a run of either kind: a file with a section `lora` is about fine-tuning."""
    from andon.config.load import is_finetuning, read_yaml

    if finetune:
        return tuning_configuration(arguments)
    files = [argument for argument in arguments if argument.endswith((".yaml", ".yml")) and argument[0] != "-"]
    values = read_yaml(Path(files[0])) if len(files) == 1 else {}
    if not is_finetuning(values):
        return configuration(arguments)
    return tuning_configuration([argument for argument in arguments if argument not in files], values)


def launch(config: RunSettings, resume: str) -> int:
    """Train on this machine, or as the rank that the environment names; gives the exit code."""
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():  # torchrun and its like
        use_kernels(config.numerics)
        from andon.cluster.torchrun import run

        return run(config, resume, terminal(lasting=True))
    from andon.cluster.launch import train

    return train(config, resume, terminal(lasting=True))


def use_kernels(numerics: Numerics = "portable") -> None:
    """Choose how torch computes, before it is used."""
    from andon.numerics import choose_kernels

    if warning := choose_kernels(numerics):
        terminal(stderr=True).print(warning, style="yellow", soft_wrap=True)


def numbers(option: str, text: str) -> list[int]:
    """The value of an option that is a list of numbers."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        cause = "Numbers are separated by commas"
        raise UserError(f"{option} {text} is not a list of numbers", cause, f"{option} 1,2") from None


def tls_of(cert: str, key: str, ca: str) -> Tls | None:
    """TLS as the options ask for it, if they do."""
    from andon.transport.tcp.entrance.tls import Tls

    tls = Tls(cert, key, ca)
    tls.check()
    return tls if cert or ca else None


def terminal(stderr: bool = False, lasting: bool = False) -> Console:
    """Where a command writes; `lasting`: for as long as a run takes."""
    from andon.run.screen.terminal import Terminal

    return Terminal(stderr, lasting)
