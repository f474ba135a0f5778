"""The commands that start something: one function each, which parses and makes one call. Heavy imports are local."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from andon.cli.arguments import (
    ANY_KEY,
    EXIT_CODES,
    Arguments,
    AsJson,
    Finetune,
    Resume,
    TlsCa,
    TlsCert,
    TlsKey,
    configuration,
    is_done,
    launch,
    list_argument,
    new_app,
    run_configuration,
    terminal,
    tls_of,
    use_kernels,
)
from andon.cli.bench import bench_app
from andon.cli.checkpoint import checkpoint_app
from andon.cli.config import config_app
from andon.cli.finetune import finetune_app
from andon.cli.runs import runs_app
from andon.errors import UserError
from andon.numerics import Numerics
from andon.transport.address import parse_address
from andon.transport.base import GroupError
from andon.version import VERSION

app = new_app(add_completion=True, help=f"Data-parallel pretraining that stops the line.\n\n{EXIT_CODES}")
launch_app = new_app(name="launch", help="Print a job script or a manifest for a cluster.")
for _commands in (finetune_app, runs_app, config_app, bench_app, checkpoint_app, launch_app):
    app.add_typer(_commands)


def main() -> None:
    """Run a command; an error that the user can correct is three lines and exit code 1, or 2 for an unknown option."""
    try:
        app()
    except (UserError, GroupError, OSError) as error:
        from andon.config.load import UsageError
        from andon.run.screen.display import show_error
        from andon.run.screen.terminal import discard

        shown = error if isinstance(error, UserError) else _as_user_error(error)
        show_error(terminal(stderr=True), shown)
        if isinstance(error, OSError):
            discard(sys.stdout)
        sys.exit(2 if isinstance(error, UsageError) else 1)


def _as_user_error(error: GroupError | OSError) -> UserError:
    if isinstance(error, GroupError):
        return UserError(str(error), error.cause, error.remedy or "The same command resumes")
    cause = f"{error.filename or 'A file, the output or a connection'} cannot be used"
    return UserError(f"andon stopped: {error.strerror or error}", cause, "Correct that and run the same command again")


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        typer.echo(f"andon {VERSION}")
        raise typer.Exit


@app.command(context_settings=ANY_KEY, epilog=EXIT_CODES)
def demo(context: typer.Context, resume: Resume = "auto") -> None:
    """Train a small story writer in about two minutes. Takes the same options as `andon train`."""
    from andon.cluster.launch import train_demo
    from andon.config.load import parse_arguments

    paths, overrides = parse_arguments(context.args)
    if paths:
        cause = "It trains on the built-in stories"
        raise UserError(f"`andon demo` takes no {paths[0]!r}", cause, f"Try `andon train {paths[0]}`")
    sys.exit(train_demo(overrides, resume, terminal(lasting=True)))


@app.command(context_settings=ANY_KEY, epilog=EXIT_CODES)
def train(arguments: Arguments, resume: Resume = "auto") -> None:
    """Train a model on CONFIG.yaml, or on your own text.

    CORPUS is any number of files, folders and globs of .txt, .md, .jsonl and .parquet, also .gz. Without CONFIG.yaml
    and CORPUS it trains on the built-in stories. Every key of the configuration is an option, --KEY VALUE or
    --KEY=VALUE; `andon config show` lists all keys with their defaults and help. Those used most:

    \b
    --model.preset NAME      tiny, 30m, 124m, 350m or 1b (`andon config presets`)
    --workers N              worker processes on this machine
    --threads N              compute threads of each worker
    --train.steps N          steps of the whole run
    --train.slots N          micro-batches per step, divided among the workers
    --train.context N        tokens per window
    --optim.lr RATE          peak learning rate
    --device DEVICE          auto, cpu or cuda
    --run.dir FOLDER         the run's folder; the same command resumes it
    --run.board false        do not serve a page that shows the run
    --checkpoint.every N     steps between saves
    --on_nonfinite skip      skip a step with a bad gradient instead of halting
    """
    sys.exit(launch(run_configuration(arguments), resume))


@app.command(context_settings={**ANY_KEY, "allow_interspersed_args": False}, epilog=EXIT_CODES)
def run(
    script: Annotated[Path, typer.Argument(help="A Python script that calls andon.init().")],
    arguments: Annotated[list[str], list_argument(help="Arguments of the script.")],
    workers: Annotated[int, typer.Option(min=1, help="Worker processes on this machine.")] = 1,
    numerics: Annotated[
        Numerics,
        typer.Option(help="Kernels: portable, compatible (the same bits on AMD and Intel) or native (fastest)."),
    ] = "portable",
) -> None:
    """Run a Python script on several workers of this machine.

    The workers exchange through shared memory. Rank 0 writes to the terminal, the others to runs/SCRIPT/logs. Ctrl-C
    ends the run after the current step and saves, if the script has called andon.load or andon.save.
    """
    from andon.cluster.scripts.run import run_script

    sys.exit(run_script(script, arguments, workers, numerics, terminal(lasting=True)))


@app.command(context_settings=ANY_KEY, epilog=EXIT_CODES)
def coordinator(
    arguments: Arguments,
    resume: Resume = "auto",
    bind: Annotated[str, typer.Option(help="HOST[:PORT] to listen on. Default: every address, port 29411.")] = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_ca: TlsCa = "",
) -> None:
    """Coordinate a run whose workers are on several machines.

    Takes the same options as `andon train`. Each of the --workers N is started with `andon worker HOST`, and must know
    the run's token: the file `token` in the run's folder, or ANDON_TOKEN.
    """
    from andon.cluster.launch import Listener, serve

    config = run_configuration(arguments)
    host, port = parse_address(bind) if bind else ("", None)
    tls = tls_of(tls_cert, tls_key, tls_ca)
    if tls:
        tls.check_accepts()
    if is_done(config, resume):
        return
    sys.exit(serve(config, resume, Listener(host, port, tls), terminal(lasting=True)))


@app.command(epilog=EXIT_CODES)
def worker(
    address: Annotated[str, typer.Argument(help="HOST[:PORT] of the coordinator; port 29411 if none is given.")],
    token_file: Annotated[Path | None, typer.Option(help="File with the run's token. Default: ANDON_TOKEN.")] = None,
    folder: Annotated[Path, typer.Option(help="The only folder of this machine that the run may write to.")] = Path(),
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the coordinator to start.")] = 600.0,
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_ca: TlsCa = "",
) -> None:
    """Join a run as a worker. The coordinator sends the configuration and, unless this machine has it, the data."""
    from andon.cluster.launch import PORT, join_run
    from andon.cluster.worker import Access
    from andon.control.token import token_of_worker

    host, port = parse_address(address)
    tls, console = tls_of(tls_cert, tls_key, tls_ca), terminal(lasting=True)

    def report(text: str) -> None:
        console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    access = Access(token_of_worker(token_file, wait, report), None, tls, folder, wait, report)
    sys.exit(join_run((host, PORT if port is None else port), access))


@app.command("gradient-server", epilog=EXIT_CODES)
def gradient_server(
    workers: Annotated[int, typer.Option(min=1, help="Number of workers; the session begins when all have joined.")],
    bind: Annotated[str, typer.Option(help="HOST[:PORT] to listen on; port 0: any free port.")] = "127.0.0.1:29412",
    steps: Annotated[int, typer.Option(min=0, help="Steps to serve; 0: until the workers leave.")] = 0,
    samples: Annotated[int, typer.Option(min=0, help="Samples per step to assign to the workers; 0: none.")] = 0,
    folder: Annotated[Path, typer.Option("--run.dir", help="Folder for the record.")] = Path("runs/gradient-server"),
    allow: Annotated[list[str] | None, typer.Option(help="Network that may connect: 10.0.0.0/24; repeatable.")] = None,
) -> None:
    """Average gradients for workers that speak protocol 2.

    Workers can be written in any language. They send whole gradient vectors (with --samples, after receiving an
    assignment for each step), or blocks and then components; the server detects which. Protocol 2 has no
    authentication, so only this machine may connect unless --allow names a network.
    """
    from andon.commands.gradient_server.serve import PORT, Service, parse_networks, serve

    host, port = parse_address(bind)
    address = host, PORT if port is None else port
    service = Service(address, workers, steps, samples, parse_networks(allow or []), folder)
    sys.exit(serve(service, terminal(lasting=True)))


@launch_app.command("slurm", context_settings=ANY_KEY)
def launch_slurm(arguments: Arguments) -> None:
    """Print a job script for `sbatch`. The run continues after a kill, a requeue or the time limit."""
    from andon.commands.schedulers import slurm_script

    typer.echo(slurm_script(run_configuration(arguments), arguments), nl=False)


@launch_app.command("k8s", context_settings=ANY_KEY)
def launch_k8s(
    arguments: Arguments,
    image: Annotated[str, typer.Option(help="Container image in which Andon is installed.")] = "andon:latest",
    claim: Annotated[str, typer.Option(help="ReadWriteMany volume claim that holds the run's folder.")] = "runs",
) -> None:
    """Print a manifest for `kubectl apply`. The run continues after a kill or an eviction."""
    from andon.commands.schedulers import kubernetes_manifest

    typer.echo(kubernetes_manifest(run_configuration(arguments), image, claim), nl=False)


@app.command(context_settings=ANY_KEY)
def prepare(arguments: Arguments) -> None:
    """Tokenize a corpus into the cache, without training."""
    from andon.commands.data import show_corpus

    show_corpus(configuration(arguments), terminal())


@app.command(context_settings=ANY_KEY)
def plan(arguments: Arguments, finetune: Finetune = False, as_json: AsJson = False) -> None:
    """Print the memory and traffic of a run before it starts. Also prints how other settings would change them."""
    from andon.commands.plan import main as run

    run(run_configuration(arguments, finetune), as_json, terminal())


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Print the facts for a bug report. These are versions, cores, memory, devices, ports and shared memory."""
    from andon.commands.doctor import examine

    examine(as_json, terminal())


@app.command(context_settings=ANY_KEY)
def profile(
    arguments: Arguments,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to profile.")] = 3,
    trace: Annotated[Path, typer.Option(help="File for the Chrome trace.")] = Path("trace.json"),
    rows: Annotated[int, typer.Option(min=1, help="Number of operations to print, the slowest first.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Print where the time of a training step goes.

    Takes the same options as `andon train`. It runs one worker on random tokens, so no corpus is needed. It prints the
    kernels of the GPU, or the operations of the CPU, and writes a Chrome trace.
    """
    config = configuration(arguments)
    use_kernels(config.numerics)
    from andon.bench.profile import main as run

    run(config, steps, trace, rows, as_json)


@app.command()
def drill(transport: Annotated[str, typer.Option(help="Transport between the three workers.")] = "shm") -> None:
    """Inject every kind of fault and check that a run reacts.

    Each fault hits a small run on this machine. Faults can also be given to `andon train`, as --fault, repeatable:

    \b
    nan|inf:rank=1,step=7[,slot=S][,parameter=NAME]
    bitflip:rank=2,step=9[,unit=NAME][,buffer=BUFFER][,bit=K]
    die|stall:rank=1,step=5[,at=PHASE][,seconds=N]

    BUFFER is weights, first, second or master. PHASE is forward, backward, exchange or optimizer; or, while that step
    is saved, snapshot, write, sync, wrote, manifest, rename, renamed or prune.
    """
    from andon.commands.drill import drill as run

    sys.exit(run(transport, terminal()))
