"""The messages of the wire, byte for byte (C-WIRE-002).

A *frame* is a big-endian u32 length and that many bytes of payload. A *payload* is one tag byte and then the
fields of the message, little-endian, without padding: `str` is a u32 byte count and UTF-8, `f32[]` a u64
element count and the floats, `u32[]` and `u64[]` a u32 count and the numbers. Tags below 0x10 are version 2,
which others speak too; 0x10 belongs to the coordinator; 0x20 and above are the transports' own.

Decoding believes nothing: a count is held against the bytes that are there before anything is allocated, and
a payload must be used up exactly. Floats are views of the payload, not copies.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import numpy.typing as npt

from andon.engine.order import Order
from andon.transport.base import ProtocolError

Buffer = bytes | bytearray | memoryview
Floats = npt.NDArray[np.float32]

MAX_FRAME: Final = 100_000_000
LENGTH: Final = struct.Struct(">I")
_NUMBERS: Final = {
    "u8": struct.Struct("<B"),
    "u32": struct.Struct("<I"),
    "i32": struct.Struct("<i"),
    "u64": struct.Struct("<Q"),
    "f32": struct.Struct("<f"),
}
_LISTS: Final = {"u32[]": "<u4", "u64[]": "<u8"}


class Message:
    """Any message: a tag, and the kinds of its fields in order."""

    tag: ClassVar[int]
    layout: ClassVar[tuple[str, ...]]


M = TypeVar("M", bound=type[Message])
_BY_TAG: Final[dict[int, type[Message]]] = {}


def _message(tag: int, *layout: str) -> Callable[[M], M]:
    def register(cls: M) -> M:
        cls.tag, cls.layout = tag, layout
        _BY_TAG[tag] = cls
        return cls

    return register


@_message(0x01, "str", "u32", "str")
@dataclass(frozen=True)
class JoinRequest(Message):
    """Worker: "I am `node_id`, with so many GPUs. May I join?" """

    node_id: str
    gpu_count: int
    backend: str


@_message(0x02, "u32", "u32")
@dataclass(frozen=True)
class JoinAccepted(Message):
    """Server: "Welcome. You are number `worker_id` of `total_workers`." """

    worker_id: int
    total_workers: int


@_message(0x03, "u64", "u64", "u64")
@dataclass(frozen=True)
class ShardAssignment(Message):
    """Server: "In this step, work on samples `shard_start` up to `shard_end`." """

    step: int
    shard_start: int
    shard_end: int


@_message(0x04, "u64", "u32", "f32[]", "f32", "u64", "u64")
@dataclass(frozen=True, eq=False)
class GradientPayload(Message):
    """Worker: "Here is my whole gradient of the step, my loss, and how many of `total` I got right." """

    step: int
    worker_id: int
    gradients: Floats
    loss: float
    correct: int
    total: int


@_message(0x05, "u64", "f32[]", "f32")
@dataclass(frozen=True, eq=False)
class AveragedGradient(Message):
    """Server: "This is the mean of everyone's gradient, and the loss over all samples." """

    step: int
    gradients: Floats
    global_loss: float


@_message(0x06, "str", "u64")
@dataclass(frozen=True)
class Heartbeat(Message):
    """Either: "I am still here." """

    node_id: str
    timestamp_ms: int


@_message(0x07)
@dataclass(frozen=True)
class Shutdown(Message):
    """Server: "We are done. Goodbye." """


@_message(0x08, "u64", "u32", "u32", "u32", "u32[]", "f32[]")
@dataclass(frozen=True, eq=False)
class BlockGradientPayload(Message):
    """Worker: "Here is my gradient of one block, its components laid end to end in these sizes." """

    step: int
    worker_id: int
    block_idx: int
    num_blocks: int
    component_sizes: tuple[int, ...]
    gradients: Floats


@_message(0x09, "u64", "u32", "u32[]", "f32[]")
@dataclass(frozen=True, eq=False)
class AveragedBlockGradient(Message):
    """Server: "This is the mean gradient of that block, in the same sizes." """

    step: int
    block_idx: int
    component_sizes: tuple[int, ...]
    gradients: Floats


@_message(0x0A, "u64", "u32", "u8", "f32[]")
@dataclass(frozen=True, eq=False)
class NonBlockGradientPayload(Message):
    """Worker: "Here is my gradient of the LM head (0), the final norm (1) or the embedding (2)." """

    step: int
    worker_id: int
    component: int
    gradients: Floats


@_message(0x0B, "u64", "u8", "f32[]")
@dataclass(frozen=True, eq=False)
class AveragedNonBlockGradient(Message):
    """Server: "This is the mean gradient of that component." """

    step: int
    component: int
    gradients: Floats


@_message(0x20, "u32", "u32", "str", "str")
@dataclass(frozen=True)
class Hello(Message):
    """Peer: "I am `rank` of `world_size`; this connection is for `channel`. You gave me this token." """

    rank: int
    world_size: int
    channel: str
    token: str


@_message(0x21, "str", "u64", "str", "u64[]", "u64", "u64[]")
@dataclass(frozen=True)
class Operation(Message):
    """Peer: "I begin this collective: so many elements of this kind, cut at these bounds, summed over this
    many slots shared out like this. My bytes follow, without further frames; there can be any number." """

    name: str
    count: int
    wire: str
    bounds: tuple[int, ...]
    slots: int
    shares: tuple[int, ...]


@_message(0x22, "u64")
@dataclass(frozen=True)
class Alive(Message):
    """Peer: "I am here, and have begun so many operations." """

    operations: int


@_message(0x23, "str", "i32", "str")
@dataclass(frozen=True)
class Broken(Message):
    """Peer: "The group is broken: rank `rank` was lost, stalled, or broke the protocol." """

    cause: str
    rank: int
    detail: str


@_message(0x24)
@dataclass(frozen=True)
class Leaving(Message):
    """Peer: "I leave on purpose; do not take my silence for a failure." """


def encode(message: Message) -> list[Buffer]:
    """The frame of a message, as buffers to be sent one after the other; floats are not copied."""
    parts: list[Buffer] = [b"", bytes([message.tag])]
    for kind, field in zip(message.layout, fields(message), strict=True):  # type: ignore[arg-type]
        parts += _encode_field(kind, getattr(message, field.name))
    size = sum(memoryview(part).nbytes for part in parts)
    if size > MAX_FRAME:
        raise ValueError(f"{type(message).__name__} of {size:,} bytes: a frame holds at most {MAX_FRAME:,}")
    parts[0] = LENGTH.pack(size)
    return parts


def payload_length(prefix: Buffer, limit: int) -> int:
    """The length that the first bytes of a frame announce; the payload has at least a tag."""
    (length,) = LENGTH.unpack(prefix)
    if not 1 <= length <= limit:
        raise ProtocolError(f"a frame of {length:,} bytes; 1 to {limit:,} are allowed")
    return int(length)


def frame(message: Message) -> bytes:
    """The frame of a message."""
    return b"".join(encode(message))


def decode(payload: Buffer) -> Message:
    """The message in a payload; anything but exactly one valid message is a `ProtocolError`."""
    view = memoryview(payload).cast("B")
    reader = _Reader(view, len(view))
    cls = reader.message_type()
    values = [reader.field(kind) for kind in cls.layout]
    reader.end()
    return cls(*values)


@lru_cache(maxsize=1024)
def announcement(name: str, count: int, wire: str, bounds: tuple[int, ...], order: Order | None) -> bytes:
    """The frame with which a rank begins a collective."""
    slots, shares = (order.slots, order.bounds) if order else (0, ())
    return frame(Operation(name, count, wire, bounds, slots, shares))


def differ(theirs: bytes, mine: bytes) -> str:
    """In what a peer's announcement differs from mine."""
    try:
        operations = [decode(header[LENGTH.size :]) for header in (theirs, mine)]
    except ProtocolError as error:
        return f"it announced no operation: {error}"
    return "it announced {}, this rank {}".format(*operations)


@dataclass(frozen=True)
class Head:
    """What a message says before its floats, how many floats follow, and how many bytes after them."""

    message: type[Message]
    values: tuple[Any, ...]
    count: int
    tail: int


def decode_head(start: Buffer, length: int) -> Head | int:
    """The head of a payload of `length` bytes that begins with `start`, or how many bytes it takes to tell.

    A gradient is read this way, so that its floats can stream past instead of being held."""
    reader = _Reader(memoryview(start), length)
    try:
        cls = reader.message_type()
        before = cls.layout[: cls.layout.index("f32[]")] if "f32[]" in cls.layout else cls.layout
        values = tuple(reader.field(kind) for kind in before)
        if before == cls.layout:
            reader.end()
            return Head(cls, values, 0, 0)
        count = reader.number("u64")
    except _Short as short:
        return short.needed
    tail = sum(_NUMBERS[kind].size for kind in cls.layout[len(before) + 1 :])
    floats = length - reader.position - tail
    if 4 * count != floats:
        raise ProtocolError(
            f"{cls.__name__} announces {count:,} floats, but its frame has {floats:,} bytes for them"
        )
    return Head(cls, values, count, tail)


def decode_tail(cls: type[Message], tail: Buffer) -> tuple[Any, ...]:
    """The fields after the floats of a gradient message."""
    reader = _Reader(memoryview(tail), len(tail))
    values = tuple(reader.field(kind) for kind in cls.layout[cls.layout.index("f32[]") + 1 :])
    reader.end()
    return values


class _Short(Exception):
    """The payload is longer than the bytes at hand, and so many of them are needed to go on."""

    def __init__(self, needed: int) -> None:
        self.needed = needed


class _Reader:
    """A cursor over the first bytes of a payload of a known length."""

    def __init__(self, view: memoryview, length: int) -> None:
        self.view, self.length, self.position, self.name = view, length, 0, "message"

    def take(self, count: int) -> memoryview:
        end = self.position + count
        if end > self.length:
            raise ProtocolError(
                f"{self.name} is cut short: {count:,} bytes should follow, {self.length - self.position:,} do"
            )
        if end > len(self.view):
            raise _Short(end)
        taken, self.position = self.view[self.position : end], end
        return taken

    def number(self, kind: str) -> Any:
        codec = _NUMBERS[kind]
        return codec.unpack(self.take(codec.size))[0]

    def message_type(self) -> type[Message]:
        tag = self.number("u8")
        if tag not in _BY_TAG:
            raise ProtocolError(f"unknown message tag 0x{tag:02x}")
        self.name = _BY_TAG[tag].__name__
        return _BY_TAG[tag]

    def field(self, kind: str) -> Any:
        if kind in _NUMBERS:
            return self.number(kind)
        if kind == "str":
            try:
                return str(self.take(self.number("u32")), "utf-8")
            except UnicodeDecodeError as error:
                raise ProtocolError(f"{self.name} holds text that is not UTF-8: {error.reason}") from error
        if kind == "f32[]":
            return np.frombuffer(self.take(4 * self.number("u64")), np.dtype("<f4"))
        numbers = np.dtype(_LISTS[kind])
        return tuple(np.frombuffer(self.take(numbers.itemsize * self.number("u32")), numbers).tolist())

    def end(self) -> None:
        if self.position != self.length:
            raise ProtocolError(f"{self.name} is followed by {self.length - self.position:,} bytes too many")


def _encode_field(kind: str, value: Any) -> list[Buffer]:
    if kind in _NUMBERS:
        return [_NUMBERS[kind].pack(value)]
    if kind == "str":
        text = value.encode()
        return [_NUMBERS["u32"].pack(len(text)), text]
    if kind == "f32[]":
        floats = np.ascontiguousarray(value, np.dtype("<f4")).reshape(-1)
        return [_NUMBERS["u64"].pack(floats.size), floats.data.cast("B") if floats.size else b""]
    return [_NUMBERS["u32"].pack(len(value)), np.array(value, np.dtype(_LISTS[kind])).tobytes()]
