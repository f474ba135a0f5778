"""A whole configuration: its sections, and what is told to a run as a whole.

The global batch is `train.slots` × `train.micro_batch` × `train.context` tokens and does not depend on the number of
workers.
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
from andon.transport.base import fastest_here


class RunSettings(Section):
    """What every kind of run is told: how long it trains, who computes, how they exchange, what is kept."""

    seed: int = Field(1, ge=0, lt=2**32)
    """Seed of weights, data order and samples."""
    numerics: Numerics = "portable"
    """CPU kernels: `portable` (AVX2) gives the same bits on every x86-64 CPU of one vendor, `compatible` on AMD
    and Intel alike, at about half the speed; `native` is the fastest."""
    probe: dict[str, str] = Field(default_factory=dict)
    """Digests of small computations where the run was made, written by the run: another machine's bits are noticed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA if there is a device, and otherwise the CPU with a note."""
    deterministic: bool = True
    """On GPUs: the same bits every time; `false` allows faster kernels whose bits vary. All checks stay on."""
    workers: PositiveInt = 1
    """Number of worker processes that are wanted."""
    min_workers: PositiveInt = 1
    """Number of workers with which the run goes on when others are lost; with fewer it waits for new ones."""
    restarts: NonNegativeInt = 100
    """How many lost workers `andon train` starts again, in all."""
    threads: int = Field(1, gt=0, le=1 << 12)
    """Compute threads per worker."""
    on_nonfinite: Literal["halt", "skip"] = "halt"
    """What to do about a gradient that is not finite: halt, or skip that step on every rank."""
    max_skips: PositiveInt = 3
    """Number of skipped steps in a row that halt the run."""
    fault: tuple[str, ...] = ()
    """Faults to inject, for drills: nan:rank=1,step=7 (see `andon drill --help`)."""
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
    def _makes_sense(self) -> Self:
        for text in self.fault:
            parse_fault(text)
        if self.group.mixed and self.zero.replicas > 1:
            raise ValueError("group.mixed needs zero.replicas 1: a replica is computed by another machine")
        if self.on_nonfinite == "skip" and self.group.server:
            name = self.group.transport
            raise ValueError(f"on_nonfinite = 'skip' needs another transport: the server of {name} halts")
        if self.min_workers > self.workers:
            raise ValueError(f"min_workers = {self.min_workers} is more than workers = {self.workers}")
        if self.workers > self.train.slots:
            raise ValueError(
                f"{self.workers} workers need at least one slot each, but train.slots = {self.train.slots}"
            )
        return self

    def with_transport(self, auto: str) -> Self:
        """The configuration with every `auto` resolved, except that of the device."""
        transport = auto if self.group.transport == "auto" else self.group.transport
        group = self.group.model_copy(update={"transport": transport})
        zero = self.zero.model_copy(update={"policy": self.zero.resolve(transport)})
        return self.model_copy(update={"group": group, "zero": zero})

    def with_own_cache(self) -> Self:
        """The configuration of another user or machine, with the cache of this one."""
        return self.model_copy(update={"data": self.data.model_copy(update={"cache": DataBase().cache})})

    def on_this_machine(self) -> Self:
        """The configuration with `auto` resolved for workers that all run on this machine."""
        return self.with_transport(fastest_here(self.workers))

    @property
    def model_name(self) -> str:
        """What is trained: a preset, or the folder of a model."""
        return str(self.model)

    @property
    def determinism_key(self) -> str:
        """What the final weights depend on besides the data: equal keys and data give equal bits."""
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
        """The preset, or the folder to go on from."""
        return self.model.source or self.model.preset

    @property
    def shape(self) -> Shape:
        """The model's shape."""
        return replace(SHAPES[self.model.preset], context=self.train.context, **self.model.sizes)

    @property
    def tokens_per_step(self) -> int:
        return self.train.slots * self.train.micro_batch * self.train.context
