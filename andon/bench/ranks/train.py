"""One rank of the training benchmark.

Each rank holds the same model several times: in Andon's step and in PyTorch's counterparts. They take turns, a step
each, so that other load on the machine slows all of them alike.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from andon.bench.kit.rank import join, open_gloo, take_turns
from andon.checkpoint.checkpointer import Checkpointer
from andon.engine.loader import IntArray
from andon.engine.optimizer import AdamW
from andon.engine.parallel import DataParallel
from andon.engine.trainer import StepSettings, Trainer
from andon.model.llama import Llama
from andon.model.shape import CHEAP, SHAPES, Shape
from andon.optim.sharding import Zero
from andon.transport.base import Group
from andon.transport.registry import open_group

LR = 1e-4
ENDLESS = 1 << 60
WARM_UP = 2
TORCH_ZERO = ("torch", "torch_bucket_view")


class RandomBatches:
    """Random tokens, the same in every step: their values do not matter here."""

    def __init__(self, shape: Shape, tokens: int, seed: int) -> None:
        context = min(tokens, shape.context)
        drawn = np.random.default_rng(seed).integers(0, shape.vocab, (tokens // context, context + 1))
        self._batch = np.ascontiguousarray(drawn[:, :-1]), np.ascontiguousarray(drawn[:, 1:])

    def __call__(self, step: int, slot: int) -> tuple[IntArray, IntArray]:
        """Inputs and targets."""
        return self._batch

    def windows(self, step: int, slot: int) -> list[int]:
        """Random tokens come from no numbered windows."""
        return []

    def name(self, window: int) -> int:
        """The name of a window is its number."""
        return window


def initialised(shape: Shape) -> Llama:
    """A model with the same initial weights every time."""
    model = Llama(shape)
    model.initialise(1)
    return model


def on_gpu(shape: Shape, is_deterministic: bool = True, activation_memory: float = CHEAP) -> Llama:
    """The same model as `andon train` has it on a GPU: compiled, in bf16."""
    from andon.model.gpu.compiled import compile_model  # loads torch's compiler

    model = initialised(shape).to("cuda")
    model.compute = torch.bfloat16
    compile_model(model, is_deterministic, activation_memory)
    return model


def make_optimizer(model: Llama, group: Group, zero: Zero) -> AdamW:
    """Andon's optimizer, with one slot per rank."""
    return AdamW(DataParallel(model, group, slots=group.world_size), LR, zero=zero)


def make_trainer(optimizer: AdamW, batches: RandomBatches, checkpointer: Checkpointer | None = None) -> Trainer:
    """Andon's step, as `andon train` does it."""
    settings = StepSettings(learning_rate=lambda step: LR, last_step=ENDLESS, clip=1.0)
    return Trainer(optimizer, batches, settings, checkpointer)


def ddp_step(shape: Shape, batches: RandomBatches) -> Callable[[], None]:
    """A plain PyTorch step with DistributedDataParallel and fused AdamW."""
    model = initialised(shape)
    matrices = [value for value in model.parameters() if value.dim() > 1]
    vectors = [value for value in model.parameters() if value.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    x, y = (torch.from_numpy(each) for each in batches(1, 0))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        (parallel(x, y) / y.numel()).backward()
        optimizer.step()

    return step


def torch_zero_update(shape: Shape, bucket_view: bool) -> Callable[[], Any]:
    """PyTorch's own ZeRO-1 on random gradients: AdamW on this rank's parameters, then a broadcast of all parameters."""
    model = initialised(shape)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter).normal_(0.0, 1e-3, generator=generator)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        parameters_as_bucket_view=bucket_view,
        lr=LR,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=True,
    )
    return optimizer.step


def measure(task: dict[str, Any], tokens: int, groups: Sequence[Group], gloo: Group) -> dict[str, Any]:
    """Seconds of every step by contestant, and the milliseconds of each phase of Andon's."""
    shape = SHAPES[task["preset"]]
    batches = RandomBatches(shape, tokens, seed=task["rank"])
    policies = (Zero("even"), Zero("off")) if task["zero"] else (Zero("even"), Zero("even"))
    optimizers = [make_optimizer(initialised(shape), group, zero) for group, zero in zip(groups, policies, strict=True)]
    trainers = [make_trainer(optimizer, batches) for optimizer in optimizers]
    works: dict[str, Callable[[], Any]] = {}
    if task["zero"]:
        works = {name: torch_zero_update(shape, name == "torch_bucket_view") for name in TORCH_ZERO}
    else:
        works["ddp"] = ddp_step(shape, batches)
        optimizers[1].model.exchange.checks = False
    works |= {"andon": trainers[0].train_step, "other": trainers[1].train_step}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    phases: list[dict[str, float]] = []
    for _ in range(task["repetitions"] + WARM_UP):
        take_turns(works, seconds, gloo)
        model = trainers[0].model
        phases.append({**model.phases.milliseconds, "all_exchange": 1e3 * model.exchange.seconds})
    for trainer in trainers:
        trainer.close()
    return {"seconds": {name: each[WARM_UP:] for name, each in seconds.items()}, "phases": phases[WARM_UP:]}


def main(task: dict[str, Any]) -> dict[Any, Any]:
    """Measure every batch size; returns seconds and phases."""
    rendezvous = join(task)
    torch.use_deterministic_algorithms(True)
    results = {}
    with open_gloo(rendezvous) as gloo:
        for tokens in task["tokens"]:
            with (
                open_group(task["transport"], rendezvous) as first,
                open_group(task["transport"], rendezvous) as second,
            ):
                results[str(tokens)] = measure(task, tokens, (first, second), gloo)
    return results
