"""The servers that some transports need, in threads of the process that starts a benchmark's ranks."""

import threading
from contextlib import suppress

from andon.errors import UserError
from andon.protocol2.server import GradientServer
from andon.protocol2.wire.dialogue import Dialogue
from andon.transport.base import GroupError
from andon.transport.keys import SERVER, LinkKeys
from andon.transport.registry import TRANSPORTS, Transport
from andon.transport.tcp.star_server import StarServer

JOIN_SECONDS = 60.0


def find_transport(name: str) -> Transport:
    """Find a transport by its name, which may end in `:bf16`."""
    if found := TRANSPORTS.get(name.partition(":")[0]):
        return found
    cause = f"Transports: {', '.join(TRANSPORTS)}"
    raise UserError(f"There is no transport {name!r}", cause, "Choose one of these")


def check_needs_no_server(name: str) -> None:
    """Refuse a transport for which a benchmark would have to start a server."""
    transport = find_transport(name)
    if transport.needs_server or transport.joins_server:
        cause = "Its ranks exchange with a server, and this benchmark starts none"
        remedy = f"`andon bench transport --transports {name}`, or another --transport"
        raise UserError(f"This benchmark cannot use {name}", cause, remedy)


def start_server(name: str, ranks: int, token: str) -> int | None:
    """Start the server of a transport and return its port; None if it needs no server."""
    transport = find_transport(name)
    if transport.needs_server:
        keys = LinkKeys.derive(token.encode(), SERVER, ranks)
        star = StarServer(("127.0.0.1", 0), ranks, timeout=JOIN_SECONDS, keys=keys)
        threading.Thread(target=star.serve, daemon=True).start()
        return star.address[1]
    if transport.joins_server:
        server = GradientServer()
        threading.Thread(target=_average, args=(server, ranks), daemon=True).start()
        return server.address[1]
    return None


def _average(server: GradientServer, ranks: int) -> None:
    dialogue = Dialogue()
    with server, suppress(GroupError):  # the ranks have left, or report the error themselves
        server.wait_for_workers(ranks, JOIN_SECONDS)
        while True:
            server.broadcast(server.collect(dialogue))
