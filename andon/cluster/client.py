"""A coordinator's client: the handshake that gives a process its rank, then rendezvous, events, the wish to stop."""

import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

from andon.cluster.control import COORDINATOR, ControlLink, Message
from andon.errors import EXIT_USER_ERROR, UserError, harmless
from andon.run.events import Event
from andon.transport.base import GroupError, GroupTimeout
from andon.transport.tcp.connect import Link
from andon.version import VERSION

LOG_SECONDS = 5.0  # how long writing to the log may take
JOIN_SECONDS = 600.0  # until every worker must have joined


class CoordinatorClient:
    """A worker's side of the control link: its rank, the rendezvous, events out and the wish to stop in."""

    def __init__(self, control: ControlLink, welcome: Message, timeout: float) -> None:
        self.control, self.timeout = control, timeout
        self.rank: int = welcome["rank"]
        self.world_size: int = welcome["world_size"]
        self.host: str = control.link.socket.getsockname()[0]
        """Where the other workers reach this one: the address that reaches the coordinator."""
        self.stop = threading.Event()
        self._leaving = False
        self._values: queue.SimpleQueue[tuple[str, list[str]]] = queue.SimpleQueue()
        control.link.socket.settimeout(None)
        threading.Thread(target=self._listen, name="andon-control", daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                message = self.control.receive()
                if message["kind"] == "values":
                    self._values.put((message["topic"], message["values"]))
                elif message["kind"] == "stop":
                    self.stop.set()
        except GroupError as error:
            if self._leaving:
                return
            # Nobody else would end this process. The newest checkpoint is complete, so it may exit at once.
            log(f"rank {self.rank}: the connection to the coordinator was lost ({error})")
            os._exit(EXIT_USER_ERROR)

    def exchange(self, topic: str, mine: str) -> list[str]:
        """The rendezvous: send this rank's value under a topic and receive every rank's, in rank order."""
        started = time.monotonic()
        self.control.send("value", topic=topic, value=mine)
        try:
            received, values = self._values.get(timeout=self.timeout)
        except queue.Empty:
            raise GroupTimeout(COORDINATOR, f"waiting for '{topic}'", time.monotonic() - started) from None
        assert received == topic, (received, topic)
        return values

    def emit(self, event: Event) -> None:
        """Report an event."""
        self.control.send("event", event=event)

    def fail(self, what: str, cause: str, remedy: str) -> None:
        """Report why this worker cannot go on."""
        self.control.send("failed", what=what, cause=cause, remedy=remedy)

    def leave(self, code: int) -> None:
        """Send the exit code; after that the coordinator may close the connection."""
        self._leaving = True
        self.control.send("bye", code=code)


def enter(
    address: tuple[str, int], rank: int | None, prepare: Callable[[Message], Mapping[str, str]]
) -> tuple[Message, CoordinatorClient]:
    """Join the coordinator at an address: its job, and the client. `prepare` makes ready for the job and gives what the
    coordinator compares: the digest of the data, and the mark of the run's folder."""
    control = ControlLink(Link.connect(*address, COORDINATOR, timeout=10))
    control.send("hello", version=VERSION, host=socket.gethostname(), pid=os.getpid(), rank=rank)
    job = _receive(control, "job")
    try:
        ready = prepare(job)
    except UserError as error:
        control.send("failed", what=error.what, cause=error.cause, remedy=error.remedy)
        raise
    control.send("ready", **ready)
    return job, CoordinatorClient(control, _receive(control, "welcome"), JOIN_SECONDS)


def log(text: str) -> None:
    """Write to this worker's log, if its disk takes it in time; the coordinator is told the same."""

    def write() -> None:
        with contextlib.suppress(OSError):
            print(harmless(text), file=sys.stderr, flush=True)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(LOG_SECONDS)


def _receive(control: ControlLink, expected: str) -> Message:
    message = control.receive()
    if message["kind"] == "refused":
        raise UserError("The coordinator refused this worker", message["reason"], "Correct that and start it again")
    assert message["kind"] == expected, message
    return message
