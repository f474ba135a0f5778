"""The loop: one thread that reads and writes all control links of a process.

It sends a heartbeat on every link once a second. A link is lost when its connection ends, when its peer has been silent
for `DEAD_AFTER` seconds, or when the peer breaks the protocol. After the process itself was suspended, every peer gets
another `DEAD_AFTER` seconds.
"""

import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

from andon.control.link import DEAD_AFTER, HEARTBEAT, ControlLink, Message
from andon.transport.base import ProtocolError

POLL_SECONDS: Final = 0.2
"""How often the thread looks for silent peers, if nothing else wakes it."""
DISMISS_SECONDS: Final = 1.0
"""How long a dismissed peer may take to read its last message, before its link is closed."""


class Owner(Protocol):
    """What the loop calls, always in its own thread."""

    def on_message(self, link: ControlLink, message: Message | bytes) -> None:
        """A message has arrived."""

    def on_lost(self, link: ControlLink, why: str) -> None:
        """A link is lost; the loop has dropped it."""

    def on_ready(self, data: Any) -> None:
        """Something that the owner has registered with the selector is ready."""

    def on_tick(self) -> None:
        """Called about once a second, and after `wake`."""

    def on_crash(self, error: Exception) -> None:
        """The loop has failed and ends."""

    def status(self) -> Message:
        """Further fields of a heartbeat."""


class Loop:
    """Reads, writes and watches links in a separate thread."""

    def __init__(self, owner: Owner, name: str) -> None:
        self.owner = owner
        self.selector = selectors.DefaultSelector()
        self.links: set[ControlLink] = set()
        self._dismissed: dict[ControlLink, float] = {}
        """Links that are no longer read, and when they are closed."""
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self.selector.register(self._woken, selectors.EVENT_READ, self)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, link: ControlLink) -> None:
        """Take over a link; in the loop's thread, or before `start`."""
        self.links.add(link)
        self.selector.register(link.socket, selectors.EVENT_READ, link)
        self._read(link)  # TLS may have read ahead

    def drop(self, link: ControlLink) -> None:
        """Close a link, after a last attempt to send its queue; in the loop's thread."""
        self._dismissed.pop(link, None)
        if link in self.links:
            self.links.remove(link)
            self.selector.unregister(link.socket)
            with suppress(OSError, ProtocolError):
                link.write()
            link.close()

    def dismiss(self, link: ControlLink) -> None:
        """Close a link when its peer does, or after `DISMISS_SECONDS`; in the loop's thread. If it were closed at once
        while the peer still sends, the peer could lose the last message."""
        self._dismissed[link] = time.monotonic() + DISMISS_SECONDS

    def wake(self) -> None:
        """Make the thread send what is queued; any thread and any signal handler may call it."""
        with suppress(OSError):  # full: it wakes anyway; closed: it has ended
            self._wake.send(b"\0")

    def close(self, seconds: float = 2.0) -> None:
        """End the thread as soon as all queues are sent, or after `seconds`; safe to call twice."""
        until = time.monotonic() + seconds
        self.wake()
        while self._thread.is_alive() and any(link.waiting for link in list(self.links)) and time.monotonic() < until:
            time.sleep(0.005)
        self._closed = True
        self.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._move_links()
        except Exception as error:  # nothing else notices that this thread has ended
            self.owner.on_crash(error)
            raise
        finally:
            for link in list(self.links):
                self.drop(link)
            self.selector.close()
            self._wake.close()
            self._woken.close()

    def _move_links(self) -> None:
        next_heartbeat = last_turn = time.monotonic()
        while not self._closed:
            now = time.monotonic()
            self._find_silent(now, was_asleep=now - last_turn > HEARTBEAT)
            last_turn = now
            if now >= next_heartbeat:
                self._send_heartbeats()
                next_heartbeat = now + HEARTBEAT
            for key, events in self.selector.select(POLL_SECONDS):
                self._handle(key.data, events)
            for link in list(self.links):
                self._write(link)

    def _handle(self, data: Any, events: int) -> None:
        if data is self:
            with suppress(BlockingIOError):
                self._woken.recv(1 << 16)
            self.owner.on_tick()
        elif not isinstance(data, ControlLink):
            self.owner.on_ready(data)
        elif events & selectors.EVENT_READ:
            self._read(data)

    def _find_silent(self, now: float, was_asleep: bool) -> None:
        for link in list(self.links):
            if now > self._dismissed.get(link, now):
                self.drop(link)
            elif was_asleep:
                link.last_seen = now
            elif now - link.last_seen > DEAD_AFTER:
                self._lose(link, f"it has been silent for {now - link.last_seen:.1f} s")

    def _send_heartbeats(self) -> None:
        for link in self.links:
            link.queue("alive", **self.owner.status())
        self.owner.on_tick()

    def _read(self, link: ControlLink) -> None:
        def read() -> None:
            for message in link.read():
                if link not in self._dismissed:
                    self.owner.on_message(link, message)
                if link not in self.links:  # the owner has dropped it
                    return

        self._guarded(link, read)

    def _write(self, link: ControlLink) -> None:
        if link.waiting:
            self._guarded(link, link.write)
        if link in self.links:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.waiting else 0)
            if self.selector.get_key(link.socket).events != wanted:
                self.selector.modify(link.socket, wanted, link)

    def _guarded(self, link: ControlLink, work: Callable[[], None]) -> None:
        if link not in self.links:
            return
        try:
            work()
        except (ProtocolError, OSError) as error:
            self._lose(link, error.strerror or str(error) if isinstance(error, OSError) else str(error))

    def _lose(self, link: ControlLink, why: str) -> None:
        is_awaited = link not in self._dismissed
        self.drop(link)
        if is_awaited:
            self.owner.on_lost(link, why)
