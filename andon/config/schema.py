"""A whole configuration: its sections, and the keys of a run as a whole.

The global batch is `train.slots` × `train.micro_batch` × `train.context` tokens, for any number of workers.
"""

from dataclasses import replace
from typing import Literal, Self

import yaml
from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic import model_validator as validator

from andon.config.sections import (
    CheckpointConfig,
    DataBase,
    DataConfig,
    EvalBase,
    EvalConfig,
    GroupConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    Section,
    TrainBase,
    TrainConfig,
    ZeroConfig,
)
from andon.integrity.faults import parse as parse_fault
from andon.model.shape import SHAPES, Shape
from andon.numerics import Numerics
from andon.transport.registry import TRANSPORTS, fastest_here


class RunSettings(Section):
    """The keys that every kind of run has."""

    seed: int = Field(1, ge=0, lt=2**32)
    """Seed of the first weights, the order of the data and all random numbers of the run."""
    numerics: Numerics = "portable"
    """CPU kernels: `portable` (AVX2) gives the same bits on every x86-64 CPU of one vendor, `compatible` on AMD
    and Intel alike, at about half the speed; `native` is the fastest."""
    probe: dict[str, str] = Field(default_factory=dict)
    """Digests of small test computations. The run fills them in, to notice a machine that computes different bits."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto` takes CUDA if there is a GPU, and else the CPU, with a note."""
    deterministic: bool = True
    """On GPUs: use only kernels that give the same bits every time; `false` allows others. All checks stay on."""
    workers: PositiveInt = 1
    """Number of worker processes to train with."""
    min_workers: PositiveInt = 1
    """Smallest number of workers that continue when others are lost; fewer wait for new workers."""
    restarts: NonNegativeInt = 100
    """How many lost workers `andon train` replaces in the whole run; the limit ends a loop of crashes."""
    threads: int = Field(1, gt=0, le=1 << 12)
    """CPU threads that each worker computes with."""
    on_nonfinite: Literal["halt", "skip"] = "halt"
    """What to do when a loss or gradient is not finite: halt the run, or skip the step on every rank."""
    max_skips: PositiveInt = 3
    """With `on_nonfinite: skip`, the number of bad steps in a row at which the run halts."""
    fault: tuple[str, ...] = ()
    """Faults to inject for drills, such as nan:rank=1,step=7 (see `andon drill --help`)."""
    model: Section | str
    data: DataBase
    train: TrainBase
    optim: OptimConfig = Field(default_factory=OptimConfig)
    eval: EvalBase
    group: GroupConfig = Field(default_factory=GroupConfig)
    zero: ZeroConfig = Field(default_factory=ZeroConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    run: RunConfig = Field(default_factory=RunConfig)

    @validator(mode="after")
    def _check_combinations(self) -> Self:
        for text in self.fault:
            parse_fault(text)
        if self.group.mixed and self.zero.replicas > 1:
            raise ValueError("group.mixed needs zero.replicas 1: a replica is computed by another machine")
        if self.on_nonfinite == "skip" and self.group.server:
            name = self.group.transport
            raise ValueError(f"on_nonfinite = 'skip' needs another transport: the server of {name} halts")
        if self.min_workers > self.workers:
            raise ValueError(f"min_workers = {self.min_workers} is more than workers = {self.workers}")
        known = TRANSPORTS.get(self.group.transport)
        if known and not known.connects and self.workers > 1:
            what = f"group.transport {known.name} is for one worker, not for {self.workers}"
            raise ValueError(f"{what}: auto takes the fastest one here")
        if self.workers > self.train.slots:
            slots = self.train.slots
            raise ValueError(f"{self.workers} workers need at least one slot each, but train.slots = {slots}")
        return self

    def with_transport(self, auto: str) -> Self:
        """The configuration with every `auto` but the device's resolved; `auto` is the transport to take."""
        transport = auto if self.group.transport == "auto" else self.group.transport
        group = self.group.model_copy(update={"transport": transport})
        zero = self.zero.model_copy(update={"policy": self.zero.resolve(transport)})
        return self.model_copy(update={"group": group, "zero": zero})

    def with_own_cache(self) -> Self:
        """A configuration from another user or machine, with the cache folder of this one."""
        return self.model_copy(update={"data": self.data.model_copy(update={"cache": DataBase().cache})})

    def on_this_machine(self) -> Self:
        """The configuration with `auto` resolved for workers that all run on this machine."""
        return self.with_transport(fastest_here(self.workers))

    @property
    def model_name(self) -> str:
        """The model to train: a preset, or a folder."""
        return str(self.model)

    @property
    def determinism_key(self) -> str:
        """The settings that the final weights depend on, besides the data, the numerics and a rounded wire."""
        keys = dict.fromkeys(("seed", "model", "train", "optim", "lora", "on_nonfinite", "max_skips"), True)
        return self.model_dump_json(include={**keys, "data": {"validation"}})

    def to_yaml(self) -> str:
        """The configuration as YAML, which `andon.config.load` reads back."""
        text: str = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
        return text


class Config(RunSettings):
    """Everything that determines a run of `andon train`."""

    model: ModelConfig
    data: DataConfig = Field(default_factory=DataConfig)
    train: TrainConfig
    eval: EvalConfig = Field(default_factory=EvalConfig)

    @property
    def model_name(self) -> str:
        """The preset, or the folder to continue from."""
        return self.model.source or self.model.preset

    @property
    def shape(self) -> Shape:
        """The sizes of the model."""
        return replace(SHAPES[self.model.preset], context=self.train.context, **self.model.sizes)

    @property
    def tokens_per_step(self) -> int:
        return self.train.slots * self.train.micro_batch * self.train.context
