"""The coordinator: admits workers, hands out ranks and the configuration, and is their rendezvous.

It holds no weights and sees no gradient. One thread per worker reads its control link (`andon.cluster.control` has the
dialogue). A worker has *left* when it has sent its exit code, and is *lost* when its connection ended without one.
"""

import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NoReturn

from andon.cluster.control import COORDINATOR, ControlLink, Message
from andon.errors import UserError, worst
from andon.run.events import Emit, Event, cannot_write, event
from andon.transport.base import GroupError, ProtocolError
from andon.transport.tcp.connect import Link, listen
from andon.version import VERSION

POLL = 0.5  # seconds; a wait without a timeout would not let Python handle signals
HANDSHAKE_SECONDS = 10.0
PREPARE_SECONDS = 3600.0


class Coordinator:
    """Serves the workers of one run; `on_event` receives their events."""

    def __init__(self, job: Message, world_size: int, on_event: Emit, bind: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.job, self.world_size, self.on_event = job, world_size, on_event
        self.failures: list[UserError] = []
        self.codes: dict[int, int] = {}
        """The exit code of every worker that has left or was lost."""
        self._lost: list[int] = []
        self._values: dict[str, dict[int, str]] = defaultdict(dict)
        self._links: dict[int, ControlLink] = {}
        self._stopping = self._begun = False
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._listener = listen(bind, backlog=world_size + 8)
        self._listener.setblocking(True)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._start(self._accept)

    def stop(self) -> None:
        """Ask every worker to save and leave after the current step."""
        with self._lock:
            self._stopping = True
            self._tell_all("stop")

    def _tell_all(self, kind: str, **fields: Any) -> None:
        for rank, link in self._links.items():
            try:
                link.send(kind, **fields)
            except GroupError as error:  # its own thread will see the end of the link
                self._record(event("note", text=f"rank {rank} did not receive '{kind}': {error}"))

    def wait(self) -> int:
        """Wait until every worker has left; the worst exit code."""
        with self._changed:
            while not self.all_left:
                self._changed.wait(POLL)
        if self._lost and not self.failures:
            what = f"Rank {self._lost[0]} was lost"
            self.failures.append(UserError(what, "Its connection ended", "Start all of them again: they resume"))
        return worst(self.codes.values())

    @property
    def all_left(self) -> bool:
        """Whether every worker has left or was lost."""
        return len(self.codes) == self.world_size

    def close(self) -> None:
        """Stop listening."""
        # shutdown wakes the thread that waits in accept; close alone would not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

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
        control = ControlLink(Link(connection, COORDINATOR, HANDSHAKE_SECONDS))
        rank, code = None, None
        try:
            rank = self._admit(control)
            while code is None:
                code = self._handle(rank, control.receive())
        except GroupError as error:
            self._record(event("note", text=str(error)))
        finally:
            control.close()
            if rank is not None:
                with self._lock:
                    del self._links[rank]
                    if self._begun or code is not None:
                        self._lost += [rank] if code is None else []
                        self.codes[rank] = 1 if code is None else code
                        self._changed.notify_all()

    def _admit(self, control: ControlLink) -> int:
        """The handshake: version, then data, then a rank."""
        hello = control.receive()
        if hello["kind"] != "hello":
            raise ProtocolError(f"a connection opened with {hello['kind']!r}, not with 'hello'")
        if hello.get("version") != VERSION:
            self._refuse(control, hello, f"the coordinator runs Andon {VERSION}, it runs {hello.get('version')}")
        control.send("job", **self.job)
        control.link.socket.settimeout(PREPARE_SECONDS)
        ready = control.receive()
        if ready["kind"] == "failed":
            self._refuse(control, hello, ready["what"])
        if ready.get("data") != self.job["data"]:
            self._refuse(control, hello, "its tokens are not the coordinator's: the corpus or the tokenizer differ")
        with self._lock:
            rank = self._free_rank(control, hello, sees_folder=ready.get("folder") == self.job["folder_mark"])
            control.link.peer = rank
            control.link.socket.settimeout(None)
            control.send("welcome", rank=rank, world_size=self.world_size)
            if self._stopping:
                control.send("stop")
            self._links[rank] = control
        self._record(event("worker", rank=rank, pid=hello.get("pid"), host=hello.get("host")))
        return rank

    def _free_rank(self, control: ControlLink, hello: Message, sees_folder: bool) -> int:
        """A rank for a worker; rank 0 writes the checkpoints and must see the folder of the run."""
        free = sorted(set(range(self.world_size)) - self._links.keys())
        if self._begun or not free:
            self._refuse(control, hello, f"all {self.world_size} ranks are taken")
        if not sees_folder:
            free = [rank for rank in free if rank]
        if not free:
            folder = self.job["config"]["run"]["dir"]
            self._refuse(control, hello, f"rank 0 is left, which writes checkpoints, and it cannot see {folder}")
        return hello["rank"] if hello.get("rank") in free else free[-1 if not sees_folder else 0]

    def _refuse(self, control: ControlLink, hello: Message, reason: str) -> NoReturn:
        control.send("refused", reason=reason)
        raise GroupError(f"a worker on {hello.get('host')} was refused: {reason}")

    def _handle(self, rank: int, message: Message) -> int | None:
        match message["kind"]:
            case "event":
                self._record(message["event"])
            case "value":
                self._collect(rank, message["topic"], message["value"])
            case "failed":
                with self._lock:
                    self.failures.append(UserError(message["what"], message["cause"], message["remedy"]))
            case "bye":
                return int(message["code"])
            case other:
                raise ProtocolError(f"rank {rank} sent a message of unknown kind {other!r}")
        return None

    def _record(self, event: Event) -> None:
        """Pass an event on; if it cannot be recorded, all workers save and leave."""
        try:
            self.on_event(event)
        except OSError as error:
            with self._lock:
                self.failures.append(cannot_write(error))
                if not self._stopping:
                    self.stop()

    def _collect(self, rank: int, topic: str, value: str) -> None:
        """Keep a rank's rendezvous value; once all have arrived, send them to everyone."""
        with self._lock:
            values = self._values[topic]
            values[rank] = value
            if len(values) == self.world_size:
                del self._values[topic]
                self._begun = True
                self._tell_all("values", topic=topic, values=[values[each] for each in sorted(values)])
