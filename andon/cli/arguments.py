"""What the commands share: options, and what their arguments mean. Heavy imports are local."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from andon.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from andon.config.schema import Config
    from andon.numerics import Numerics
    from andon.transport.tcp.entrance.tls import Tls

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
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
Checkpoints = Annotated[Path, typer.Argument(help="A run, its folder of checkpoints, or one checkpoint.")]


def configuration(arguments: list[str]) -> Config:
    """The configuration that a command line asks for."""
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


def address_of(text: str) -> tuple[str, int | None]:
    """The host and, if it is given, the port of HOST, HOST:PORT, an IPv6 address, or [IPv6]:PORT."""
    found = re.fullmatch(r"\[([0-9a-fA-F:.%\w]+)\](?::([0-9]{1,5}))?|([^:\[\]\s]+)(?::([0-9]{1,5}))?", text, re.ASCII)
    if not found and re.fullmatch("[0-9a-fA-F:.]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*", text):
        return text, None
    port = (found[2] or found[4]) if found else None
    if not found or (port and int(port) > 65535):
        raise UserError(f"{text!r} is not an address", "It must be HOST or HOST:PORT", "For example 127.0.0.1:29411")
    return found[1] or found[3], int(port) if port else None


def tls_of(cert: str, key: str, ca: str) -> Tls | None:
    """TLS as the options ask for it, if they do."""
    from andon.transport.tcp.entrance.tls import Tls

    tls = Tls(cert, key, ca)
    tls.check()
    return tls if cert or ca else None


def terminal(stderr: bool = False, lasting: bool = False) -> Console:
    """Where a command writes; `lasting`: for as long as a run takes."""
    from andon.run.terminal import Terminal

    return Terminal(stderr, lasting)
