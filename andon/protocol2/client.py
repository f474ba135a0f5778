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
from andon.protocol2.link import Link, Move
from andon.protocol2.wire import messages
from andon.protocol2.wire.dialogue import BLOCK, WHOLE, Part
from andon.protocol2.wire.extension import MARK, Abilities, AveragedPiece, GradientPiece, Halted, Leaving, WorkerLost
from andon.transport.base import GroupError, ProtocolError
from andon.transport.tcp.frames import MAX_FRAME_BYTES, Buffer, Floats, Message, encode

M = TypeVar("M", bound=Message)
Samples = tuple[float, int, int]
"""The loss on a worker's samples, the number of correct predictions, and the number of samples."""
NO_SAMPLES: Final[Samples] = (0.0, 0, 0)
LEAVE_SECONDS: Final = 1.0
"""How long a worker that leaves waits for the server to close the connection."""


class ServerShutdown(GroupError):
    """The server ended the session."""


class ServerHalted(GroupError):
    """The server halted: a worker's gradient, or the sum, was not finite."""


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
        """Join the server at `address`, and wait for it as long as it lives. An Andon server and its workers send
        heartbeats every `heartbeat` seconds (0: none); it counts as dead after `dead_after` seconds of silence."""
        self.lost: dict[int, str] = {}
        """Workers that an Andon server has reported as lost, and why; means are over the others."""
        self.piece_floats = 0
        """Floats of a piece; 0: the server knows only version 2."""
        self._node_id = join.node_id
        self._sending = threading.Lock()
        self._unsent = b""
        """The bytes of a heartbeat that the kernel did not accept: they go out before the next message."""
        self._link = Link(address, mover)
        try:
            self._send(encode(replace(join, backend=join.backend + MARK)), "joining")
            accepted = self._receive(messages.JoinAccepted, "joining")
        except GroupError:
            self._link.close()
            raise
        self.worker_id, self.total_workers = accepted.worker_id, accepted.total_workers
        self._left = threading.Event()
        name = "andon-heartbeat"
        self._heartbeats = threading.Thread(target=self._send_heartbeats, args=(heartbeat,), name=name, daemon=True)
        if self.piece_floats:
            self._link.patience = dead_after
            if heartbeat:
                self._heartbeats.start()

    def receive_assignment(self) -> messages.ShardAssignment | None:
        """Receive the samples of the next step, or None when the server has ended the session."""
        try:
            return self._receive(messages.ShardAssignment, "waiting for a shard")
        except ServerShutdown:
            return None

    def average(self, step: int, gradients: Floats, samples: Samples = NO_SAMPLES) -> tuple[Floats, float]:
        """Send a whole gradient; returns the mean over all workers, and the loss over all samples."""
        message = messages.GradientPayload(step, self.worker_id, gradients, *samples)
        part = Part(WHOLE, step, length=len(gradients))
        return self._average(part, message, messages.AveragedGradient, samples, step=step)

    def average_part(self, part: Part, gradients: Floats) -> Floats:
        """Send the gradient of a block or a component; returns the mean over all workers."""
        step, index = part.step, part.index
        if part.tag == BLOCK:
            block = messages.BlockGradientPayload(step, self.worker_id, index, part.blocks, part.sizes, gradients)
            return self._average(part, block, messages.AveragedBlockGradient, step=step, block_idx=index)[0]
        component = messages.NonBlockGradientPayload(step, self.worker_id, index, gradients)
        return self._average(part, component, messages.AveragedNonBlockGradient, step=step, component=index)[0]

    def close(self) -> None:
        """Leave, because this worker is done; safe to call twice."""
        self._stop_heartbeats()
        if self.piece_floats:
            self._send_if_free(b"".join(encode(Leaving())))
            self._link.wait_for_end(LEAVE_SECONDS)
        self._link.close()

    def abort(self) -> None:
        """Disconnect after a failure: an Andon server reports this worker as lost."""
        self._link.close()
        self._stop_heartbeats()

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
        """Send a message with a gradient, in pieces if it is too long for a frame, and receive the mean."""
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
            operation = f"averaging {part.name} of step {part.step} from float {start:,} on"
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
            lengths = f"a mean of {len(mean):,} floats for a gradient of {len(mine):,}"
            raise ProtocolError(f"the server sent {lengths} while {operation}")
        return mean, getattr(averaged, "global_loss", 0.0)

    def _send(self, frame: list[Buffer], operation: str) -> None:
        with self._sending:
            rest, self._unsent = self._unsent, b""
            self._link.send([rest, *frame], operation)

    def _send_heartbeats(self, interval: float) -> None:
        while not self._left.wait(interval):
            beat = messages.Heartbeat(self._node_id, int(time.time() * 1000))
            self._send_if_free(b"" if self._unsent else b"".join(encode(beat)))

    def _stop_heartbeats(self) -> None:
        self._left.set()
        if self._heartbeats.is_alive():
            self._heartbeats.join()

    def _send_if_free(self, frame: bytes) -> None:
        """Send a short message, unless another one is being sent; never waits."""
        if self._sending.acquire(blocking=False):
            try:
                data = self._unsent + frame
                with suppress(OSError):  # the next send or receive fails too, and reports it
                    self._unsent = data[self._link.socket.send(data) :]
            finally:
                self._sending.release()

    def _receive(self, expected: type[M], operation: str, **fields: Any) -> M:
        """Receive a message of this type with these fields, after any heartbeats and losses."""
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
    """The error for a gradient that a server of another implementation refuses."""
    return UserError(
        f"A gradient of {floats:,} floats is too long for the gradient server",
        f"It supports only version 2, in which a message has at most {MAX_FRAME_BYTES:,} bytes",
        "Use `andon gradient-server`, which receives it in pieces, or a smaller model",
    )
