"""Commands for a run that goes on or is over: one function each, which parses and makes one call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from andon.cli.arguments import AsJson, TlsCert, TlsKey, new_app, numbers, terminal, use_kernels
from andon.errors import UserError
from andon.transport.address import parse_address

runs_app = new_app()
data_app = new_app(name="data", help="Show training data.")
runs_app.add_typer(data_app)

Model = Annotated[Path, typer.Argument(help="A checkpoint, a run (its newest good one), an adapter or a model folder.")]
RunFolder = Annotated[Path, typer.Argument(help="Folder of a run.")]
Runs = Annotated[list[Path] | None, typer.Argument(help="Folders of runs, or folders that hold them; default: runs/.")]


@runs_app.command()
def generate(
    checkpoint: Model,
    prompt: Annotated[str, typer.Argument(help="The beginning of the text.")] = "",
    count: Annotated[int, typer.Option(min=1, help="Number of texts.")] = 1,
    length: Annotated[int, typer.Option(min=0, help="Most tokens per text; 0: up to the context.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
) -> None:
    """Write text with the model of a checkpoint."""
    use_kernels()
    from andon.commands.generate import generate as run

    run(checkpoint, prompt, count=count, length=length, temperature=temperature, seed=seed)


@runs_app.command()
def evaluate(
    checkpoint: Model,
    windows: Annotated[int, typer.Option(min=1, help="Number of held-out windows.")] = 256,
    as_json: AsJson = False,
) -> None:
    """Print loss, bits per byte and, for the built-in stories, the share of valid samples of a checkpoint."""
    use_kernels()
    from andon.commands.generate import evaluate as run

    run(checkpoint, windows, as_json, terminal())


@runs_app.command()
def board(
    runs: Runs = None,
    bind: Annotated[str, typer.Option(help="HOST[:PORT] to listen on; off loopback it asks for the run's token.")] = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
) -> None:
    """Show runs in a browser, live or finished: loss, workers, saves, samples, halts. Also serves /metrics."""
    from andon.commands.runs.board import board as run

    if bool(tls_cert) != bool(tls_key):
        raise UserError("TLS needs a certificate and a key", "Only one was given", "Give --tls-cert and --tls-key")
    address = parse_address(bind) if bind else ("127.0.0.1", None)
    run(runs or [Path("runs")], address, (tls_cert, tls_key) if tls_cert else None, terminal())


@runs_app.command()
def status(runs: Runs = None, as_json: AsJson = False) -> None:
    """Print state, step, loss and speed of every run."""
    from andon.commands.runs.status import status as show

    show(runs or [Path("runs")], as_json, terminal())


@runs_app.command()
def stop(
    run: RunFolder, wait: Annotated[float, typer.Option(min=0, help="Seconds to wait until it has saved.")] = 120.0
) -> None:
    """Let a run of this machine save after its step and end, as Ctrl-C does; the same command resumes it."""
    from andon.commands.runs.status import stop as end

    end(run, wait, terminal())


@runs_app.command()
def plot(
    run: RunFolder,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A .png; default: in the terminal.")] = None,
    curve: Annotated[str, typer.Option(help="loss, accuracy, tokens_per_s, grad_norm, lr or mfu.")] = "loss",
) -> None:
    """Draw a curve of a run, in the terminal or as a PNG."""
    from andon.commands.runs.status import plot as draw

    draw(run, output, curve, terminal())


@runs_app.command()
def export(
    run: RunFolder,
    to: Annotated[str, typer.Option(help="csv, tensorboard or wandb.")] = "csv",
    output: Annotated[Path | None, typer.Option(help="Where to write; default: into the run's folder.")] = None,
    online: Annotated[bool, typer.Option("--online", help="wandb: send it now, not later with `wandb sync`.")] = False,
) -> None:
    """Write a run's metrics for another tool: train/loss, val/loss, …, each step once."""
    from andon.commands.runs.export import export as write

    write(run, to, output, online, terminal())


@runs_app.command()
def resize(
    run: Annotated[Path, typer.Argument(help="Folder of a run that goes on.")],
    workers: Annotated[int, typer.Argument(help="Number of workers from now on.")],
) -> None:
    """Have a run go on with more or fewer workers, from its next step on."""
    from andon.run.records.resize import request_workers

    request_workers(run, workers)
    typer.echo(f"If a run goes on in {run}, it does so with {workers} workers after its current step")


@runs_app.command()
def audit(run: RunFolder) -> None:
    """Prove that a run has used every sample of every committed step exactly once."""
    from andon.commands.runs.audit import audit

    audit(run, terminal())


@data_app.command("show")
def data_show(
    run: RunFolder,
    windows: Annotated[str, typer.Option(help="Window numbers, as named in a halt: 12,480")] = "",
    samples: Annotated[str, typer.Option(help="Samples of a fine-tuning run, as named in a halt: a.jsonl:7,…")] = "",
) -> None:
    """Print the text of training windows, or samples as they were trained on."""
    from andon.commands.data import show

    show(run, numbers("--windows", windows) if windows else [], samples.split(",") if samples else [], terminal())
