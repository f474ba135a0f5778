"""One rank of the transport benchmark.

All ranks open every transport. Each repetition gives every transport one turn, so that other load on the machine slows
all of them alike. A turn is a few all-reduces in a row (one, if the vector is large) between two barriers, after one
that is not timed.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from andon.bench.kit.rank import join
from andon.transport.base import Group, Settings
from andon.transport.keys import LinkKeys
from andon.transport.registry import open_group
from andon.transport.rows import Wire
from andon.transport.torch_backend import StoreRendezvous

AllReduce = Callable[[], None]
WARM_UP = 2  # turns
TURN_BYTES = 32 << 20
MOST_PER_TURN = 40  # all-reduces


def open_all(names: list[str], rendezvous: StoreRendezvous, servers: dict[str, int]) -> dict[str, Group]:
    """Open a group per transport; `ring:bf16` is the ring with bf16 on the wire, `torch` shares gloo's group."""
    keys = LinkKeys.derive(os.environ["ANDON_TOKEN"].encode(), rendezvous.rank, rendezvous.world_size)
    groups: dict[str, Group] = {"gloo": open_group("torch", rendezvous)}
    for name in names:
        transport, _, suffix = name.partition(":")
        wire: Wire = "bf16" if suffix == "bf16" else "f32"
        settings = Settings(wire=wire, server=("127.0.0.1", servers.get(name, 0)), keys=keys)
        groups[name] = open_group(transport, rendezvous, settings)
    return groups


def all_reduces(groups: dict[str, Group], vectors: dict[str, torch.Tensor], numel: int) -> dict[str, AllReduce]:
    """The all-reduce of each transport, over its own vector."""

    def all_reduce(name: str, group: Group, vector: torch.Tensor) -> AllReduce:
        if name == "gloo":
            return lambda: dist.all_reduce(vector) and None
        return lambda: group.all_reduce(vector)

    return {name: all_reduce(name, group, vectors[name][:numel]) for name, group in groups.items()}


def measure(works: dict[str, AllReduce], gloo: Group, per_turn: int, repetitions: int) -> dict[str, list[list[float]]]:
    """Per transport and repetition: seconds and processor seconds of one all-reduce."""
    results: dict[str, list[list[float]]] = {name: [] for name in works}
    for repetition in range(-WARM_UP, repetitions):
        for name, all_reduce in works.items():
            gloo.barrier()
            all_reduce()  # ranks leave the barrier at different times, but an all-reduce almost together
            seconds, processor = time.perf_counter(), time.process_time()
            for _ in range(per_turn):
                all_reduce()
            seconds, processor = time.perf_counter() - seconds, time.process_time() - processor
            gloo.barrier()
            if repetition >= 0:
                results[name].append([seconds / per_turn, processor / per_turn])
    return results


def main(task: dict[str, Any]) -> dict[Any, Any]:
    """Measure all sizes; returns the timings."""
    groups = open_all(task["transports"], join(task), task["servers"])
    longest = max(task["sizes"]) // 4
    vectors = {name: group.allocate(1, longest)[0].fill_(0) for name, group in groups.items()}
    timings = {}
    for size in task["sizes"]:
        per_turn = max(1, min(MOST_PER_TURN, TURN_BYTES // max(1, size)))
        works = all_reduces(groups, vectors, size // 4)
        timings[size] = measure(works, groups["gloo"], per_turn, task["repetitions"])
    for group in reversed(groups.values()):
        group.barrier()
        group.close()
    return timings
