"""Commands for existing runs, live or finished: one function each, which parses and makes one call."""

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

RunFolder = Annotated[Path, typer.Argument(help="Folder of a run.")]
Runs = Annotated[list[Path] | None, typer.Argument(help="Runs, or folders that contain runs. Default: runs/.")]


@runs_app.command()
def generate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, a run, an adapter or a model folder.")],
    prompt: Annotated[str, typer.Argument(help="Text that the model continues.")] = "",
    count: Annotated[int, typer.Option(min=1, help="Number of texts to write.")] = 1,
    length: Annotated[
        int, typer.Option(min=0, help="Maximum tokens per text; 0: the context, or 256 for a Hugging Face model.")
    ] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="Temperature; 0: always the likeliest token.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Random seed.")] = 0,
) -> None:
    """Write text with a trained model. Of a run, the newest good checkpoint is used."""
    use_kernels()
    from andon.commands.generate import generate as run

    run(checkpoint, prompt, count=count, length=length, temperature=temperature, seed=seed)


@runs_app.command()
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run: its newest good checkpoint.")],
    windows: Annotated[int, typer.Option(min=1, help="Number of held-out windows to measure.")] = 256,
    as_json: AsJson = False,
) -> None:
    """Measure a checkpoint on held-out data. Prints loss, bits per byte and the valid share of the built-in stories."""
    use_kernels()
    from andon.commands.generate import evaluate as run

    run(checkpoint, windows, as_json, terminal())


@runs_app.command()
def board(
    runs: Runs = None,
    bind: Annotated[str, typer.Option(help="HOST[:PORT] to listen on. Default: 127.0.0.1, port 29413 or free.")] = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
) -> None:
    """Show runs in a browser, live or finished.

    The page has loss, workers, checkpoints, samples and halts; /metrics is for Prometheus. If other machines can reach
    the address, viewers need the run's token.
    """
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
    run: RunFolder, wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for it to end.")] = 120.0
) -> None:
    """Save and end a run of this machine, as Ctrl-C does. The command that started the run resumes it."""
    from andon.commands.runs.status import stop as end

    end(run, wait, terminal())


@runs_app.command()
def plot(
    run: RunFolder,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="PNG file. Default: the terminal.")] = None,
    curve: Annotated[str, typer.Option(help="Curve: loss, accuracy, tokens_per_s, grad_norm, lr or mfu.")] = "loss",
) -> None:
    """Draw a curve of a run, in the terminal or as a PNG."""
    from andon.commands.runs.status import plot as draw

    draw(run, output, curve, terminal())


@runs_app.command()
def export(
    run: RunFolder,
    to: Annotated[str, typer.Option(help="Format: csv, tensorboard or wandb.")] = "csv",
    output: Annotated[Path | None, typer.Option(help="File or folder to write. Default: in the run's folder.")] = None,
    online: Annotated[bool, typer.Option("--online", help="wandb: upload now, not later by `wandb sync`.")] = False,
) -> None:
    """Write a run's metrics for another tool. Each step appears once, as train/loss, val/loss, …"""
    from andon.commands.runs.export import export as write

    write(run, to, output, online, terminal())


@runs_app.command()
def resize(
    run: Annotated[Path, typer.Argument(help="Folder of a live run.")],
    workers: Annotated[int, typer.Argument(help="Number of workers that the run continues with.")],
) -> None:
    """Change the number of workers of a live run."""
    from andon.commands.runs.live import resize as change

    change(run, workers, terminal())


@runs_app.command()
def audit(run: RunFolder) -> None:
    """Prove that a run used every sample exactly once. Checks the samples of all committed steps against its ledger."""
    from andon.commands.runs.audit import audit

    audit(run, terminal())


@data_app.command("show")
def data_show(
    run: RunFolder,
    windows: Annotated[str, typer.Option(help="Numbers of windows, such as 12,480.")] = "",
    samples: Annotated[str, typer.Option(help="Samples of a fine-tuning run, such as a.jsonl:7,a.jsonl:8.")] = "",
) -> None:
    """Print training windows or samples as text. A halt names them."""
    from andon.commands.data import show

    numbered = numbers("--windows", windows, least=0) if windows else []
    show(run, numbered, samples.split(",") if samples else [], terminal())
