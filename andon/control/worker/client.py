"""A worker's end of the control plane: a background thread exchanges messages with the coordinator.

The thread starts as soon as both sides have proved that they know the token. So each side knows that the other one is
alive, also while the worker prepares its data or waits for others. When a rank is lost, the thread aborts the group
(`Group.abort`); the worker then parts and takes part in the next generation. In a run that cannot go on without a rank
the worker ends; if it does not end soon, because it computes, its process is ended. The same happens when the
coordinator is lost for good: the newest checkpoint is complete.
"""

import contextlib
import itertools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from andon.control.files import Receiver
from andon.control.link import FROM_COORDINATOR, ControlLink, Message
from andon.control.loop import Loop
from andon.control.worker.exit import end_soon
from andon.control.worker.outbox import Outbox
from andon.errors import UserError, sentence
from andon.machine import machine_id
from andon.run.records.events import Event
from andon.transport.base import COORDINATOR, SOMEONE, Abortable, GroupError, GroupTimeout, PeerLost, ProtocolError
from andon.transport.keys import LinkKeys
from andon.version import VERSION

RENDEZVOUS_SECONDS = 300.0  # time for all ranks to meet: some load torch from a slow disk
RETRY_SECONDS = 0.5
RETURN_SECONDS = 60.0  # time for a lost coordinator to come back
MAX_PIECES = 64  # of the data, 256 KB each, that may wait for the disk
PIECE_PAUSE_SECONDS = 0.2


class CoordinatorClient:
    """A worker's side of the control link: its rank, the rendezvous, its reports, and the coordinator's requests."""

    def __init__(self, sock: socket.socket, token: str, wanted: int | None = None) -> None:
        self.link = ControlLink(sock, FROM_COORDINATOR)
        self.rank, self.world_size = -1, 0
        self.local_rank = 0
        """Its number among the workers of this machine, which selects its GPU."""
        self.host = self.link.local
        """Where the other workers reach this one."""
        self.hosts: list[str] = []
        self.keys: LinkKeys | None = None
        self.server: tuple[str, int] | None = None
        """Where a star's server listens, in this generation."""
        self.later = False
        """Whether this is not the first generation, so that others may have the run's state."""
        self.recorded = 0
        """The last step in the run's ledger when the generation began."""
        self._returns = 0
        """How often this generation has gone back to a checkpoint."""
        self.stop = threading.Event()
        self.change = threading.Event()
        """Set while a worker waits to join, or is to leave."""
        self.shrink = threading.Event()
        """Set while a worker is to leave."""
        self.goes_on = False
        """Whether the run goes on without a rank that is lost."""
        self.released = False
        """Whether the run goes on without this worker, because fewer are wanted."""
        self.redial: Callable[[], socket.socket] | None = None
        """Connects to the coordinator again, if it may come back."""
        self.folder_mark: Callable[[], str] = lambda: ""
        """Reads the mark of the process that holds the run's folder, as this worker sees it."""
        self.compute_ms: Callable[[], float | None] = lambda: None
        """How long forward and backward of the last step took."""
        self._token, self._wanted = token, wanted
        self._group: Abortable | None = None
        self._lost_peer: tuple[int, str] | None = None
        self._lock = threading.Lock()  # of the group and the lost peer
        self._outbox = Outbox(self.link)
        self._inbox: queue.SimpleQueue[Message | bytes | None] = queue.SimpleQueue()
        self._parted: dict[str, Any] | None = None
        """The fields of this worker's `part` message, until the next generation begins."""
        self._new_link: ControlLink | None = None
        self._request_ids = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[str | None]] = {}
        self._begun = self._leaving = False
        self._lost = ""
        """Why the coordinator was lost."""
        self._silence = 0.0
        self._loop = Loop(self, "andon-control")
        self._loop.add(self.link)
        self._loop.start()

    def identity(self) -> Message:
        """How this worker introduces itself."""
        host = socket.gethostname()
        return {"version": VERSION, "host": host, "machine": machine_id(), "pid": os.getpid(), "rank": self._wanted}

    def send(self, kind: str, **fields: Any) -> None:
        """Queue a message; while the coordinator is gone, messages that still matter later are kept."""
        self._outbox.send(kind, fields)
        self._loop.wake()

    def receive(self, *expected: str, timeout: float | None = None) -> Message:
        """Wait for the next message, which must be of one of these kinds, as long as the coordinator is alive."""
        message = self._inbox.get(timeout=timeout)
        if isinstance(message, dict) and message["kind"] in expected:
            return message
        raise self._failure(message, "joining")

    def _failure(self, message: Message | bytes | None, operation: str) -> Exception:
        """What a message means that was not expected in this operation; None: the coordinator is lost."""
        match message:
            case None:
                return PeerLost(COORDINATOR, operation, 0.0, self._lost)
            case {"kind": "lost", "rank": rank, "why": why}:
                return PeerLost(rank, "forming the group", 0.0, why)
            case {"kind": "refused", "reason": reason, **more}:
                remedy = more.get("remedy", "Correct that, then start the worker again")
                return UserError("The coordinator refused this worker", sentence(reason), str(remedy))
        return ProtocolError("the coordinator sent a message out of turn")

    def fetch(self, folder: Path) -> int:
        """Receive the data from the coordinator into a folder; returns its size in bytes."""
        receiver = Receiver(folder)
        self.send("fetch")
        while receiver.begin(self.receive("file")):
            size = receiver.received + receiver.left
            while receiver.received < size:
                piece = self._inbox.get()
                if not isinstance(piece, bytes):
                    raise self._failure(piece, "receiving the data")
                receiver.write(piece)
        return receiver.received

    def enter(self, ready: Mapping[str, str]) -> None:
        """Report that this worker is ready, and receive its rank."""
        self.send("ready", **ready)
        welcome = self.receive("welcome")
        self.rank, self.world_size = welcome["rank"], welcome["world_size"]

    def wait_for_generation(self) -> bool:
        """Wait until the next generation begins; False if there is none for this worker."""
        while (message := self.receive("begin", "stop", "end", "lost", "values"))["kind"] in ("lost", "values"):
            pass  # of the previous generation
        if message["kind"] != "begin":
            self.released = bool(message.get("released"))
            return False
        try:
            issued = {int(peer): bytes.fromhex(key) for peer, key in message["keys"].items()}
            self.server = (str(message["server"][0]), int(message["server"][1])) if message["server"] else None
        except (TypeError, ValueError, IndexError):
            raise ProtocolError("the coordinator sent malformed keys, or a malformed address") from None
        self.keys = LinkKeys(message["generation"], issued).sealed(self._token)
        self.rank, self.world_size, self.recorded = message["rank"], message["world_size"], message["recorded"]
        self.hosts, self.host = message["hosts"], message["host"]
        self.later, self._returns = bool(message["later"]), 0
        return True

    def part(self, why: str, lost: int | None) -> bool:
        """Report that this worker has left its group, and wait for the next generation; False if there is none for it.

        `lost` is the rank that made the group fail, if one did."""
        with self._lock:
            self._group = None
        self._parted = {"generation": self.keys.generation if self.keys else 0, "why": why, "lost": lost}
        self.send("part", **self._parted)
        return self.wait_for_generation()

    def watch(self, group: Abortable) -> None:
        """Abort a group, or its opening, when a rank is lost."""
        with self._lock:
            self._group = group
            if self._lost_peer:
                group.abort(*self._lost_peer)

    def exchange(self, topic: str, mine: str) -> list[str]:
        """The rendezvous: send this rank's value under a topic and receive every rank's, in rank order."""
        self.send("value", topic=topic, value=mine)
        try:
            message = self.receive("values", timeout=RENDEZVOUS_SECONDS)
        except queue.Empty:
            detail = "it is alive, but has not come to the rendezvous"
            raise GroupTimeout(SOMEONE, f"rendezvous on {topic!r}", RENDEZVOUS_SECONDS, detail) from None
        assert message["topic"] == topic, (message, topic)
        return list(message["values"])

    def ask_store(self, operation: str, key: str, value: str = "", seconds: float = 600.0) -> str:
        """Send a request to the coordinator's store and wait for the answer; any thread may call it."""
        number = next(self._request_ids)
        answers = self._answers[number] = queue.SimpleQueue()
        try:
            self.send("store", id=number, operation=operation, key=key, value=value)
            answer = answers.get(timeout=seconds)
        except queue.Empty:
            raise RuntimeError(f"timed out after {seconds:.0f} s waiting for {key!r}") from None
        finally:
            del self._answers[number]
        if answer is None:
            raise RuntimeError(f"the coordinator was lost: {self._lost}")
        return answer

    def emit(self, event: Event) -> None:
        """Report an event."""
        self.send("event", event=event)

    def report(self, records: Sequence[Any]) -> None:
        """Report committed steps, for the ledger; many slots of several steps are too long for one message."""
        for record in records:
            self.send("commit", records=[record])

    def went_back(self, generation: int, step: int) -> None:
        """Report that this generation goes on from the checkpoint of a step."""
        self._returns += 1
        self.send("back", generation=generation, number=self._returns, step=step)

    def fail(self, what: str, cause: str, remedy: str) -> None:
        """Report why this worker cannot go on."""
        self.send("failed", what=what, cause=cause, remedy=remedy)

    def leave(self, code: int) -> None:
        """Send the exit code and close the link."""
        self._leaving = True
        self.send("bye", code=code)
        self.close()

    def close(self) -> None:
        """Close the link without an exit code."""
        self._leaving = True
        self._loop.close()

    def name(self, rank: int) -> str:
        """A rank and its host."""
        return f"rank {rank} on {self.hosts[rank]}" if 0 <= rank < len(self.hosts) else f"rank {rank}"

    def on_message(self, link: ControlLink, message: Message | bytes) -> None:
        """Handle a message of the coordinator; what a caller of `receive` waits for goes into the inbox."""
        if isinstance(message, bytes):
            if self._inbox.qsize() > MAX_PIECES:
                time.sleep(PIECE_PAUSE_SECONDS)  # the disk is slower than the network: stop reading for a moment
            self._inbox.put(message)
            return
        match message["kind"]:
            case "alive":
                pass
            case "stored":
                if message["id"] in self._answers:
                    self._answers[message["id"]].put(message["value"])
            case "stop" if self._begun:
                self.stop.set()
            case "change":
                if message["released"]:
                    self.shrink.set()
                self.change.set()
            case "lost":
                self._inbox.put(message)
                self._abort_group(message["rank"], message["why"])
            case "refused" if self._begun:
                self.redial = None
                self._inbox.put(message)
                self._end_soon(f"the coordinator has refused it: {message['reason']}")
            case "begin":
                self._parted = None
                with self._lock:
                    self._begun, self._lost_peer = True, None
                self.change.clear()
                self.shrink.clear()
                self._inbox.put(message)
            case _:
                self._inbox.put(message)

    def _abort_group(self, rank: int, why: str) -> None:
        with self._lock:
            self._lost_peer = rank, why
            if self._group:
                self._group.abort(rank, why)
        if not self.goes_on:
            self._end_soon(f"{self.name(rank)} was lost: {why}")

    def on_lost(self, link: ControlLink, why: str) -> None:
        """Wait for a lost coordinator to come back, or end this worker."""
        if self._leaving:
            return
        self._lost = why
        for answers in list(self._answers.values()):
            answers.put(None)
        what = f"the coordinator at {link.remote} was lost: {why}"
        if self.goes_on and self._begun and self.redial:
            self._outbox.lose_link()
            self._inbox.put({"kind": "lost", "rank": COORDINATOR, "why": why})  # ends a rendezvous
            threading.Thread(target=self._reconnect, args=[what], name="andon-return", daemon=True).start()
            return
        self._inbox.put(None)
        self._end_soon(what)

    def _reconnect(self, what: str) -> None:
        """Connect to the coordinator as soon as it is back; without it the worker ends."""
        until = time.monotonic() + RETURN_SECONDS
        while time.monotonic() < until and not self._leaving:
            try:
                assert self.redial
                self._new_link = ControlLink(self.redial(), FROM_COORDINATOR)
                self._loop.wake()
                return
            except (GroupError, OSError):
                time.sleep(RETRY_SECONDS)
        self._end_soon(what)

    def _rejoin(self, link: ControlLink) -> None:
        """Introduce this worker to the coordinator that is back, and send the messages that were kept."""
        generation = self.keys.generation if self.keys else -1
        place = {"generation": generation, "member": self.rank, "local_rank": self.local_rank}
        link.queue("again", **self.identity(), **place, folder=self.folder_mark())
        self._outbox.take_link(link)
        if self._parted:  # that message may have been lost with the link
            link.queue("part", **self._parted)
        self.link = link
        self._loop.add(link)

    def _end_soon(self, why: str) -> None:
        end_soon(self.rank, why, lambda: self._leaving)

    def on_ready(self, data: Any) -> None:
        """Nothing but the link is registered."""

    def on_tick(self) -> None:
        """Take over a new connection to the coordinator, if there is one."""
        link, self._new_link = self._new_link, None
        if link:
            self._rejoin(link)

    def on_crash(self, error: Exception) -> None:
        """Treat the coordinator as lost for good."""
        self.redial = None
        self.on_lost(self.link, f"{type(error).__name__}: {error}")

    def status(self) -> Message:
        """Further fields of a heartbeat."""
        took = self.compute_ms()
        status: Message = {} if took is None else {"compute_ms": round(took, 1)}
        return {**status, "silence": self._silence} if self._silence else status

    @contextlib.contextmanager
    def may_be_silent(self, seconds: float) -> Iterator[None]:
        """Announce a silence to the coordinator: the block may stop all threads of this process."""
        self._silence = seconds
        self.send("alive", **self.status())
        try:
            yield
        finally:
            self._silence = 0.0
            self.send("alive", **self.status())  # from now on the usual limit holds again
