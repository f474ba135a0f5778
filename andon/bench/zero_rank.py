"""One rank of the ZeRO benchmark: `python -m andon.bench.zero_rank '{...}'` prints its timings.

Each rank holds the same model four times: under Andon's step with plain data parallel and with ZeRO, and
twice under PyTorch's ZeroRedundancyOptimizer, which needs no step around it: any gradients will do. They take
turns.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.optim import ZeroRedundancyOptimizer

from andon.bench.train_rank import LR, RandomBatches, initialised, make_optimizer, make_trainer
from andon.model.shape import SHAPES, Shape
from andon.optim.sharding import Zero
from andon.transport import open_group
from andon.transport.base import Group
from andon.transport.torch_dist import StoreRendezvous


def torch_update(shape: Shape, bucket_view: bool) -> Callable[[], Any]:
    """PyTorch's own ZeRO-1: AdamW on this rank's parameters, then a broadcast of everyone's."""
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


def measure(task: dict[str, Any], tokens: int, groups: dict[str, Group], gloo: Group) -> dict[str, Any]:
    """Seconds of each turn: whole steps, and updates alone."""
    shape = SHAPES[task["preset"]]
    batches = RandomBatches(shape, tokens, seed=task["rank"])
    policies = {"plain": Zero("off"), "zero": Zero("even")}
    trainers = {
        name: make_trainer(make_optimizer(initialised(shape), group, policies[name]), batches)
        for name, group in groups.items()
    }
    updates = {"torch": torch_update(shape, False), "torch_bucket_view": torch_update(shape, True)}
    works: dict[str, Callable[[], Any]] = {
        **{name: trainer.train_step for name, trainer in trainers.items()},
        **updates,
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*works, "update")}
    for _ in range(task["repetitions"] + 2):
        for name, work in works.items():
            gloo.barrier()
            started = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - started)
        seconds["update"].append(trainers["zero"].model.phases.milliseconds["optimizer"] / 1e3)
    for trainer in trainers.values():
        trainer.close()
    return {name: values[2:] for name, values in seconds.items()}


def main(task: dict[str, Any]) -> None:
    """Measure every batch size and print the seconds as JSON."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    store = TCPStore("127.0.0.1", task["port"], wait_for_workers=False)
    rendezvous = StoreRendezvous(store, task["rank"], task["ranks"], timeout=120.0)
    gloo = open_group("torch", rendezvous)
    results = {}
    for tokens in task["tokens"]:
        groups = {name: open_group(task["transport"], rendezvous) for name in ("plain", "zero")}
        results[str(tokens)] = measure(task, tokens, groups, gloo)
        for group in groups.values():
            group.close()
    gloo.barrier()
    gloo.close()
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
