"""The coordinator: admits workers, hands out ranks and the configuration, is their rendezvous, and knows who is alive.

It holds no weights and sees no gradient. One thread moves all control links (`andon.control.loop`; the dialogue is in
`andon.control.link`), another one passes events on, so that a slow disk or terminal holds up nobody. A worker has
*left* when it has sent its exit code, and is *lost* when its link ended without one. The run *begins* when all ranks
are taken: before that a lost worker only frees its rank, after that its loss is told to everyone and ends the run.
"""

import json
import socket
import threading
import time
from collections.abc import Generator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from andon.control.files import send_files
from andon.control.link import DEAD_AFTER, FROM_WORKER, LONGEST_SILENCE, ControlLink, Message
from andon.control.loop import Loop
from andon.control.members import Phase, Worker, free_rank, seats
from andon.control.store import KeyValues, Topics
from andon.control.stragglers import Stragglers
from andon.control.token import Credentials
from andon.errors import EXIT_HALTED, EXIT_STOPPED, EXIT_USER_ERROR, UserError, worst
from andon.run.events import Emit, Event, cannot_write, check_event, event
from andon.transport.base import ProtocolError
from andon.transport.tcp.connect import listen
from andon.transport.tcp.entrance.handshake import authenticate
from andon.transport.tcp.entrance.reception import Reception
from andon.transport.tcp.frames import Hello
from andon.version import VERSION

POLL = 0.5  # seconds; a wait without a timeout would not let Python handle signals
OTHERS_SECONDS = DEAD_AFTER + 1.0  # that the others get to find out by themselves why a rank has stopped
LAST_WORDS = 10.0  # seconds that the others get, after a rank was lost, to say so and leave
MOST_WAITING = 64 << 20  # bytes of events that may wait for a disk or a terminal


class Coordinator:
    """Serves the workers of one run; `on_event` receives their events."""

    def __init__(
        self,
        job: Message,
        world_size: int,
        on_event: Emit,
        credentials: Credentials,
        bind: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self.job, self.world_size, self.on_event, self.credentials = job, world_size, on_event, credentials
        self.generation = 0
        self.failures: list[UserError] = []
        self.codes: dict[int, int] = {}
        """The exit code of every worker that has left or was lost."""
        self.begun = False
        self._stop_wanted = self._stopping = False
        self._end_by = float("inf")
        self._failed: tuple[Worker, float] | None = None
        """The first member that has left with an error, and when."""
        self._workers: dict[ControlLink, Worker] = {}
        self._topics, self._store = Topics(world_size), KeyValues()
        self._stragglers = Stragglers(self._note)
        self._changed = threading.Condition()
        self._events: SimpleQueue[tuple[Event, int] | None] = SimpleQueue()
        self._waiting, self._counting = 0, threading.Lock()
        listener = listen(bind, backlog=world_size + 128)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._loop = Loop(self, "andon-coordinator")
        self._reception: Reception[Hello] = Reception(
            listener, self._loop.selector, self._authenticate, credentials.tls, self._note
        )
        self._recording = threading.Thread(target=self._record, name="andon-record", daemon=True)
        self._recording.start()
        self._loop.start()

    def stop(self) -> None:
        """Ask every worker to save and leave after the current step; a signal handler may call it."""
        self._stop_wanted = True
        self._loop.wake()

    def wait(self) -> int:
        """Wait until every worker has left, or the run cannot go on; the worst exit code."""
        with self._changed:
            while not self.ended:
                self._changed.wait(POLL)
        if self._stopping and not self.begun:
            return EXIT_STOPPED
        missing = set(range(self.world_size)) - self.codes.keys()
        return worst([*self.codes.values(), *(EXIT_USER_ERROR for _ in missing)])

    @property
    def ended(self) -> bool:
        """Whether every worker has left, or those that have not will not."""
        before = self._stopping and not self.begun and not self._workers
        return self.all_left or before or time.monotonic() > self._end_by

    @property
    def all_left(self) -> bool:
        """Whether every worker has left or was lost."""
        return len(self.codes) == self.world_size

    def close(self) -> None:
        """Stop listening, close all links and pass on the events that wait; safe to call twice."""
        self._loop.close()
        self._reception.close()
        self._events.put(None)
        self._recording.join(LAST_WORDS)

    def _authenticate(self, sock: socket.socket) -> Generator[memoryview, None, Hello]:
        return authenticate(sock, lambda hello: self.credentials.token.encode())

    def on_ready(self, data: Any) -> None:
        """A connection arrives, or goes on with its handshake."""
        if arrival := self._reception.handle(data):
            try:
                link = ControlLink(arrival[0], FROM_WORKER)
            except OSError:  # it has gone again
                arrival[0].close()
                return
            if len(self._workers) > 4 * self.world_size + 64:
                self._reception.refusals.add(link.remote, "too many workers are connected")
                link.close()
                return
            self._workers[link] = Worker(link)
            self._loop.add(link)

    def on_tick(self) -> None:
        """Once a second, and when someone has woken the loop."""
        self._reception.tick()
        if self._failed and time.monotonic() - self._failed[1] > OTHERS_SECONDS:
            self._end_without(self._failed[0], "it has stopped with an error")
            self._failed = None
        if self._stop_wanted and not self._stopping:
            self._stopping = True
            self._tell_all("stop")
            if not self.begun:
                self._end_by = time.monotonic() + 1.0
        with self._changed:
            self._changed.notify_all()

    def on_crash(self, error: Exception) -> None:
        """End the run rather than leave everyone waiting."""
        what = f"The coordinator failed: {type(error).__name__}: {error}"
        self.failures.append(UserError(what, "An unexpected error", "Start all of them again: they resume"))
        self._end_by = 0.0

    def status(self) -> Message:
        """A coordinator's heartbeat says nothing more."""
        return {}

    def on_lost(self, link: ControlLink, why: str) -> None:
        """A link has ended without an exit code."""
        worker = self._workers.pop(link)
        if worker.phase is not Phase.MEMBER or not self.begun:
            if worker.host:
                self._note(f"{worker.name} was lost before the run began: {why}")
            return
        self._note(f"{worker.name} was lost: {why}")
        what = f"{worker.name[0].upper()}{worker.name[1:]} was lost{self._stragglers.at_step}: {why}"
        cause = "Its process died, its machine stopped, or the network between them failed"
        self.failures.append(UserError(what, cause, "Start all of them again: they resume from the newest checkpoint"))
        self._end_without(worker, why)
        self._leave(worker, EXIT_USER_ERROR)

    def _end_without(self, worker: Worker, why: str) -> None:
        """The run cannot go on: tell everyone, who may wait for this one, and wait for a while until they have left."""
        self._tell_all("lost", rank=worker.rank, host=worker.host, why=why)
        self._end_by = min(self._end_by, time.monotonic() + LAST_WORDS)

    def on_message(self, link: ControlLink, message: Message | bytes) -> None:
        """What a worker says, by how far it has come."""
        worker = self._workers[link]
        assert isinstance(message, dict), "workers send no files"
        kind = message["kind"]
        if kind == "alive":
            silence = message.get("silence")
            if isinstance(silence, int | float) and 0 < silence <= LONGEST_SILENCE:
                link.heard = time.monotonic() + silence
            self._stragglers.hear(worker, message, self._workers.values())
        elif worker.phase is Phase.KNOWN and kind == "hello":
            self._greet(worker, message)
        elif worker.phase is Phase.PREPARING and kind in ("fetch", "ready", "failed"):
            self._prepare(worker, message)
        elif worker.phase is Phase.MEMBER and kind in ("value", "store", "event", "failed", "bye"):
            self._serve(worker, message)
        else:
            raise ProtocolError(f"it sent '{kind}' out of turn")

    def _greet(self, worker: Worker, hello: Message) -> None:
        worker.introduce(hello)
        if hello["version"] != VERSION:
            self._refuse(worker, f"the coordinator runs Andon {VERSION}, it runs {hello['version'][:20]}")
        elif self.begun:
            self._refuse(worker, f"all {self.world_size} ranks are taken")
        else:
            worker.phase = Phase.PREPARING
            worker.link.queue("job", **self.job)

    def _prepare(self, worker: Worker, message: Message) -> None:
        if message["kind"] == "failed":
            self._refuse(worker, message["what"])
        elif message["kind"] == "fetch":
            if "tokens" not in self.job or worker.fetches:
                raise ProtocolError("it asked for data that it has, or that this run does not have")
            worker.fetches = True
            folder = Path(self.job["tokens"])
            threading.Thread(target=send_files, args=(worker.link, self._loop, folder), daemon=True).start()
        elif message["data"] != self.job["data"]:
            self._refuse(worker, "its tokens are not the coordinator's")
        else:
            self._admit(worker, sees_folder=message["folder"] == self.job["folder_mark"])

    def _admit(self, worker: Worker, sees_folder: bool) -> None:
        taken = [other.rank for other in self._members()]
        rank = free_rank(taken, self.world_size, worker, sees_folder)
        if rank is None:
            folder = self.job.get("config", {}).get("run", {}).get("dir")
            full = self.begun or len(taken) == self.world_size
            all_taken = f"all {self.world_size} ranks are taken"
            blind = f"rank 0 is left, which writes checkpoints, and it cannot see {folder}: give --folder"
            self._refuse(worker, all_taken if full else blind)
            return
        worker.phase, worker.rank = Phase.MEMBER, rank
        keys = self.credentials.issue(rank, self.world_size, self.generation).keys
        worker.link.queue(
            "welcome",
            rank=rank,
            world_size=self.world_size,
            generation=self.generation,
            keys={str(peer): key.hex() for peer, key in keys.items()},
        )
        if self._stopping:
            worker.link.queue("stop")
        self._emit(event("worker", rank=rank, pid=worker.pid, host=worker.host))
        if len(members := self._members()) == self.world_size and not self._stopping:
            self.begun = True
            hosts = [member.host for member in sorted(members, key=lambda member: member.rank)]
            for seat, member in zip(seats(members), sorted(members, key=lambda member: member.rank), strict=True):
                member.link.queue("begin", hosts=hosts, host=seat.address, local_rank=seat.local_rank)

    def _refuse(self, worker: Worker, reason: str) -> None:
        self._note(f"a worker on {worker.host} was refused: {reason}")
        worker.link.queue("refused", reason=reason)
        del self._workers[worker.link]
        self._loop.drop(worker.link)

    def _serve(self, worker: Worker, message: Message) -> None:
        match message["kind"]:
            case "event":
                try:
                    self._emit(check_event(message["event"], worker.rank))
                except ValueError as error:
                    raise ProtocolError(f"it reported {error}") from None
                self._stragglers.follow(message["event"])
            case "value":
                if values := self._topics.add(worker.rank, message["topic"], message["value"]):
                    self._tell_all("values", topic=message["topic"], values=values)
            case "store":
                number, link = message["id"], worker.link
                self._store.request(
                    message["operation"],
                    message["key"],
                    message["value"],
                    lambda value: link.queue("stored", id=number, value=value),
                )
            case "failed":
                if self.begun and len(self.failures) < self.world_size + 1:
                    self.failures.append(UserError(message["what"], message["cause"], message["remedy"]))
            case "bye":
                del self._workers[worker.link]
                self._loop.drop(worker.link)
                if self.begun:
                    if message["code"] not in (0, EXIT_HALTED, EXIT_STOPPED):
                        self._failed = self._failed or (worker, time.monotonic())
                    self._leave(worker, message["code"])

    def _leave(self, worker: Worker, code: int) -> None:
        with self._changed:
            self.codes[worker.rank] = code
            self._changed.notify_all()

    def _members(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.phase is Phase.MEMBER]

    def _tell_all(self, kind: str, **fields: Any) -> None:
        for member in self._members():
            member.link.queue(kind, **fields)

    def _note(self, text: str) -> None:
        self._emit(event("note", text=text))

    def _emit(self, event: Event) -> None:
        size = len(json.dumps(event))
        with self._counting:
            self._waiting += size
            full = self._waiting > MOST_WAITING
        if full:
            self._stop_wanted = True
        else:
            self._events.put((event, size))

    def _record(self) -> None:
        """Pass events on; if one cannot be recorded, all workers save and leave."""
        while waiting := self._events.get():
            event, size = waiting
            with self._counting:
                self._waiting -= size
            try:
                self.on_event(event)
            except OSError as error:
                if not self._stopping:
                    self.failures.append(cannot_write(error))
                    self.stop()
