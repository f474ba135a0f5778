"""One rank's training session: device, group, trainer. The same for every way of starting."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from andon.config.schema import Config
from andon.data.token_set import TokenSet
from andon.errors import UserError
from andon.integrity.probe import compare_probes, differing, take_probe
from andon.run.build import build_trainer
from andon.run.events import Emit, event, no_event
from andon.run.loop import Run
from andon.transport.base import Group, Rendezvous, Settings, open_group


def train(
    config: Config, tokens: TokenSet, group: Group, resume: Path | None, emit: Emit, stop_wanted: Callable[[], bool]
) -> bool:
    """Train as one rank of a run, from a checkpoint if one is given; whether it was stopped before its end."""
    emit = emit if group.rank == 0 else no_event
    device = choose_device(config.device, group.rank, emit)
    config = with_probe(config, group, device, emit)
    group.stop_wanted = stop_wanted
    trainer = build_trainer(config, tokens, group, device, emit)
    try:
        if resume:
            trainer.resume(resume)
        Run(config, tokens, trainer, emit).train()
        return trainer.progress.step < config.train.steps
    finally:
        trainer.close()


def open_configured(
    config: Config, rendezvous: Rendezvous, host: str = "127.0.0.1", server: Sequence[Any] | None = None
) -> Group:
    """The group that the configuration asks for; torch is made to give the same bits every time first.

    `host` is where this rank can be reached, `server` host, port and token of a star's server."""
    make_torch_deterministic(config.threads)
    address, token = ((str(server[0]), int(server[1])), str(server[2])) if server else (None, "")
    settings = Settings(config.group.timeout, config.group.wire, host, address, token)
    return open_group(config.group.transport, rendezvous, settings)


def with_probe(config: Config, group: Group, device: torch.device, emit: Emit) -> Config:
    """Take the probe; refuse ranks that compute other bits, unless the configuration allows them."""
    probe = dict(take_probe(device))
    if found := compare_probes(group, probe, config.group.mixed):
        emit(event("note", text=f"Unequal machines: {found}. Each weight is updated by one of them"))
    if operations := differing(probe, config.probe):
        what = (
            f"This machine computes {', '.join(operations)} otherwise than the one that this configuration comes from"
        )
        emit(event("note", text=what))
    return config.model_copy(update={"probe": probe})


def make_torch_deterministic(threads: int) -> None:
    """Make torch give the same bits every time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(threads)
    # `use_deterministic_algorithms` does the same, but loads torch's compiler: 2 s and 70 MB a worker.
    torch.set_deterministic_debug_mode("error")
    # Nothing here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def choose_device(wanted: str, rank: int, emit: Emit) -> torch.device:
    """The device of a rank (F-DP-004): `auto` falls back to the CPU and says so, a name is a promise."""
    if wanted != "cpu" and torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", rank))
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if wanted == "cuda":
        raise UserError("device = 'cuda', but torch sees no CUDA device", _why_no_cuda(), "Use --device auto or cpu")
    if wanted == "auto" and rank == 0:
        emit(event("note", text=f"Training on the CPU: {_why_no_cuda()}"))
    return torch.device("cpu")


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    return "no CUDA device is visible to torch"
