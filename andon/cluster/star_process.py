"""The server of a star in a process of its own: `star_process` starts it, `main` runs in it.

The first line of its standard input is JSON with its credentials; it prints its address as JSON, or why it has none;
and it ends when its standard input ends.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict

from andon.control.token import Credentials
from andon.errors import UserError
from andon.transport.base import GroupError
from andon.transport.keys import SERVER
from andon.transport.tcp.entrance.tls import Tls


@contextlib.contextmanager
def star_process(
    host: str, world_size: int, timeout: float, credentials: Credentials, generation: int = 0
) -> Iterator[tuple[str, int]]:
    """Run the server for as long as the context lasts; its host and port."""
    command = [sys.executable, "-m", "andon.cluster.star_process", host, str(world_size), str(timeout)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    assert process.stdin is not None and process.stdout is not None
    told = {
        "token": credentials.token,
        "secret": credentials.secret.hex(),
        "tls": asdict(credentials.tls) if credentials.tls else None,
        "generation": generation,
    }
    try:
        print(json.dumps(told), file=process.stdin, flush=True)
        line = process.stdout.readline()
        address = json.loads(line) if line else f"Its process ended with {process.wait()}"
        if isinstance(address, str):
            remedy = "Choose an address of this machine, or try --group.transport ring"
            raise UserError(f"The server of the star cannot listen at {host}", address, remedy)
        yield address[0], address[1]
    finally:
        process.kill()
        process.communicate()


def main(host: str, world_size: int, timeout: float) -> None:
    """Print the address, then serve until the workers have left."""
    from andon.transport.tcp.star_server import StarServer

    # A batch system signals every process; the workers need this one until they have saved.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    told = json.loads(sys.stdin.readline())
    tls = Tls(**told["tls"]) if told["tls"] else None
    credentials = Credentials(told["token"], tls, bytes.fromhex(told["secret"]))
    keys = credentials.issue(SERVER, world_size, told["generation"]).sealed(credentials.token)
    try:
        server = StarServer((host, 0), world_size, timeout, keys, tls)
    except OSError as error:
        print(json.dumps(error.strerror or str(error)), flush=True)
        return
    print(json.dumps(server.address), flush=True)
    threading.Thread(target=_end_with_input, daemon=True).start()
    with contextlib.suppress(GroupError):  # the ranks and the coordinator say what happened
        server.serve()


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
