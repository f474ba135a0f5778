"""Options that several commands have, and how their arguments become a configuration. Heavy imports are local."""

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
ANY_KEY = {"allow_extra_args": True, "ignore_unknown_options": True}
new_app = partial(
    typer.Typer, no_args_is_help=True, rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False
)
Resume = Annotated[str, typer.Option(help="auto: the run's newest good checkpoint; none: a new run; or a checkpoint.")]
Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint folder.")]
TlsCert = Annotated[str, typer.Option(help="PEM certificate of this process; turns TLS on.")]
TlsKey = Annotated[str, typer.Option(help="PEM private key of that certificate.")]
TlsCa = Annotated[str, typer.Option(help="PEM certificate of the authority that signed the peers' certificates.")]
list_argument = partial(typer.Argument, default_factory=list, show_default=False)
Arguments = Annotated[
    list[str],
    list_argument(metavar="CONFIG.yaml | CORPUS", help="A configuration, or text; and --KEY VALUE, in any order."),
]
Samples = Annotated[list[str], list_argument(help="Files of samples, .jsonl or .parquet; and --KEY VALUE.")]
Finetune = Annotated[bool, typer.Option("--finetune", help="Take MODEL DATA… and keys, as `andon finetune` does.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
Checkpoints = Annotated[Path, typer.Argument(help="A run, its folder of checkpoints, or one checkpoint.")]


def configuration(arguments: list[str]) -> Config:
    """Build the configuration of a pretraining run from a command line."""
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
    if "data.corpus" in overrides:
        _refuse_ignored(corpus, "--data.corpus names the corpus")
    return load(Path(files[0]) if files else None, {"data.corpus": corpus, **overrides} if corpus else overrides)


def tuning_configuration(arguments: list[str], values: Mapping[str, Any] | None = None) -> FinetuneConfig:
    """Build the configuration of a fine-tuning run from options and either MODEL DATA… or the values of a file."""
    from andon.config.finetune import FinetuneConfig
    from andon.config.load import merge, parse_arguments, validate

    paths, overrides = parse_arguments(arguments, FinetuneConfig)
    if values is not None:
        _refuse_ignored(paths, "The configuration names model and samples; --model and --data.files override them")
    else:
        model, *files = paths or ["MODEL"]
        if "model" in overrides:
            _refuse_ignored(paths[:1], "--model names the model")
        if "data.files" in overrides:
            _refuse_ignored(files, "--data.files names the samples")
        if not files and "data.files" not in overrides:
            remedy = f"`andon finetune {model} samples.jsonl`"
            raise UserError("There is no data", "`andon finetune` takes a model and files of samples", remedy)
        given: dict[str, Any] = {"model": model, "data.files": files} if files else {"model": model}
        overrides = given | overrides
    return validate(merge(values or {}, overrides, FinetuneConfig), FinetuneConfig)


def _refuse_ignored(paths: list[str], cause: str) -> None:
    """Refuse paths that would change nothing."""
    if paths:
        raise UserError(f"{' '.join(paths)} would be ignored", cause, "Leave one of them out")


def run_configuration(arguments: list[str], finetune: bool = False) -> RunSettings:
    """Build the configuration of a run of either kind; a file with a section `lora` is for fine-tuning."""
    from andon.config.load import is_finetuning, read_yaml

    if finetune:
        return tuning_configuration(arguments)
    files = [argument for argument in arguments if argument.endswith((".yaml", ".yml")) and argument[0] != "-"]
    values = read_yaml(Path(files[0])) if len(files) == 1 else {}
    if not is_finetuning(values):
        return configuration(arguments)
    return tuning_configuration([argument for argument in arguments if argument not in files], values)


def launch(config: RunSettings, resume: str) -> int:
    """Train on this machine, or as the rank that torchrun's environment variables name; returns the exit code."""
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():  # torchrun and its like
        use_kernels(config.numerics)
        from andon.cluster.torchrun import run

        return run(config, resume, terminal(lasting=True))
    if is_done(config, resume):
        return 0
    from andon.cluster.launch import train

    return train(config, resume, terminal(lasting=True))


def is_done(config: RunSettings, resume: str) -> bool:
    """Whether a run that would be resumed has done its last step; then its result is shown again."""
    from andon.run.resumable import summary_if_done

    summary = summary_if_done(config) if resume == "auto" else None
    if summary:
        from andon.run.screen.ending import show_summary

        console = terminal()
        more = "more steps: --train.steps N; a new run: --resume none"
        console.print(f"{config.run.dir} is done: all {summary['step']:,} steps ({more})", soft_wrap=True, markup=False)
        show_summary(console, config.run.dir, summary)
    return summary is not None


def use_kernels(numerics: Numerics = "portable") -> None:
    """Choose the CPU kernels, before torch is loaded."""
    from andon.numerics import choose_kernels

    if warning := choose_kernels(numerics):
        terminal(stderr=True).print(warning, style="yellow", soft_wrap=True)


def numbers(option: str, text: str, least: int = 1) -> list[int]:
    """Parse the value of an option that is a list of numbers."""
    try:
        values = [int(number) for number in text.split(",")]
        if min(values) < least:
            raise ValueError
        return values
    except ValueError:
        cause = f"It must be numbers from {least} on, separated by commas"
        raise UserError(f"{option} {text} is not a list of numbers", cause, f"For example {option} 1,2") from None


def tls_of(cert: str, key: str, ca: str) -> Tls | None:
    """The TLS settings of the options, None if they name no certificate."""
    from andon.transport.tcp.entrance.tls import Tls

    tls = Tls(cert, key, ca)
    tls.check()
    return tls if cert or ca else None


def terminal(stderr: bool = False, lasting: bool = False) -> Console:
    """The console of a command; with `lasting`, a run continues when nothing can be written to it any more."""
    from andon.run.screen.terminal import Terminal

    return Terminal(stderr, lasting)
