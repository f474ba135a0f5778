"""The worker's end of wire version 2 (see `andon.protocol2.server`)."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from socket import socket
from typing import Any, Final, Self, TypeVar

import numpy as np

from andon.errors import UserError
from andon.protocol2.heartbeat import HeartbeatThread
from andon.protocol2.link import Link, Move
from andon.protocol2.wire import messages
from andon.protocol2.wire.dialogue import WHOLE, Part
from andon.protocol2.wire.extension import MARK, Abilities, AveragedPiece, GradientPiece, Halted, Leaving, WorkerLost
from andon.transport.base import GroupError, ProtocolError
from andon.transport.tcp.frames import MAX_FRAME, Buffer, Floats, Message, encode

M = TypeVar("M", bound=Message)
Samples = tuple[float, int, int]
"""The loss on a worker's samples, how many of them it got right, and their number."""
NO_SAMPLES: Final[Samples] = (0.0, 0, 0)
LEAVE_SECONDS: Final = 1.0
"""How long a worker that leaves waits for the server to take note."""


class ServerShutdown(GroupError):
    """The server ended the session."""


class ServerHalted(GroupError):
    """The server stopped the line: some worker's gradient, or the sum, was not finite."""


class WorkerClient:
    """A worker that has joined a gradient server. It may be used by one thread at a time."""

    def __init__(
        self,
        address: tuple[str, int],
        join: messages.JoinRequest,
        dead_after: float = 30.0,
        heartbeat: float = 5.0,
        mover: Callable[[socket], Move] | None = None,
    ) -> None:
        """Join the server at `address`, and wait for it as long as it lives. If it is Andon's own, both send
        heartbeats: it counts as dead after `dead_after` seconds of silence."""
        self.lost: dict[int, str] = {}
        """Workers that an Andon server has reported as lost, and why; means are those of the others."""
        self.piece_floats = 0
        """Floats of a piece; 0: the server knows only version 2."""
        self._node_id = join.node_id
        self._sending = threading.Lock()
        self._unsent = b""
        """What the kernel did not take of a heartbeat: the next message comes behind it."""
        self._link = Link(address, mover)
        try:
            self._send(encode(replace(join, backend=join.backend + MARK)), "joining")
            accepted = self._receive(messages.JoinAccepted, "joining")
        except GroupError:
            self._link.close()
            raise
        self.worker_id, self.total_workers = accepted.worker_id, accepted.total_workers
        if self.piece_floats:
            self._link.patience = dead_after
        self._heartbeat = HeartbeatThread(heartbeat if self.piece_floats else 0.0, self._beat)

    def receive_assignment(self) -> messages.ShardAssignment | None:
        """The samples of the next step, or None when the server has ended the session."""
        try:
            return self._receive(messages.ShardAssignment, "waiting for a shard")
        except ServerShutdown:
            return None

    def average(self, step: int, gradients: Floats, samples: Samples = NO_SAMPLES) -> tuple[Floats, float]:
        """The mean of everyone's whole gradient, and the loss over all samples."""
        message = messages.GradientPayload(step, self.worker_id, gradients, *samples)
        part = Part(WHOLE, step, length=len(gradients))
        return self._average(part, message, messages.AveragedGradient, samples, step=step)

    def average_block(self, part: Part, gradients: Floats) -> Floats:
        """The mean of everyone's gradient of one block, its components end to end."""
        step, block = part.step, part.index
        message = messages.BlockGradientPayload(step, self.worker_id, block, part.blocks, part.sizes, gradients)
        return self._average(part, message, messages.AveragedBlockGradient, step=step, block_idx=block)[0]

    def average_component(self, part: Part, gradients: Floats) -> Floats:
        """The mean of everyone's gradient of the LM head (0), the final norm (1) or the embedding (2)."""
        step, component = part.step, part.index
        message = messages.NonBlockGradientPayload(step, self.worker_id, component, gradients)
        return self._average(part, message, messages.AveragedNonBlockGradient, step=step, component=component)[0]

    def close(self) -> None:
        """Leave: this worker is done; safe to call twice."""
        self._heartbeat.close()
        if self.piece_floats:
            self._send_if_free(b"".join(encode(Leaving())))
            self._link.wait_for_end(LEAVE_SECONDS)
        self._link.close()

    def abort(self) -> None:
        """Disconnect after a failure: an Andon server reports this worker as lost."""
        self._link.close()
        self._heartbeat.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _average(
        self, part: Part, message: Message, answer: type[Message], samples: Samples = NO_SAMPLES, **fields: Any
    ) -> tuple[Floats, float]:
        """Send a message with a gradient and receive its mean; in pieces, if it is too long for a frame."""
        mine: Floats = message.gradients  # type: ignore[attr-defined]
        operation = f"averaging {part.name} of step {part.step}"
        try:
            frame = encode(message)
        except ValueError:
            if not self.piece_floats:
                raise too_long(len(mine)) from None
            return self._average_pieces(part, mine, samples)
        self._send(frame, operation)
        return self._receive_mean(answer, mine, operation, **fields)

    def _average_pieces(self, part: Part, mine: Floats, samples: Samples) -> tuple[Floats, float]:
        mean, loss = np.empty(part.length, np.float32), 0.0
        for start in range(0, part.length, self.piece_floats):
            operation = f"averaging {part.name} of step {part.step} from {start:,} on"
            piece = mine[start : start + self.piece_floats]
            place = (part.tag, part.index, part.blocks, part.sizes, start, part.length)
            self._send(encode(GradientPiece(part.step, self.worker_id, *place, piece, *samples)), operation)
            fields = {"step": part.step, "tag_of_whole": part.tag, "index": part.index, "start": start}
            mean[start : start + len(piece)], loss = self._receive_mean(AveragedPiece, piece, operation, **fields)
        return mean, loss

    def _receive_mean(self, answer: type[Message], mine: Floats, operation: str, **fields: Any) -> tuple[Floats, float]:
        averaged = self._receive(answer, operation, **fields)
        mean: Floats = averaged.gradients  # type: ignore[attr-defined]
        if len(mean) != len(mine):
            raise ProtocolError(f"the server sent {len(mean):,} floats where {len(mine):,} were sent in {operation}")
        return mean, getattr(averaged, "global_loss", 0.0)

    def _send(self, frame: list[Buffer], operation: str) -> None:
        with self._sending:
            rest, self._unsent = self._unsent, b""
            self._link.send([rest, *frame], operation)

    def _beat(self) -> None:
        beat = messages.Heartbeat(self._node_id, int(time.time() * 1000))
        self._send_if_free(b"" if self._unsent else b"".join(encode(beat)))

    def _send_if_free(self, frame: bytes) -> None:
        """Send a short message, unless another one is on its way; never waits."""
        if self._sending.acquire(blocking=False):
            try:
                data = self._unsent + frame
                with suppress(OSError):  # the next send or receive fails too, and reports it
                    self._unsent = data[self._link.socket.send(data) :]
            finally:
                self._sending.release()

    def _receive(self, expected: type[M], operation: str, **fields: Any) -> M:
        """The next message, which must have this type and these fields; heartbeats and losses are noted."""
        while True:
            message = self._link.receive(operation)
            if isinstance(message, Abilities):
                self.piece_floats = message.piece_floats
            elif isinstance(message, WorkerLost):
                self.lost[message.worker_id] = message.reason
            elif not isinstance(message, messages.Heartbeat):
                break
        if isinstance(message, messages.Shutdown):
            raise ServerShutdown(f"the server ended the session while {operation}")
        if isinstance(message, Halted):
            raise ServerHalted(f"the server halted at step {message.step}: {message.cause}")
        if not isinstance(message, expected):
            raise ProtocolError(f"the server sent {type(message).__name__} while {operation}")
        for name, value in fields.items():
            if getattr(message, name) != value:
                raise ProtocolError(f"the server sent {name} {getattr(message, name)} while {operation}")
        return message


def too_long(floats: int) -> UserError:
    """The error for a gradient that a server of another implementation would refuse."""
    return UserError(
        f"A gradient of {floats:,} floats is too long for the gradient server",
        f"It speaks version 2 only, in which a message has at most {MAX_FRAME:,} bytes",
        "Use `andon gradient-server`, which takes it in pieces, or a smaller model",
    )
