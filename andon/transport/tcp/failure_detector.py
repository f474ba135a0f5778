"""The failure detector: all ranks agree on which peer failed.

Besides the connections for data, each pair of peers has a *heartbeat link*. A background thread sends "I am alive and
have begun n operations" on every link a few times per timeout. The link of a killed process is closed, so its peers
notice at once; a stopped process falls silent; a slow one has begun fewer operations than the others. The rank that
first notices a failure publishes it as the *verdict* on all its links, before it leaves. The first verdict is final. It
shuts down the data connections, which wakes a rank that waits for data. So a rank that only waits for another waiting
rank is never blamed.
"""

import selectors
import socket
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from andon.transport.base import GroupError, GroupTimeout, PeerLost, ProtocolError, peer_name
from andon.transport.tcp.frames import Alive, Broken, Leaving, Message, decode, frame
from andon.transport.tcp.stream import MessageReader, Stream, StreamFailed, move_all, read_frame

MAX_MESSAGE_BYTES: Final = 1 << 16
DEAD_AFTER: Final = 5.0
"""Seconds of silence on a heartbeat link after which a peer counts as lost."""
POLL_SECONDS: Final = 0.25
"""How often the thread looks for silent peers, if nothing else wakes it."""
GRACE_SECONDS: Final = 0.5
"""How long to wait for a peer's verdict after a data connection has failed."""


class FailureDetector:
    """The detector of one rank. It owns the heartbeat links to the peers, `links`, and the data connections."""

    def __init__(self, links: Mapping[int, socket.socket], data: Sequence[socket.socket], timeout: float) -> None:
        self.links, self.timeout = links, timeout
        self._data, self._operations, self._closed = data, 0, False
        self._begun = dict.fromkeys(links, 0)
        self._last_seen = dict.fromkeys(links, time.monotonic())
        self._seen: set[int] = set()
        self._readers = {peer: MessageReader(link, peer, self._handle_messages(peer)) for peer, link in links.items()}
        self._left: set[int] = set()
        self._verdict: Broken | None = None
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._stop, self._stopped = socket.socketpair()
        self._selector.register(self._stopped, selectors.EVENT_READ, None)
        for peer, link in links.items():
            link.setblocking(False)
            self._selector.register(link, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._run, name="andon-heartbeat", daemon=True)
        self._thread.start()

    def run(self, streams: Sequence[Stream], operation: str, patience: float = 0.0) -> None:
        """Move the streams of an operation; if they fail, raise an error that names the right peer."""
        started = time.monotonic()
        try:
            move_all(streams, self.timeout)
        except StreamFailed as failed:
            peer = failed.stream.peer
            if failed.cause == "stalled":
                raise self.stalled(peer, operation, patience) from failed
            if failed.cause == "protocol":
                raise self.refuse(peer, failed.detail, operation) from failed
            raise self.lost(peer, operation, time.monotonic() - started, failed.detail) from failed

    def watch(self, sock: socket.socket) -> None:
        """Add a data connection: a verdict shuts it down, and `close` closes it."""
        self._data = [*self._data, sock]

    def wait_for_first_heartbeat(self, peer: int, seconds: float) -> None:
        """Wait until a peer has sent a heartbeat, or the group is broken."""
        if peer in self._seen:
            return
        with self._changed:
            if not self._changed.wait_for(lambda: self._verdict or peer in self._seen, seconds):
                raise GroupTimeout(peer, "joining", seconds, "a rank has not connected")

    def begin(self, operation: str) -> None:
        """Count an operation that begins; raises if the group is already broken."""
        self._operations += 1
        if self._verdict:
            raise group_error(self._verdict, operation, 0.0, self.timeout)

    def lost(self, peer: int, operation: str, seconds: float, detail: str) -> GroupError:
        """The error to raise when the data connection to a peer failed."""
        if self.has_left(peer):
            detail = "it left the group"
        return self.publish_verdict(Broken("lost", peer, detail), operation, seconds)

    def has_left(self, peer: int) -> bool:
        """Whether a peer whose connection has ended left on purpose, and the group is not broken."""
        with self._changed:
            self._changed.wait_for(lambda: self._verdict or peer in self._left, GRACE_SECONDS)
            return peer in self._left and not self._verdict

    def stalled(self, peer: int, operation: str, patience: float = 0.0) -> GroupError:
        """The error to raise when nothing moved for the timeout while waiting for a peer.

        A peer that still sends heartbeats gets `patience` seconds to publish the rank that it waits for itself."""
        if not self.links:
            return self.publish_verdict(Broken("stalled", peer, ""), operation, self.timeout)
        now = time.monotonic()
        silent = min(self.links, key=self._last_seen.__getitem__)
        slowest = min(self.links, key=self._begun.__getitem__)
        verdict = Broken("stalled", silent, "it does not answer")
        if now - self._last_seen[silent] <= self.timeout / 2:
            with self._changed:
                self._changed.wait_for(lambda: self._verdict, patience)
            late = self._begun[slowest] < self._operations
            verdict = Broken("stalled", slowest if late else peer, "it has not begun the operation" if late else "")
        return self.publish_verdict(verdict, operation, self.timeout)

    def refuse(self, peer: int, detail: str, operation: str) -> GroupError:
        """The error to raise when a peer broke the protocol."""
        return self.publish_verdict(Broken("protocol", peer, detail), operation, 0.0)

    def publish_verdict(self, verdict: Broken, operation: str, seconds: float) -> GroupError:
        """Make a failure the verdict unless there is one, send it to all peers, and return the error to raise."""
        with self._changed:
            first = self._verdict is None
            if first:
                # Send before setting it: a rank that sees the verdict may leave, and peers that see it leave before
                # they see the verdict would blame it.
                self._send_to_all(verdict)
                self._verdict = verdict
            published = self._verdict or verdict
            self._changed.notify_all()
        if first:
            for sock in self._data:
                with suppress(OSError):  # the peer may have closed it first
                    _shut_down(sock)
        return group_error(published, operation, seconds, self.timeout)

    def abort(self, rank: int, detail: str) -> None:
        """Publish the verdict that a rank is lost."""
        self.publish_verdict(Broken("lost", rank, detail), "a heartbeat", 0.0)

    def close(self) -> None:
        """Notify the peers that this rank leaves on purpose, and close all connections; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._send_to_all(Leaving())
        self._stop.close()
        self._thread.join()
        self._selector.close()
        self._stopped.close()
        for sock in (*self.links.values(), *self._data):
            sock.close()

    def _send_to_all(self, message: Message) -> None:
        data = frame(message)
        for link in self.links.values():
            # A link with a full buffer belongs to a silent peer; a broken link is noticed when it is read.
            with suppress(OSError):
                link.send(data)

    def _run(self) -> None:
        period = min(1.0, self.timeout / 5)
        next_heartbeat, last_turn = 0.0, time.monotonic()
        while True:
            now = time.monotonic()
            self._find_silent(now, was_asleep=now - last_turn > 1.0)
            last_turn = now
            if now >= next_heartbeat:
                self._send_to_all(Alive(self._operations))
                next_heartbeat = now + period
            for key, _ in self._selector.select(min(POLL_SECONDS, next_heartbeat - now)):
                if key.data is None:
                    return
                self._receive(key.data)

    def _find_silent(self, now: float, was_asleep: bool) -> None:
        """Publish a peer that has been silent for too long. If this process was asleep itself, all peers get more
        time: their heartbeats have not been read yet."""
        for peer in self.links:
            if was_asleep:
                self._last_seen[peer] = now
            elif peer in self._left or peer not in self._seen or self._verdict:
                continue
            elif now - self._last_seen[peer] > DEAD_AFTER:
                seconds = now - self._last_seen[peer]
                verdict = Broken("lost", peer, f"it has been silent for {seconds:.1f} s")
                self.publish_verdict(verdict, "a heartbeat", seconds)

    def _receive(self, peer: int) -> None:
        try:
            while self._readers[peer].move():
                self._last_seen[peer] = time.monotonic()
                if peer not in self._seen:
                    with self._changed:
                        self._seen.add(peer)
                        self._changed.notify_all()
        except StreamFailed as failed:
            self._selector.unregister(self.links[peer])
            if failed.cause == "protocol":
                self.refuse(peer, failed.detail, "a heartbeat")
            elif peer not in self._left:
                self.publish_verdict(Broken("lost", peer, "its connection was closed"), "a heartbeat", 0.0)

    def _handle_messages(self, peer: int) -> Generator[memoryview, None, None]:
        while True:
            message = decode((yield from read_frame(MAX_MESSAGE_BYTES)))
            if isinstance(message, Alive):
                self._begun[peer] = message.operations
            elif isinstance(message, Leaving):
                with self._changed:
                    self._left.add(peer)
                    self._changed.notify_all()
            elif isinstance(message, Broken):
                self.publish_verdict(message, "a heartbeat", 0.0)
            else:
                raise ProtocolError(f"{type(message).__name__} does not belong on a heartbeat link")


def group_error(verdict: Broken, operation: str, seconds: float, timeout: float = 0.0) -> GroupError:
    """The error to raise after a verdict; a stall that another rank reported took `timeout` seconds."""
    if verdict.cause == "lost":
        return PeerLost(verdict.rank, operation, seconds, verdict.detail)
    if verdict.cause == "stalled":
        return GroupTimeout(verdict.rank, operation, seconds or timeout, verdict.detail)
    return ProtocolError(f"{peer_name(verdict.rank)} broke the protocol in {operation}: {verdict.detail}")


def _shut_down(sock: socket.socket) -> None:
    """End both directions of a connection, below TLS: another thread may be using it."""
    socket.socket.shutdown(sock, socket.SHUT_RDWR)
