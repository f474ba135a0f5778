"""The messages of wire protocol version 2, byte for byte (C-WIRE-002).

`andon.transport.tcp.frames` has the encoding of fields. A version-2 peer refuses frames above 100 MB.
"""

from dataclasses import dataclass
from typing import Any, Final

from andon.transport.base import ProtocolError
from andon.transport.tcp.frames import NUMBERS, Buffer, Floats, Message, PayloadReader, Protocol, Short, message

VERSION_2: Final[Protocol] = {}


@message(VERSION_2, 0x01, "str", "u32", "str")
class JoinRequest(Message):
    """Worker: "I am `node_id`, with so many GPUs. May I join?" """

    node_id: str
    gpu_count: int
    backend: str


@message(VERSION_2, 0x02, "u32", "u32")
class JoinAccepted(Message):
    """Server: "Welcome. You are number `worker_id` of `total_workers`." """

    worker_id: int
    total_workers: int


@message(VERSION_2, 0x03, "u64", "u64", "u64")
class ShardAssignment(Message):
    """Server: "In this step, work on samples `shard_start` up to `shard_end`." """

    step: int
    shard_start: int
    shard_end: int


@message(VERSION_2, 0x04, "u64", "u32", "f32[]", "f32", "u64", "u64")
class GradientPayload(Message):
    """Worker: "Here is my whole gradient of the step, my loss, and how many of `total` I got right." """

    step: int
    worker_id: int
    gradients: Floats
    loss: float
    correct: int
    total: int


@message(VERSION_2, 0x05, "u64", "f32[]", "f32")
class AveragedGradient(Message):
    """Server: "This is the mean of everyone's gradient, and the loss over all samples." """

    step: int
    gradients: Floats
    global_loss: float


@message(VERSION_2, 0x06, "str", "u64")
class Heartbeat(Message):
    """Either: "I am still here." """

    node_id: str
    timestamp_ms: int


@message(VERSION_2, 0x07)
class Shutdown(Message):
    """Server: "We are done. Goodbye." """


@message(VERSION_2, 0x08, "u64", "u32", "u32", "u32", "u32[]", "f32[]")
class BlockGradientPayload(Message):
    """Worker: "Here is my gradient of one block, its components laid end to end in these sizes." """

    step: int
    worker_id: int
    block_idx: int
    num_blocks: int
    component_sizes: tuple[int, ...]
    gradients: Floats


@message(VERSION_2, 0x09, "u64", "u32", "u32[]", "f32[]")
class AveragedBlockGradient(Message):
    """Server: "This is the mean gradient of that block, in the same sizes." """

    step: int
    block_idx: int
    component_sizes: tuple[int, ...]
    gradients: Floats


@message(VERSION_2, 0x0A, "u64", "u32", "u8", "f32[]")
class NonBlockGradientPayload(Message):
    """Worker: "Here is my gradient of the LM head (0), the final norm (1) or the embedding (2)." """

    step: int
    worker_id: int
    component: int
    gradients: Floats


@message(VERSION_2, 0x0B, "u64", "u8", "f32[]")
class AveragedNonBlockGradient(Message):
    """Server: "This is the mean gradient of that component." """

    step: int
    component: int
    gradients: Floats


@dataclass(frozen=True)
class Head:
    """The fields of a message before its floats, the number of floats, and the bytes after them."""

    message: type[Message]
    values: tuple[Any, ...]
    count: int
    tail: int


def decode_head(start: Buffer, length: int) -> Head | int:
    """The head of a payload of `length` bytes that begins with `start`, or how many of its bytes are needed.

    A gradient is read this way, so that its floats can be added piece by piece instead of being held."""
    reader = PayloadReader(memoryview(start), length, VERSION_2)
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
    reader = PayloadReader(memoryview(tail), len(tail), VERSION_2)
    values = tuple(reader.field(kind) for kind in cls.layout[cls.layout.index("f32[]") + 1 :])
    reader.end()
    return values
