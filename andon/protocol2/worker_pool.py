"""The workers of a gradient server, read from and written to all at the same time.

A worker that disconnects, stalls or breaks the protocol is dropped, and the others go on; the first such failure is
kept for the caller to raise when the others have been served.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from andon.protocol2.heartbeat import HeartbeatThread
from andon.protocol2.messages import Head, Heartbeat, decode_head
from andon.transport.base import GroupError, GroupTimeout, PeerLost, ProtocolError
from andon.transport.tcp.frames import LENGTH, MAX_FRAME, Buffer, Message, encode, frame, payload_length
from andon.transport.tcp.stream import MessageReader, Outgoing, Stream, StreamFailed, move_all

LONGEST_HEAD: Final = 1 << 20
PIECE_BYTES: Final = 1 << 19
"""Bytes that are sent at once."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Worker:
    """A worker that has joined. `beats`: it sends heartbeats, so the server may send it some."""

    worker_id: int
    node_id: str
    gpu_count: int
    backend: str
    sock: socket.socket = field(repr=False)
    beats: bool = field(default=False, repr=False)
    sending: threading.Lock = field(default_factory=threading.Lock, repr=False)


class WorkerPool:
    """The connected workers of a server; they may be silent for `dead_after` seconds, and get heartbeats."""

    def __init__(self, dead_after: float, heartbeat: float) -> None:
        self.workers: list[Worker] = []
        self.dead_after = dead_after
        self._failure: GroupError | None = None
        self._heartbeat = HeartbeatThread(heartbeat, self._beat)

    def heads(self, accept: Callable[[Worker, Head], None], operation: str) -> dict[Worker, Head]:
        """Each worker's next message up to its floats; `accept` raises `ProtocolError` for a wrong one."""
        heads: dict[Worker, Head] = {}

        def read(worker: Worker) -> Generator[memoryview, None, None]:
            while True:
                head = yield from read_head()
                if head.message is not Heartbeat:
                    break
                worker.beats = True
            accept(worker, head)
            heads[worker] = head

        self.run([MessageReader(worker.sock, worker.worker_id, read(worker)) for worker in self.workers], operation)
        return heads

    def send(self, message: Callable[[Worker], Message], operation: str) -> None:
        """Send each worker its message; raises, when all have been served, if one could not be."""
        streams = []
        with ExitStack() as held:
            for worker in self.workers:
                held.enter_context(worker.sending)
                pieces = _cut(encode(message(worker)))
                streams.append(Outgoing(worker.sock, worker.worker_id, len(pieces), pieces.__getitem__))
            self.run(streams, operation)
        self.raise_failure()

    def run(self, streams: Sequence[Stream], operation: str) -> None:
        """Move a stream per worker; a worker whose stream fails is dropped, the others finish."""
        active, started = list(streams), time.monotonic()
        while active:
            try:
                return move_all(active, self.dead_after)
            except StreamFailed as failed:
                active.remove(failed.stream)
                self.drop(failed.stream.peer, _error(failed, operation, time.monotonic() - started))

    def drop(self, worker_id: int, error: GroupError) -> None:
        """Disconnect a worker; the error is raised when the others have been served."""
        worker = next(worker for worker in self.workers if worker.worker_id == worker_id)
        self.workers.remove(worker)
        worker.sock.close()
        self.fail(error)

    def fail(self, error: GroupError) -> None:
        """Keep a failure for `raise_failure`; the first counts."""
        log.warning("%s", error)
        self._failure = self._failure or error

    def raise_failure(self) -> None:
        """Raise the first failure since the last call, if there is one."""
        failure, self._failure = self._failure, None
        if failure:
            raise failure

    def close(self) -> None:
        """Disconnect everyone; safe to call twice."""
        self._heartbeat.close()
        for worker in self.workers:
            worker.sock.close()
        self.workers.clear()

    def _beat(self) -> None:
        for worker in list(self.workers):
            if worker.beats and worker.sending.acquire(blocking=False):
                try:
                    worker.sock.send(frame(Heartbeat("server", int(time.time() * 1000))))
                except OSError as error:
                    log.debug("no heartbeat to worker %d: %s", worker.worker_id, error)
                finally:
                    worker.sending.release()


def read_head() -> Generator[memoryview, None, Head]:
    """For a `MessageReader`: reads the next message up to its floats and returns its head."""
    prefix = bytearray(LENGTH.size)
    yield memoryview(prefix)
    length = payload_length(prefix, MAX_FRAME)
    start = bytearray()
    while isinstance(head := decode_head(bytes(start), length), int):
        if head > LONGEST_HEAD:
            raise ProtocolError(f"a message with {head:,} bytes before its floats")
        more = bytearray(head - len(start))
        yield memoryview(more)
        start += more
    return head


def _error(failed: StreamFailed, operation: str, seconds: float) -> GroupError:
    rank = failed.stream.peer
    if failed.cause == "lost":
        return PeerLost(rank, operation, seconds, failed.detail)
    if failed.cause == "stalled":
        return GroupTimeout(rank, operation, seconds)
    return ProtocolError(f"worker {rank} broke the protocol in {operation}: {failed.detail}")


def _cut(buffers: Sequence[Buffer]) -> list[memoryview]:
    views = [memoryview(buffer) for buffer in buffers]
    return [view[at : at + PIECE_BYTES] for view in views for at in range(0, len(view), PIECE_BYTES)]
