"""A background thread that sends heartbeats."""

import threading
from collections.abc import Callable


class HeartbeatThread:
    """Calls `beat` every `interval` seconds until it is closed; with an interval of 0, never."""

    def __init__(self, interval: float, beat: Callable[[], None]) -> None:
        self._interval, self._beat = interval, beat
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="andon-heartbeat", daemon=True)
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
