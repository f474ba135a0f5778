"""The control link: JSON messages between the coordinator and a worker, after both have proved that they know the
run's token (`andon.transport.tcp.entrance.handshake`).

One frame per message: tag 0x10, then a JSON object with its `kind`. A piece of a file is a frame with tag 0x11 and the
bytes. The dialogue:
  worker       hello    "here I am: this version, host, machine and process"
  coordinator  job      "this is the whole configuration, and the digest of the data"
  worker       again    "you have come back, or I have: I am this rank of this generation"   (instead of hello)
  worker       fetch    "I have no data with this digest: send it"
  coordinator  file     "a file of this name and size follows"   (with size -1: that was the last one)
  worker       ready    "I have data with this digest"
  coordinator  welcome  "you will be this rank, in a world of this size"   (rank -1: you get your rank when the next
                        generation begins)
  coordinator  refused  "you cannot take part, for this reason; try this"   (at any time before the worker has a rank;
                        a remedy only if the worker has nothing to correct)
  coordinator  begin    "this generation begins: this is your rank, the world size, the hosts of all ranks, your
                        address, the keys of your links and the star's server; the ledger has recorded this step;
                        this is not the first generation (later), so another rank may have the run's state"
  worker       value    "my value for this topic of the rendezvous is …"  (addresses, when a group is formed)
  coordinator  values   "these are everyone's values, by rank"
  worker       store    "set, get, check or add to a key of torch's store"
  coordinator  stored   "the answer to that request"
  worker       event    "this happened" (see andon.run.records.events)
  worker       failed   "I must stop, and this is why"
  worker       commit   "these steps are committed" (see andon.run.records.ledger)
  worker       back     "this generation goes on from the checkpoint of this step; it is its first, second, … return"
  coordinator  lost     "this rank is lost, for this reason"
  coordinator  change   "a worker waits to join, or this number of you is released: leave the group after this step"
  worker       part     "I have left the group of this generation, because of this (and of this rank, if it failed),
                        and wait for the next one"
  coordinator  end      "there is no next one" (or, for a worker that is released: it begins without you)
  coordinator  stop     "save and leave after this step"
  worker       bye      "I am done, with this exit code"
  both         alive    "I am here"   (every second; a worker adds how long its last step took, and for how many seconds
                        it may be silent, because it loads a library that blocks all its threads)

Sending never blocks: messages wait in a queue of limited size until the peer reads them.
"""

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from andon.errors import shown
from andon.transport.base import ProtocolError
from andon.transport.tcp.frames import LENGTH, payload_length

TAG: Final = 0x10
FILE_TAG: Final = 0x11
MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_WAITING_BYTES: Final = 8 << 20
"""Most bytes that wait for a peer that does not read; with more the peer is dropped."""
HEARTBEAT: Final = 1.0
"""Seconds between `alive` messages."""
DEAD_AFTER: Final = 5.0
"""Seconds of silence after which a peer counts as dead."""
MAX_SILENCE_SECONDS: Final = 300.0
"""The longest silence that a worker may announce."""
READ_BYTES: Final = 1 << 16

Message = dict[str, Any]
Fields = dict[str, type | tuple[type, ...]]
MAYBE_INT: Final = (int, type(None))
IDENTITY: Final[Fields] = {"version": str, "host": str, "machine": str, "pid": int, "rank": MAYBE_INT}
FROM_WORKER: Final[dict[str, Fields]] = {
    "alive": {},
    "hello": IDENTITY,
    "again": {**IDENTITY, "generation": int, "member": int, "local_rank": int, "folder": str},
    "fetch": {},
    "ready": {"data": str, "folder": str},
    "value": {"topic": str, "value": str},
    "store": {"id": int, "operation": str, "key": str, "value": str},
    "event": {"event": dict},
    "commit": {"records": list},
    "back": {"generation": int, "number": int, "step": int},
    "part": {"generation": int, "why": str, "lost": MAYBE_INT},
    "failed": {"what": str, "cause": str, "remedy": str},
    "bye": {"code": int},
}
FROM_COORDINATOR: Final[dict[str, Fields]] = {
    "alive": {},
    "job": {"data": str, "local_rank": int},
    "file": {"name": str, "size": int},
    "refused": {"reason": str},
    "welcome": {"rank": int, "world_size": int},
    "begin": {
        "generation": int,
        "rank": int,
        "world_size": int,
        "recorded": int,
        "later": int,
        "hosts": list,
        "host": str,
        "keys": dict,
        "server": (list, type(None)),
    },
    "values": {"topic": str, "values": list},
    "stored": {"id": int, "value": str},
    "lost": {"rank": int, "host": str, "why": str},
    "change": {"released": int},
    "end": {"released": int},
    "stop": {},
}
"""The required fields of each kind of message."""


class ControlLink:
    """Messages over one connection; any thread may queue them, only the loop's thread reads and writes."""

    def __init__(self, sock: socket.socket, allowed: dict[str, Fields]) -> None:
        sock.setblocking(False)
        self.socket, self.allowed = sock, allowed
        self.local: str = plain_address(sock.getsockname()[0])
        self.remote: str = plain_address(sock.getpeername()[0])
        self.last_seen = time.monotonic()
        """When the peer last sent something."""
        self.waiting = 0
        """Bytes that are queued and not sent yet."""
        self._queue: deque[memoryview] = deque()
        self._lock = threading.Lock()  # of the queue; not held during a send
        self._received = bytearray()

    def queue(self, kind: str, **fields: Any) -> None:
        """Queue a message; `ValueError` if it is larger than the peer allows."""
        payload = bytes([TAG]) + json.dumps({"kind": kind, **fields}).encode()
        if len(payload) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message '{kind}' of {len(payload):,} bytes; at most {MAX_MESSAGE_BYTES:,} are allowed")
        self.queue_frame(payload)

    def queue_frame(self, payload: bytes) -> None:
        """Queue a frame."""
        data = LENGTH.pack(len(payload)) + payload
        with self._lock:
            self._queue.append(memoryview(data))
            self.waiting += len(data)

    def write(self) -> None:
        """Send as much of the queue as the peer takes now; `ProtocolError` if too much still waits."""
        while self._queue:
            data = self._queue[0]
            try:
                count = self.socket.send(data)
            except BlockingIOError:
                break
            with self._lock:
                self.waiting -= count
                if count == len(data):
                    self._queue.popleft()
                else:
                    self._queue[0] = data[count:]
        if self.waiting > MAX_WAITING_BYTES:
            raise ProtocolError(f"it does not read: {self.waiting:,} bytes wait for it")

    def read(self) -> Iterator[Message | bytes]:
        """Yield the messages that have arrived, before the error that follows them; bytes are a piece of a file."""
        for _ in range(16):  # then the other links get their turn
            try:
                data = self.socket.recv(READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionError("its connection was closed")
            self.last_seen = time.monotonic()
            self._received += data
            yield from self._whole_frames()

    def _whole_frames(self) -> Iterator[Message | bytes]:
        received = self._received
        while len(received) >= LENGTH.size:
            end = LENGTH.size + payload_length(received[: LENGTH.size], MAX_MESSAGE_BYTES)
            if len(received) < end:
                return
            payload = bytes(received[LENGTH.size : end])
            del received[:end]
            yield self._decode(payload)

    def _decode(self, payload: bytes) -> Message | bytes:
        if payload[0] == FILE_TAG and "file" in self.allowed:
            return payload[1:]
        if payload[0] != TAG:
            raise ProtocolError(f"it sent tag 0x{payload[0]:02x}, not 0x{TAG:02x}")
        try:
            message = json.loads(payload[1:])
        except (ValueError, RecursionError):
            raise ProtocolError("it sent a message that is not JSON") from None
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise ProtocolError("it sent a message without a kind")
        fields = self.allowed.get(message["kind"])
        if fields is None:
            raise ProtocolError(f"it sent a message of unknown kind {shown(message['kind'])}")
        for name, kind in fields.items():
            if name not in message or not isinstance(message[name], kind) or isinstance(message[name], bool):
                raise ProtocolError(f"it sent '{message['kind']}' with {name} = {shown(message.get(name))}")
        return message

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def plain_address(address: str) -> str:
    """An IPv4 address that an IPv6 socket shows as ::ffff:a.b.c.d, in its usual form; any other address unchanged."""
    return address.removeprefix("::ffff:") if "." in address else address
