"""One rank of the training benchmark: `python -m andon.bench.train_rank '{...}'` prints its timings.

Each rank holds the same model three times: under Andon's step with all checks, under the same step with the
checks off, and under PyTorch's DistributedDataParallel over Gloo with fused AdamW. They take turns, a step
each, so that what disturbs the machine disturbs all of them alike.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel

from andon.engine.parallel import DataParallel
from andon.model.llama import Llama
from andon.model.shape import SHAPES, Shape
from andon.transport.base import open_group
from andon.transport.torch_dist import StoreRendezvous

LR = 1e-4


def batch(shape: Shape, rank: int, step: int, windows: int, context: int) -> tuple[Tensor, Tensor]:
    """Random tokens: what they are does not matter here."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    drawn = torch.randint(0, shape.vocab, (windows, context + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


class AndonStep:
    """Andon's step, one slot per rank; `checks` are looks at contributions and the fingerprints."""

    def __init__(self, model: Llama, parallel: DataParallel, checks: bool) -> None:
        self.model, self.parallel, self.checks = model, parallel, checks
        if not checks:
            parallel.gradients.looks_ahead = False

    def __call__(self, x: Tensor, y: Tensor, step: int) -> dict[str, float]:
        """Do one step; how long each phase took."""
        parallel, clock = self.parallel, [time.perf_counter()]
        loss = self.model(x, y)
        clock.append(time.perf_counter())
        parallel.backward(loss, parallel.slots[0], y.numel())
        clock.append(time.perf_counter())
        prints = parallel.fingerprints.take(f"{step} {LR}") if self.checks else b""
        clock.append(time.perf_counter())
        totals = parallel.gradients.finish()
        if self.checks:
            parallel.compare(step, prints)
        clock.append(time.perf_counter())
        parallel.update(totals, LR, clip=1.0)
        clock.append(time.perf_counter())
        names = ("forward", "backward", "fingerprints", "exchange_after_backward", "optimizer")
        phases = {name: end - start for name, (start, end) in zip(names, pairwise(clock), strict=True)}
        return {**phases, "exchange": parallel.gradients.exchange_seconds}


class PlainStep:
    """What one would write with PyTorch's own DistributedDataParallel."""

    def __init__(self, model: Llama) -> None:
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        matrices = [value for value in model.parameters() if value.dim() > 1]
        vectors = [value for value in model.parameters() if value.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)

    def __call__(self, x: Tensor, y: Tensor, step: int) -> dict[str, float]:
        """Do one step."""
        self.optimizer.zero_grad(set_to_none=True)
        (self.model(x, y) / y.numel()).backward()
        self.optimizer.step()
        return {}


def main(task: dict[str, Any]) -> None:
    """Measure every batch size and print seconds and phases as JSON."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rank, ranks = task["rank"], task["ranks"]
    store = TCPStore("127.0.0.1", task["port"], wait_for_workers=False)
    rendezvous = StoreRendezvous(store, rank, ranks, timeout=120.0)
    gloo = open_group("torch", rendezvous)
    results: dict[str, Any] = {}
    for tokens in task["tokens"]:
        shape = SHAPES[task["preset"]]
        context = min(tokens, shape.context)
        groups = {name: open_group(task["transport"], rendezvous) for name in ("andon", "unchecked")}
        models = {name: Llama(shape) for name in ("andon", "unchecked", "ddp")}
        for model in models.values():
            model.initialise(1)
        steps: dict[str, AndonStep | PlainStep] = {"ddp": PlainStep(models["ddp"])}
        for name, group in groups.items():
            parallel = DataParallel(models[name], group, slots=ranks, zero=True)
            steps[name] = AndonStep(models[name], parallel, checks=name == "andon")
        timings: dict[str, list[float]] = {name: [] for name in steps}
        phases: list[dict[str, float]] = []
        for repetition in range(-2, task["repetitions"]):
            x, y = batch(shape, rank, repetition + 2, tokens // context, context)
            for name, step in steps.items():
                gloo.barrier()
                started = time.perf_counter()
                phase = step(x, y, repetition + 3)
                seconds = time.perf_counter() - started
                if repetition >= 0:
                    timings[name].append(seconds)
                    phases += [phase] if name == "andon" else []
        results[str(tokens)] = {"seconds": timings, "phases": phases}
        for step in steps.values():
            if isinstance(step, AndonStep):
                step.parallel.close()
        del steps, models
    gloo.barrier()
    gloo.close()
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
