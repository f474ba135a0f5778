"""A coordinator in the process of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from andon.control.coordinator import Coordinator
from andon.control.generations.server import Serve
from andon.control.generations.succession import GoesOn
from andon.control.token import Credentials
from andon.control.worker.client import CoordinatorClient
from andon.control.worker.join import join
from andon.run.records.events import Emit, no_event
from andon.run.records.ledger import Ledger
from andon.transport.tcp.entrance.tls import Tls

JOB: dict[str, Any] = {"config": {"run": {"dir": "here"}}, "data": "digest", "folder_mark": "mark", "tokens": "nowhere"}
READY = {"data": "digest", "folder": "mark"}
TOKEN = "the token of the tests"


@contextmanager
def coordinator_of(
    world_size: int,
    on_event: Emit = no_event,
    job: dict[str, Any] = JOB,
    tls: Tls | None = None,
    goes_on: bool = False,
    server: Serve | None = None,
) -> Iterator[Coordinator]:
    """The coordinator of a run, which has one generation unless it `goes_on`."""
    with TemporaryDirectory() as folder, closing(Ledger(Path(folder), 0)) as ledger:
        what = GoesOn(1, 60.0, ledger, server, possible=goes_on)
        with closing(Coordinator(job, world_size, on_event, Credentials(TOKEN, tls), what)) as coordinator:
            yield coordinator


def members_of(coordinator: Coordinator, world_size: int) -> list[CoordinatorClient]:
    """Workers with all ranks of the first generation, by rank."""
    clients = [join(coordinator.address, TOKEN, rank)[1] for rank in range(world_size)]
    for client in clients:
        client._leaving = True  # the loss of another one must not end the tests
        client.enter(READY)
    assert all(client.wait_for_generation() for client in clients)
    return clients
