"""The messages of wire protocol version 2, byte for byte (C-WIRE-002).

`andon.transport.tcp.frames` has the encoding of fields. A version-2 peer refuses frames above 100 MB.
"""

from typing import Final

from andon.transport.tcp.frames import Floats, Message, Protocol, message

VERSION_2: Final[Protocol] = {}


@message(VERSION_2, 0x01, "str", "u32", "str")
class JoinRequest(Message):
    """Worker: "I am `node_id`, with `gpu_count` GPUs. May I join?" """

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
    """Server: "This is the mean gradient over all workers, and the loss over all samples." """

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
    """Worker: "Here is my gradient of one block: its components, of these sizes, one after the other." """

    step: int
    worker_id: int
    block_idx: int
    num_blocks: int
    component_sizes: tuple[int, ...]
    gradients: Floats


@message(VERSION_2, 0x09, "u64", "u32", "u32[]", "f32[]")
class AveragedBlockGradient(Message):
    """Server: "This is the mean gradient of that block, with the same sizes." """

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
