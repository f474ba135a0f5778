"""A worker's end of the control plane: it joins a coordinator, and from then on a thread hears and answers it.

The thread starts as soon as both have proved that they know the token, so that a worker that prepares its data, or
waits for others, is known to be alive, and knows that the coordinator is. When a rank is lost the group is made to fail
at once (`Group.abort`); then this worker parts and takes part in the next generation. In a run that cannot go on
without a rank it ends in an orderly way; a worker that does not end soon, because it computes, is ended here, and so is
one whose coordinator is lost: the newest checkpoint is complete.
"""

import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from andon.control.files import Receiver
from andon.control.link import FROM_COORDINATOR, ControlLink, Message
from andon.control.loop import Loop
from andon.control.worker.outbox import Outbox
from andon.errors import EXIT_USER_ERROR, UserError, harmless
from andon.machine import machine_id
from andon.run.records.events import Event
from andon.transport.base import COORDINATOR, SOMEONE, Abortable, GroupError, GroupTimeout, PeerLost, ProtocolError
from andon.transport.keys import LinkKeys
from andon.version import VERSION

LOG_SECONDS = 5.0  # how long writing to the log may take
RENDEZVOUS_SECONDS = 300.0  # that ranks get to meet: some load torch from a slow disk
RETRY_SECONDS = 0.5
RETURN_SECONDS = 60.0  # that a coordinator gets to come back
LEAVE_SECONDS = 2.0  # that a worker gets to end in an orderly way when another one is lost
MOST_PIECES = 64  # of the data, 256 KB each, that may wait for the disk
PIECE_PAUSE = 0.2


class CoordinatorClient:
    """A worker's side of the control link: its rank, the rendezvous, events out and the wish to stop in."""

    def __init__(self, sock: socket.socket, token: str, wanted: int | None = None) -> None:
        self.link = ControlLink(sock, FROM_COORDINATOR)
        self.rank, self.world_size, self.local_rank = -1, 0, 0
        self.host = self.link.local
        """Where the other workers reach this one."""
        self.hosts: list[str] = []
        self.keys: LinkKeys | None = None
        self.stop = threading.Event()
        self.change = threading.Event()
        """Whether somebody waits to join, or is to leave."""
        self.shrink = threading.Event()
        """Whether somebody is to leave."""
        self.goes_on = False
        """Whether the run goes on without a rank that is lost."""
        self.released = False
        """Whether the run goes on without this worker, because it wants fewer."""
        self.later = False
        """Whether this is not the first generation, so that others may have the run's state."""
        self.recorded = 0
        """The last step that the run's ledger had when the generation began."""
        self.server: tuple[str, int] | None = None
        """Where a star's server listens, in this generation."""
        self._group: Abortable | None = None
        self._peer_gone: tuple[int, str] | None = None
        self._turn = threading.Lock()
        self.way_back: Callable[[], socket.socket] | None = None
        """Connects to the coordinator again, if it can come back."""
        self.folder_mark: Callable[[], str] = lambda: ""
        """The mark of the process that holds the run's folder, as this worker sees it."""
        self._outbox = Outbox(self.link)
        self._parted: dict[str, Any] | None = None
        """What this worker has said when it left its group, until the next generation begins."""
        self._new_link: ControlLink | None = None
        self.compute_ms: Callable[[], float | None] = lambda: None
        """What forward and backward of the last step took."""
        self._token, self._wanted, self._leaving, self._asked = token, wanted, False, 0
        self._inbox: queue.SimpleQueue[Message | bytes | None] = queue.SimpleQueue()
        self._answers: dict[int, queue.SimpleQueue[str | None]] = {}
        self._lost = ""
        self._begun = False
        self._silence = 0.0
        self._loop = Loop(self, "andon-control")
        self._loop.add(self.link)
        self._loop.start()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, without waiting for it to be taken; while the coordinator is gone, what matters waits."""
        self._outbox.send(kind, fields)
        self._loop.wake()

    def receive(self, *expected: str, timeout: float | None = None) -> Message:
        """The next message, which must be of one of these kinds; waits for as long as the coordinator is alive."""
        message = self._inbox.get(timeout=timeout)
        if message is None:
            raise PeerLost(COORDINATOR, "joining", 0.0, self._lost)
        if isinstance(message, dict) and message["kind"] == "lost" and "lost" not in expected:
            raise PeerLost(message["rank"], "forming the group", 0.0, message["why"])
        if isinstance(message, bytes) or message["kind"] not in ("refused", *expected):
            raise ProtocolError("the coordinator spoke out of turn")
        if message["kind"] == "refused":
            remedy = "Start it again when that is put right"
            raise UserError("The coordinator refused this worker", message["reason"], remedy)
        return message

    def fetch(self, folder: Path) -> int:
        """Receive the data from the coordinator into a folder; gives its size in bytes."""
        receiver = Receiver(folder)
        self.send("fetch")
        while receiver.begin(self.receive("file")):
            size = receiver.received + receiver.left
            while receiver.received < size:
                piece = self._inbox.get()
                if not isinstance(piece, bytes):
                    raise PeerLost(COORDINATOR, "receiving the data", 0.0, self._lost or "it stopped sending")
                receiver.write(piece)
        return receiver.received

    def enter(self, ready: Mapping[str, str]) -> None:
        """Say that this worker is ready, and become a rank."""
        self.send("ready", **ready)
        welcome = self.receive("welcome")
        self.rank, self.world_size = welcome["rank"], welcome["world_size"]

    def wait_for_generation(self) -> bool:
        """Wait until the next generation begins; False if there will be none."""
        while (message := self.receive("begin", "stop", "end", "lost", "values"))["kind"] in ("lost", "values"):
            pass  # of the generation before
        if message["kind"] != "begin":
            self.released = bool(message.get("released"))
            return False
        try:
            issued = {int(peer): bytes.fromhex(key) for peer, key in message["keys"].items()}
            self.server = (str(message["server"][0]), int(message["server"][1])) if message["server"] else None
        except (TypeError, ValueError, IndexError):
            raise ProtocolError("the coordinator sent keys or an address that are none") from None
        self.keys = LinkKeys(message["generation"], issued).sealed(self._token)
        self.rank, self.world_size, self.recorded = message["rank"], message["world_size"], message["recorded"]
        self.hosts, self.host, self.local_rank = message["hosts"], message["host"], message["local_rank"]
        self.later = bool(message["later"])
        return True

    def part(self, why: str, lost: int | None) -> bool:
        """Say that this worker has left its group, and wait for the next generation; False if there will be none.

        `lost` is the rank on whose account the group failed, if it did."""
        with self._turn:
            self._group = None
        self._parted = {"generation": self.keys.generation if self.keys else 0, "why": why, "lost": lost}
        self.send("part", **self._parted)
        return self.wait_for_generation()

    def watch(self, group: Abortable) -> None:
        """Abort a group, or its opening, when a rank is lost."""
        with self._turn:
            self._group = group
            if self._peer_gone:
                group.abort(*self._peer_gone)

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
        """One request to the coordinator's store; any thread may ask."""
        self._asked += 1
        number = self._asked
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
        """Report committed steps, for the ledger."""
        self.send("commit", records=list(records))

    def went_back(self, generation: int, step: int) -> None:
        """Report that this generation goes on from the checkpoint of a step."""
        self.send("back", generation=generation, step=step)

    def fail(self, what: str, cause: str, remedy: str) -> None:
        """Report why this worker cannot go on."""
        self.send("failed", what=what, cause=cause, remedy=remedy)

    def leave(self, code: int) -> None:
        """Send the exit code and close the link."""
        self._leaving = True
        self.send("bye", code=code)
        self._loop.close()

    def close(self) -> None:
        """Close the link without a goodbye."""
        self._leaving = True
        self._loop.close()

    def name(self, rank: int) -> str:
        """A rank and its host."""
        return f"rank {rank} on {self.hosts[rank]}" if 0 <= rank < len(self.hosts) else f"rank {rank}"

    def on_message(self, link: ControlLink, message: Message | bytes) -> None:
        """What the coordinator says."""
        kind = "file" if isinstance(message, bytes) else message["kind"]
        if kind == "stop" and self._begun:
            self.stop.set()
        elif kind == "stored":
            assert isinstance(message, dict)
            if message["id"] in self._answers:
                self._answers[message["id"]].put(message["value"])
        elif kind == "change":
            assert isinstance(message, dict)
            if message["released"]:
                self.shrink.set()
            self.change.set()
        elif kind == "lost":
            assert isinstance(message, dict)
            self._inbox.put(message)
            self._peer_lost(message["rank"], message["why"])
        elif kind == "refused" and self._begun:
            assert isinstance(message, dict)
            self.way_back = None
            self._inbox.put(message)
            self._end_soon(f"the coordinator has refused it: {message['reason']}")
        elif kind != "alive":
            if isinstance(message, bytes) and self._inbox.qsize() > MOST_PIECES:
                time.sleep(PIECE_PAUSE)  # the disk is slower than the network, which has to wait for it
            if kind == "begin":
                self._parted = None
                with self._turn:
                    self._begun, self._peer_gone = True, None
                self.change.clear()
                self.shrink.clear()
            self._inbox.put(message)

    def _peer_lost(self, rank: int, why: str) -> None:
        with self._turn:
            self._peer_gone = rank, why
            if self._group:
                self._group.abort(rank, why)
        if not self.goes_on:
            self._end_soon(f"{self.name(rank)} was lost: {why}")

    def on_lost(self, link: ControlLink, why: str) -> None:
        """The coordinator is gone."""
        if self._leaving:
            return
        self._lost = why
        for answers in list(self._answers.values()):
            answers.put(None)
        what = f"the coordinator at {link.remote} was lost: {why}"
        if self.goes_on and self._begun and self.way_back:
            self._outbox.lose_link()
            self._inbox.put({"kind": "lost", "rank": COORDINATOR, "why": why})  # whoever is at a rendezvous leaves it
            threading.Thread(target=self._find_back, args=[what], name="andon-return", daemon=True).start()
            return
        self._inbox.put(None)
        self._end_soon(what)

    def _find_back(self, what: str) -> None:
        """Connect to the coordinator again, as soon as it is back; without it the worker ends."""
        until = time.monotonic() + RETURN_SECONDS
        while time.monotonic() < until and not self._leaving:
            try:
                assert self.way_back
                self._new_link = ControlLink(self.way_back(), FROM_COORDINATOR)
                self._loop.wake()
                return
            except (GroupError, OSError):
                time.sleep(RETRY_SECONDS)
        self._end_soon(what)

    def _return(self, link: ControlLink) -> None:
        """The coordinator is back: say who this is, and what was said meanwhile; in the loop's thread."""
        me = {"host": socket.gethostname(), "machine": machine_id(), "pid": os.getpid(), "rank": self._wanted}
        generation = self.keys.generation if self.keys else -1
        link.queue("again", version=VERSION, **me, generation=generation, member=self.rank, folder=self.folder_mark())
        self._outbox.take_link(link)
        if self._parted:  # that may have been lost with the link
            link.queue("part", **self._parted)
        self.link = link
        self._loop.add(link)

    def _end_soon(self, why: str) -> None:
        def end() -> None:
            time.sleep(LEAVE_SECONDS)
            if not self._leaving:
                log(f"Rank {self.rank} on {socket.gethostname()} ends: {why}")
                os._exit(EXIT_USER_ERROR)

        threading.Thread(target=end, name="andon-end", daemon=True).start()

    def on_ready(self, data: Any) -> None:
        """There is nothing but the one link."""

    def on_tick(self) -> None:
        """A connection to a coordinator that is back may be there."""
        link, self._new_link = self._new_link, None
        if link:
            self._return(link)

    def on_crash(self, error: Exception) -> None:
        """As if the coordinator were lost, and for good."""
        self.way_back = None
        self.on_lost(self.link, f"{type(error).__name__}: {error}")

    def status(self) -> Message:
        """What a heartbeat says besides."""
        took = self.compute_ms()
        status: Message = {} if took is None else {"compute_ms": round(took, 1)}
        return {**status, "silence": self._silence} if self._silence else status

    @contextlib.contextmanager
    def may_be_silent(self, seconds: float) -> Iterator[None]:
        """Ask the coordinator for patience: what is done here may stop all threads of this process."""
        self._silence = seconds
        self.send("alive", **self.status())
        try:
            yield
        finally:
            self._silence = 0.0
            self.send("alive", **self.status())  # from now on it is missed as soon as anyone


def log(text: str) -> None:
    """Write to this worker's log, if its disk takes it in time; the coordinator is told the same."""

    def write() -> None:
        with contextlib.suppress(OSError):
            print(harmless(text), file=sys.stderr, flush=True)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(LOG_SECONDS)
