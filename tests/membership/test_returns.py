"""A member of a run that connects to its coordinator again, spoken word by word."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from andon.control.coordinator import Coordinator
from tests.cluster.coordinators import coordinator_of
from tests.cluster.peers import Peer


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with coordinator_of(2, goes_on=True) as found:
        yield found


def begin(coordinator: Coordinator) -> tuple[list[Peer], list[int]]:
    """Two members of the first generation, and their ranks."""
    peers = [Peer(coordinator, pid) for pid in (1, 2)]
    for peer in peers:
        peer.join()
    return peers, [peer.hear("begin")["rank"] for peer in peers]


def test_members_are_known_before_their_old_links_are_found_dead(coordinator: Coordinator) -> None:
    """A network that was cut for about as long as silence is borne: both come back first, and are noticed later."""
    _, ranks = begin(coordinator)
    back = [Peer(coordinator, pid) for pid in (1, 2)]
    for peer, rank in zip(back, ranks, strict=True):
        peer.again(0, rank)
        peer.part(0)
    assert [peer.hear("begin", "refused").get("generation") for peer in back] == [1, 1]


def test_a_generation_that_a_member_has_not_heard_of_is_told_again(coordinator: Coordinator) -> None:
    peers, ranks = begin(coordinator)
    for peer in peers:
        peer.part(0)
    told = peers[0].hear("begin")
    back = Peer(coordinator, 1)
    back.again(0, ranks[0])
    assert back.hear("begin", "refused") == told and told["generation"] == 1


def test_a_member_hears_what_was_said_while_it_was_out_of_reach(coordinator: Coordinator) -> None:
    peers, ranks = begin(coordinator)
    peers[1].sock.close()
    peers[0].hear("lost")
    coordinator.stop()
    peers[0].hear("stop")
    back = Peer(coordinator, 1)
    back.again(0, ranks[0])
    assert back.hear("lost", "refused")["rank"] == ranks[1] and back.hear("stop")


def test_another_process_is_refused_and_hears_why_whatever_it_sends(coordinator: Coordinator) -> None:
    _, ranks = begin(coordinator)
    other = Peer(coordinator, 3)
    other.again(0, ranks[0])
    for _ in range(20):  # a connection that is closed on this breaks, and its last words may be lost
        other.say("event", event={"event": "note", "time": 1.0, "text": "x" * 1000})
        time.sleep(0.01)
    assert "has gone on without generation 0" in other.hear("begin", "refused")["reason"]
