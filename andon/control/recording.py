"""Passes the coordinator's events to the run's files and the terminal, in a background thread, so that a slow disk or
terminal delays no worker."""

import json
import threading
from collections.abc import Callable
from queue import SimpleQueue

from andon.run.records.events import Emit, Event

MAX_WAITING_BYTES = 64 << 20  # of events that a disk or terminal has not taken yet


class Recording:
    """Passes events to `record`; calls `fail` with the error if that fails, and with None if it is too slow."""

    def __init__(self, record: Emit, fail: Callable[[OSError | None], None]) -> None:
        self._record, self._fail = record, fail
        self._events: SimpleQueue[tuple[Event, int] | None] = SimpleQueue()
        self._waiting_bytes, self._lock = 0, threading.Lock()
        self._thread = threading.Thread(target=self._pass_on, name="andon-record", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        """Queue an event; any thread may call it."""
        size = len(json.dumps(event))
        with self._lock:
            self._waiting_bytes += size
            full = self._waiting_bytes > MAX_WAITING_BYTES
        if full:
            self._fail(None)
        else:
            self._events.put((event, size))

    def close(self, seconds: float) -> None:
        """Pass on the events that wait, but wait no longer than `seconds`."""
        self._events.put(None)
        self._thread.join(seconds)

    def _pass_on(self) -> None:
        while waiting := self._events.get():
            event, size = waiting
            with self._lock:
                self._waiting_bytes -= size
            try:
                self._record(event)
            except OSError as error:
                self._fail(error)
