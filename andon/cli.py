"""The command line: one function per command, which parses and makes one call. Heavy imports are local."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from andon.errors import UserError
from andon.transport.address import parse_address
from andon.transport.base import GroupError
from andon.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from andon.config.finetune import FinetuneConfig
    from andon.config.schema import Config, RunSettings
    from andon.numerics import Numerics
    from andon.transport.tcp.entrance.tls import Tls

ANY = {"allow_extra_args": True, "ignore_unknown_options": True}
new_app = partial(
    typer.Typer, no_args_is_help=True, rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False
)
EXIT_CODES = "Exit codes: 0 done, 1 user error, 2 usage, 3 halted, 4 stopped and saved."
app = new_app(help=f"Data-parallel pretraining that stops the line.\n\n{EXIT_CODES}")
config_app = new_app(name="config", help="Show and check configurations.")
bench_app = new_app(name="bench", help="Measure this machine.")
data_app = new_app(name="data", help="Show training data.")
checkpoint_app = new_app(name="checkpoint", help="List, verify, compare and remove checkpoints.")
launch_app = new_app(name="launch", help="Print what a cluster's scheduler needs to run a configuration.")
for _commands in (config_app, bench_app, data_app, checkpoint_app, launch_app):
    app.add_typer(_commands)

Resume = Annotated[str, typer.Option(help="auto: the newest good checkpoint of the run; none: a new run; or a path.")]
Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint folder.")]
Preset = Annotated[str, typer.Option(help="The model.")]
Workers = Annotated[int, typer.Option(min=1, help="Workers.")]
TlsCert = Annotated[str, typer.Option(help="PEM certificate of this process; turns TLS on.")]
TlsKey = Annotated[str, typer.Option(help="PEM key of that certificate.")]
TlsCa = Annotated[str, typer.Option(help="PEM certificate of the authority that peers' certificates come from.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
Finetune = Annotated[bool, typer.Option("--finetune", help="MODEL DATA… and the keys of `andon finetune`.")]
Checkpoints = Annotated[Path, typer.Argument(help="A run, its folder of checkpoints, or one checkpoint.")]


def main() -> None:
    """Run a command; an error that the user can correct is three lines and exit code 1."""
    try:
        app()
    except (UserError, GroupError) as error:
        from andon.run.display import show_error

        if isinstance(error, GroupError):
            error = UserError(str(error), "A worker died or cannot be reached", "The same command resumes")
        show_error(_console(stderr=True), error)
        sys.exit(1)
    except OSError as error:
        from andon.run.display import show_error
        from andon.run.terminal import discard

        cause = f"{error.filename or 'A file, the output or a connection'} cannot be used"
        remedy = "Correct that and run the same command again"
        show_error(_console(stderr=True), UserError(f"andon stopped: {error.strerror or error}", cause, remedy))
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
    sys.exit(train_demo(overrides, resume, _console(lasting=True)))


@app.command(context_settings=ANY, epilog=EXIT_CODES)
def train(context: typer.Context, resume: Resume = "auto") -> None:
    """Train on CONFIG.yaml, or on CORPUS… (files, folders, globs of .txt, .jsonl, .parquet).

    Without either it trains on the built-in stories. Any configuration key is an option: --section.key value
    (`andon config show` lists them): --workers 2 --optim.lr 3e-4 --train.steps=100
    """
    _launch(_run_config(context.args), resume)


@app.command(context_settings=ANY, epilog=EXIT_CODES)
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
    _launch(_finetune_config([model, *context.args]), resume)


def _launch(config: RunSettings, resume: str) -> None:
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():  # torchrun and its like
        _choose_kernels(config.numerics)
        from andon.cluster.torchrun import run

        sys.exit(run(config, resume, _console(lasting=True)))
    from andon.cluster.launch import train as launch

    sys.exit(launch(config, resume, _console(lasting=True)))


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(help="The folder of an adapter.")],
    out: Annotated[Path | None, typer.Option(help="The new folder; default: `merged` beside the adapter.")] = None,
) -> None:
    """Write the model of an adapter with the adapter merged into its weights."""
    _choose_kernels()
    from andon.finetune.result import merge as run

    typer.echo(f"The merged model is in {run(adapter, out)}")


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
    from andon.cluster.script import run_script

    kernels: Numerics = "native" if native else "portable"
    sys.exit(run_script(script, context.args, workers, kernels, _console(lasting=True)))


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

    config = _run_config(context.args)
    host, port = parse_address(bind) if bind else ("", None)
    tls = _tls(tls_cert, tls_key, tls_ca)
    if tls:
        tls.check_accepts()
    sys.exit(serve(config, resume, Door(host, port, tls), _console(lasting=True)))


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
    tls, console = _tls(tls_cert, tls_key, tls_ca), _console(lasting=True)

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
    from andon.commands.gradient_server import PORT, Service, parse_networks, serve

    host, port = parse_address(bind)
    service = Service(
        (host, PORT if port is None else port), workers, steps, samples, parse_networks(allow or []), folder
    )
    sys.exit(serve(service, _console(lasting=True)))


@launch_app.command("slurm", context_settings=ANY)
def launch_slurm(context: typer.Context) -> None:
    """Print a job script for `sbatch`: one task per worker; it goes on after a kill, a requeue or the time limit."""
    from andon.commands.schedulers import slurm_script

    typer.echo(slurm_script(_run_config(context.args), context.args), nl=False)


@launch_app.command("k8s", context_settings=ANY)
def launch_k8s(
    context: typer.Context,
    image: Annotated[str, typer.Option(help="A container image with Andon.")] = "andon:latest",
    claim: Annotated[str, typer.Option(help="A ReadWriteMany volume claim for the run's folder.")] = "runs",
) -> None:
    """Print a manifest for `kubectl apply`: a coordinator and its workers, which go on after a kill or an eviction."""
    from andon.commands.schedulers import kubernetes_manifest

    typer.echo(kubernetes_manifest(_run_config(context.args), image, claim), nl=False)


@app.command(context_settings=ANY)
def prepare(context: typer.Context) -> None:
    """Tokenize CORPUS… into the cache without training."""
    from andon.commands.data import show_corpus

    show_corpus(_config(context.args), _console())


@app.command(context_settings=ANY)
def plan(context: typer.Context, finetune: Finetune = False, as_json: AsJson = False) -> None:
    """Print memory and traffic of a configuration, and what other settings would change."""
    from andon.commands.plan import main as run

    run(_finetune_config(context.args) if finetune else _run_config(context.args), as_json, _console())


@app.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Argument(help="The beginning of the text.")] = "",
    count: Annotated[int, typer.Option(min=1, help="Number of texts.")] = 1,
    length: Annotated[int, typer.Option(min=0, help="Most tokens per text; 0: up to the context.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
) -> None:
    """Write text with the model of a checkpoint."""
    _choose_kernels()
    from andon.commands.generate import generate as run

    run(checkpoint, prompt, count=count, length=length, temperature=temperature, seed=seed)


@app.command()
def evaluate(
    checkpoint: Checkpoint, windows: Annotated[int, typer.Option(min=1, help="Number of held-out windows.")] = 256
) -> None:
    """Print loss, bits per byte and, for the built-in stories, the share of valid samples of a checkpoint."""
    _choose_kernels()
    from andon.commands.generate import evaluate as run

    run(checkpoint, windows, _console())


@app.command()
def doctor() -> None:
    """Print what a bug report needs: versions, cores, memory, devices, ports, shared memory."""
    from andon.commands.doctor import examine

    examine(_console())


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

    sys.exit(run(transport, _console()))


@bench_app.command("transport")
def bench_transport(
    transports: Annotated[str, typer.Option(help="`:bf16` rounds on the wire.")] = "shm,ring,ring:bf16,star,torch",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,4",
    sizes: Annotated[str, typer.Option(help="Vector sizes.")] = "64KB,1MB,16MB,64MB,256MB",
    repetitions: Annotated[int, typer.Option(min=1, help="Repetitions of each; the median counts.")] = 7,
    rate: Annotated[str, typer.Option(help="Limit the network to a rate such as 4gbit (Linux).")] = "",
    as_json: AsJson = False,
) -> None:
    """Measure the all-reduce of every transport against gloo, interleaved in one run."""
    _enter_network(rate)
    from andon.bench.transport import main as run
    from andon.bench.transport import parse_size

    counts = _numbers("--ranks", ranks)
    run(transports.split(","), counts, [parse_size(size) for size in sizes.split(",")], repetitions, as_json)


@bench_app.command("train")
def bench_train(
    preset: Preset = "30m",
    ranks: Workers = 2,
    tokens: Annotated[str, typer.Option(help="Tokens per worker and step.")] = "64,512,4096",
    repetitions: Annotated[int, typer.Option(min=1, help="Steps of each; the median counts.")] = 9,
    transport: Annotated[str, typer.Option(help="Andon's transport.")] = "shm",
    zero: Annotated[bool, typer.Option("--zero", help="Compare ZeRO, plain data parallel and torch's ZeRO.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure Andon's step with and without checks against PyTorch DDP over gloo, interleaved in one run."""
    _enter_network()
    from andon.bench.servers import check_needs_no_server
    from andon.bench.train import main as run

    check_needs_no_server(transport)
    run(preset, ranks, _numbers("--tokens", tokens), repetitions, transport, zero, as_json)


@bench_app.command("hosts")
def bench_hosts(
    rates: Annotated[str, typer.Option(help="Rates of the hosts' networks.")] = "100mbit,1gbit",
    ranks: Annotated[int, typer.Option(min=2, help="Hosts, with a worker each.")] = 3,
    preset: Preset = "tiny",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per worker and step.")] = 512,
    repetitions: Annotated[int, typer.Option(min=1, help="Steps of each; the median counts.")] = 9,
    as_json: AsJson = False,
) -> None:
    """Measure Andon's step over ring and star against PyTorch DDP over gloo, on hosts with slow networks (root)."""
    from andon.bench.hosts import main as run

    run(rates.split(","), ranks, preset, tokens, repetitions, as_json)


@bench_app.command("cnn")
def bench_cnn(
    ranks: Workers = 2,
    images: Annotated[str, typer.Option(help="Images per worker and step.")] = "32,256",
    repetitions: Annotated[int, typer.Option(min=1, help="Turns of ten steps; the median counts.")] = 21,
    transport: Annotated[str, typer.Option(help="Andon's transport.")] = "shm",
    as_json: AsJson = False,
) -> None:
    """Measure a script's small CNN with Andon's Python interface against PyTorch DDP, interleaved in one run."""
    _enter_network()
    from andon.bench.cnn import main as run
    from andon.bench.servers import check_needs_no_server

    check_needs_no_server(transport)
    run(ranks, _numbers("--images", images), repetitions, transport, as_json)


@bench_app.command("finetune")
def bench_finetune(
    presets: Annotated[str, typer.Option(help="Models.")] = "tiny,30m",
    ranks: Workers = 2,
    samples: Annotated[int, typer.Option(min=1, help="Samples per worker and step.")] = 4,
    repetitions: Annotated[int, typer.Option(min=1, help="Turns of five steps; the median counts.")] = 9,
    transport: Annotated[str, typer.Option(help="Andon's transport.")] = "shm",
    as_json: AsJson = False,
) -> None:
    """Measure fine-tuning with LoRA against Hugging Face's Trainer with peft and DDP, interleaved in one run."""
    _enter_network()
    from andon.bench.finetune import main as run
    from andon.bench.servers import check_needs_no_server

    check_needs_no_server(transport)
    run(presets.split(","), ranks, samples, repetitions, transport, as_json)


@bench_app.command("numerics")
def bench_numerics(
    presets: Annotated[str, typer.Option(help="Models.")] = "tiny,30m",
    repetitions: Annotated[int, typer.Option(min=1, help="Repetitions of each; the median counts.")] = 15,
    as_json: AsJson = False,
) -> None:
    """Measure what portable kernels cost against native ones, interleaved in one run."""
    from andon.bench.numerics import main as run

    run(presets.split(","), repetitions, as_json)


@bench_app.command("checkpoint")
def bench_checkpoint(
    preset: Preset = "124m",
    ranks: Workers = 2,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per worker and step.")] = 128,
    repetitions: Annotated[int, typer.Option(min=1, help="Saves of each kind; the median counts.")] = 3,
    folder: Annotated[Path, typer.Option(help="The disk to write to.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Measure a save against a memory copy, dd and torch.distributed.checkpoint, in one run."""
    from andon.bench.checkpoint import main as run

    run(preset, ranks, tokens, repetitions, folder, as_json)


@checkpoint_app.command("ls")
def checkpoint_ls(
    path: Checkpoints,
    verify: Annotated[bool, typer.Option("--verify", help="Verify every byte, not only sizes.")] = False,
) -> None:
    """Print step, loss, size, age and verdict of every checkpoint."""
    from andon.commands.checkpoint import show

    show(path, verify, _console())


@checkpoint_app.command("verify")
def checkpoint_verify(path: Checkpoints) -> None:
    """Read every byte and compare it with the manifest; exit code 1 if anything is damaged."""
    from andon.commands.checkpoint import verify

    sys.exit(verify(path, _console()))


@checkpoint_app.command("diff")
def checkpoint_diff(first: Checkpoint, second: Checkpoint) -> None:
    """Compare two checkpoints tensor by tensor; exit code 1 if they differ."""
    from andon.commands.checkpoint import diff

    sys.exit(diff(first, second, _console()))


@checkpoint_app.command("prune")
def checkpoint_prune(
    path: Checkpoints,
    keep: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep.")] = 3,
    keep_every: Annotated[int, typer.Option(min=0, help="Also keep the checkpoint of every N-th step; 0: none.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
) -> None:
    """Remove old checkpoints, but never the newest good one."""
    from andon.commands.checkpoint import prune

    prune(path, keep, keep_every, dry_run, _console())


@config_app.command("show", context_settings=ANY)
def config_show(context: typer.Context, finetune: Finetune = False) -> None:
    """Print the configuration that CONFIG.yaml, presets and overrides resolve to."""
    config = _finetune_config(context.args or ["MODEL", "DATA"]) if finetune else _run_config(context.args)
    typer.echo(config.to_yaml(), nl=False)


@config_app.command("validate", context_settings=ANY)
def config_validate(context: typer.Context) -> None:
    """Check CONFIG.yaml and overrides."""
    from andon.cluster.kinds import describe

    config = _run_config(context.args)
    steps = f"{config.train.steps:,} steps" if config.train.steps else "as many steps as its epochs take"
    typer.echo(f"valid: {describe(config)}, {steps}, {config.workers} workers")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of configurations."""
    from andon.config.schema import Config

    typer.echo(json.dumps(Config.model_json_schema(), indent=2))


@data_app.command("show")
def data_show(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    windows: Annotated[str, typer.Option(help="Window numbers, as named in a halt: 12,480")] = "",
    samples: Annotated[str, typer.Option(help="Samples of a fine-tuning run, as named in a halt: a.jsonl:7,…")] = "",
) -> None:
    """Print the text of training windows, or samples as they were trained on."""
    from andon.commands.data import show

    show(run, _numbers("--windows", windows) if windows else [], samples.split(",") if samples else [], _console())


def _config(arguments: list[str]) -> Config:
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


def _finetune_config(arguments: list[str], values: Mapping[str, Any] | None = None) -> FinetuneConfig:
    """The configuration of MODEL DATA… and options, or of a file's values and options."""
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


def _run_config(arguments: list[str]) -> RunSettings:
    """The configuration of a run of either kind: a file with a section `lora` is about fine-tuning."""
    from andon.config.load import is_finetuning, read_yaml

    files = [argument for argument in arguments if argument.endswith((".yaml", ".yml")) and argument[0] != "-"]
    values = read_yaml(Path(files[0])) if len(files) == 1 else {}
    if not is_finetuning(values):
        return _config(arguments)
    return _finetune_config([argument for argument in arguments if argument not in files], values)


def _choose_kernels(numerics: Numerics = "portable") -> None:
    """Choose how torch computes, before it is used."""
    from andon.numerics import choose_kernels

    if warning := choose_kernels(numerics):
        _console(stderr=True).print(warning, style="yellow", soft_wrap=True)


def _enter_network(rate: str = "") -> None:
    """Give a benchmark a network of its own, before anything heavy is imported."""
    from andon.bench.link import enter_network

    if note := enter_network(rate):
        _console(stderr=True).print(note, style="dim")


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        cause = "Numbers are separated by commas"
        raise UserError(f"{option} {text} is not a list of numbers", cause, f"{option} 1,2") from None


def _tls(cert: str, key: str, ca: str) -> Tls | None:
    from andon.transport.tcp.entrance.tls import Tls

    tls = Tls(cert, key, ca)
    tls.check()
    return tls if cert or ca else None


def _console(stderr: bool = False, lasting: bool = False) -> Console:
    from andon.run.terminal import Terminal

    return Terminal(stderr, lasting)
