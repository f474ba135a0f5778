"""A heart: something that is done every few seconds in the background, until it is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Heart:
    """Calls `beat` every `interval` seconds; an interval of 0 is a heart that does not beat."""

    def __init__(self, interval: float, beat: Callable[[], None]) -> None:
        self._interval, self._beat = interval, beat
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="andon-heart", daemon=True)
        if interval > 0:
            self._thread.start()

    def close(self) -> None:
        """Stop; safe to call twice."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._beat()
