"""`andon bench …`: one function per benchmark, which parses and makes one call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from andon.cli.arguments import AsJson, Preset, Workers, new_app, numbers, terminal
from andon.errors import UserError

bench_app = new_app(name="bench", help="Measure this machine.")


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

    counts = numbers("--ranks", ranks)
    run(transports.split(","), counts, [parse_size(size) for size in sizes.split(",")], repetitions, as_json)


@bench_app.command("train")
def bench_train(
    preset: Preset = "30m",
    device: Annotated[str, typer.Option(help="cpu, or cuda: one GPU, against transformers' same shape.")] = "cpu",
    ranks: Workers = 2,
    tokens: Annotated[str, typer.Option(help="Tokens per worker and step.")] = "",
    repetitions: Annotated[int, typer.Option(min=1, help="Steps of each; the median counts.")] = 9,
    transport: Annotated[str, typer.Option(help="Andon's transport.")] = "shm",
    zero: Annotated[bool, typer.Option("--zero", help="Compare ZeRO, plain data parallel and torch's ZeRO.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure Andon's step with and without checks against PyTorch DDP over gloo, or on one GPU against transformers'
    Llama, interleaved in one run. By default with 64, 512 and 4,096 tokens per worker and step, or 32,768 on a GPU."""
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device {device} is none of cpu, cuda", "It says what to measure", "--device cuda")
    if device == "cuda":
        from andon.bench.gpu import main as run_on_gpu

        run_on_gpu(preset, numbers("--tokens", tokens or "32768")[0], repetitions, as_json)
        return
    _enter_network()
    from andon.bench.kit.servers import check_needs_no_server
    from andon.bench.train import main as run

    check_needs_no_server(transport)
    run(preset, ranks, numbers("--tokens", tokens or "64,512,4096"), repetitions, transport, zero, as_json)


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
    from andon.bench.kit.servers import check_needs_no_server

    check_needs_no_server(transport)
    run(ranks, numbers("--images", images), repetitions, transport, as_json)


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
    from andon.bench.kit.servers import check_needs_no_server

    check_needs_no_server(transport)
    run(presets.split(","), ranks, samples, repetitions, transport, as_json)


@bench_app.command("numerics")
def bench_numerics(
    presets: Annotated[str, typer.Option(help="Models.")] = "tiny,30m",
    repetitions: Annotated[int, typer.Option(min=1, help="Repetitions of each; the median counts.")] = 15,
    as_json: AsJson = False,
) -> None:
    """Measure what portable and compatible kernels cost against native ones, interleaved in one run."""
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


@bench_app.command("goodput")
def bench_goodput(
    workers: Workers = 4,
    every: Annotated[float, typer.Option(min=1, help="Seconds between kills.")] = 60.0,
    minutes: Annotated[float, typer.Option(min=0, help="Minutes with kills, for each system.")] = 10.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the kills.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Measure what is left of the tokens/s while workers are killed, against torchrun that restarts a DDP script."""
    from andon.bench.goodput import main as run

    run(workers, every, minutes, seed, as_json)


def _enter_network(rate: str = "") -> None:
    """Give a benchmark a network of its own, before anything heavy is imported."""
    from andon.bench.kit.link import enter_network

    if note := enter_network(rate):
        terminal(stderr=True).print(note, style="dim")
