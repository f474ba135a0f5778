"""Events on their way from the coordinator to the run's files and the terminal.

A thread of its own passes them on, so that a slow disk or terminal holds up nobody.
"""

import json
import threading
from collections.abc import Callable
from queue import SimpleQueue

from andon.run.records.events import Emit, Event

MOST_WAITING = 64 << 20  # bytes of events that may wait for a disk or a terminal


class Recording:
    """Passes events on to `record`; `fail` is told if that is too slow (None) or fails."""

    def __init__(self, record: Emit, fail: Callable[[OSError | None], None]) -> None:
        self._record, self._fail = record, fail
        self._events: SimpleQueue[tuple[Event, int] | None] = SimpleQueue()
        self._waiting, self._counting = 0, threading.Lock()
        self._thread = threading.Thread(target=self._pass_on, name="andon-record", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        """Pass an event on, later; any thread may call it."""
        size = len(json.dumps(event))
        with self._counting:
            self._waiting += size
            full = self._waiting > MOST_WAITING
        if full:
            self._fail(None)
        else:
            self._events.put((event, size))

    def close(self, seconds: float) -> None:
        """Pass on what waits, if that takes no longer."""
        self._events.put(None)
        self._thread.join(seconds)

    def _pass_on(self) -> None:
        while waiting := self._events.get():
            event, size = waiting
            with self._counting:
                self._waiting -= size
            try:
                self._record(event)
            except OSError as error:
                self._fail(error)
