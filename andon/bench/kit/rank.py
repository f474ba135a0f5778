"""A rank's side of a benchmark: it meets the other ranks and takes turns with them."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from andon.transport.base import Group
from andon.transport.registry import open_group
from andon.transport.torch_backend import StoreRendezvous

TIMEOUT = 120.0  # seconds


def join(task: dict[str, Any]) -> StoreRendezvous:
    """Connect to the store that `run_ranks` has started; this process computes with one thread from now on."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", task["port"], wait_for_workers=False)
    return StoreRendezvous(store, task["rank"], task["ranks"], TIMEOUT)


@contextmanager
def open_gloo(rendezvous: StoreRendezvous) -> Iterator[Group]:
    """Open torch's process group over gloo, which DDP uses; close it when all ranks are done."""
    with open_group("torch", rendezvous) as gloo:
        yield gloo
        # A DDP model that outlives the process group joins its threads while it holds the lock that they wait for.
        gc.collect()
        gloo.barrier()


def take_turns(
    works: Mapping[str, Callable[[], Any]], seconds: dict[str, list[float]], gloo: Group, steps: int = 1
) -> None:
    """Do `steps` steps of each work, one work after the other, all ranks together; append the seconds of a step."""
    for name, work in works.items():
        gloo.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            work()
        seconds[name].append((time.perf_counter() - started) / steps)
