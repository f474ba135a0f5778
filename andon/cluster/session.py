"""One rank's training session: device, group, trainer. The same for every way of starting."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from andon.config import Config
from andon.data.tokens import TokenSet
from andon.errors import UserError
from andon.group import open_group
from andon.group.base import Group, Rendezvous
from andon.metrics import Emit, event
from andon.run import Run
from andon.trainer import Trainer


def train(
    config: Config,
    tokens: TokenSet,
    group: Group,
    resume: Path | None,
    emit: Emit,
    stop_wanted: Callable[[], bool],
) -> None:
    """Train as one rank of a run, from a checkpoint if one is given, to its end."""
    device = choose_device(config.device, group.rank, emit)
    trainer = Trainer(config, tokens, group, device)
    try:
        if resume:
            trainer.resume(resume)
        Run(trainer, choose_transport(config.group.transport, group.world_size), emit).train(stop_wanted)
    finally:
        trainer.close()


def open_configured(config: Config, rendezvous: Rendezvous) -> Group:
    """The group that the configuration asks for; torch is made to give the same bits every time first."""
    settle(config.threads)
    transport = choose_transport(config.group.transport, rendezvous.world_size)
    return open_group(transport, rendezvous, timeout=config.group.timeout, wire=config.group.wire)


def settle(threads: int) -> None:
    """Make torch give the same bits every time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def choose_transport(wanted: str, world_size: int) -> str:
    """What `auto` means: nothing to exchange alone, torch otherwise."""
    if wanted != "auto":
        return wanted
    return "local" if world_size == 1 else "torch"


def choose_device(wanted: str, rank: int, emit: Emit) -> torch.device:
    """The device of a rank (F-DP-004): `auto` falls back to the CPU and says so, a name is a promise."""
    if wanted != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if wanted == "cuda":
        raise UserError(
            "device = 'cuda', but torch sees no CUDA device", _why_no_cuda(), "Use --device auto or cpu"
        )
    if wanted == "auto" and rank == 0:
        emit(event("note", text=f"Training on the CPU: {_why_no_cuda()}"))
    return torch.device("cpu")


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    return "no CUDA device is visible to torch"
