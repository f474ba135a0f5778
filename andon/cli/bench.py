"""`andon bench …`: one function per benchmark, which parses and makes one call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from andon.cli.arguments import AsJson, new_app, numbers, terminal
from andon.errors import UserError

bench_app = new_app(name="bench", help="Measure Andon against its peers on this machine.")


def _check_presets(names: str) -> str:
    from andon.model.shape import SHAPES

    for name in names.split(","):
        if name not in SHAPES:
            raise UserError(f"{name!r} is not a preset", f"Presets: {', '.join(SHAPES)}", "Choose one of these")
    return names


Preset = Annotated[str, typer.Option(callback=_check_presets, help="Model: tiny, 30m, 124m, 350m or 1b.")]
Presets = Annotated[str, typer.Option(callback=_check_presets, help="Models, comma-separated.")]
Workers = Annotated[int, typer.Option(min=1, help="Number of workers.")]
WorkerTransport = Annotated[str, typer.Option(help="Transport of Andon's workers: shm, ring or torch.")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens per worker and step.")]
GPU_TOKENS = 32_768


@bench_app.command("transport")
def bench_transport(
    transports: Annotated[
        str, typer.Option(help="Transports, comma-separated; `:bf16` sends bf16 instead of f32.")
    ] = "shm,ring,ring:bf16,star,torch",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, comma-separated.")] = "2,4",
    sizes: Annotated[str, typer.Option(help="Sizes of the vector, comma-separated.")] = "64KB,1MB,16MB,64MB,256MB",
    repetitions: Annotated[int, typer.Option(min=1, help="Turns of each transport; the median is printed.")] = 7,
    rate: Annotated[
        str, typer.Option(help="Limit the network to a rate such as 4gbit (Linux). Default: no limit.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Measure the all-reduce of every transport against gloo. All take turns in one run."""
    _enter_network(rate=rate)
    from andon.bench.transport import main as run
    from andon.bench.transport import parse_size

    counts = numbers("--ranks", ranks)
    run(transports.split(","), counts, [parse_size(size) for size in sizes.split(",")], repetitions, as_json)


@bench_app.command("train")
def bench_train(
    context: typer.Context,
    preset: Preset = "30m",
    device: Annotated[
        str, typer.Option(help="cpu: against DDP over gloo; cuda: on one GPU, against transformers' Llama.")
    ] = "cpu",
    ranks: Workers = 2,
    tokens: Annotated[
        str, typer.Option(help="Tokens per worker and step: 64,512,4096 by default; with cuda one number, 32768.")
    ] = "",
    repetitions: Annotated[int, typer.Option(min=1, help="Steps of each; the median is printed.")] = 9,
    transport: WorkerTransport = "shm",
    zero: Annotated[bool, typer.Option("--zero", help="Compare ZeRO, plain data parallel and torch's ZeRO.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure a step, with and without checks, against PyTorch. All take turns in one run."""
    if _on_gpu(context, device, "ranks", "transport", "zero"):
        from andon.bench.gpu import main as run_on_gpu

        count, *more = numbers("--tokens", tokens or str(GPU_TOKENS))
        if more:
            raise UserError(
                f"--tokens {tokens} is not one number", "--device cuda measures one batch size", "--tokens 32768"
            )
        _require_gpu()
        run_on_gpu(preset, count, repetitions, as_json)
        return
    _enter_network(transport)
    from andon.bench.train import main as run

    run(preset, ranks, numbers("--tokens", tokens or "64,512,4096"), repetitions, transport, zero, as_json)


@bench_app.command("hosts")
def bench_hosts(
    rates: Annotated[str, typer.Option(help="Rates of the hosts' networks, comma-separated.")] = "100mbit,1gbit",
    ranks: Annotated[int, typer.Option(min=2, help="Number of hosts, with one worker each.")] = 3,
    preset: Preset = "tiny",
    tokens: Tokens = 512,
    repetitions: Annotated[int, typer.Option(min=1, help="Steps of each; the median is printed.")] = 9,
    as_json: AsJson = False,
) -> None:
    """Measure a step over slow networks against DDP (needs root). A host is a network namespace of this machine."""
    from andon.bench.hosts import main as run

    run(rates.split(","), ranks, preset, tokens, repetitions, as_json)


@bench_app.command("cnn")
def bench_cnn(
    ranks: Workers = 2,
    images: Annotated[str, typer.Option(help="Images per worker and step, comma-separated.")] = "32,256",
    repetitions: Annotated[int, typer.Option(min=1, help="Turns of ten steps; the median is printed.")] = 21,
    transport: WorkerTransport = "shm",
    as_json: AsJson = False,
) -> None:
    """Measure the small CNN of a script against PyTorch DDP. Both take turns in one run."""
    _enter_network(transport)
    from andon.bench.cnn import main as run

    run(ranks, numbers("--images", images), repetitions, transport, as_json)


@bench_app.command("finetune")
def bench_finetune(
    presets: Presets = "tiny,30m",
    ranks: Workers = 2,
    samples: Annotated[int, typer.Option(min=1, help="Samples per worker and step.")] = 4,
    repetitions: Annotated[int, typer.Option(min=1, help="Turns of five steps; the median is printed.")] = 9,
    transport: WorkerTransport = "shm",
    as_json: AsJson = False,
) -> None:
    """Measure LoRA against Hugging Face's Trainer with peft. Both take turns in one run."""
    _enter_network(transport)
    from andon.bench.finetune import main as run

    run(presets.split(","), ranks, samples, repetitions, transport, as_json)


@bench_app.command("numerics")
def bench_numerics(
    presets: Presets = "tiny,30m",
    repetitions: Annotated[int, typer.Option(min=1, help="Turns of each; the median is printed.")] = 15,
    as_json: AsJson = False,
) -> None:
    """Measure what portable and compatible kernels cost against native ones. All take turns in one run."""
    from andon.bench.numerics import main as run

    run(presets.split(","), repetitions, as_json)


@bench_app.command("checkpoint")
def bench_checkpoint(
    context: typer.Context,
    preset: Preset = "124m",
    device: Annotated[str, typer.Option(help="cpu: with several workers; cuda: with one worker on one GPU.")] = "cpu",
    ranks: Workers = 2,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per worker and step: 128 by default; with cuda 32768.")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Saves of each kind; the median is printed.")] = 3,
    folder: Annotated[Path, typer.Option(help="Folder on the disk to measure.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Measure a save against a memory copy, dd and async_save. All take turns in one run."""
    if _on_gpu(context, device, "ranks"):
        _require_gpu()
        ranks, tokens = 1, tokens or GPU_TOKENS
    from andon.bench.checkpoint import main as run

    run(preset, device, ranks, tokens or 128, repetitions, folder, as_json)


@bench_app.command("goodput")
def bench_goodput(
    workers: Workers = 4,
    every: Annotated[float, typer.Option(min=1, help="Seconds between kills.")] = 60.0,
    minutes: Annotated[float, typer.Option(min=0, help="Minutes with kills, for each system.")] = 10.0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the kills.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Measure the tokens/s that are left while workers die. The peer is torchrun, which restarts a DDP script."""
    from andon.bench.goodput import main as run

    run(workers, every, minutes, seed, as_json)


def _on_gpu(context: typer.Context, device: str, *ignored: str) -> bool:
    """Whether one GPU is measured; refuses options that a benchmark of one worker would have to ignore."""
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device {device} is not cpu or cuda", "It selects what is measured", "--device cuda")
    if device == "cpu":
        return False
    for name in ignored:
        source = context.get_parameter_source(name)
        if source and source.name == "COMMANDLINE":
            what = f"--{name} has no meaning with --device cuda"
            raise UserError(what, "It measures one worker on one GPU", f"Leave out --{name}")
    return True


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError("--device cuda needs a GPU", "torch sees no CUDA device", "Try --device cpu")


def _enter_network(transport: str = "", rate: str = "") -> None:
    """Give a benchmark its own network, before torch is imported; then check that its transport needs no server."""
    from andon.bench.kit.link import enter_network

    if note := enter_network(rate):
        terminal(stderr=True).print(note, style="dim")
    if transport:
        from andon.bench.kit.servers import check_needs_no_server

        check_needs_no_server(transport)
