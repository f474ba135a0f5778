"""How a worker joins its coordinator: it connects, proves that it knows the token, and receives the job."""

import ssl
import time
from collections.abc import Callable
from functools import partial

from andon.control.link import Message
from andon.control.worker.client import RETRY_SECONDS, CoordinatorClient
from andon.errors import UserError
from andon.transport.base import COORDINATOR, GroupError
from andon.transport.tcp.connect import connect
from andon.transport.tcp.entrance.handshake import NotAuthenticated, Refused
from andon.transport.tcp.entrance.tls import Tls
from andon.transport.tcp.frames import Hello

CONNECT_SECONDS = 10.0
ATTEMPTS = 3  # to prove that this process knows the token


def join(
    address: tuple[str, int],
    token: str,
    rank: int | None,
    tls: Tls | None = None,
    patience: float = 0.0,
    notify: Callable[[str], None] = print,
) -> tuple[Message, CoordinatorClient]:
    """Connect to the coordinator at an address, wait up to `patience` seconds for it, and receive its job."""
    dial = partial(connect, address, COORDINATOR, Hello(0, 0, 0, "control"), token.encode(), CONNECT_SECONDS, tls)
    until, waited, refused = time.monotonic() + patience, False, 0
    while True:
        try:
            sock = dial()
            break
        except NotAuthenticated as error:
            refused += 1
            if isinstance(error, Refused) and refused < ATTEMPTS:  # perhaps only because of too many connections there
                time.sleep(RETRY_SECONDS)
                continue
            cause = "The token here is not that of this run, or another program listens there"
            raise UserError(f"The coordinator cannot be joined: {error}", cause, "Copy the run's token again") from None
        except GroupError as error:
            if isinstance(error.__cause__, ssl.SSLError):
                remedy = "Check --tls-ca here and --tls-cert there, or leave TLS out on both sides"
                raise UserError("TLS with the coordinator failed", str(error.__cause__), remedy) from None
            if time.monotonic() >= until:
                raise
            if not waited:
                reason = str(error).rpartition(": ")[2]
                notify(f"Waiting up to {patience:.0f} s for the coordinator at {address[0]}:{address[1]} ({reason})")
                waited = True
            time.sleep(RETRY_SECONDS)
    client = CoordinatorClient(sock, token, rank)
    client.send("hello", **client.identity())
    try:
        job = client.receive("job")
    except BaseException:
        client.close()
        raise
    client.goes_on, client.local_rank = bool(job.get("goes_on")), job["local_rank"]
    if patience:  # then it also waits for a coordinator that is restarted
        client.redial = dial
    return job, client
