"""The watch: how every rank learns who failed, and that it was that one and no other.

Beside the connections that carry data, each pair of peers keeps a *watch link* on which a small thread says
"I am alive and have begun so many operations" a few times per timeout. A killed process closes its links, so
everyone sees it go at once. A stopped one falls silent; a slow one has begun fewer operations than the rest.
Whoever notices a failure first makes it the *verdict* and tells the others before it leaves; the first
verdict stands, and it *cuts* the data connections, which wakes a rank that waits for data. So a rank that
merely waits for someone who waits is never blamed.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from andon.transport.base import GroupError, GroupTimeout, PeerLost, ProtocolError
from andon.transport.tcp.frames import Alive, Broken, Leaving, Message, decode, frame
from andon.transport.tcp.stream import Flow, FlowBroken, FlowRefused, FlowStalled, Listening, read_frame, run

LONGEST: Final = 1 << 16
GRACE: Final = 0.5
"""How long a failed data connection waits for the watch to say who is to blame."""


class Watch:
    """Watches the peers of one rank; `links` has a connection for each of them, `data` is what to cut."""

    def __init__(
        self, links: Mapping[int, socket.socket], data: Sequence[socket.socket], timeout: float
    ) -> None:
        self.timeout = timeout
        self._links, self._data = dict(links), list(data)
        self._operations = 0
        self._closed = False
        self._begun = dict.fromkeys(links, 0)
        self._heard = dict.fromkeys(links, time.monotonic())
        self._listening = {
            peer: Listening(link, peer, self._messages_of(peer)) for peer, link in links.items()
        }
        self._left: set[int] = set()
        self._verdict: Broken | None = None
        self._news = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._wake, waker = socket.socketpair()
        self._selector.register(waker, selectors.EVENT_READ, None)
        for peer, link in self._links.items():
            link.setblocking(False)
            self._selector.register(link, selectors.EVENT_READ, peer)
        self._waker = waker
        self._thread = threading.Thread(target=self._run, name="andon-watch", daemon=True)
        self._thread.start()

    def carry(self, flows: Sequence[Flow], operation: str, patience: float = 0.0) -> None:
        """Run the flows of an operation; if they fail, blame the right peer."""
        started = time.monotonic()
        try:
            run(flows, self.timeout)
        except FlowBroken as broken:
            raise self.lost(
                broken.flow.peer, operation, time.monotonic() - started, broken.detail
            ) from broken
        except FlowStalled as stall:
            raise self.stalled(stall.flow.peer, operation, patience) from stall
        except FlowRefused as refused:
            raise self.refuse(refused.flow.peer, refused.detail, operation) from refused

    def begin(self, operation: str) -> None:
        """An operation begins; raises if the group is broken already."""
        self._operations += 1
        if self._verdict:
            raise self._error(self._verdict, operation, 0.0)

    def lost(self, peer: int, operation: str, seconds: float, detail: str) -> GroupError:
        """What to raise when the data connection to a peer failed."""
        if self.has_left(peer):
            detail = "it left the group"
        return self._settle(Broken("lost", peer, detail), operation, seconds)

    def has_left(self, peer: int) -> bool:
        """Whether a peer whose connection ended left on purpose, and the group is not broken."""
        with self._news:
            self._news.wait_for(lambda: self._verdict or peer in self._left, GRACE)
            return peer in self._left and not self._verdict

    def stalled(self, peer: int, operation: str, patience: float = 0.0) -> GroupError:
        """What to raise when nothing moved for the timeout while waiting for a peer.

        With patience, a peer that does answer is given that long to say whom it waits for itself."""
        now = time.monotonic()
        silent = max(self._links, key=lambda rank: now - self._heard[rank])
        slowest = min(self._links, key=lambda rank: self._begun[rank])
        if now - self._heard[silent] > self.timeout / 2:
            verdict = Broken("stalled", silent, "it does not answer")
        elif self._await_verdict(patience) and self._verdict:
            verdict = self._verdict
        elif self._begun[slowest] < self._operations:
            verdict = Broken("stalled", slowest, "it has not begun the operation")
        else:
            verdict = Broken("stalled", peer, "")
        return self._settle(verdict, operation, self.timeout)

    def refuse(self, peer: int, detail: str, operation: str) -> GroupError:
        """What to raise when a peer broke the protocol."""
        return self._settle(Broken("protocol", peer, detail), operation, 0.0)

    @property
    def peers(self) -> list[int]:
        """Everyone whom this rank watches."""
        return list(self._links)

    def close(self) -> None:
        """Tell the peers that this is a departure, not a failure, and stop; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._tell(Leaving())
        self._wake.close()
        self._thread.join()
        self._selector.close()
        self._waker.close()
        for link in self._links.values():
            link.close()

    def _await_verdict(self, seconds: float) -> bool:
        with self._news:
            return bool(self._news.wait_for(lambda: self._verdict, seconds))

    def _settle(self, verdict: Broken, operation: str, seconds: float) -> GroupError:
        with self._news:
            first = self._verdict is None
            if first:
                # Told before it can be seen: whoever sees it may leave, and that must not be heard first.
                self._tell(verdict)
                self._verdict = verdict
            settled = self._verdict or verdict
            self._news.notify_all()
        if first:
            for sock in self._data:
                _cut(sock)
        return self._error(settled, operation, seconds)

    def _error(self, verdict: Broken, operation: str, seconds: float) -> GroupError:
        if verdict.cause == "lost":
            return PeerLost(verdict.rank, operation, seconds, verdict.detail)
        if verdict.cause == "stalled":
            return GroupTimeout(verdict.rank, operation, seconds or self.timeout, verdict.detail)
        return ProtocolError(f"rank {verdict.rank} broke the protocol in {operation}: {verdict.detail}")

    def _tell(self, message: Message) -> None:
        data = frame(message)
        for link in self._links.values():
            # A link that takes no more is that of a silent peer; of one that failed the reading side learns.
            with suppress(OSError):
                link.send(data)

    def _run(self) -> None:
        period = min(1.0, self.timeout / 5)
        beat = 0.0
        while True:
            now = time.monotonic()
            if now >= beat:
                self._tell(Alive(self._operations))
                beat = now + period
            for key, _ in self._selector.select(beat - now):
                if key.data is None:
                    return
                self._listen(key.data)

    def _listen(self, peer: int) -> None:
        try:
            while self._listening[peer].move():
                self._heard[peer] = time.monotonic()
        except FlowRefused as refused:
            self._selector.unregister(self._links[peer])
            self._settle(Broken("protocol", peer, refused.detail), "watch", 0.0)
        except FlowBroken:
            self._selector.unregister(self._links[peer])
            if peer not in self._left:
                self._settle(Broken("lost", peer, "its connection was closed"), "watch", 0.0)

    def _messages_of(self, peer: int) -> Generator[memoryview, None, None]:
        while True:
            payload = yield from read_frame(LONGEST)
            self._hear(peer, decode(payload))

    def _hear(self, peer: int, message: Message) -> None:
        if isinstance(message, Alive):
            self._begun[peer] = message.operations
        elif isinstance(message, Leaving):
            with self._news:
                self._left.add(peer)
                self._news.notify_all()
        elif isinstance(message, Broken):
            self._settle(message, "watch", 0.0)
        else:
            raise ProtocolError(f"a watch link is not for {type(message).__name__}")


def _cut(sock: socket.socket) -> None:
    """End a connection without closing it, so that whoever waits for it wakes up."""
    with suppress(OSError):  # the peer may have been faster
        sock.shutdown(socket.SHUT_RDWR)
