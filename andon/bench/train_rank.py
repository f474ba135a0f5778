"""One rank of the training benchmark: `python -m andon.bench.train_rank '{...}'` prints its timings.

Each rank holds the same model three times: under Andon's step with all checks, under the same step with the
checks off, and under PyTorch's DistributedDataParallel over Gloo with fused AdamW. They take turns, a step
each, so that what disturbs the machine disturbs all of them alike.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel

from andon.checkpoint.checkpointer import Checkpointer
from andon.checkpoint.progress import Progress
from andon.engine.optimizer import AdamW
from andon.engine.parallel import DataParallel
from andon.engine.trainer import IntArray, StepSettings, Trainer
from andon.model.llama import Llama
from andon.model.shape import SHAPES, Shape
from andon.optim.sharding import Zero
from andon.transport import open_group
from andon.transport.base import Group
from andon.transport.torch_dist import StoreRendezvous

LR = 1e-4
ENDLESS = 1 << 60


class RandomBatches:
    """Random tokens, the same in every step: what they are does not matter here."""

    def __init__(self, shape: Shape, tokens: int, seed: int) -> None:
        context = min(tokens, shape.context)
        drawn = np.random.default_rng(seed).integers(0, shape.vocab, (tokens // context, context + 1))
        self._batch = np.ascontiguousarray(drawn[:, :-1]), np.ascontiguousarray(drawn[:, 1:])

    def __call__(self, step: int, slot: int) -> tuple[IntArray, IntArray]:
        """Inputs and targets."""
        return self._batch

    def windows(self, step: int, slot: int) -> list[int]:
        """They have no numbers."""
        return []


def initialised(shape: Shape) -> Llama:
    """The model, the same every time."""
    model = Llama(shape)
    model.initialise(1)
    return model


def make_optimizer(model: Llama, group: Group, zero: Zero) -> AdamW:
    """Andon's optimizer, with one slot per rank."""
    return AdamW(DataParallel(model, group, slots=group.world_size), LR, zero=zero)


def make_trainer(
    optimizer: AdamW, batches: RandomBatches, checkpointer: Checkpointer | None = None
) -> Trainer:
    """Andon's step, as `andon train` does it."""
    settings = StepSettings(learning_rate=lambda step: LR, last_step=ENDLESS, clip=1.0)
    progress = checkpointer.progress if checkpointer else Progress()
    return Trainer(optimizer, batches, settings, progress, checkpointer)


class DdpStep:
    """What one would write with PyTorch's own DistributedDataParallel."""

    def __init__(self, model: Llama) -> None:
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        matrices = [value for value in model.parameters() if value.dim() > 1]
        vectors = [value for value in model.parameters() if value.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Do one step."""
        self.optimizer.zero_grad(set_to_none=True)
        (self.model(x, y) / y.numel()).backward()
        self.optimizer.step()


def measure(task: dict[str, Any], tokens: int, groups: dict[str, Group], gloo: Group) -> dict[str, Any]:
    """Seconds of each one's steps, and the phases of Andon's."""
    shape = SHAPES[task["preset"]]
    batches = RandomBatches(shape, tokens, seed=task["rank"])
    x, y = (torch.from_numpy(each) for each in batches(1, 0))
    ddp = DdpStep(initialised(shape))
    trainers = {}
    for name, group in groups.items():
        optimizer = make_optimizer(initialised(shape), group, Zero("even"))
        optimizer.model.exchange.checks = name == "andon"
        trainers[name] = make_trainer(optimizer, batches)
    seconds: dict[str, list[float]] = {name: [] for name in ("ddp", *trainers)}
    phases: list[dict[str, float]] = []
    for _ in range(task["repetitions"] + 2):
        for name in seconds:
            gloo.barrier()
            started = time.perf_counter()
            if name == "ddp":
                ddp(x, y)
            else:
                trainers[name].train_step()
            seconds[name].append(time.perf_counter() - started)
        model = trainers["andon"].model
        phases.append({**model.phases.milliseconds, "all_exchange": 1e3 * model.exchange.seconds})
    for trainer in trainers.values():
        trainer.close()
    return {"seconds": {name: values[2:] for name, values in seconds.items()}, "phases": phases[2:]}


def main(task: dict[str, Any]) -> None:
    """Measure every batch size and print seconds and phases as JSON."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    store = TCPStore("127.0.0.1", task["port"], wait_for_workers=False)
    rendezvous = StoreRendezvous(store, task["rank"], task["ranks"], timeout=120.0)
    gloo = open_group("torch", rendezvous)
    results = {}
    for tokens in task["tokens"]:
        groups = {name: open_group(task["transport"], rendezvous) for name in ("andon", "unchecked")}
        results[str(tokens)] = measure(task, tokens, groups, gloo)
        for group in groups.values():
            group.close()
    gloo.barrier()
    gloo.close()
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
