"""The star: our own ranks around a server."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from andon.engine.gradients.order import order_of_ranges
from andon.transport.base import GroupTimeout, PeerLost, ProtocolError, Settings
from andon.transport.keys import SERVER, LinkKeys
from andon.transport.rows import Wire
from andon.transport.tcp import failure_detector
from andon.transport.tcp.entrance.handshake import NotAuthenticated
from andon.transport.tcp.star import StarGroup
from andon.transport.tcp.star_server import StarServer
from tests.kit.group_harness import busy, link_keys
from tests.protocol2.plain_peers import SECONDS, PlainWorker


class Seat:
    """A rendezvous for a star, whose ranks need no exchange."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def exchange(self, topic: str, mine: str) -> list[str]:
        raise AssertionError("a star knows its server")


@contextmanager
def star(size: int, timeout: float = SECONDS, wire: Wire = "f32") -> Iterator[tuple[list[StarGroup], Future[None]]]:
    """The ranks of a star, in this process, and what its server comes to."""
    server = StarServer(("127.0.0.1", 0), size, timeout, link_keys(SERVER, size))
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(server.serve)
        groups = [
            StarGroup.open(Seat(rank, size), at(server.address, rank, size, wire, timeout)) for rank in range(size)
        ]
        try:
            yield groups, serving
        finally:
            for group in groups:
                group.close()
            server.close()


def at(
    server: tuple[str, int], rank: int, size: int, wire: Wire = "f32", timeout: float = SECONDS, secret: bytes = b""
) -> Settings:
    """What a rank needs to find the server, with another secret if one is given."""
    keys = LinkKeys.derive(secret, rank, size) if secret else link_keys(rank, size)
    return Settings(timeout, wire, server=server, keys=keys)


def everyone(groups: list[StarGroup], act: Callable[[StarGroup], Any]) -> list[Any]:
    """What came of it, by rank: a result or an exception."""
    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(act, group) for group in groups]
        return [future.exception(SECONDS) or future.result(SECONDS) for future in futures]


def test_a_server_ends_when_its_ranks_have_left_and_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    with star(2) as (groups, serving):
        everyone(groups, lambda group: group.barrier())
        for group in groups:
            group.close()
        serving.result(SECONDS)
    assert threading.active_count() == before


def test_a_rank_that_comes_late_makes_nobody_miss_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "DEAD_AFTER", 1.5)
    server = StarServer(("127.0.0.1", 0), 2, SECONDS, link_keys(SERVER, 2))
    with ThreadPoolExecutor(2) as pool:
        serving = pool.submit(server.serve)
        first = StarGroup.open(Seat(0, 2), at(server.address, 0, 2))
        early = pool.submit(first.all_gather_bytes, b"early")
        time.sleep(2.5)
        second = StarGroup.open(Seat(1, 2), at(server.address, 1, 2))
        assert second.all_gather_bytes(b"late") == early.result(SECONDS) == [b"early", b"late"]
        for group in (first, second):
            group.close()
        serving.result(SECONDS)


@pytest.mark.parametrize("wire", ["f32", "bf16"])
@pytest.mark.parametrize("shares", [(0, 0, 5, 8), (0, 3, 3, 8), (0, 1, 7, 8), (0, 8, 8, 8)])
def test_owners_receive_long_sums_in_the_one_order_whoever_has_rows(shares: tuple[int, ...], wire: Wire) -> None:
    count, order = 600_001, order_of_ranges(8, shares)
    bounds = [0, 20_000, 20_000, count]
    leaves = [torch.randn(count, generator=torch.Generator().manual_seed(leaf)) for leaf in range(8)]
    leaves = leaves[: len(order.leaves)]
    mine = [[leaf for leaf, (rank, _) in enumerate(order.leaves) if rank == r] or [0] for r in range(3)]
    rows = [torch.stack([leaves[leaf] for leaf in own]) for own in mine]
    with star(3, wire=wire) as (groups, _):
        assert everyone(groups, lambda group: group.reduce_scatter(rows[group.rank], bounds, order)) == [None] * 3
        for group in groups:
            assert group.bytes_sent == len(order.nodes[group.rank]) * count * (4 if wire == "f32" else 2)
    if wire == "bf16":
        leaves = [leaf.bfloat16() for leaf in leaves]  # every partial sum is rounded, too
    order.add_up(leaves)
    want = leaves[0].float()
    for rank in range(3):
        assert torch.equal(rows[rank][0, bounds[rank] : bounds[rank + 1]], want[bounds[rank] : bounds[rank + 1]])


def test_ranks_that_announce_different_operations_are_all_refused() -> None:
    with star(3) as (groups, serving):
        lengths = [10, 10, 11]
        errors = everyone(groups, lambda group: group.all_reduce(torch.ones(lengths[group.rank])))
        assert [type(error) for error in errors] == [ProtocolError] * 3
        assert all("rank 2" in str(error) for error in errors)
        assert isinstance(serving.exception(SECONDS), ProtocolError)


def test_a_rank_that_leaves_early_is_named() -> None:
    with star(3) as (groups, _):
        groups[1].close()
        errors = everyone([groups[0], groups[2]], lambda group: group.barrier())
        assert [(type(error), error.rank) for error in errors] == [(PeerLost, 1)] * 2


def test_a_rank_that_does_not_come_is_named() -> None:
    with star(3, timeout=0.5) as (groups, _):
        errors = everyone([groups[0], groups[2]], lambda group: group.barrier())
        assert [(type(error), error.rank) for error in errors] == [(GroupTimeout, 1)] * 2


def test_a_server_that_ends_is_missed() -> None:
    with star(2) as (groups, serving):
        everyone(groups, lambda group: group.barrier())
        groups[0]._data.shutdown(socket.SHUT_RDWR)  # to the server, rank 0 is gone
        assert isinstance(serving.exception(SECONDS), PeerLost)
        errors = everyone(groups, lambda group: group.barrier())
        assert [(type(error), error.rank) for error in errors] == [(PeerLost, 0)] * 2


def test_strangers_and_wrong_tokens_are_turned_away_from_a_star() -> None:
    server = StarServer(("127.0.0.1", 0), 1, SECONDS, link_keys(SERVER, 1))
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(server.serve)
        rude = PlainWorker(server.address, join=False)
        rude.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        rude.receive()  # the challenge, which is all that a stranger gets
        assert rude.is_closed()
        with pytest.raises(NotAuthenticated, match="tokens differ"):
            StarGroup.open(Seat(0, 1), at(server.address, 0, 1, secret=b"wrong"))
        with StarGroup.open(Seat(0, 1), at(server.address, 0, 1)) as group:
            assert group.all_gather_bytes(b"x") == [b"x"]
        serving.result(SECONDS)


def test_closing_a_server_that_still_waits_ends_it() -> None:
    server = StarServer(("127.0.0.1", 0), 1, SECONDS, link_keys(SERVER, 1))
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(server.serve)
        server.close()
        serving.result(SECONDS)


SERVE = """
import sys, torch
from andon.transport.base import SERVER
from andon.transport.tcp.star_server import StarServer
from tests.kit.group_harness import link_keys
torch.set_num_threads(1)
size = int(sys.argv[1])
server = StarServer(("127.0.0.1", 0), size, 120.0, link_keys(SERVER, size))
print(server.address[1], flush=True)
server.serve()
print(int([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1]) // 1024)
"""
RANK = """
import sys, torch
from andon.transport.base import Settings
from andon.transport.tcp.star import StarGroup
from tests.kit.group_harness import link_keys
torch.set_num_threads(1)
rank, size, port, count = map(int, sys.argv[1:])
class Seat:
    world_size = size
Seat.rank = rank
flat = torch.arange(count, dtype=torch.float32).remainder_(1000.0) + rank
with StarGroup.open(Seat(), Settings(120.0, server=("127.0.0.1", port), keys=link_keys(rank, size))) as group:
    group.all_reduce(flat)
expected = torch.arange(count, dtype=torch.float32).remainder_(1000.0) * size + size * (size - 1) / 2
assert torch.equal(flat, expected)
"""


@pytest.mark.alone
def test_the_ranks_of_a_killed_server_name_it() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVE, "2"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        address = ("127.0.0.1", int(server.stdout.readline()))
        groups = [StarGroup.open(Seat(rank, 2), at(address, rank, 2)) for rank in range(2)]
        assert everyone(groups, lambda group: group.barrier()) == [None, None]
        server.kill()
        started = time.monotonic()
        errors = everyone(groups, lambda group: group.barrier())
        assert [(type(error), error.rank) for error in errors] == [(PeerLost, SERVER)] * 2
        assert time.monotonic() - started < 1.0 * busy()
        for group in groups:
            group.close()
    finally:
        server.kill()
        server.communicate()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("size", "megabytes"), [(2, 600), (8, 256)])
def test_large_vectors_pass_a_star_whose_server_stays_small(size: int, megabytes: int) -> None:
    python = [sys.executable, "-c"]
    server = subprocess.Popen([*python, SERVE, str(size)], stdout=subprocess.PIPE, text=True)
    assert server.stdout
    port = server.stdout.readline().strip()
    count = str(megabytes * (1 << 18))
    ranks = [subprocess.Popen([*python, RANK, str(rank), str(size), port, count]) for rank in range(size)]
    try:
        assert [process.wait(500) for process in ranks] == [0] * size
        resident = int(server.stdout.readline())
        assert server.wait(SECONDS) == 0
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        server.kill()
        server.wait()
    print(f"{size} x {megabytes} MB: server {resident} MB")
    assert resident < 700
