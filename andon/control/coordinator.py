"""The coordinator: admits workers, hands out ranks and the configuration, is their rendezvous, and knows who is alive.

It holds no weights and sees no gradient. One thread moves all control links (`andon.control.loop`; the dialogue is in
`andon.control.link`), another one passes events on (`andon.control.recording`). A worker has *left* when it has sent
its exit code, and is *lost* when its link ended without one. The run *begins* when all ranks are taken: before that a
lost worker only frees its rank, after that the others go on as the next generation (`andon.control.generations`), or
the run ends if it cannot go on without a rank.
"""

import socket
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from andon.control.files import send_files
from andon.control.generations.succession import GoesOn, Succession
from andon.control.link import DEAD_AFTER, FROM_WORKER, LONGEST_SILENCE, ControlLink, Message
from andon.control.loop import Loop
from andon.control.members import Phase, Place, Worker, free_rank
from andon.control.recording import Recording
from andon.control.store import KeyValues
from andon.control.stragglers import Stragglers
from andon.control.token import Credentials
from andon.errors import EXIT_HALTED, EXIT_STOPPED, EXIT_USER_ERROR, UserError, worst
from andon.run.records.events import Emit, Event, cannot_write, check_event, event
from andon.transport.base import ProtocolError
from andon.transport.tcp.connect import listen
from andon.transport.tcp.entrance.handshake import authenticate
from andon.transport.tcp.entrance.reception import Reception
from andon.transport.tcp.frames import Hello
from andon.version import VERSION

POLL = 0.5  # seconds; a wait without a timeout would not let Python handle signals
OTHERS_SECONDS = DEAD_AFTER + 1.0  # that the others get to find out by themselves why a rank has stopped
LAST_WORDS = 10.0  # seconds that the others get, after a rank was lost, to say so and leave
MEMBERS_SAY = ("value", "store", "event", "commit", "back", "part", "failed", "bye")


class Coordinator:
    """Serves the workers of one run; `on_event` receives their events."""

    def __init__(
        self,
        job: Message,
        world_size: int,
        on_event: Emit,
        credentials: Credentials,
        bind: tuple[str, int] = ("127.0.0.1", 0),
        goes_on: GoesOn | None = None,
    ) -> None:
        self.job, self.world_size, self.credentials = job, world_size, credentials
        self._recording = Recording(on_event, self._cannot_record)
        self._emit = self._recording.emit
        self.succession = Succession(world_size, goes_on, credentials, self._emit)
        self.failures: list[UserError] = []
        self.codes: list[int] = []
        """The exit codes of the workers that have left for good."""
        self._heard_of: set[int] = set()
        """The processes that have said hello."""
        self._resize_to = 0
        self._stop_wanted = self._stopping = False
        self._end_by = float("inf")
        self._failed: tuple[Worker, float] | None = None
        """The first member that has left with an error, and when."""
        self._workers: dict[ControlLink, Worker] = {}
        self._store = KeyValues()
        self._stragglers = Stragglers(self.note)
        self._changed = threading.Condition()
        listener = listen(bind, backlog=world_size + 128)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._loop = Loop(self, "andon-coordinator")
        self._reception: Reception[Hello] = Reception(
            listener, self._loop.selector, self._authenticate, credentials.tls, self.note
        )
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
        return worst([*self.codes, *(EXIT_USER_ERROR for _ in self.succession.generations.members)])

    @property
    def ended(self) -> bool:
        """Whether every worker has left, or those that have not will not."""
        before = self._stopping and not self.begun and not self._workers
        return self.all_left or before or time.monotonic() > self._end_by

    @property
    def begun(self) -> bool:
        """Whether the first generation has begun."""
        return self.succession.begun

    @property
    def all_left(self) -> bool:
        """Whether every worker has left or was lost, and none is to come."""
        return self.succession.over and not self.succession.generations.members

    def may_return(self, place: Place, process: int) -> bool:
        """Whether a launcher's worker that has ended may be started again; from any thread."""
        succession = self.succession
        if not succession.goes_on or not self.begun or succession.over or self._stopping or self.failures:
            return False
        if process not in self._heard_of:  # nobody else has noticed
            self.note(f"A worker on {place[0]} was lost before it said anything")
            succession.strike_unheard(place)
        return place not in succession.quarantine

    def resize(self, wanted: int) -> None:
        """From now on so many workers are wanted; from any thread."""
        self._resize_to = wanted
        self._loop.wake()

    def end(self, why: str) -> None:
        """The run cannot go on; from any thread."""
        self.succession.end(why)
        self._loop.wake()

    def close(self) -> None:
        """Stop listening, close all links and pass on the events that wait; safe to call twice."""
        self._loop.close()
        self._reception.close()
        self._recording.close(LAST_WORDS)

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
        if not self.begun:
            self._stragglers.wait_for_ranks([member.rank for member in self._members()], self.world_size)
        if self._failed and time.monotonic() - self._failed[1] > OTHERS_SECONDS:
            self._end_without(self._failed[0], "it has stopped with an error")
            self._failed = None
        if self._stop_wanted and not self._stopping and not self.succession.renews:
            self._stopping = True
            self._tell_all("stop")
            if not self.begun:
                self._end_by = time.monotonic() + 1.0
        if self._resize_to and self.begun:
            wanted, self._resize_to = self._resize_to, 0
            self.world_size = wanted
            self.note(f"The run wants {wanted} workers from now on")
            self.succession.resize(wanted)
        for worker in self.succession.tick():
            self._loop.drop(worker.link)
            self.on_lost(worker.link, "it made no progress, and the others go on without it")
        if self._stopping and self.begun and self.succession.waits:
            self.succession.end("It was stopped while it waited for workers")
        if self.succession.impossible and not self.failures:
            remedy = "Look at the logs, then run the same command again: it resumes from the newest checkpoint"
            self.failures.append(UserError("The run cannot go on", self.succession.impossible, remedy))
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
        worker, succession = self._workers.pop(link), self.succession
        if worker.phase is not Phase.MEMBER or not self.begun:
            succession.generations.lose(worker)
            if worker.host:
                self.note(f"{worker.name} was lost before {'it joined' if self.begun else 'the run began'}: {why}")
                succession.strike(worker)
            return
        step = self._stragglers.at_step
        succession.lose(worker, why, step)
        if not succession.goes_on:
            text = f"{worker.name[0].upper()}{worker.name[1:]} was lost{step}: {why}"
            cause = "Its process died, its machine stopped, or the network between them failed"
            remedy = "Start all of them again: they resume from the newest checkpoint"
            self.failures.append(UserError(text, cause, remedy))
            self._leave(worker, EXIT_USER_ERROR)
            succession.end(text)
            self._end_by = min(self._end_by, time.monotonic() + LAST_WORDS)

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
            link.heard = time.monotonic()
            if isinstance(silence, int | float) and 0 < silence <= LONGEST_SILENCE:
                link.heard += silence
            self._stragglers.hear(worker, message, self._workers.values())
        elif worker.phase is Phase.KNOWN and kind == "hello":
            self._greet(worker, message)
        elif worker.phase is Phase.KNOWN and kind == "again":
            self._greet_again(worker, message)
        elif worker.phase is Phase.PREPARING and kind in ("fetch", "ready", "failed"):
            self._prepare(worker, message)
        elif worker.phase is Phase.MEMBER and kind in MEMBERS_SAY:
            self._serve(worker, message)
        else:
            raise ProtocolError(f"it sent '{kind}' out of turn")

    def _greet(self, worker: Worker, hello: Message) -> None:
        worker.introduce(hello)
        self._heard_of.add(worker.pid)
        if hello["version"] != VERSION:
            self._refuse(worker, f"the coordinator runs Andon {VERSION}, it runs {hello['version'][:20]}")
        elif self.begun and not self.succession.takes_more:
            self._refuse(worker, self._why_full)
        elif worker.place in self.succession.quarantine:
            self._refuse(worker, f"workers of {worker.host} were lost again and again")
        else:
            worker.phase = Phase.PREPARING
            worker.link.queue("job", **self.job, goes_on=bool(self.succession.goes_on), joins=self.begun)

    def _greet_again(self, worker: Worker, again: Message) -> None:
        """A member that has lost its coordinator, or that was cut off from it."""
        worker.introduce(again)
        self._heard_of.add(worker.pid)
        worker.sees_folder = again["folder"] == self.job["folder_mark"]
        generation = again["generation"]
        if known := self.succession.member_in(worker, generation):
            self._take_link(known, worker.link, generation)
        elif again["version"] != VERSION or not self.succession.come_back(worker, generation, again["member"]):
            self._refuse(worker, f"the run has gone on without generation {generation}, a new worker can join")

    def _take_link(self, member: Worker, link: ControlLink, generation: int) -> None:
        """A member has connected again before its old link was found dead."""
        old, member.link = member.link, link
        del self._workers[old]
        self._workers[link] = member
        self._loop.drop(old)
        self.succession.say_again(member, generation)
        if self._stopping:
            link.queue("stop")

    @property
    def _why_full(self) -> str:
        return "the run ends" if self.succession.over else f"all {self.world_size} ranks are taken"

    def _prepare(self, worker: Worker, message: Message) -> None:
        if message["kind"] == "failed":
            self.succession.strike(worker)
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
        worker.sees_folder = sees_folder
        if self.begun:
            self._admit_later(worker)
            return
        taken = [other.rank for other in self._members()]
        rank = free_rank(taken, self.world_size, worker, sees_folder)
        if rank is None:
            folder = self.job.get("config", {}).get("run", {}).get("dir")
            blind = f"rank 0 is left, which writes checkpoints, and it cannot see {folder}: give --folder"
            self._refuse(worker, self._why_full if len(taken) == self.world_size else blind)
            return
        worker.phase, worker.rank = Phase.MEMBER, rank
        worker.link.queue("welcome", rank=rank, world_size=self.world_size)
        if self._stopping:
            worker.link.queue("stop")
        self._emit(event("worker", rank=rank, pid=worker.pid, host=worker.host))
        if not self._stopping:
            self.succession.ready(worker)

    def _admit_later(self, worker: Worker) -> None:
        """A worker that joins a run that has begun."""
        if not self.succession.takes_more or self._stopping:
            self._refuse(worker, "the run ends" if self._stopping else self._why_full)
            return
        worker.phase = Phase.WAITING
        worker.link.queue("welcome", rank=-1, world_size=self.world_size)
        self.succession.ready(worker)

    def _refuse(self, worker: Worker, reason: str) -> None:
        self.note(f"a worker on {worker.host} was refused: {reason}")
        worker.link.queue("refused", reason=reason)
        del self._workers[worker.link]
        self._loop.dismiss(worker.link)

    def _serve(self, worker: Worker, message: Message) -> None:
        match message["kind"]:
            case "event":
                try:
                    self._emit_once(check_event(message["event"], worker.rank))
                except ValueError as error:
                    raise ProtocolError(f"it reported {error}") from None
                self._stragglers.follow(message["event"])
            case "value":
                if values := self.succession.topics.add(worker.rank, message["topic"], message["value"]):
                    self._tell_all("values", topic=message["topic"], values=values)
            case "store":
                number, link = message["id"], worker.link
                self._store.request(
                    message["operation"],
                    message["key"],
                    message["value"],
                    lambda value: link.queue("stored", id=number, value=value),
                )
            case "commit" | "back" | "part":
                self.succession.hear(worker, message)
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
                else:
                    self.succession.generations.lose(worker)

    def _emit_once(self, event: Event) -> None:
        """Each generation tells that the run has started, and does again a step that was not committed."""
        if event["event"] == "step":
            if event["step"] <= self.succession.told_step:
                return
            self.succession.told_step = event["step"]
        elif event["event"] == "start":
            if "probe" in self.job:
                return
            self.job = {**self.job, "probe": event["probe"], "frozen": event.get("frozen", "")}
        self._emit(event)

    def _leave(self, worker: Worker, code: int) -> None:
        with self._changed:
            self.codes.append(code)
            self.succession.leave(worker, failed=code not in (0, EXIT_STOPPED))
            self._changed.notify_all()

    def _members(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.phase is Phase.MEMBER]

    def _tell_all(self, kind: str, **fields: Any) -> None:
        for member in self._members():
            member.link.queue(kind, **fields)

    def note(self, text: str) -> None:
        """Tell the user something; from any thread."""
        self._emit(event("note", text=text))

    def _cannot_record(self, error: OSError | None) -> None:
        """Events cannot be recorded, or not as fast as they come: all workers save and leave."""
        if error and not self._stopping:
            self.failures.append(cannot_write(error))
        self.stop()
