"""The server of a star in a process of its own: `star_process` starts it, `main` runs in it.

The first line of its standard input is the token that workers must show; it prints its address as JSON, or why it has
none; and it ends when its standard input ends.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

from andon.errors import UserError


@contextlib.contextmanager
def star_process(host: str, world_size: int, timeout: float) -> Iterator[tuple[str, int, str]]:
    """Run the server for as long as the context lasts; its host, port and token."""
    command = [sys.executable, "-m", "andon.cluster.star_process", host, str(world_size), str(timeout)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    assert process.stdin is not None and process.stdout is not None
    token = secrets.token_hex(16)
    try:
        print(token, file=process.stdin, flush=True)
        line = process.stdout.readline()
        address = json.loads(line) if line else f"Its process ended with {process.wait()}"
        if isinstance(address, str):
            remedy = "Choose an address of this machine, or try --group.transport ring"
            raise UserError(f"The server of the star cannot listen at {host}", address, remedy)
        yield address[0], address[1], token
    finally:
        process.kill()
        process.communicate()


def main(host: str, world_size: int, timeout: float) -> None:
    """Print the address, then serve until the workers have left."""
    from andon.transport.tcp.star_server import StarServer

    # A batch system signals every process; the workers need this one until they have saved.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    token = sys.stdin.readline().strip()
    try:
        server = StarServer((host, 0), world_size, timeout, token)
    except OSError as error:
        print(json.dumps(error.strerror or str(error)), flush=True)
        return
    print(json.dumps(server.address), flush=True)
    threading.Thread(target=_end_with_input, daemon=True).start()
    server.serve()


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
