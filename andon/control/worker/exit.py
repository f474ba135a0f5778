"""How a worker ends when nothing else ends it: a last line in its log, then the exit of its process."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from andon.errors import EXIT_USER_ERROR, harmless

LOG_SECONDS = 5.0  # how long writing to the log may take
LEAVE_SECONDS = 2.0  # time for a worker to end in an orderly way when another one is lost


def end_soon(rank: int, why: str, has_left: Callable[[], bool]) -> None:
    """End this process after `LEAVE_SECONDS`, unless it has left by then: it may compute, or wait for a lost peer."""

    def end() -> None:
        time.sleep(LEAVE_SECONDS)
        if not has_left():
            log(f"Rank {rank} on {socket.gethostname()} ends: {why}")
            os._exit(EXIT_USER_ERROR)

    threading.Thread(target=end, name="andon-end", daemon=True).start()


def log(text: str) -> None:
    """Write to this worker's log, but do not wait for a disk that hangs; the coordinator receives the same text."""

    def write() -> None:
        with contextlib.suppress(OSError):
            print(harmless(text), file=sys.stderr, flush=True)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(LOG_SECONDS)
