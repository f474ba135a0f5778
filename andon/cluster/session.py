"""One rank's training session: device, group, trainer; the same for every launcher."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from andon.cluster.kinds import builder_of
from andon.config.schema import RunSettings
from andon.data.cache import Prepared
from andon.engine.membership import Membership
from andon.engine.optimizer import Optimizer
from andon.engine.trainer import Trainer
from andon.errors import UserError
from andon.integrity.halt import JidokaHalt
from andon.integrity.probe import compare_probes, differing, take_probe
from andon.run.build import Builder
from andon.run.loop import Loop
from andon.run.records.events import Emit, Event, event, no_event
from andon.run.records.ledger import LedgerReports
from andon.transport.base import Group, Rendezvous, Settings
from andon.transport.local import LocalGroup
from andon.transport.registry import TRANSPORTS, fastest_here, open_group


@dataclass(frozen=True)
class Hooks:
    """How a session reports to its launcher, and learns what the launcher wants."""

    emit: Emit
    stop_wanted: Callable[[], bool]
    local_rank: int = 0
    """The number among the workers of its machine, which selects the GPU."""
    on_built: Callable[[Trainer], None] = lambda trainer: None
    change_wanted: Callable[[], bool] = lambda: False
    """Whether a worker waits to join, or is to leave."""
    shrink_wanted: Callable[[], bool] = lambda: False
    """Whether a worker is to leave."""
    ledger: LedgerReports | None = None


class Session:
    """One worker's part of a run, through all generations in which it takes part."""

    def __init__(self, config: RunSettings, data: Prepared, hooks: Hooks) -> None:
        self.config, self.data, self.hooks = config, data, hooks
        self.builder: Builder | None = None
        self.optimizer: Optimizer | None = None
        self.run: Loop | None = None

    def prepare(self, known: Mapping[str, str], frozen: str = "") -> None:
        """Build everything that a joining worker needs, before the others wait for it. `known` is the run's probe,
        `frozen` the digest of its weights that are not trained."""
        device = choose_device(self.config.device, self.hooks.local_rank, no_event)
        operations = differing(take_probe(device), known)
        if operations and not self.config.group.mixed:
            what = f"This machine computes {', '.join(operations)} differently from the run that it joins"
            raise UserError(what, "Another processor, GPU or version of torch", "Use an equal machine, or group.mixed")
        self.config = self.config.model_copy(update={"probe": dict(known)})
        self.builder = builder_of(self.config, self.data)
        optimizer = self.builder.optimizer(LocalGroup(self.config.group.wire), device, joins=True)
        if frozen and optimizer.model.frozen != frozen:
            what = f"{self.config.model_name} is another model here"
            cause = "The weights that are not trained differ from those of the run that it joins"
            raise UserError(what, cause, "Copy the run's model to this machine")
        self.optimizer, optimizer.is_new = optimizer, True
        self.builder.warm_up(optimizer.model)

    def train(self, group: Group, resume: Path | None = None) -> bool:
        """Train in the first generation, from a checkpoint if one is given; returns whether it was stopped early."""
        self._attach(group)
        emit = self.hooks.emit if group.rank == 0 else no_event
        device = choose_device(self.config.device, self.hooks.local_rank, emit)
        refuse_mixed_devices(group, device)
        self.config = with_probe(self.config, group, device, emit)
        self.builder = builder_of(self.config, self.data)
        trainer = self.builder.first(group, device, self._emit)
        trainer.optimizer.is_new = resume is not None
        self._built(trainer, self.builder)
        if resume:
            trainer.resume(resume)
        return self._run()

    def go_on(self, group: Group, recorded: int, since: float) -> bool:
        """Train in a later generation, which began to form at `since`; returns whether it was stopped early."""
        self._attach(group)
        if self.optimizer is None:  # the first generation ended before the optimizer was built
            self.prepare(self.config.probe)
        assert self.optimizer and self.builder
        membership = Membership.of(group, self.config.train.slots)
        try:
            if self.run:
                recovery = self.run.trainer.enter(membership, recorded)
            else:
                recovery = self.optimizer.enter(membership, recorded)
                self._built(self.builder.trainer(self.optimizer, self._emit), self.builder)
        except JidokaHalt as halt:
            self._emit(event("halt", **halt.fields(), data=self.data.digest))
            raise
        assert self.run
        self.run.go_on(recovery, recorded, since)
        return self._run()

    def _attach(self, group: Group) -> None:
        """Let the group ask the launcher whether to stop or to change."""
        group.stop_wanted, group.change_wanted = self.hooks.stop_wanted, self.hooks.change_wanted
        group.shrink_wanted = self.hooks.shrink_wanted

    def part(self) -> None:
        """Leave the generation; its group may have failed."""
        if self.run:
            self.run.trainer.part()
        elif self.optimizer:
            self.optimizer.model.part()

    def close(self) -> None:
        """Stop all threads."""
        if self.run:
            self.run.trainer.close()

    @property
    def is_over(self) -> bool:
        """Whether all steps are done."""
        return self.run is not None and self.run.trainer.progress.step >= self.config.train.steps

    def _built(self, trainer: Trainer, builder: Builder) -> None:
        self.optimizer = trainer.optimizer
        self.run = builder.loop(trainer, self.hooks.emit, self.hooks.ledger)
        self.hooks.on_built(trainer)

    def _emit(self, event: Event) -> None:
        """Emit an event of rank 0; the other ranks emit none."""
        if self.optimizer is None or self.optimizer.model.membership.rank == 0:
            self.hooks.emit(event)

    def _run(self) -> bool:
        assert self.run
        self.run.train()
        return self.run.trainer.progress.step < self.config.train.steps


def open_configured(config: RunSettings, rendezvous: Rendezvous, settings: Settings) -> Group:
    """Open the group that the configuration asks for."""
    alone = not TRANSPORTS[config.group.transport].connects  # but the run may have grown since
    size = rendezvous.world_size
    group = open_group(fastest_here(size) if alone else config.group.transport, rendezvous, settings)
    group.generation = settings.keys.generation if settings.keys else 0
    return group


def refuse_mixed_devices(group: Group, device: torch.device) -> None:
    """Refuse a group of CPUs and GPUs: by default GPUs compute in bf16 and CPUs in f32."""
    kinds = [kind.decode() for kind in group.all_gather_bytes(device.type.encode())]
    if len(set(kinds)) > 1:
        found = ", ".join(f"rank {rank} on {kind}" for rank, kind in enumerate(kinds))
        cause = "GPU and CPU compute different bits, and by default in different precisions"
        raise UserError(f"The ranks train on different devices: {found}", cause, "Give --device cpu or --device cuda")


def with_probe(config: RunSettings, group: Group, device: torch.device, emit: Emit) -> RunSettings:
    """Take the probe; refuse ranks that compute different bits, unless the configuration allows them."""
    probe = dict(take_probe(device))
    if found := compare_probes(group, probe, config.group.mixed):
        emit(event("note", text=f"Unequal machines: {found}. Each weight is updated by one of them"))
    if operations := differing(probe, config.probe):
        text = f"This machine computes {', '.join(operations)} differently from the one of this configuration"
        emit(event("note", text=text))
    return config.model_copy(update={"probe": probe})


def make_torch_deterministic(threads: int) -> None:
    """Make torch compute the same bits every time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(threads)
    # `use_deterministic_algorithms` does the same, but loads torch's compiler: 2 s and 70 MB per worker.
    torch.set_deterministic_debug_mode("error")
    # Nothing here reads uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def choose_device(wanted: str, local_rank: int, emit: Emit) -> torch.device:
    """Choose the device of a rank (F-DP-004): `auto` falls back to the CPU with a note, `cuda` does not."""
    if wanted != "cpu" and torch.cuda.is_available():
        return use_gpu(local_rank)
    if wanted == "cuda":
        raise UserError("device = 'cuda', but torch sees no CUDA device", _why_no_cuda(), "Use --device auto or cpu")
    if wanted == "auto":
        emit(event("note", text=f"Training on the CPU: {_why_no_cuda()}"))
    return torch.device("cpu")


def use_gpu(local_rank: int) -> torch.device:
    """Make a GPU the current device of this process: workers of one machine take its GPUs in turn."""
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    return "no CUDA device is visible to torch"
