"""The messages from a worker to its coordinator. While the coordinator is gone, those that still matter later are kept.
When it is back it receives them, and again the recent ones about steps, which may have been lost with the link."""

import threading
from collections import deque
from typing import Any, Final

from andon.control.link import ControlLink

KEPT_KINDS: Final = ("event", "commit", "back", "part", "failed", "bye")
"""Messages that are kept while the coordinator is gone; the others mean nothing later."""
MAX_KEPT: Final = 100_000
MAX_RECENT: Final = 8192
"""Messages about steps that are sent again: as many as a link can lose before its silence is noticed. The coordinator
drops those that it has received before."""


class Outbox:
    """Sends messages to the coordinator, or keeps them; any thread may call it."""

    def __init__(self, link: ControlLink) -> None:
        self.link: ControlLink | None = link
        self._recent: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MAX_RECENT)
        self._kept: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MAX_KEPT)
        self._lock = threading.Lock()

    def send(self, kind: str, fields: dict[str, Any]) -> None:
        """Queue a message, or keep it until the coordinator is back."""
        with self._lock:
            if self.link is None:
                if kind in KEPT_KINDS:
                    self._kept.append((kind, fields))
                return
            self.link.queue(kind, **fields)
            if kind == "commit" or (kind == "event" and fields["event"]["event"] == "step"):
                self._recent.append((kind, fields))

    def lose_link(self) -> None:
        """Keep messages from now on: the coordinator is gone."""
        with self._lock:
            self.link = None

    def take_link(self, link: ControlLink) -> None:
        """Send the recent and the kept messages: the coordinator is back."""
        with self._lock:
            for kind, fields in [*self._recent, *self._kept]:
                link.queue(kind, **fields)
            self._kept.clear()
            self.link = link
