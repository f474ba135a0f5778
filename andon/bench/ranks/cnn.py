"""One rank of the benchmark of a script: a small CNN with Andon's Python interface and with PyTorch's DDP, in turn."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from andon.bench.kit.rank import join, open_gloo, take_turns
from andon.engine.optimizer import AdamW
from andon.engine.parallel import DataParallel
from andon.transport.base import Group
from andon.transport.registry import open_group

WARM_UP = 5  # turns
LR = 3e-3


def network() -> nn.Module:
    """The CNN of examples/cnn.py."""
    torch.manual_seed(1)
    body = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(16 * 64, 4))


def andon_step(group: Group, x: Tensor, y: Tensor) -> Callable[[], None]:
    """The step of examples/cnn.py, with one slot per rank."""
    model = DataParallel(network(), group, slots=group.world_size)
    optimizer = AdamW(model, lr=LR)

    def step() -> None:
        for _ in model.slots:
            model.backward(F.cross_entropy(model(x), y), count=len(y))
        optimizer.step()

    return step


def ddp_step(x: Tensor, y: Tensor) -> Callable[[], None]:
    """A plain PyTorch step with DistributedDataParallel and fused AdamW."""
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def measure(task: dict[str, Any], images: int, group: Group, gloo: Group) -> dict[str, list[float]]:
    """Seconds of a step in each turn, with Andon and with DDP."""
    x, y = torch.randn(images, 1, 16, 16), torch.arange(images) % 4
    works = {"andon": andon_step(group, x, y), "ddp": ddp_step(x, y)}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(task["repetitions"] + WARM_UP):
        take_turns(works, seconds, gloo, task["steps"])
    return {name: each[WARM_UP:] for name, each in seconds.items()}


def main(task: dict[str, Any]) -> dict[Any, Any]:
    """Measure; returns the seconds of every step by number of images."""
    rendezvous = join(task)
    results = {}
    with open_gloo(rendezvous) as gloo:
        for images in task["images"]:
            with open_group(task["transport"], rendezvous) as group:
                results[str(images)] = measure(task, images, group, gloo)
    return results
