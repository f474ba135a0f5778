"""The torch adapter: what the contract suite does not see."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from andon.engine.gradients.order import make_order
from andon.errors import UserError
from andon.transport.base import Group, GroupTimeout, PeerLost, Settings
from andon.transport.registry import open_group
from andon.transport.torch_backend import StoreRendezvous, choose_backend
from andon.transport.torch_dist import TorchGroup
from tests.kit.group_harness import World


def adapt(group: Group) -> None:
    """An adapter over a group that someone else made leaves it alone when it closes."""
    part = dist.new_group([1, 2])
    if group.rank > 0:
        with TorchGroup(part) as pair:
            assert (pair.rank, pair.world_size) == (group.rank - 1, 2)
            assert pair.all_gather_bytes(b"%d" % group.rank) == [b"1", b"2"]
            vector = torch.full((5,), float(group.rank))
            pair.all_reduce(vector)
            assert (vector == 3).all()
    assert dist.is_initialized()
    group.barrier()


def test_an_adapter_uses_the_ranks_of_its_own_group_and_leaves_it_open() -> None:
    with World("torch", 3) as world:
        world.run(adapt)


def test_a_rendezvous_gives_everyones_word_by_rank_and_topics_can_repeat() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said: dict[int, list[list[str]]] = {}

    def speak(rank: int) -> None:
        mine = TCPStore("127.0.0.1", store.port, wait_for_workers=False)
        rendezvous = StoreRendezvous(mine, rank, 3, timeout=10.0)
        said[rank] = [rendezvous.exchange("names", f"{turn} of {rank}") for turn in range(2)]

    threads = [threading.Thread(target=speak, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(said[rank] == [[f"{turn} of {r}" for r in range(3)] for turn in range(2)] for rank in range(3))


def test_a_rendezvous_names_who_did_not_come() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(GroupTimeout, match="still missing: rank 1, 2") as caught:
        StoreRendezvous(store, 0, 3, timeout=0.2).exchange("names", "me")
    assert caught.value.rank == 1


def test_a_store_that_is_gone_is_a_lost_peer() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, wait_for_workers=False)
    rendezvous = StoreRendezvous(client, 1, 2, timeout=5.0)
    del store
    with pytest.raises(PeerLost, match="the store failed"):
        rendezvous.exchange("names", "me")


class Alone:
    """A rendezvous of one; it need not ask."""

    def __init__(self, world_size: int = 1) -> None:
        self.rank, self.world_size = 0, world_size

    def exchange(self, topic: str, mine: str) -> list[str]:
        return [mine]


def test_open_group_refuses_what_cannot_be() -> None:
    with pytest.raises(UserError, match="no transport 'pigeon'"):
        open_group("pigeon", Alone())
    with pytest.raises(UserError, match="cannot connect 2 workers"):
        open_group("local", Alone(2))
    with pytest.raises(ValueError, match="address"):
        open_group("star", Alone())


def test_one_rank_alone_opens_every_transport_that_needs_no_one_else() -> None:
    for transport in ("local", "shm", "torch"):
        with open_group(transport, Alone()) as group:
            vector = torch.arange(5.0)
            group.all_reduce(vector)
            assert torch.equal(vector, torch.arange(5.0))
            assert group.all_gather_bytes(b"x") == [b"x"]


@pytest.mark.parametrize(
    "cards, backend",
    [(["a", "b"], "nccl"), (["a", "a"], "gloo"), (["a", ""], "gloo"), (["", ""], "gloo"), (["a"], "nccl")],
)
def test_nccl_needs_a_gpu_for_every_rank(cards: list[str], backend: str) -> None:
    assert choose_backend(cards, "gloo") == backend


def test_a_group_that_made_its_process_group_destroys_it() -> None:
    with open_group("torch", Alone()):
        assert dist.is_initialized()
    assert not dist.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: tests/gpu.sh on a machine that has one")
def test_nccl_gives_the_sum_on_the_gpu() -> None:
    order = make_order(5, 1)
    with TorchGroup.open(Alone(), Settings(30.0), backend="nccl") as group:
        rows = torch.arange(10.0).cuda().reshape(1, 10)
        group.all_reduce(rows, order)
        assert torch.equal(rows[0].cpu(), torch.arange(10.0))
        assert group.all_gather_bytes(b"x" * 1000) == [b"x" * 1000]
