"""One rank of the benchmark on namespaced hosts: a step over every transport and of DDP, in turn."""

import gc
import os
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from andon.bench.kit.rank import TIMEOUT, take_turns
from andon.bench.ranks.train import WARM_UP, RandomBatches, ddp_step, initialised, make_optimizer, make_trainer
from andon.cluster.star_process import star_process
from andon.control.token import Credentials
from andon.model.shape import SHAPES
from andon.optim.sharding import Zero
from andon.transport.base import Group, Settings
from andon.transport.registry import TRANSPORTS, open_group
from andon.transport.rows import Wire
from andon.transport.torch_backend import StoreRendezvous

PORT = 29512
"""Where rank 0 serves the store at which the ranks meet."""


def open_named(name: str, rendezvous: StoreRendezvous, host: str, stack: ExitStack) -> Group:
    """Open a group; `ring:bf16` is the ring with bf16 on the wire. Rank 0 starts the server of a star."""
    transport, _, suffix = name.partition(":")
    wire: Wire = "bf16" if suffix == "bf16" else "f32"
    rank, size = rendezvous.rank, rendezvous.world_size
    token = os.environ["ANDON_TOKEN"]
    credentials = Credentials(token, secret=name.encode())
    server = None
    if TRANSPORTS[transport].needs_server:
        own = stack.enter_context(star_process(host, size, TIMEOUT, credentials)) if rank == 0 else ("", 0)
        star_host, star_port = rendezvous.exchange(name, f"{own[0]} {own[1]}")[0].split()
        server = (star_host, int(star_port))
    keys = credentials.issue(rank, size, 0).sealed(token)
    return open_group(transport, rendezvous, Settings(TIMEOUT, wire, host, server, keys))


def main(task: dict[str, Any]) -> dict[Any, Any]:
    """Time a step over every transport and of DDP, in turn; returns the seconds."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rank, size, wait = task["rank"], task["ranks"], timedelta(seconds=TIMEOUT)
    store = TCPStore(task["master"], PORT, is_master=rank == 0, timeout=wait, wait_for_workers=False)
    rendezvous = StoreRendezvous(store, rank, size, TIMEOUT)
    shape = SHAPES[task["preset"]]
    batches = RandomBatches(shape, task["tokens"], seed=rank)
    with ExitStack() as stack:
        gloo = stack.enter_context(open_group("torch", rendezvous, Settings(TIMEOUT, host=task["host"])))
        works: dict[str, Callable[[], Any]] = {"ddp": ddp_step(shape, batches)}
        for name in task["names"]:
            group = stack.enter_context(open_named(name, rendezvous, task["host"], stack))
            policy = Zero("off") if TRANSPORTS[group.transport].needs_server else Zero("even")
            trainer = make_trainer(make_optimizer(initialised(shape), group, policy), batches)
            stack.callback(trainer.close)
            works[name] = trainer.train_step
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(task["repetitions"] + WARM_UP):
            take_turns(works, seconds, gloo)
        works.clear()
        gc.collect()  # a DDP model that outlives the process group can hang when it is freed
        gloo.barrier()
    return {name: each[WARM_UP:] for name, each in seconds.items()}
