"""How a worker finds its coordinator: it connects, proves that it knows the token, and receives the job."""

import os
import socket
import ssl
import time
from collections.abc import Callable

from andon.control.link import Message
from andon.control.worker.client import RETRY_SECONDS, CoordinatorClient
from andon.errors import UserError
from andon.machine import machine_id
from andon.transport.base import COORDINATOR, GroupError
from andon.transport.tcp.connect import connect
from andon.transport.tcp.entrance.handshake import NotAuthenticated, Refused
from andon.transport.tcp.entrance.tls import Tls
from andon.transport.tcp.frames import Hello
from andon.version import VERSION

CONNECT_SECONDS = 10.0
ATTEMPTS = 3  # to prove that this process knows the token
Say = Callable[[str], None]


def join(
    address: tuple[str, int],
    token: str,
    rank: int | None,
    tls: Tls | None = None,
    patience: float = 0.0,
    say: Say = print,
) -> tuple[Message, CoordinatorClient]:
    """Connect to the coordinator at an address, wait for it if it is not there yet, and receive its job."""
    until, waited, refused = time.monotonic() + patience, False, 0
    while True:
        try:
            sock = connect(address, COORDINATOR, Hello(0, 0, 0, "control"), token.encode(), CONNECT_SECONDS, tls)
            break
        except NotAuthenticated as error:
            refused += 1
            if isinstance(error, Refused) and refused < ATTEMPTS:  # perhaps only because too many knock there
                time.sleep(RETRY_SECONDS)
                continue
            cause = "The token here is not that of this run, or something else listens there"
            raise UserError(f"The coordinator cannot be joined: {error}", cause, "Copy the run's token again") from None
        except GroupError as error:
            if isinstance(error.__cause__, ssl.SSLError):
                remedy = "Check --tls-ca here and --tls-cert there, or leave TLS out on both sides"
                raise UserError("TLS with the coordinator failed", str(error.__cause__), remedy) from None
            if time.monotonic() >= until:
                raise
            if not waited:
                reason = str(error).rpartition(": ")[2]
                say(f"Waiting up to {patience:.0f} s for the coordinator at {address[0]}:{address[1]} ({reason})")
                waited = True
            time.sleep(RETRY_SECONDS)
    client = CoordinatorClient(sock, token, rank)
    client.send("hello", version=VERSION, host=socket.gethostname(), machine=machine_id(), pid=os.getpid(), rank=rank)
    try:
        job = client.receive("job")
        client.goes_on = bool(job.get("goes_on"))
        if patience:  # whoever waited for the coordinator waits for it again
            hello = Hello(0, 0, 0, "control")
            client.way_back = lambda: connect(address, COORDINATOR, hello, token.encode(), CONNECT_SECONDS, tls)
        return job, client
    except BaseException:
        client.close()
        raise
