"""The server of a star between two generations: it may start slowly, fail, or be closed meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import psutil
import pytest

from andon.cluster.star_process import ANSWER_SECONDS, StarProcess
from andon.control.coordinator import Coordinator
from andon.control.token import Credentials
from andon.errors import UserError
from tests.cluster.coordinators import TOKEN, coordinator_of
from tests.cluster.peers import Peer


class SlowServer:
    """Serves the first generation at once, and later ones when it is `started`."""

    def __init__(self) -> None:
        self.started, self.asked = threading.Event(), threading.Event()
        self.fails = False

    def serve(self, generation: int, world_size: int) -> tuple[str, int]:
        if generation:
            self.asked.set()
            assert self.started.wait(60)
        if self.fails:
            raise UserError("The server does not start", "It is broken", "Repair it")
        return f"generation {generation}", world_size


@contextmanager
def one_is_lost(server: SlowServer) -> Iterator[tuple[Coordinator, Peer]]:
    """A run of two workers of which one is lost; the other one has parted, and the server is asked."""
    with coordinator_of(2, goes_on=True, server=server.serve) as coordinator:
        peers = [Peer(coordinator, pid) for pid in (1, 2)]
        for peer in peers:
            peer.join()
        assert [peer.hear("begin")["server"] for peer in peers] == [["generation 0", 2]] * 2
        stays, lost = peers
        lost.sock.close()
        stays.hear("lost")
        stays.part(0)
        assert server.asked.wait(20)
        yield coordinator, stays


def test_while_a_server_starts_workers_join_and_take_part_in_the_generation_that_waits_for_it() -> None:
    server = SlowServer()
    with one_is_lost(server) as (coordinator, stays):
        joins = Peer(coordinator, 3)
        joins.join()  # the coordinator answers
        server.started.set()
        assert [peer.hear("begin")["server"] for peer in (stays, joins)] == [["generation 1", 2]] * 2


def test_a_stop_while_a_server_starts_leaves_the_workers_a_generation_in_which_they_save() -> None:
    server = SlowServer()
    with one_is_lost(server) as (coordinator, stays):
        coordinator.stop()
        stays.hear("stop")
        stays.hear("alive")  # the coordinator has looked at what is due
        server.started.set()
        assert stays.hear("begin", "end")["kind"] == "begin" and not coordinator.failures


def test_a_server_that_does_not_start_ends_the_run_with_its_error() -> None:
    server = SlowServer()
    server.fails = True
    with coordinator_of(1, goes_on=True, server=server.serve) as coordinator:
        peer = Peer(coordinator, 1)
        peer.join()
        assert peer.hear("begin", "end")["kind"] == "end"
        assert [failure.what for failure in coordinator.failures] == ["The server does not start"]


def server_process() -> psutil.Process:
    """The newest server process of this test."""
    found = [each for each in psutil.Process().children() if "andon.cluster.star_process" in each.cmdline()]
    return max(found, key=lambda each: each.create_time())


def test_a_server_process_that_has_died_is_replaced_and_one_that_hangs_does_not_delay_the_end() -> None:
    with closing(StarProcess("127.0.0.1", 10.0, Credentials(TOKEN))) as star, ThreadPoolExecutor(1) as pool:
        star.serve(0, 2)
        server_process().kill()
        assert star.serve(1, 2)[0] == "127.0.0.1"
        os.kill(server_process().pid, signal.SIGSTOP)
        hangs = pool.submit(star.serve, 2, 2)
        while not star._serving.locked():
            assert not hangs.done()
        began = time.monotonic()
        star.close()
        assert time.monotonic() - began < ANSWER_SECONDS / 2
        with pytest.raises(UserError):
            hangs.result(10)
    assert not [each for each in psutil.Process().children() if "andon.cluster.star_process" in each.cmdline()]
