"""The gradient server of a `star` run, in a process of its own.

Its standard input begins with the token that workers must know, and when it ends, so does the server.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from andon.transport.tcp.star_server import StarServer


def main(host: str, world_size: int, timeout: float) -> None:
    """Say where I listen, then serve until the workers are gone."""
    # A batch system signals every process; the workers need this one until they have saved.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    server = StarServer((host, 0), world_size, timeout, token=sys.stdin.readline().strip())
    print(*server.address, flush=True)
    threading.Thread(target=_end_with_input, daemon=True).start()
    server.serve()


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
