"""One rank of the transport benchmark: `python -m andon.bench.ranks.transport '{...}'` prints its timings.

All ranks open every transport, then take turns: each repetition does every transport once, so that what
disturbs the machine disturbs all of them alike. A turn is a few all-reduces in a row (one, when the vector is
large), after one that does not count, between two barriers.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from andon.transport.base import Group, Settings, open_group
from andon.transport.keys import LinkKeys
from andon.transport.rows import Wire
from andon.transport.torch_dist import StoreRendezvous

Turn = Callable[[], None]
BATCH_BYTES = 32 << 20
LONGEST_BATCH = 40


def open_all(names: list[str], rendezvous: StoreRendezvous, servers: dict[str, int]) -> dict[str, Group]:
    """A group per transport; `ring:bf16` is the ring with bf16 on the wire, `torch` shares gloo's."""
    keys = LinkKeys.derive(os.environ["ANDON_TOKEN"].encode(), rendezvous.rank, rendezvous.world_size)
    groups: dict[str, Group] = {"gloo": open_group("torch", rendezvous)}
    for name in names:
        transport, _, suffix = name.partition(":")
        wire: Wire = "bf16" if suffix == "bf16" else "f32"
        settings = Settings(wire=wire, server=("127.0.0.1", servers.get(name, 0)), keys=keys)
        groups[name] = open_group(transport, rendezvous, settings)
    return groups


def turns_of(groups: dict[str, Group], vectors: dict[str, torch.Tensor], numel: int) -> dict[str, Turn]:
    """What each transport does in its turn: all-reduce a vector of its own."""

    def turn(name: str, group: Group, vector: torch.Tensor) -> Turn:
        if name == "gloo":
            return lambda: dist.all_reduce(vector) and None
        return lambda: group.all_reduce(vector)

    return {name: turn(name, group, vectors[name][:numel]) for name, group in groups.items()}


def measure(turns: dict[str, Turn], meet: Turn, batch: int, repetitions: int) -> dict[str, list[list[float]]]:
    """Per transport and repetition: seconds and processor seconds of one all-reduce."""
    results: dict[str, list[list[float]]] = {name: [] for name in turns}
    for repetition in range(-2, repetitions):
        for name, turn in turns.items():
            meet()
            turn()  # ranks leave the barrier at unlike times, and this turn almost at once
            seconds, processor = time.perf_counter(), time.process_time()
            for _ in range(batch):
                turn()
            seconds, processor = time.perf_counter() - seconds, time.process_time() - processor
            meet()
            if repetition >= 0:
                results[name].append([seconds / batch, processor / batch])
    return results


def main(task: dict[str, Any]) -> None:
    """Measure all sizes and print the timings as JSON."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", task["port"], wait_for_workers=False)
    rendezvous = StoreRendezvous(store, task["rank"], task["ranks"], timeout=60.0)
    groups = open_all(task["transports"], rendezvous, task["servers"])
    longest = max(task["sizes"]) // 4
    vectors = {name: group.allocate(1, longest)[0].fill_(0) for name, group in groups.items()}
    timings = {}
    for size in task["sizes"]:
        batch = max(1, min(LONGEST_BATCH, BATCH_BYTES // max(1, size)))
        turns = turns_of(groups, vectors, size // 4)
        timings[size] = measure(turns, groups["gloo"].barrier, batch, task["repetitions"])
    for group in reversed(groups.values()):
        group.barrier()
        group.close()
    print(json.dumps(timings), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
