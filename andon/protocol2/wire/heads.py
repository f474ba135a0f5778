"""A gradient message in two parts: its *head*, everything before the floats, and what follows.

The head says how many floats follow, so that they are received into their own memory, and whether the message may come
now, before they are received at all.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final

from andon.protocol2.wire.extension import EXTENDED
from andon.transport.base import ProtocolError
from andon.transport.tcp.frames import LENGTH, MAX_FRAME, NUMBERS, Buffer, Message, PayloadReader, Short, payload_length

LONGEST_HEAD: Final = 1 << 20
"""Bytes before the floats: the sizes of a quarter of a million components."""


@dataclass(frozen=True)
class Head:
    """The fields of a message before its floats, the number of floats, and the bytes after them."""

    message: type[Message]
    values: tuple[Any, ...]
    count: int
    tail: int


def read_head(began: Callable[[int], None]) -> Generator[memoryview, None, Head]:
    """For a `MessageReader`: reads the next message up to its floats and returns its head. `began` is told the length
    of the frame as soon as it is known."""
    prefix = bytearray(LENGTH.size)
    yield memoryview(prefix)
    length = payload_length(prefix, MAX_FRAME)
    began(length)
    start = bytearray()
    while isinstance(head := decode_head(bytes(start), length), int):
        if head > LONGEST_HEAD:
            raise ProtocolError(f"a message with {head:,} bytes before its floats")
        more = bytearray(head - len(start))
        yield memoryview(more)
        start += more
    return head


def decode_head(start: Buffer, length: int) -> Head | int:
    """The head of a payload of `length` bytes that begins with `start`, or how many of its bytes are needed."""
    reader = PayloadReader(memoryview(start), length, EXTENDED)
    try:
        cls = reader.message_type()
        before = cls.layout[: cls.layout.index("f32[]")] if "f32[]" in cls.layout else cls.layout
        values = tuple(reader.field(kind) for kind in before)
        if before == cls.layout:
            reader.end()
            return Head(cls, values, 0, 0)
        count = reader.number("u64")
    except Short as short:
        return short.needed
    tail = sum(NUMBERS[kind].size for kind in cls.layout[len(before) + 1 :])
    floats = length - reader.position - tail
    if 4 * count != floats:
        raise ProtocolError(f"{cls.__name__} announces {count:,} floats, but its frame has {floats:,} bytes for them")
    return Head(cls, values, count, tail)


def decode_tail(cls: type[Message], tail: Buffer) -> tuple[Any, ...]:
    """The fields after the floats of a gradient message."""
    reader = PayloadReader(memoryview(tail), len(tail), EXTENDED)
    values = tuple(reader.field(kind) for kind in cls.layout[cls.layout.index("f32[]") + 1 :])
    reader.end()
    return values
