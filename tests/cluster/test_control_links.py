"""Control links: what arrives before a connection breaks counts, oversized messages are refused, goodbyes are clean."""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from andon.control import files as files_module
from andon.control.link import FROM_WORKER, MAX_MESSAGE_BYTES, ControlLink, Message
from andon.control.loop import Loop
from andon.control.worker.join import join
from andon.errors import UserError
from andon.run.records.events import Event
from tests.cluster.coordinators import JOB, TOKEN, coordinator_of, members_of
from tests.cluster.peers import Peer
from tests.security.test_entrance_fuzz import message_frame


class Recorder:
    """The owner of a loop, which writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_message(self, link: ControlLink, message: Message | bytes) -> None:
        assert isinstance(message, dict)
        self.told.append(message["kind"])

    def on_lost(self, link: ControlLink, why: str) -> None:
        self.told.append(f"lost: {why}")

    def on_ready(self, data: Any) -> None: ...
    def on_tick(self) -> None: ...
    def on_crash(self, error: Exception) -> None: ...
    def status(self) -> Message:
        return {}


@pytest.mark.parametrize(
    ("after", "why"), [(b"", "Connection reset by peer"), (message_frame([]), "a message without a kind")]
)
def test_what_arrives_before_a_link_breaks_counts(after: bytes, why: str) -> None:
    """A worker that closes before it has read the last heartbeat resets the connection."""
    owner = Recorder()
    loop = Loop(owner, "test")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link = ControlLink(server.accept()[0], FROM_WORKER)
        peer.sendall(message_frame({"kind": "fetch"}) + message_frame({"kind": "bye", "code": 0}) + after)
        peer.close()
        loop.add(link)  # reads it
    loop.start()
    loop.close()
    assert owner.told[:2] == ["fetch", "bye"] and why in owner.told[2], owner.told


def test_a_message_that_is_too_large_is_refused_where_it_is_sent() -> None:
    with coordinator_of(1) as coordinator:
        (client,) = members_of(coordinator, 1)
        with pytest.raises(ValueError, match=r"a message 'event' of 1,\d{3},\d{3} bytes"):
            client.emit({"event": "note", "time": 1.0, "text": "x" * MAX_MESSAGE_BYTES})
        client.leave(0)
        assert coordinator.wait() == 0 and not coordinator.failures


def test_steps_of_very_many_slots_are_reported_together() -> None:
    slots = 1 << 14
    with coordinator_of(1, goes_on=True) as coordinator:
        (client,) = members_of(coordinator, 1)
        record = {"generation": 0, "shares": [0, slots], "samples": [1 << 32] * slots}
        client.report([{"step": step, **record} for step in range(1, 11)])
        client.leave(0)
        assert coordinator.wait() == 0
        assert coordinator.succession.ledger.chain.step == 10


def test_a_worker_that_still_waits_when_the_run_ends_leaves_without_a_word() -> None:
    events: list[Event] = []
    with coordinator_of(2, events.append, goes_on=True) as coordinator:
        peers = [Peer(coordinator, pid) for pid in (1, 2)]
        for peer in peers:
            peer.join()
        stays, lost = peers
        stays.hear("begin")
        lost.sock.close()
        stays.hear("lost")
        waits = Peer(coordinator, 3)
        waits.join()
        stays.say("bye", code=0)
        waits.hear("end")
        waits.say("bye", code=4)
        waits.hear_the_end()
        assert coordinator.wait() == 0
    assert [event["event"] for event in events] == ["worker", "worker", "lost"]


def test_a_worker_that_comes_when_the_run_ends_has_nothing_to_correct() -> None:
    with coordinator_of(2, goes_on=True) as coordinator:
        stays, done = members_of(coordinator, 2)
        done.leave(0)
        while not coordinator.succession.over:
            time.sleep(0.01)
        with pytest.raises(UserError) as refused:
            join(coordinator.address, TOKEN, 1)
        stays.leave(0)
    what, cause, remedy = str(refused.value).splitlines()
    assert (what, cause) == ("The coordinator refused this worker", "The run ends") and "Correct" not in remedy


def test_a_worker_that_is_one_too_many_has_nothing_to_correct() -> None:
    with coordinator_of(1, goes_on=True) as coordinator:
        (client,) = members_of(coordinator, 1)
        with pytest.raises(UserError, match=r"All 1 ranks are taken\nStart the worker again when one of them is free"):
            join(coordinator.address, TOKEN, 1)
        client.leave(0)


def test_data_that_the_coordinator_cannot_read_is_named_in_the_middle_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs" / "tokens-00000.bin").write_bytes(bytes(1000))

    def damaged_disk(path: Path) -> Iterator[bytes]:
        yield path.read_bytes()[:500]
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files_module, "_pieces", damaged_disk)
    with coordinator_of(1, job={**JOB, "tokens": str(tmp_path / "theirs")}) as coordinator:
        _, client = join(coordinator.address, TOKEN, None)
        with pytest.raises(UserError, match="The coordinator cannot read its data: Input/output error"):
            client.fetch(tmp_path / "mine")
        client.close()
