"""The coordinator: knows the workers, hands out ranks and the configuration, lets them find each other.

It holds no weights and sees no gradient. Each worker has one thread here that reads its control link.
"""

from __future__ import annotations

import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import andon
from andon.cluster.control import ControlLink, Message
from andon.errors import UserError
from andon.group.base import GroupError, ProtocolError
from andon.group.link import Link
from andon.metrics import Emit, event

FREE_SPACE = "Free some space or choose another --run.dir; the checkpoints are intact"


class Coordinator:
    """Serves the workers of one run; `on_event` is told what happens."""

    def __init__(
        self, welcome: dict[str, Any], world_size: int, on_event: Emit, host: str = "127.0.0.1"
    ) -> None:
        self.welcome, self.world_size, self.on_event = welcome, world_size, on_event
        self.failures: list[UserError] = []
        self._words: dict[str, dict[int, str]] = defaultdict(dict)
        self._links: dict[int, ControlLink] = {}
        self._lock = threading.RLock()
        self._stopping = False
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._start(self._accept)

    def _start(self, function: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=function, args=arguments, name="andon-coordinator", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed: the run is over
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        control = ControlLink(Link(connection, -1, timeout=10))
        try:
            rank = self._admit(control)
            while self._handle(rank, control.receive()):
                pass
        except OSError as error:  # from whoever records the events: the disk is full, the folder is gone
            with self._lock:
                self.failures.append(UserError("The run's events cannot be written", str(error), FREE_SPACE))
            self.stop()
        except GroupError as error:
            # The worker's process is watched by whoever started it; here only the connection ends.
            self.on_event(event("link", detail=str(error)))
        finally:
            control.close()

    def _admit(self, control: ControlLink) -> int:
        hello = control.receive()
        if hello["kind"] != "hello":
            raise ProtocolError(f"a connection opened with {hello['kind']!r}, not with 'hello'")
        with self._lock:
            refusal = None
            if hello.get("version") != andon.__version__:
                refusal = (
                    f"this coordinator runs Andon {andon.__version__}, the worker {hello.get('version')}"
                )
            elif len(self._links) >= self.world_size:
                refusal = f"all {self.world_size} ranks are taken"
            if refusal:
                control.send("refused", reason=refusal)
                raise ProtocolError(f"a worker on {hello.get('host')} was refused: {refusal}")
            wanted = hello.get("rank")
            rank = wanted if wanted is not None else min(set(range(self.world_size)) - self._links.keys())
            control.link.peer = rank
            control.link.socket.settimeout(None)
            self._links[rank] = control
        control.send("welcome", rank=rank, world_size=self.world_size, **self.welcome)
        self.on_event(event("worker", rank=rank, pid=hello.get("pid"), host=hello.get("host")))
        return rank

    def _handle(self, rank: int, message: Message) -> bool:
        match message["kind"]:
            case "event":
                self.on_event(message["event"])
            case "word":
                self._hear(rank, message["topic"], message["word"])
            case "failed":
                with self._lock:
                    self.failures.append(UserError(message["what"], message["cause"], message["remedy"]))
            case "bye":
                return False
            case other:
                raise ProtocolError(f"rank {rank} sent a message of unknown kind {other!r}")
        return True

    def _hear(self, rank: int, topic: str, word: str) -> None:
        with self._lock:
            words = self._words[topic]
            words[rank] = word
            if len(words) == self.world_size:
                del self._words[topic]
                for link in self._links.values():
                    link.send("words", topic=topic, words=[words[each] for each in range(self.world_size)])

    def stop(self) -> None:
        """Ask every worker to save and leave after the current step."""
        with self._lock:
            for link in self._links.values():
                link.send("stop")

    def close(self) -> None:
        """Stop listening."""
        # shutdown wakes the thread that waits in accept; close alone would leave it there.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
