"""Frames, the codec of messages, and the messages between ranks.

A *frame* is a big-endian u32 length and that many bytes of payload. A *payload* is one tag byte and then the fields of
the message, little-endian, without padding: `str` is a u32 byte count and UTF-8, `f32[]` a u64 element count and the
floats, `u32[]` and `u64[]` a u32 count and the numbers. Tags below 0x10 are wire version 2
(`andon.protocol2.wire.messages`), 0x10 and 0x11 the control plane (`andon.control.link`), 0x20 to 0x26 this file, 0x40
and above extensions of version 2 (`andon.protocol2.wire.extension`).

Decoding trusts nothing: a count is compared with the number of bytes left before anything is allocated, and the fields
must fill the payload exactly. Floats are views of the payload, not copies.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, Final, dataclass_transform

import numpy as np
import numpy.typing as npt

from andon.engine.gradients.order import Order
from andon.transport.base import ProtocolError

Buffer = bytes | bytearray | memoryview
Floats = npt.NDArray[np.float32]

MAX_FRAME_BYTES: Final = 100_000_000
LENGTH: Final = struct.Struct(">I")
_CODES: Final = {"u8": "<B", "u32": "<I", "i32": "<i", "u64": "<Q", "f32": "<f"}
NUMBERS: Final = {kind: struct.Struct(code) for kind, code in _CODES.items()}
_LISTS: Final = {"u32[]": ("u32", "<u4"), "u64[]": ("u32", "<u8"), "f32[]": ("u64", "<f4")}  # count, elements


class Message:
    """A message: its tag, and the kinds of its fields in order."""

    tag: ClassVar[int]
    layout: ClassVar[tuple[str, ...]]


Protocol = dict[int, type[Message]]
"""The messages that a connection may carry, by tag."""
TRANSPORT: Final[Protocol] = {}


@dataclass_transform(frozen_default=True)
def message(protocol: Protocol, tag: int, *layout: str) -> Callable[[type[Any]], type[Any]]:
    """Decorate a class: make it a frozen dataclass and a message of a protocol."""

    def register(cls: type[Any]) -> type[Any]:
        cls.tag, cls.layout = tag, layout
        protocol[tag] = dataclass(frozen=True, eq="f32[]" not in layout)(cls)  # arrays are not compared
        return cls

    return register


@message(TRANSPORT, 0x20, "u32", "u32", "u64", "str", "str", "str")
class Hello(Message):
    """Connector: "I am `rank` of `world_size` in `generation`, and this connection is for `channel`. Here are my nonce
    and the proof that I know the key of this link." """

    rank: int
    world_size: int
    generation: int
    channel: str
    nonce: str = ""
    proof: str = ""


@message(TRANSPORT, 0x21, "str", "u64", "str", "u64[]", "u64", "u64[]")
class Operation(Message):
    """Peer: "I begin the collective `name` on `count` elements of type `wire`, cut at `bounds`, summed over `slots`
    slots that are divided among the ranks at `shares`. My bytes follow without frames, any number of them." """

    name: str
    count: int
    wire: str
    bounds: tuple[int, ...]
    slots: int
    shares: tuple[int, ...]


@message(TRANSPORT, 0x22, "u64")
class Alive(Message):
    """Peer: "I am alive and have begun `operations` operations." """

    operations: int


@message(TRANSPORT, 0x23, "str", "i32", "str")
class Broken(Message):
    """Peer: "The group is broken: rank `rank` was lost, stalled, or broke the protocol." """

    cause: str
    rank: int
    detail: str


@message(TRANSPORT, 0x24)
class Leaving(Message):
    """Peer: "I leave on purpose; my silence is not a failure." """


@message(TRANSPORT, 0x25, "str")
class Challenge(Message):
    """Acceptor: "Prove that you know the key. This is my nonce." """

    nonce: str


@message(TRANSPORT, 0x26, "str")
class Accepted(Message):
    """Acceptor: "Your proof is right. This is mine." """

    proof: str


def encode(message: Message) -> list[Buffer]:
    """Encode the frame of a message as buffers to send one after the other; floats are not copied."""
    parts: list[Buffer] = [b"", bytes([message.tag])]
    for kind, field in zip(message.layout, fields(message), strict=True):  # type: ignore[arg-type]
        parts += _encode_field(kind, getattr(message, field.name))
    size = sum(memoryview(part).nbytes for part in parts)
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"{type(message).__name__} of {size:,} bytes: a frame holds at most {MAX_FRAME_BYTES:,}")
    parts[0] = LENGTH.pack(size)
    return parts


def payload_length(prefix: Buffer, limit: int = MAX_FRAME_BYTES) -> int:
    """The length of the payload, which the first bytes of a frame announce; it has at least a tag."""
    (length,) = LENGTH.unpack(prefix)
    if not 1 <= length <= limit:
        raise ProtocolError(f"a frame of {length:,} bytes; 1 to {limit:,} are allowed")
    return int(length)


def frame(message: Message) -> bytes:
    """Encode the frame of a message as bytes."""
    return b"".join(encode(message))


def decode(payload: Buffer, protocol: Protocol = TRANSPORT) -> Message:
    """Decode the message in a payload; anything but exactly one valid message is a `ProtocolError`."""
    view = memoryview(payload).cast("B")
    reader = PayloadReader(view, len(view), protocol)
    cls = reader.message_type()
    values = [reader.field(kind) for kind in cls.layout]
    reader.end()
    return cls(*values)


@lru_cache(maxsize=1024)
def announcement(name: str, count: int, wire: str, bounds: tuple[int, ...], order: Order | None) -> bytes:
    """The frame that announces a collective."""
    slots, shares = (order.slots, order.bounds) if order else (0, ())
    return frame(Operation(name, count, wire, bounds, slots, shares))


def difference(theirs: bytes, mine: bytes) -> str:
    """How a peer's announcement differs from this rank's."""
    try:
        operations = [decode(header[LENGTH.size :]) for header in (theirs, mine)]
    except ProtocolError as error:
        return f"it announced no operation: {error}"
    return "it announced {}, this rank {}".format(*operations)


class Incomplete(Exception):
    """Too little of the payload has been received: `needed` bytes are needed to continue."""

    def __init__(self, needed: int) -> None:
        self.needed = needed


class PayloadReader:
    """Reads fields from the first bytes of a payload of a known length."""

    def __init__(self, view: memoryview, length: int, protocol: Protocol) -> None:
        self.view, self.length, self.protocol = view, length, protocol
        self.position, self.name = 0, "message"

    def take(self, count: int) -> memoryview:
        """The next `count` bytes."""
        end = self.position + count
        if end > self.length:
            there = self.length - self.position
            raise ProtocolError(f"{self.name} is cut short: {count:,} bytes should follow, {there:,} do")
        if end > len(self.view):
            raise Incomplete(end)
        taken, self.position = self.view[self.position : end], end
        return taken

    def number(self, kind: str) -> Any:
        """The next number."""
        codec = NUMBERS[kind]
        return codec.unpack(self.take(codec.size))[0]

    def message_type(self) -> type[Message]:
        """The message type of the tag."""
        tag = self.number("u8")
        if tag not in self.protocol:
            raise ProtocolError(f"unknown message tag 0x{tag:02x}")
        self.name = self.protocol[tag].__name__
        return self.protocol[tag]

    def field(self, kind: str) -> Any:
        """The next field."""
        if kind in NUMBERS:
            return self.number(kind)
        if kind == "str":
            try:
                return str(self.take(self.number("u32")), "utf-8")
            except UnicodeDecodeError as error:
                raise ProtocolError(f"{self.name} holds text that is not UTF-8: {error.reason}") from error
        count, dtype = _LISTS[kind]
        numbers = np.frombuffer(self.take(np.dtype(dtype).itemsize * self.number(count)), dtype)
        return numbers if kind == "f32[]" else tuple(numbers.tolist())

    def end(self) -> None:
        """Refuse bytes after the last field."""
        if self.position != self.length:
            raise ProtocolError(f"{self.name} is followed by {self.length - self.position:,} bytes too many")


def _encode_field(kind: str, value: Any) -> list[Buffer]:
    if kind in NUMBERS:
        return [NUMBERS[kind].pack(value)]
    if kind == "str":
        text = value.encode()
        return [NUMBERS["u32"].pack(len(text)), text]
    count, dtype = _LISTS[kind]
    numbers = np.ascontiguousarray(value, dtype).reshape(-1)
    return [NUMBERS[count].pack(numbers.size), numbers.data.cast("B") if numbers.size else b""]
