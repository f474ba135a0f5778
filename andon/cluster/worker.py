"""A worker: joins a coordinator, learns the configuration and its rank, and trains."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import andon
from andon.cluster.control import COORDINATOR, ControlLink, Message
from andon.config.schema import Config
from andon.data.token_set import TokenSet
from andon.errors import UserError
from andon.run.events import Event
from andon.run.folder import read_mark
from andon.transport.base import GroupError, GroupTimeout
from andon.transport.tcp.connect import Link

EXIT_USER_ERROR = 1
EXIT_HALTED = 3
START_AGAIN = "The same command goes on from the newest checkpoint"
LOGGING = 5.0  # seconds that the log may take
WAIT_FOR_ALL = 600.0  # seconds until every worker must have joined


class Membership:
    """This worker's place in a run: its rank, and the coordinator's ear."""

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
            # Without a coordinator nobody would end this process: leave, the last checkpoint stands.
            _log(f"rank {self.rank}: the coordinator is gone ({error})")
            os._exit(EXIT_USER_ERROR)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first Ctrl-C or SIGTERM: all workers save and leave after this step. The second ends this one.

        A system that shuts down, or a batch system, signals every process and not the launcher alone."""
        signal.signal(number, signal.SIG_DFL)
        self.stop.set()

    def exchange(self, topic: str, mine: str) -> list[str]:
        """Send the coordinator my value for a topic and get everyone's, by rank."""
        started = time.monotonic()
        self.control.send("value", topic=topic, value=mine)
        try:
            heard, values = self._values.get(timeout=self.timeout)
        except queue.Empty:
            raise GroupTimeout(COORDINATOR, f"waiting for '{topic}'", time.monotonic() - started) from None
        assert heard == topic, (heard, topic)
        return values

    def leave(self, code: int) -> None:
        """Say goodbye: from here on the coordinator may go."""
        self._leaving = True
        self.control.send("bye", code=code)

    def emit(self, said: Event) -> None:
        """Report an event."""
        self.control.send("event", event=said)


def join(host: str, port: int, rank: int | None, tokens_of: Callable[[Config, Message], TokenSet]) -> int:
    """Join the coordinator at host:port, take part in its run, and give the exit code."""
    control = ControlLink(Link.connect(host, port, COORDINATOR, timeout=10))
    control.send("hello", version=andon.__version__, host=socket.gethostname(), pid=os.getpid(), rank=rank)
    plan = _answer(control, "plan")
    config = Config.model_validate(plan["config"])
    try:
        tokens = tokens_of(config, plan)
    except UserError as error:
        control.send("failed", what=error.what, cause=error.cause, remedy=error.remedy)
        raise
    control.send("ready", data=tokens.digest, folder=read_mark(config.run.dir))
    membership = Membership(control, _answer(control, "welcome"), WAIT_FOR_ALL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, membership.on_signal)
    code = EXIT_USER_ERROR
    try:
        code = _work(config, tokens, plan, membership)
    except UserError as error:
        control.send("failed", what=error.what, cause=error.cause, remedy=error.remedy)
        _log(str(error))
    except GroupError as error:
        what = f"Rank {membership.rank} on {socket.gethostname()} stopped: {error}"
        control.send("failed", what=what, cause="A worker died or cannot be reached", remedy=START_AGAIN)
        _log(traceback.format_exc())
    except Exception as error:
        what = f"Rank {membership.rank} on {socket.gethostname()} stopped: {type(error).__name__}: {error}"
        control.send(
            "failed", what=what, cause="This was not expected", remedy=f"Its traceback is in {plan['log']}"
        )
        _log(traceback.format_exc())
    membership.leave(code)
    return code


def _work(config: Config, tokens: TokenSet, plan: dict[str, Any], membership: Membership) -> int:
    """Train as one rank of a run; torch is loaded here and not before."""
    from andon.cluster.session import open_configured, train
    from andon.integrity.halt import JidokaHalt

    group = open_configured(config, membership, membership.host, _reachable(plan["server"], membership))
    resume = Path(plan["resume"]) if plan["resume"] else None
    try:
        train(config, tokens, group, resume, membership.emit, membership.stop.is_set)
    except JidokaHalt as halt:
        _log(str(halt))
        return EXIT_HALTED
    return 0


def _reachable(server: list[Any] | None, membership: Membership) -> list[Any] | None:
    """The address of the star's server; one that listens everywhere is where the coordinator is."""
    if server and server[0] in ("0.0.0.0", "::"):
        return [membership.control.link.socket.getpeername()[0], *server[1:]]
    return server


def _log(text: str) -> None:
    """Write to the log of this worker, which may lie on a disk that is full or hangs: it is no loss, for the
    coordinator hears it too."""

    def write() -> None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(LOGGING)


def _answer(control: ControlLink, expected: str) -> Message:
    answer = control.receive()
    if answer["kind"] == "refused":
        raise UserError(
            "The coordinator refused this worker", answer["reason"], "Put that right and start it again"
        )
    assert answer["kind"] == expected, answer
    return answer


def main(arguments: Sequence[str]) -> int:
    """One worker of `andon train`: the coordinator's address and the rank come as arguments."""
    faulthandler.enable()
    host, port, rank = arguments
    return join(host, int(port), int(rank), lambda config, plan: TokenSet.open(Path(plan["tokens"])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
