"""A worker's end of the control plane: it joins a coordinator, and from then on a thread hears and answers it.

The thread starts as soon as both have proved that they know the token, so that a worker that prepares its data, or
waits for others, is known to be alive, and knows that the coordinator is. When a rank is lost the group is made to fail
at once (`Group.abort`), which ends this worker in an orderly way; a worker that does not end soon, because it computes,
is ended here, and so is one whose coordinator is lost: the newest checkpoint is complete.
"""

import contextlib
import os
import queue
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from andon.control.files import Receiver
from andon.control.link import FROM_COORDINATOR, ControlLink, Message
from andon.control.loop import Loop
from andon.errors import EXIT_USER_ERROR, UserError, harmless
from andon.machine import machine_id
from andon.run.events import Event
from andon.transport.base import COORDINATOR, SOMEONE, Group, GroupError, GroupTimeout, PeerLost, ProtocolError
from andon.transport.keys import LinkKeys
from andon.transport.tcp.connect import connect
from andon.transport.tcp.entrance.handshake import NotAuthenticated, Refused
from andon.transport.tcp.entrance.tls import Tls
from andon.transport.tcp.frames import Hello
from andon.version import VERSION

LOG_SECONDS = 5.0  # how long writing to the log may take
CONNECT_SECONDS = 10.0
RENDEZVOUS_SECONDS = 300.0  # that ranks get to meet: some load torch from a slow disk
RETRY_SECONDS = 0.5
ATTEMPTS = 3  # to prove that this process knows the token
LEAVE_SECONDS = 2.0  # that a worker gets to end in an orderly way when another one is lost
MOST_PIECES = 64  # of the data, 256 KB each, that may wait for the disk
PIECE_PAUSE = 0.2
Say = Callable[[str], None]


class CoordinatorClient:
    """A worker's side of the control link: its rank, the rendezvous, events out and the wish to stop in."""

    def __init__(self, sock: socket.socket, token: str) -> None:
        self.link = ControlLink(sock, FROM_COORDINATOR)
        self.rank, self.world_size, self.local_rank = -1, 0, 0
        self.host = self.link.local
        """Where the other workers reach this one."""
        self.hosts: list[str] = []
        self.keys: LinkKeys | None = None
        self.stop = threading.Event()
        self.group: Group | None = None
        """The group to abort when a rank is lost."""
        self.compute_ms: Callable[[], float | None] = lambda: None
        """What forward and backward of the last step took."""
        self._token, self._leaving, self._asked = token, False, 0
        self._inbox: queue.SimpleQueue[Message | bytes | None] = queue.SimpleQueue()
        self._answers: dict[int, queue.SimpleQueue[str | None]] = {}
        self._lost = ""
        self._begun = False
        self._silence = 0.0
        self._loop = Loop(self, "andon-control")
        self._loop.add(self.link)
        self._loop.start()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, without waiting for it to be taken."""
        self.link.queue(kind, **fields)
        self._loop.wake()

    def receive(self, *expected: str, timeout: float | None = None) -> Message:
        """The next message, which must be of one of these kinds; waits for as long as the coordinator is alive."""
        message = self._inbox.get(timeout=timeout)
        if message is None:
            raise PeerLost(COORDINATOR, "joining", 0.0, self._lost)
        if isinstance(message, dict) and message["kind"] == "lost":
            raise PeerLost(message["rank"], "forming the group", 0.0, message["why"])
        if isinstance(message, bytes) or message["kind"] not in ("refused", *expected):
            raise ProtocolError("the coordinator spoke out of turn")
        if message["kind"] == "refused":
            raise UserError("The coordinator refused this worker", message["reason"], "Correct that and start it again")
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
        try:
            issued = {int(peer): bytes.fromhex(key) for peer, key in welcome["keys"].items()}
        except (TypeError, ValueError):
            raise ProtocolError("the coordinator sent keys that are none") from None
        self.keys = LinkKeys(welcome["generation"], issued).sealed(self._token)

    def wait_for_all(self) -> bool:
        """Wait until every rank is there; False if the run was stopped before that."""
        message = self.receive("begin", "stop")
        if message["kind"] == "stop":
            return False
        self.hosts, self.host, self.local_rank = message["hosts"], message["host"], message["local_rank"]
        return True

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
        elif kind == "lost":
            assert isinstance(message, dict)
            if not self.group:
                self._inbox.put(message)
            self._peer_lost(message["rank"], message["why"])
        elif kind != "alive":
            if isinstance(message, bytes) and self._inbox.qsize() > MOST_PIECES:
                time.sleep(PIECE_PAUSE)  # the disk is slower than the network, which has to wait for it
            self._begun = self._begun or kind == "begin"
            self._inbox.put(message)

    def _peer_lost(self, rank: int, why: str) -> None:
        if self.group:
            self.group.abort(rank, why)
        self._end_soon(f"{self.name(rank)} was lost: {why}")

    def on_lost(self, link: ControlLink, why: str) -> None:
        """The coordinator is gone."""
        if self._leaving:
            return
        self._lost = why
        self._inbox.put(None)
        for answers in list(self._answers.values()):
            answers.put(None)
        self._end_soon(f"the coordinator at {link.remote} was lost: {why}")

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
        """Nothing is due."""

    def on_crash(self, error: Exception) -> None:
        """As if the coordinator were lost."""
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


def join(
    address: tuple[str, int],
    token: str,
    rank: int | None,
    tls: Tls | None = None,
    patience: float = 0.0,
    say: Say = print,
) -> tuple[Message, CoordinatorClient]:
    """Connect to the coordinator at an address, wait for it if it is not there yet, and receive its job."""
    until, waited, refused = time.monotonic() + patience, False, 0
    while True:
        try:
            sock = connect(address, COORDINATOR, Hello(0, 0, 0, "control"), token.encode(), CONNECT_SECONDS, tls)
            break
        except NotAuthenticated as error:
            refused += 1
            if isinstance(error, Refused) and refused < ATTEMPTS:  # perhaps only because too many knock there
                time.sleep(RETRY_SECONDS)
                continue
            cause = "The token here is not that of this run, or something else listens there"
            raise UserError(f"The coordinator cannot be joined: {error}", cause, "Copy the run's token again") from None
        except GroupError as error:
            if isinstance(error.__cause__, ssl.SSLError):
                remedy = "Check --tls-ca here and --tls-cert there, or leave TLS out on both sides"
                raise UserError("TLS with the coordinator failed", str(error.__cause__), remedy) from None
            if time.monotonic() >= until:
                raise
            if not waited:
                reason = str(error).rpartition(": ")[2]
                say(f"Waiting up to {patience:.0f} s for the coordinator at {address[0]}:{address[1]} ({reason})")
                waited = True
            time.sleep(RETRY_SECONDS)
    client = CoordinatorClient(sock, token)
    client.send("hello", version=VERSION, host=socket.gethostname(), machine=machine_id(), pid=os.getpid(), rank=rank)
    try:
        return client.receive("job"), client
    except BaseException:
        client.close()
        raise


def log(text: str) -> None:
    """Write to this worker's log, if its disk takes it in time; the coordinator is told the same."""

    def write() -> None:
        with contextlib.suppress(OSError):
            print(harmless(text), file=sys.stderr, flush=True)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(LOG_SECONDS)
