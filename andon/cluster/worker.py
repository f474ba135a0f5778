"""A worker: joins a coordinator, learns its rank and the configuration, and trains."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import andon
from andon.cluster.control import COORDINATOR, ControlLink
from andon.config import Config
from andon.data.tokens import TokenSet
from andon.errors import UserError
from andon.group.base import GroupError, GroupTimeout
from andon.group.link import Link
from andon.metrics import Event

EXIT_USER_ERROR = 1
EXIT_HALTED = 3


class Membership:
    """This worker's place in a run: its rank, the configuration, and the coordinator's ear."""

    def __init__(self, host: str, port: int, timeout: float, rank: int | None = None) -> None:
        self.control = ControlLink(Link.connect(host, port, COORDINATOR, timeout))
        self.control.send(
            "hello", version=andon.__version__, host=socket.gethostname(), pid=os.getpid(), rank=rank
        )
        welcome = self.control.receive()
        if welcome["kind"] == "refused":
            raise UserError(
                f"{host}:{port} refused this worker", welcome["reason"], "Install the same version"
            )
        self.rank: int = welcome["rank"]
        self.world_size: int = welcome["world_size"]
        self.welcome: dict[str, Any] = welcome
        self.timeout = timeout
        self.stop = threading.Event()
        self._leaving = False
        self._words: queue.SimpleQueue[tuple[str, list[str]]] = queue.SimpleQueue()
        self.control.link.socket.settimeout(None)
        threading.Thread(target=self._listen, name="andon-control", daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                message = self.control.receive()
                if message["kind"] == "words":
                    self._words.put((message["topic"], message["words"]))
                elif message["kind"] == "stop":
                    self.stop.set()
        except GroupError as error:
            if self._leaving:
                return
            # Without a coordinator nobody would end this process: leave, the last checkpoint stands.
            print(f"rank {self.rank}: the coordinator is gone ({error})", file=sys.stderr, flush=True)
            os._exit(EXIT_USER_ERROR)

    def exchange(self, topic: str, mine: str) -> list[str]:
        """Tell the coordinator my word on a topic and hear everyone's."""
        started = time.monotonic()
        self.control.send("word", topic=topic, word=mine)
        try:
            heard, words = self._words.get(timeout=self.timeout)
        except queue.Empty:
            raise GroupTimeout(COORDINATOR, f"waiting for '{topic}'", time.monotonic() - started) from None
        assert heard == topic, (heard, topic)
        return words

    def leave(self) -> None:
        """Say goodbye: from here on the coordinator may go."""
        self._leaving = True
        self.control.send("bye")

    def emit(self, said: Event) -> None:
        """Report an event."""
        self.control.send("event", event=said)


def main(arguments: Sequence[str]) -> int:
    """Run one worker of `andon train`: the coordinator's address and the rank come as arguments."""
    host, port, rank = arguments
    membership = Membership(host, int(port), timeout=60, rank=int(rank))
    try:
        return work(membership)
    except UserError as error:
        membership.control.send("failed", what=error.what, cause=error.cause, remedy=error.remedy)
    except Exception as error:
        traceback.print_exc()
        membership.control.send(
            "failed",
            what=f"Rank {membership.rank} on {socket.gethostname()} stopped: {type(error).__name__}: {error}",
            cause="This was not expected; the traceback is in the worker's log",
            remedy=f"Look at {membership.welcome['log'].format(rank=membership.rank)}",
        )
    return EXIT_USER_ERROR


def work(membership: Membership) -> int:
    """Train as one rank of a run; torch is loaded here and not before."""
    from andon.cluster.session import open_configured, train
    from andon.integrity.halt import JidokaHalt

    welcome = membership.welcome
    config = Config.model_validate(welcome["config"])
    tokens = TokenSet.open(Path(welcome["tokens"]))
    resume = Path(welcome["resume"]) if welcome["resume"] else None
    try:
        group = open_configured(config, membership)
        train(config, tokens, group, resume, membership.emit, membership.stop.is_set)
    except JidokaHalt:
        membership.leave()
        return EXIT_HALTED
    membership.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
