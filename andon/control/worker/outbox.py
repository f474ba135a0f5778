"""What a worker says to its coordinator. While the coordinator is gone, what matters waits; when it is back, it hears
that, and once more what was said of steps just before, which may have been lost with it."""

import threading
from collections import deque
from typing import Any, Final

from andon.control.link import ControlLink

WAITS: Final = ("event", "commit", "back", "part", "failed", "bye")
"""Kinds of messages that wait for a coordinator that is gone; the others mean nothing later."""
MOST_WAITING: Final = 100_000
RECENT: Final = 8192
"""Messages about steps that are said again, as many as may be lost in a link until its silence is noticed; the
coordinator knows which of them it has heard."""


class Outbox:
    """Messages on their way to a coordinator; any thread may send them."""

    def __init__(self, link: ControlLink) -> None:
        self.link: ControlLink | None = link
        self._recent: deque[tuple[str, dict[str, Any]]] = deque(maxlen=RECENT)
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MOST_WAITING)
        self._turn = threading.Lock()

    def send(self, kind: str, fields: dict[str, Any]) -> None:
        """Queue a message, or keep it until the coordinator is back."""
        with self._turn:
            if self.link is None:
                if kind in WAITS:
                    self._waiting.append((kind, fields))
                return
            self.link.queue(kind, **fields)
            if kind == "commit" or (kind == "event" and fields["event"]["event"] == "step"):
                self._recent.append((kind, fields))

    def lose_link(self) -> None:
        """The coordinator is gone."""
        with self._turn:
            self.link = None

    def take_link(self, link: ControlLink) -> None:
        """The coordinator is back."""
        with self._turn:
            for kind, fields in [*self._recent, *self._waiting]:
                link.queue(kind, **fields)
            self._waiting.clear()
            self.link = link
