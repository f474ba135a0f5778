"""The backend of torch.distributed for ranks that torchrun or SLURM has started, and its store as a rendezvous.

NCCL needs a GPU for every rank. The ranks therefore exchange the identity of their GPUs before they choose it.
"""

import re
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from andon.transport.base import SOMEONE, GroupTimeout, PeerLost


def init_ranks(gloo: str, timeout: float, device: torch.device) -> None:
    """Initialise the default process group from torchrun's variables; all ranks call it together.

    `gloo` is the backend of ranks that have no GPU, or share one."""
    store, rank, size = next(rendezvous("env://"))
    card = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    cards = StoreRendezvous(store, rank, size, timeout).exchange("GPU", card)
    dist.init_process_group(choose_backend(cards, gloo), store=store, rank=rank, world_size=size)


def choose_backend(cards: Sequence[str], gloo: str) -> str:
    """NCCL if every rank has a GPU of its own; a rank without one has an empty name."""
    return "nccl" if all(cards) and len(set(cards)) == len(cards) else gloo


class StoreRendezvous:
    """A rendezvous in a torch store (torchrun's or Andon's)."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float) -> None:
        self.store, self.rank, self.world_size, self.timeout = store, rank, world_size, timeout
        self._turn = 0

    def exchange(self, topic: str, mine: str) -> list[str]:
        """Publish this rank's value for a topic and return all ranks' values; all ranks call in the same order."""
        started = time.monotonic()
        self._turn += 1
        keys = [f"andon/{self._turn}/{topic}/{rank}" for rank in range(self.world_size)]
        try:
            self.store.set(keys[self.rank], mine)
            while missing := [rank for rank, key in enumerate(keys) if not self.store.check([key])]:
                seconds = time.monotonic() - started
                if seconds >= self.timeout:
                    detail = f"still missing: rank {', '.join(map(str, missing))}"
                    raise GroupTimeout(missing[0], f"rendezvous on {topic!r}", seconds, detail)
                time.sleep(0.005 if seconds < 1 else 0.05)
            return [self.store.get(key).decode() for key in keys]
        except RuntimeError as error:
            seconds = time.monotonic() - started
            raise PeerLost(SOMEONE, f"rendezvous on {topic!r}", seconds, f"the store failed: {error}") from error


def gloo_at(host: str) -> str:
    """Register a backend of torch.distributed and return its name: Gloo that uses one address of this machine, and not
    the one to which the host name resolves."""

    def create(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, size, options)

    name = "gloo_at_" + re.sub(r"\W", "_", host)
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, create, devices=["cpu"])
    return name
