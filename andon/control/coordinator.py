"""The coordinator: admits workers, hands out ranks and the configuration, is their rendezvous, and knows who is alive.

It holds no weights and sees no gradient. One thread reads and writes all control links (`andon.control.loop`; the
messages are in `andon.control.link`), another one records events (`andon.control.recording`). A worker has *left* when
it has sent its exit code; it is *lost* when its link ended without one. The run *begins* when all ranks are taken.
Before that a lost worker only frees its rank. After that the others go on as the next generation
(`andon.control.generations`), or the run ends if it cannot go on without a rank.
"""

import socket
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from andon.control.admission import Admission
from andon.control.generations.succession import GoesOn, Succession
from andon.control.link import DEAD_AFTER, FROM_WORKER, MAX_SILENCE_SECONDS, ControlLink, Message
from andon.control.loop import Loop
from andon.control.members import Phase, Place, Worker
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

POLL_SECONDS = 0.5  # a wait without a timeout would not let Python handle signals
OTHERS_SECONDS = DEAD_AFTER + 1.0  # time for the others to find out by themselves why a rank has stopped
END_SECONDS = 10.0  # time for the others to report the loss of a rank and to leave
FROM_MEMBER = ("value", "store", "event", "commit", "back", "part", "failed")
RESUMES = "Start all of them again: they resume from the newest checkpoint"


class Coordinator:
    """Serves the workers of one run; `on_event` receives their events."""

    def __init__(
        self,
        job: Message,
        world_size: int,
        on_event: Emit,
        credentials: Credentials,
        goes_on: GoesOn,
        bind: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self._credentials = credentials
        self._recording = Recording(on_event, self._cannot_record)
        self._emit = self._recording.emit
        self.codes: list[int] = []
        """The exit codes of the workers that have left for good."""
        self.lost_since: dict[tuple[Place, int], float] = {}
        """The place and process id of each lost member, and when it was lost; its process may be stopped, or hang."""
        self._resize_to = 0
        self._stop_wanted = False
        self._end_by = float("inf")
        self._failed: tuple[Worker, float] | None = None
        """The first member that has left with an error, and when."""
        self._store = KeyValues()
        self._stragglers = Stragglers(self.note)
        self._changed = threading.Condition()
        listener = listen(bind, backlog=world_size + 128)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._loop = Loop(self, "andon-coordinator")
        self.succession = Succession(world_size, goes_on, credentials, self._emit, self._loop.wake)
        self.failures = self.succession.failures
        self._admission = Admission(job, self.succession, self._loop, self._emit)
        self._workers = self._admission.workers
        self._reception: Reception[Hello] = Reception(
            listener, self._loop.selector, self._authenticate, credentials.tls, self.note
        )
        self._loop.start()

    def stop(self) -> None:
        """Ask every worker to save and leave after the current step; a signal handler may call it."""
        self._stop_wanted = True
        self._loop.wake()

    def wait(self, new_size: Callable[[], int | None] = lambda: None) -> int:
        """Wait until every worker has left, or the run cannot go on; returns the worst exit code.

        `new_size` returns the number of workers that are wanted, if it has changed."""
        with self._changed:
            while not self.ended:
                self._changed.wait(POLL_SECONDS)
                if self.begun and not self.succession.over and (wanted := new_size()):
                    self.resize(wanted)
        if self.succession.stopping and not self.begun:
            return EXIT_STOPPED
        return worst([*self.codes, *(EXIT_USER_ERROR for _ in self.succession.generations.members)])

    @property
    def ended(self) -> bool:
        """Whether every worker has left, or the time for it is over."""
        before_begin = self.succession.stopping and not self.begun and not self._workers
        return self.all_left or before_begin or time.monotonic() > self._end_by

    @property
    def begun(self) -> bool:
        """Whether the first generation has begun."""
        return self.succession.begun

    @property
    def all_left(self) -> bool:
        """Whether every worker has left or was lost, and no other can join."""
        return self.succession.over and not self.succession.generations.members

    def may_return(self, place: Place, process: int) -> bool:
        """Whether a launcher's worker that has ended may be started again; any thread may call it."""
        succession = self.succession
        ends = succession.over or succession.stopping or self.failures
        if not succession.goes_on.possible or not self.begun or ends:
            return False
        if process not in self._admission.processes:  # it had no link whose end would have been noticed
            self.note(f"A worker on {place[0]} was lost before it sent anything")
            succession.strike_before_hello(place)
        return place not in succession.quarantine

    def resize(self, wanted: int) -> None:
        """Change the number of workers that are wanted; any thread may call it."""
        self._resize_to = wanted
        self._loop.wake()

    def end(self, why: str) -> None:
        """End the run, because it cannot go on; any thread may call it."""
        self.succession.end(why)
        self._loop.wake()

    def close(self) -> None:
        """Stop listening, close all links and record the events that wait; safe to call twice."""
        self._loop.close()
        self._reception.close()
        self._recording.close(END_SECONDS)

    def _authenticate(self, sock: socket.socket) -> Generator[memoryview, None, Hello]:
        return authenticate(sock, lambda hello: self._credentials.token.encode())

    def on_ready(self, data: Any) -> None:
        """Accept a connection, or continue its handshake."""
        if arrival := self._reception.handle(data):
            try:
                link = ControlLink(arrival[0], FROM_WORKER)
            except OSError:  # it was closed again
                arrival[0].close()
                return
            if len(self._workers) > 4 * self.succession.generations.wanted + 64:
                self._reception.refusals.add(link.remote, "too many workers are connected")
                link.close()
                return
            self._workers[link] = Worker(link)
            self._loop.add(link)

    def on_tick(self) -> None:
        """Do what is due; called once a second, and when a thread has woken the loop."""
        succession = self.succession
        self._reception.tick()
        if not self.begun:
            joined = [member.rank for member in self._admission.members()]
            self._stragglers.wait_for_ranks(joined, succession.generations.wanted)
        if self._failed and time.monotonic() - self._failed[1] > OTHERS_SECONDS:
            failed, self._failed = self._failed[0], None
            self._broadcast("lost", rank=failed.rank, host=failed.host, why="it has stopped with an error")
            self._end_within(END_SECONDS)
        if self._stop_wanted and not succession.stopping and not succession.renews:
            succession.stopping = True
            self._broadcast("stop")
            if not self.begun:
                self._end_within(1.0)
        if self._resize_to and self.begun:
            wanted, self._resize_to = self._resize_to, 0
            self.note(f"The run wants {wanted} workers from now on")
            succession.resize(wanted)
        for worker in succession.tick():
            self._loop.drop(worker.link)
            self.on_lost(worker.link, "it made no progress, and the others go on without it")
        if succession.stopping and self.begun and succession.waits:
            succession.end("It was stopped while it waited for workers")
        if succession.impossible and not self.failures:
            remedy = "Look at the logs, then run the same command again: it resumes from the newest checkpoint"
            self.failures.append(UserError("The run cannot go on", succession.impossible, remedy))
        with self._changed:
            self._changed.notify_all()

    def on_crash(self, error: Exception) -> None:
        """End the run, so that no worker waits for a coordinator that has failed."""
        what = f"The coordinator failed: {type(error).__name__}: {error}"
        self.failures.append(UserError(what, "An unexpected error", RESUMES))
        self._end_by = 0.0

    def status(self) -> Message:
        """A coordinator's heartbeat has no further fields."""
        return {}

    def on_lost(self, link: ControlLink, why: str) -> None:
        """Handle a link that ended without an exit code."""
        worker, succession = self._workers.pop(link), self.succession
        if worker.phase is not Phase.MEMBER or not self.begun:
            succession.generations.lose(worker)
            if worker.host:
                self.note(f"{worker.name} was lost before {'it joined' if self.begun else 'the run began'}: {why}")
                succession.strike(worker)
            return
        text = succession.lose(worker, why, self._stragglers.at_step)
        self.lost_since[worker.place, worker.pid] = time.monotonic()
        if not succession.goes_on.possible:
            cause = "Its process died, its machine stopped, or the network between them failed"
            self.failures.append(UserError(text, cause, RESUMES))
            self._leave(worker, EXIT_USER_ERROR)
            succession.end(text)
            self._end_within(END_SECONDS)

    def _end_within(self, seconds: float) -> None:
        """Wait no longer than this for the workers to leave."""
        self._end_by = min(self._end_by, time.monotonic() + seconds)

    def on_message(self, link: ControlLink, message: Message | bytes) -> None:
        """Handle a worker's message."""
        worker = self._workers[link]
        assert isinstance(message, dict), "workers send no files"
        kind = message["kind"]
        if kind == "alive":
            silence = message.get("silence")
            link.last_seen = time.monotonic()
            if isinstance(silence, int | float) and 0 < silence <= MAX_SILENCE_SECONDS:
                link.last_seen += silence
            self._stragglers.on_heartbeat(worker, message, self._workers.values())
        elif kind == "bye":
            self._say_goodbye(worker, message["code"])
        elif worker.phase is Phase.MEMBER and kind in FROM_MEMBER:
            self._serve(worker, message)
        else:
            self._admission.on_message(worker, message)

    def _serve(self, worker: Worker, message: Message) -> None:
        match message["kind"]:
            case "event":
                try:
                    self._emit_once(check_event(message["event"], worker.rank))
                except ValueError as error:
                    raise ProtocolError(f"it reported {error}") from None
                self._stragglers.on_event(message["event"])
            case "value":
                if values := self.succession.topics.add(worker.rank, message["topic"], message["value"]):
                    self._broadcast("values", topic=message["topic"], values=values)
            case "store":
                number, link = message["id"], worker.link
                self._store.request(
                    message["operation"],
                    message["key"],
                    message["value"],
                    lambda value: link.queue("stored", id=number, value=value),
                )
            case "commit" | "back" | "part":
                self.succession.on_message(worker, message)
            case "failed":
                if self.begun and len(self.failures) <= self.succession.generations.wanted:
                    self.failures.append(UserError(message["what"], message["cause"], message["remedy"]))

    def _say_goodbye(self, worker: Worker, code: int) -> None:
        """A worker leaves in an orderly way; the code of one that takes part counts."""
        del self._workers[worker.link]
        self._loop.drop(worker.link)
        if not self.begun or worker.phase is not Phase.MEMBER:
            self.succession.generations.lose(worker)
            return
        if code not in (0, EXIT_HALTED, EXIT_STOPPED):
            self._failed = self._failed or (worker, time.monotonic())
        self._leave(worker, code)

    def _emit_once(self, event: Event) -> None:
        """Emit a member's event, unless it repeats one: each generation reports the start of the run, and does again a
        step that was not committed."""
        if event["event"] == "step":
            if event["step"] <= self.succession.reported_step:
                return
            self.succession.reported_step = event["step"]
        elif event["event"] == "start":
            if "probe" in self._admission.job:
                return
            self._admission.job |= {"probe": event["probe"], "frozen": event.get("frozen", "")}
        self._emit(event)

    def _leave(self, worker: Worker, code: int) -> None:
        with self._changed:
            self.codes.append(code)
            self.succession.leave(worker, failed=code not in (0, EXIT_STOPPED))
            self._changed.notify_all()

    def _broadcast(self, kind: str, **fields: Any) -> None:
        for member in self._admission.members():
            member.link.queue(kind, **fields)

    def note(self, text: str) -> None:
        """Show a line to the user; any thread may call it."""
        self._emit(event("note", text=text))

    def _cannot_record(self, error: OSError | None) -> None:
        """Stop the run, because events cannot be recorded, or not as fast as they arrive (None)."""
        if error and not self.succession.stopping:
            self.failures.append(cannot_write(error))
        self.stop()
