"""The messages that only Andon's server and workers exchange, besides wire version 2, in tags from 0x40 on.

An Andon worker ends the `backend` of its `JoinRequest` with `MARK`, which another server takes for part of a name. An
Andon server answers it with `Abilities` and then `JoinAccepted`. Only a worker that has received `Abilities` sends
heartbeats, pieces and `Leaving`, and only a worker with the mark is sent heartbeats, losses and halts. So no other peer
ever receives a message that version 2 does not have.
"""

from typing import Final

from andon.protocol2.wire.messages import VERSION_2
from andon.transport.tcp.frames import Floats, Message, Protocol, message

EXTENDED: Final[Protocol] = dict(VERSION_2)
"""Version 2 and the messages of this file."""
MARK: Final = "+andon"
PIECE_FLOATS: Final = 1 << 22
"""Floats of a piece: a server holds one piece per worker, whatever the length of the gradient."""


@message(EXTENDED, 0x40, "u64")
class Abilities(Message):
    """Server: "I am Andon's. Send heartbeats, and a gradient that is too long for a frame in pieces of `piece_floats`
    floats." """

    piece_floats: int


@message(EXTENDED, 0x41, "u32", "str")
class WorkerLost(Message):
    """Server: "This worker is lost; the next mean is over the others." """

    worker_id: int
    reason: str


@message(EXTENDED, 0x42, "u64", "str")
class Halted(Message):
    """Server: "I halted at this step, for this cause. There will be no mean." """

    step: int
    cause: str


@message(EXTENDED, 0x43, *("u64", "u32", "u8", "u32", "u32", "u32[]", "u64", "u64", "f32[]", "f32", "u64", "u64"))
class GradientPiece(Message):
    """Worker: "Here are the floats from `start` on of my gradient of `length` floats. As a whole it would be a message
    with this tag, about this block or component." """

    step: int
    worker_id: int
    tag_of_whole: int
    index: int
    num_blocks: int
    component_sizes: tuple[int, ...]
    start: int
    length: int
    gradients: Floats
    loss: float
    correct: int
    total: int


@message(EXTENDED, 0x44, "u64", "u8", "u32", "u64", "f32[]", "f32")
class AveragedPiece(Message):
    """Server: "This is the mean of those floats, and the loss over all samples." """

    step: int
    tag_of_whole: int
    index: int
    start: int
    gradients: Floats
    global_loss: float


@message(EXTENDED, 0x45)
class Leaving(Message):
    """Worker: "I am done, and close the connection." A worker that closes it without this message was lost."""
