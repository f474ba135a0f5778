"""The server of a star in a separate process: `StarProcess` starts it, `main` runs in it.

The first line of its standard input is JSON with its credentials. Each further line is a generation and its world size.
The server then stops serving the previous generation, and prints as JSON the address at which it serves this one, or
why it cannot. It ends when its standard input ends.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from andon.control.token import Credentials
from andon.errors import UserError
from andon.transport.base import GroupError
from andon.transport.keys import SERVER
from andon.transport.tcp.entrance.tls import Tls

START_SECONDS = 120.0  # loading torch from a slow disk may take this long
ANSWER_SECONDS = 20.0


class StarProcess:
    """Starts the server and makes it serve one generation after the other; a process that has ended is replaced."""

    def __init__(self, host: str, timeout: float, credentials: Credentials) -> None:
        self.host, self.timeout, self.credentials = host, timeout, credentials
        self._closed = False
        self._serving = threading.Lock()  # held while a thread waits for answers of the process
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "andon.cluster.star_process", self.host, str(self.timeout)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        if self._closed:  # by another thread, which has killed the process before
            self._process.kill()
        token, secret, tls = self.credentials.token, self.credentials.secret.hex(), self.credentials.tls
        _send(self._process, {"token": token, "secret": secret, "tls": asdict(tls) if tls else None})
        if not _answer(self._process, START_SECONDS):  # it has loaded torch then: later answers are quick
            self._end()
            cause = f"Its process has ended, or has not loaded torch within {START_SECONDS:.0f} s"
            raise UserError("The server of the star does not start", cause, "Try --group.transport ring")

    def serve(self, generation: int, world_size: int) -> tuple[str, int]:
        """Serve a generation; returns the server's host and port."""
        with self._serving:
            line = self._ask(generation, world_size)
            if not line and not self._closed:
                self._end()
                self._start()
                line = self._ask(generation, world_size)
        address = json.loads(line) if line else "Its process has ended, or does not answer"
        if isinstance(address, str):
            remedy = "Choose an address of this machine, or try --group.transport ring"
            raise UserError(f"The server of the star cannot listen at {self.host}", address, remedy)
        return address[0], address[1]

    def _ask(self, generation: int, world_size: int) -> str:
        _send(self._process, [generation, world_size])
        return _answer(self._process, ANSWER_SECONDS)

    def close(self) -> None:
        """End the process; a thread that waits in `serve` gets an error."""
        self._closed = True
        self._process.kill()
        with self._serving:
            self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


def _answer(process: subprocess.Popen[str], seconds: float) -> str:
    """Its next line; empty if it has ended, or does not answer in time."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if ready else ""


def _send(process: subprocess.Popen[str], value: Any) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the missing answer shows that it has ended
        print(json.dumps(value), file=process.stdin, flush=True)


@contextlib.contextmanager
def star_process(
    host: str, world_size: int, timeout: float, credentials: Credentials, generation: int = 0
) -> Iterator[tuple[str, int]]:
    """Run the server of one generation while the context lasts; yields its host and port."""
    with contextlib.closing(StarProcess(host, timeout, credentials)) as process:
        yield process.serve(generation, world_size)


def main(host: str, timeout: float) -> None:
    """Serve each generation that standard input names, until standard input ends."""
    from andon.transport.tcp.star_server import StarServer

    # A batch system signals every process; the workers need this one until they have saved.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    given = json.loads(sys.stdin.readline())
    tls = Tls(**given["tls"]) if given["tls"] else None
    credentials = Credentials(given["token"], tls, bytes.fromhex(given["secret"]))
    server: StarServer | None = None
    print(flush=True)
    for line in sys.stdin:
        if server:
            server.close()
        generation, world_size = json.loads(line)
        keys = credentials.issue(SERVER, world_size, generation).sealed(credentials.token)
        try:
            server = StarServer((host, 0), world_size, timeout, keys, tls)
        except OSError as error:
            print(json.dumps(error.strerror or str(error)), flush=True)
            continue
        print(json.dumps(server.address), flush=True)
        threading.Thread(target=_serve, args=[server], daemon=True).start()
    os._exit(0)


def _serve(server: Any) -> None:
    with contextlib.suppress(GroupError, OSError):  # the ranks and the coordinator report what happened
        server.serve()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
