"""A worker: joins a coordinator, receives the configuration and its rank, and trains."""

import contextlib
import faulthandler
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from andon.cluster.control import COORDINATOR, ControlLink, Message
from andon.cluster.signals import save_on_signal
from andon.config.schema import Config
from andon.data.token_set import TokenSet
from andon.errors import UserError
from andon.run.events import Event
from andon.run.folder import read_mark
from andon.transport.base import GroupError, GroupTimeout
from andon.transport.tcp.connect import Link
from andon.version import VERSION

EXIT_USER_ERROR = 1
EXIT_HALTED = 3
START_AGAIN = "Run the same command again: it resumes from the newest checkpoint"
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
            _log(f"rank {self.rank}: the connection to the coordinator was lost ({error})")
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


def join(host: str, port: int, rank: int | None, tokens_of: Callable[[Config, Message], TokenSet]) -> int:
    """Join the coordinator at host:port and train as one rank of its run; gives the exit code."""
    control = ControlLink(Link.connect(host, port, COORDINATOR, timeout=10))
    control.send("hello", version=VERSION, host=socket.gethostname(), pid=os.getpid(), rank=rank)
    job = _receive(control, "job")
    config = Config.model_validate(job["config"])
    try:
        tokens = tokens_of(config, job)
    except UserError as error:
        control.send("failed", what=error.what, cause=error.cause, remedy=error.remedy)
        raise
    control.send("ready", data=tokens.digest, folder=read_mark(config.run.dir))
    client = CoordinatorClient(control, _receive(control, "welcome"), JOIN_SECONDS)
    # A batch system, or a machine that shuts down, signals every process and not only the launcher.
    save_on_signal(client.stop.set)
    code, stopped = EXIT_USER_ERROR, f"Rank {client.rank} on {socket.gethostname()} stopped"
    try:
        code = _train(config, tokens, job, client)
    except UserError as error:
        client.fail(error.what, error.cause, error.remedy)
        _log(str(error))
    except GroupError as error:
        client.fail(f"{stopped}: {error}", "A worker died or cannot be reached", START_AGAIN)
        _log(traceback.format_exc())
    except Exception as error:
        what = f"{stopped}: {type(error).__name__}: {error}"
        client.fail(what, "An unexpected error", f"Its traceback is in {job['log']}")
        _log(traceback.format_exc())
    client.leave(code)
    return code


def _train(config: Config, tokens: TokenSet, job: Message, client: CoordinatorClient) -> int:
    """Train as one rank; torch is loaded here and not before."""
    from andon.cluster.session import open_configured, train
    from andon.integrity.halt import JidokaHalt

    server = job["server"]
    if server and server[0] in ("0.0.0.0", "::"):  # it listens everywhere, so also where the coordinator is
        server = [client.control.link.socket.getpeername()[0], *server[1:]]
    resume = Path(job["resume"]) if job["resume"] else None
    try:
        with open_configured(config, client, client.host, server) as group:
            train(config, tokens, group, resume, client.emit, client.stop.is_set)
    except JidokaHalt as halt:
        _log(str(halt))
        return EXIT_HALTED
    return 0


def _log(text: str) -> None:
    """Write to this worker's log, if its disk takes it in time; the coordinator is told the same."""

    def write() -> None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(LOG_SECONDS)


def _receive(control: ControlLink, expected: str) -> Message:
    message = control.receive()
    if message["kind"] == "refused":
        raise UserError("The coordinator refused this worker", message["reason"], "Correct that and start it again")
    assert message["kind"] == expected, message
    return message


def main(arguments: Sequence[str]) -> int:
    """One worker of `andon train`; its arguments are the coordinator's host and port, and the rank."""
    faulthandler.enable()
    host, port, rank = arguments
    return join(host, int(port), int(rank), lambda config, job: TokenSet.open(Path(job["tokens"])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
