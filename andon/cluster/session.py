"""One rank's training session: device, group, trainer. The same for every way of starting."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from andon.cluster.kinds import make_run
from andon.config.schema import RunSettings
from andon.data.build import Prepared
from andon.engine.trainer import Trainer
from andon.errors import UserError
from andon.integrity.probe import compare_probes, differing, take_probe
from andon.run.events import Emit, event, no_event
from andon.transport.base import Group, Rendezvous, Settings, open_group


@dataclass(frozen=True)
class Surroundings:
    """What a rank's launcher gives it."""

    emit: Emit
    stop_wanted: Callable[[], bool]
    local_rank: int = 0
    """Its place among the ranks of its machine, which decides on its GPU."""
    on_built: Callable[[Trainer], None] = lambda trainer: None


def train(config: RunSettings, data: Prepared, group: Group, resume: Path | None, around: Surroundings) -> bool:
    """Train as one rank of a run, from a checkpoint if one is given; whether it was stopped before its end."""
    emit = around.emit if group.rank == 0 else no_event
    device = choose_device(config.device, around.local_rank, emit)
    refuse_mixed_devices(group, device)
    config = with_probe(config, group, device, emit)
    group.stop_wanted = around.stop_wanted
    run = make_run(config, data, group, device, emit)
    trainer = run.trainer
    around.on_built(trainer)
    try:
        if resume:
            trainer.resume(resume)
        run.train()
        return trainer.progress.step < config.train.steps
    finally:
        trainer.close()


def open_configured(config: RunSettings, rendezvous: Rendezvous, settings: Settings) -> Group:
    """The group that the configuration asks for; torch is made to give the same bits every time first."""
    make_torch_deterministic(config.threads)
    return open_group(config.group.transport, rendezvous, settings)


def refuse_mixed_devices(group: Group, device: torch.device) -> None:
    """Ranks on a GPU compute in bf16 and those on a CPU in f32, unless told otherwise: all must have the same kind."""
    kinds = [kind.decode() for kind in group.all_gather_bytes(device.type.encode())]
    if len(set(kinds)) > 1:
        found = ", ".join(f"rank {rank} on {kind}" for rank, kind in enumerate(kinds))
        cause = "GPU and CPU compute other bits, and by default in another precision"
        raise UserError(f"The ranks train on different devices: {found}", cause, "Give --device cpu or --device cuda")


def with_probe(config: RunSettings, group: Group, device: torch.device, emit: Emit) -> RunSettings:
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


def choose_device(wanted: str, local_rank: int, emit: Emit) -> torch.device:
    """The device of a rank (F-DP-004): `auto` falls back to the CPU and says so, a name is a promise."""
    if wanted != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if wanted == "cuda":
        raise UserError("device = 'cuda', but torch sees no CUDA device", _why_no_cuda(), "Use --device auto or cpu")
    if wanted == "auto":
        emit(event("note", text=f"Training on the CPU: {_why_no_cuda()}"))
    return torch.device("cpu")


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    return "no CUDA device is visible to torch"
