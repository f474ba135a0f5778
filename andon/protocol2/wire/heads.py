"""A gradient message in two parts: its *head*, all fields before the floats, and what follows.

The head has the number of floats, so that they are received directly into their array. It also decides whether the
message may come now, before any float is received.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final

from andon.protocol2.wire.extension import EXTENDED
from andon.transport.base import ProtocolError
from andon.transport.tcp.frames import LENGTH, NUMBERS, Buffer, Incomplete, Message, PayloadReader, payload_length

MAX_HEAD_BYTES: Final = 1 << 20
"""The sizes of a quarter of a million components."""


@dataclass(frozen=True)
class Head:
    """The fields of a message before its floats, the number of floats, and the bytes after them."""

    message: type[Message]
    values: tuple[Any, ...]
    count: int
    tail: int


def read_head(began: Callable[[int], None]) -> Generator[memoryview, None, Head]:
    """For a `MessageReader`: read the next message up to its floats and return its head. `began` is called with the
    length of the frame as soon as it is known."""
    prefix = bytearray(LENGTH.size)
    yield memoryview(prefix)
    length = payload_length(prefix)
    began(length)
    start = bytearray()
    while isinstance(head := decode_head(bytes(start), length), int):
        if head > MAX_HEAD_BYTES:
            raise ProtocolError(f"a message with {head:,} bytes before its floats")
        more = bytearray(head - len(start))
        yield memoryview(more)
        start += more
    return head


def decode_head(start: Buffer, length: int) -> Head | int:
    """Decode the head of a payload of `length` bytes that begins with `start`; or return how many bytes it takes."""
    reader = PayloadReader(memoryview(start), length, EXTENDED)
    try:
        cls = reader.message_type()
        before = cls.layout[: cls.layout.index("f32[]")] if "f32[]" in cls.layout else cls.layout
        values = tuple(reader.field(kind) for kind in before)
        if before == cls.layout:
            reader.end()
            return Head(cls, values, 0, 0)
        count = reader.number("u64")
    except Incomplete as incomplete:
        return incomplete.needed
    tail = sum(NUMBERS[kind].size for kind in cls.layout[len(before) + 1 :])
    floats = length - reader.position - tail
    if 4 * count != floats:
        raise ProtocolError(f"{cls.__name__} announces {count:,} floats, but its frame has {floats:,} bytes for them")
    return Head(cls, values, count, tail)


def decode_tail(cls: type[Message], tail: Buffer) -> tuple[Any, ...]:
    """Decode the fields after the floats of a gradient message."""
    reader = PayloadReader(memoryview(tail), len(tail), EXTENDED)
    values = tuple(reader.field(kind) for kind in cls.layout[cls.layout.index("f32[]") + 1 :])
    reader.end()
    return values
