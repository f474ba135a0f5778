"""The command line: one function per command, which parses and makes one call. Heavy imports are local."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from andon.cli.arguments import (
    ANY,
    EXIT_CODES,
    AsJson,
    Finetune,
    Resume,
    TlsCa,
    TlsCert,
    TlsKey,
    Words,
    configuration,
    launch,
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
from andon.transport.address import parse_address
from andon.transport.base import GroupError
from andon.version import VERSION

if TYPE_CHECKING:
    from andon.numerics import Numerics

app = new_app(add_completion=True, help=f"Data-parallel pretraining that stops the line.\n\n{EXIT_CODES}")
launch_app = new_app(name="launch", help="Print what a cluster's scheduler needs to run a configuration.")
for _commands in (finetune_app, runs_app, config_app, bench_app, checkpoint_app, launch_app):
    app.add_typer(_commands)


def main() -> None:
    """Run a command; an error that the user can correct is three lines and exit code 1."""
    try:
        app()
    except (UserError, GroupError) as error:
        from andon.run.screen.display import show_error

        if isinstance(error, GroupError):
            error = UserError(str(error), error.cause, error.remedy or "The same command resumes")
        show_error(terminal(stderr=True), error)
        sys.exit(1)
    except OSError as error:
        from andon.run.screen.display import show_error
        from andon.run.screen.terminal import discard

        cause = f"{error.filename or 'A file, the output or a connection'} cannot be used"
        remedy = "Correct that and run the same command again"
        show_error(terminal(stderr=True), UserError(f"andon stopped: {error.strerror or error}", cause, remedy))
        discard(sys.stdout)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        typer.echo(f"andon {VERSION}")
        raise typer.Exit


@app.command(context_settings=ANY, epilog=EXIT_CODES)
def demo(context: typer.Context, resume: Resume = "auto") -> None:
    """Train a small model that writes stories, in about two minutes; takes the same options as `andon train`."""
    from andon.cluster.launch import train_demo
    from andon.config.load import parse_arguments

    paths, overrides = parse_arguments(context.args)
    if paths:
        cause = "It trains on the built-in stories"
        raise UserError(f"`andon demo` takes no {paths[0]!r}", cause, f"Try `andon train {paths[0]}`")
    sys.exit(train_demo(overrides, resume, terminal(lasting=True)))


@app.command(context_settings=ANY, epilog=EXIT_CODES)
def train(words: Words = None, resume: Resume = "auto") -> None:
    """Train on CONFIG.yaml, or on CORPUS…: files, folders and globs of .txt, .md, .jsonl, .parquet, also .gz.

    Without either it trains on the built-in stories. Every key of the configuration is an option, --KEY VALUE or
    --KEY=VALUE; `andon config show` lists all of them with their help. Those used most:

    \b
    --model.preset NAME      tiny, 30m, 124m, 350m or 1b (`andon config presets`)
    --workers N              worker processes on this machine
    --threads N              compute threads of each
    --train.steps N          steps of the whole run
    --train.slots N          micro-batches a step, divided among the workers
    --train.context N        tokens of a window
    --optim.lr RATE          peak learning rate
    --device DEVICE          auto, cpu or cuda
    --run.dir FOLDER         where the run lives; the same command resumes it
    --run.board false        no page beside the run
    --checkpoint.every N     steps between saves
    --on_nonfinite skip      skip a step with a bad gradient instead of halting
    """
    sys.exit(launch(run_configuration(words or []), resume))


@app.command(context_settings={**ANY, "allow_interspersed_args": False}, epilog=EXIT_CODES)
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python script that calls andon.init().")],
    workers: Annotated[int, typer.Option(min=1, help="Worker processes on this machine.")] = 1,
    native: Annotated[bool, typer.Option("--native", help="Take the fastest kernels, not the portable ones.")] = False,
) -> None:
    """Run SCRIPT ARGS… on local workers that exchange through shared memory.

    Rank 0 writes to the terminal, the others to runs/SCRIPT/logs. Ctrl-C saves what andon.load and andon.save know of,
    after the step.
    """
    from andon.cluster.scripts.run import run_script

    kernels: Numerics = "native" if native else "portable"
    sys.exit(run_script(script, context.args, workers, kernels, terminal(lasting=True)))


@app.command(context_settings=ANY, epilog=EXIT_CODES)
def coordinator(
    context: typer.Context,
    resume: Resume = "auto",
    bind: Annotated[str, typer.Option(help="HOST[:PORT] to listen on; default: every address of this machine.")] = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_ca: TlsCa = "",
) -> None:
    """Coordinate a run whose --workers N are started elsewhere with `andon worker HOST`.

    Workers must know the run's token: the file `token` in the run's folder, or ANDON_TOKEN.
    """
    from andon.cluster.launch import Door, serve

    config = run_configuration(context.args)
    host, port = parse_address(bind) if bind else ("", None)
    tls = tls_of(tls_cert, tls_key, tls_ca)
    if tls:
        tls.check_accepts()
    sys.exit(serve(config, resume, Door(host, port, tls), terminal(lasting=True)))


@app.command(epilog=EXIT_CODES)
def worker(
    address: Annotated[str, typer.Argument(help="HOST[:PORT] of the coordinator.")],
    token_file: Annotated[Path | None, typer.Option(help="The run's token; default: ANDON_TOKEN.")] = None,
    folder: Annotated[Path, typer.Option(help="The only folder in which the run may write here.")] = Path(),
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the coordinator to be there.")] = 600.0,
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_ca: TlsCa = "",
) -> None:
    """Join a coordinator: it sends the configuration and, unless this machine has it, the data."""
    from andon.cluster.launch import PORT, join_run
    from andon.cluster.worker import Access
    from andon.control.token import token_of_worker

    host, port = parse_address(address)
    tls, console = tls_of(tls_cert, tls_key, tls_ca), terminal(lasting=True)

    def say(text: str) -> None:
        console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    access = Access(token_of_worker(token_file, wait, say), None, tls, folder, wait, say)
    sys.exit(join_run((host, PORT if port is None else port), access))


@app.command("gradient-server", epilog=EXIT_CODES)
def gradient_server(
    workers: Annotated[int, typer.Option(min=1, help="Workers that take part.")],
    bind: Annotated[str, typer.Option(help="HOST[:PORT] to listen on; port 0: any free one.")] = "127.0.0.1:29412",
    steps: Annotated[int, typer.Option(min=0, help="Steps to serve; 0: until the workers leave.")] = 0,
    samples: Annotated[
        int, typer.Option(min=0, help="Samples to share out among the workers in every step; 0: no assignments.")
    ] = 0,
    folder: Annotated[Path, typer.Option("--run.dir", help="Where the session is recorded.")] = Path(
        "runs/gradient-server"
    ),
    allow: Annotated[list[str] | None, typer.Option(help="A NETWORK whose hosts may take part; repeatable.")] = None,
) -> None:
    """Average gradients for workers of any language that speak protocol 2.

    It follows the dialogue of its workers: whole vectors (with --samples after an assignment for each step), or blocks
    and then components. Protocol 2 has no authentication, so only this machine may connect unless --allow names others.
    """
    from andon.commands.gradient_server.serve import PORT, Service, parse_networks, serve

    host, port = parse_address(bind)
    service = Service(
        (host, PORT if port is None else port), workers, steps, samples, parse_networks(allow or []), folder
    )
    sys.exit(serve(service, terminal(lasting=True)))


@launch_app.command("slurm", context_settings=ANY)
def launch_slurm(context: typer.Context) -> None:
    """Print a job script for `sbatch`: one task per worker; it goes on after a kill, a requeue or the time limit."""
    from andon.commands.schedulers import slurm_script

    typer.echo(slurm_script(run_configuration(context.args), context.args), nl=False)


@launch_app.command("k8s", context_settings=ANY)
def launch_k8s(
    context: typer.Context,
    image: Annotated[str, typer.Option(help="A container image with Andon.")] = "andon:latest",
    claim: Annotated[str, typer.Option(help="A ReadWriteMany volume claim for the run's folder.")] = "runs",
) -> None:
    """Print a manifest for `kubectl apply`: a coordinator and its workers, which go on after a kill or an eviction."""
    from andon.commands.schedulers import kubernetes_manifest

    typer.echo(kubernetes_manifest(run_configuration(context.args), image, claim), nl=False)


@app.command(context_settings=ANY)
def prepare(context: typer.Context) -> None:
    """Tokenize CORPUS… into the cache without training."""
    from andon.commands.data import show_corpus

    show_corpus(configuration(context.args), terminal())


@app.command(context_settings=ANY)
def plan(context: typer.Context, finetune: Finetune = False, as_json: AsJson = False) -> None:
    """Print memory and traffic of a configuration, and what other settings would change."""
    from andon.commands.plan import main as run

    run(run_configuration(context.args, finetune), as_json, terminal())


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Print what a bug report needs: versions, cores, memory, devices, ports, shared memory."""
    from andon.commands.doctor import examine

    examine(as_json, terminal())


@app.command(context_settings=ANY)
def profile(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=1, help="Steps to profile.")] = 3,
    trace: Annotated[Path, typer.Option(help="Where the Chrome trace goes.")] = Path("trace.json"),
    rows: Annotated[int, typer.Option(min=1, help="Operations to print.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Print where the time of a step of CONFIG.yaml goes, and write a Chrome trace; takes the options of `andon train`.

    One worker, random tokens: no corpus is needed. Kernels of the GPU, or operations of the CPU."""
    config = configuration(context.args)
    use_kernels(config.numerics)
    from andon.bench.profile import main as run

    run(config, steps, trace, rows, as_json)


@app.command()
def drill(transport: Annotated[str, typer.Option(help="A transport that connects workers.")] = "shm") -> None:
    """Inject every kind of fault into a small run on this machine and check that the run stops.

    Faults can also be given to `andon train` as --fault kind:key=value,… (repeatable):
    nan|inf:rank=1,step=7[,slot=S][,parameter=NAME] ·
    bitflip:rank=2,step=9[,unit=NAME][,buffer=weights|first|second|master][,bit=K] ·
    die|stall:rank=1,step=5[,at=forward|backward|exchange|optimizer][,seconds=N]
    (while that step is saved: at=snapshot|write|sync|wrote|manifest|rename|renamed|prune)
    """
    from andon.commands.drill import drill as run

    sys.exit(run(transport, terminal()))
