"""The worker's end of wire version 2 (see `andon.protocol2.server`)."""

import threading
import time
from contextlib import suppress
from typing import Any, Self, TypeVar

from andon.protocol2 import messages
from andon.protocol2.heartbeat import HeartbeatThread
from andon.protocol2.link import Link
from andon.transport.base import GroupError, GroupTimeout, PeerLost, ProtocolError
from andon.transport.tcp.frames import MAX_FRAME, Floats, Message, decode, encode

M = TypeVar("M", bound=Message)
SERVER = -1


class ServerShutdown(GroupError):
    """The server ended the session."""


class WorkerClient:
    """A worker that has joined a gradient server. It may be used by one thread at a time."""

    def __init__(
        self, address: tuple[str, int], join: messages.JoinRequest, dead_after: float = 30.0, heartbeat: float = 5.0
    ) -> None:
        """Join the server at `address`. Turn heartbeats off (0) for a server that does not expect them."""
        self._node_id = join.node_id
        self._sending = threading.Lock()
        self._link = Link.connect(*address, SERVER, dead_after)
        try:
            self._send(join, "joining")
            accepted = self._receive(messages.JoinAccepted, "joining")
        except GroupError:
            self._link.close()
            raise
        self.worker_id, self.total_workers = accepted.worker_id, accepted.total_workers
        self._heartbeat = HeartbeatThread(heartbeat, self._beat)

    def receive_assignment(self) -> messages.ShardAssignment | None:
        """The samples of the next step, or None when the server has ended the session."""
        try:
            return self._receive(messages.ShardAssignment, "waiting for a shard")
        except ServerShutdown:
            return None

    def send_gradients(self, step: int, gradients: Floats, loss: float, correct: int, total: int) -> None:
        """Send a whole gradient with the loss and accuracy on this worker's samples."""
        message = messages.GradientPayload(step, self.worker_id, gradients, loss, correct, total)
        self._send(message, f"sending the gradient of step {step}")

    def receive_averaged(self, step: int) -> messages.AveragedGradient:
        """The mean of everyone's gradient."""
        return self._receive(messages.AveragedGradient, f"waiting for the mean of step {step}", step=step)

    def send_block(
        self, step: int, block: int, num_blocks: int, component_sizes: tuple[int, ...], gradients: Floats
    ) -> None:
        """Send the gradient of one block, its components end to end."""
        message = messages.BlockGradientPayload(step, self.worker_id, block, num_blocks, component_sizes, gradients)
        self._send(message, f"sending block {block} of step {step}")

    def receive_averaged_block(self, step: int, block: int) -> messages.AveragedBlockGradient:
        """The mean of everyone's gradient of a block."""
        operation = f"waiting for block {block} of step {step}"
        averaged = self._receive(messages.AveragedBlockGradient, operation, step=step, block_idx=block)
        if sum(averaged.component_sizes) != len(averaged.gradients):
            raise ProtocolError(f"the server sent sizes that do not add up in {operation}")
        return averaged

    def send_non_block(self, step: int, component: int, gradients: Floats) -> None:
        """Send the gradient of the LM head (0), the final norm (1) or the embedding (2)."""
        message = messages.NonBlockGradientPayload(step, self.worker_id, component, gradients)
        self._send(message, f"sending component {component} of step {step}")

    def receive_averaged_non_block(self, step: int, component: int) -> messages.AveragedNonBlockGradient:
        """The mean of everyone's gradient of a component."""
        operation = f"waiting for component {component} of step {step}"
        return self._receive(messages.AveragedNonBlockGradient, operation, step=step, component=component)

    def close(self) -> None:
        """Leave; safe to call twice."""
        self._link.close()
        self._heartbeat.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, message: Message, operation: str) -> None:
        with self._sending:
            for part in encode(message):
                self._link.send(part, operation)

    def _beat(self) -> None:
        with suppress(PeerLost, GroupTimeout):  # the next send or receive fails too, and reports it
            self._send(messages.Heartbeat(self._node_id, int(time.time() * 1000)), "a heartbeat")

    def _receive(self, expected: type[M], operation: str, **fields: Any) -> M:
        """The next message, which must have this type and these fields; heartbeats are skipped."""
        message: Message = messages.Heartbeat("", 0)
        while isinstance(message, messages.Heartbeat):
            message = decode(self._link.receive_frame(MAX_FRAME, operation), messages.VERSION_2)
        if isinstance(message, messages.Shutdown):
            raise ServerShutdown(f"the server ended the session while {operation}")
        if not isinstance(message, expected):
            raise ProtocolError(f"the server sent {type(message).__name__} while {operation}")
        for name, value in fields.items():
            if getattr(message, name) != value:
                raise ProtocolError(f"the server sent {name} {getattr(message, name)} while {operation}")
        return message
