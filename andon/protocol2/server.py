"""The gradient server of wire version 2: workers join, get their shards, send gradients, get the mean.

To collect a gradient, the server reads the *head* of every worker's message (everything before the floats), then the
floats in pieces: the same piece of every worker at the same time, added in the one order and divided. So it holds one
vector and a piece per worker. A worker that disconnects, stalls or breaks the protocol is dropped; the server still
reads to the end what the others sent, so that it can go on serving them, and then raises an error that names the
worker. A gradient that is not finite raises in the same way but drops nobody.
"""

import logging
import math
import socket
import time
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from andon.protocol2 import messages
from andon.protocol2.worker_pool import LONGEST_HEAD, Worker, WorkerPool
from andon.transport.base import GroupError, GroupTimeout, ProtocolError
from andon.transport.rows import one_node_each
from andon.transport.tcp.connect import introductions, listen
from andon.transport.tcp.frames import Floats, Message, decode, frame
from andon.transport.tcp.stream import Incoming, read_frame

PIECE_ELEMENTS: Final = 1 << 17
"""Floats that are read from each worker at once."""

log = logging.getLogger(__name__)


class NonFiniteGradient(GroupError):
    """A worker sent NaN or infinity: halt before it reaches a weight (F-DP-003)."""

    def __init__(self, rank: int, step: int, where: str) -> None:
        super().__init__(f"halt: worker {rank} sent a non-finite gradient at step {step} ({where})")
        self.rank, self.step, self.where = rank, step, where


@dataclass(frozen=True, eq=False)
class Reduced:
    """The mean of whole gradients."""

    gradients: Floats
    global_loss: float
    total_correct: int
    total_samples: int
    milliseconds: float


@dataclass(frozen=True, eq=False)
class ReducedBlock:
    """The mean gradient of a block."""

    block: int
    component_sizes: tuple[int, ...]
    gradients: Floats
    milliseconds: float


@dataclass(frozen=True, eq=False)
class ReducedComponent:
    """The mean gradient of the LM head (0), the final norm (1) or the embedding (2)."""

    component: int
    gradients: Floats
    milliseconds: float


class GradientServer:
    """Serves version-2 workers at `bind` (port 0: any free port)."""

    def __init__(
        self, bind: tuple[str, int] = ("127.0.0.1", 0), dead_after: float = 30.0, heartbeat: float = 5.0
    ) -> None:
        self._listener = listen(bind, backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._pool = WorkerPool(dead_after, heartbeat)
        self._joined = 0

    @property
    def workers(self) -> list[Worker]:
        """The workers that have joined and are connected."""
        return list(self._pool.workers)

    @property
    def worker_count(self) -> int:
        """How many workers are connected."""
        return len(self._pool.workers)

    def wait_for_workers(self, count: int, deadline: float) -> None:
        """Wait until `count` workers have joined, `deadline` seconds at most; other connections are closed."""
        with closing(introductions(self._listener, lambda sock: _read_join(), deadline)) as arrivals:
            while self.worker_count < count:
                sock, request = next(arrivals, (None, None))
                if sock is None or request is None:
                    raise GroupTimeout(self._joined, "joining", deadline, f"{count} workers were expected")
                self._admit(sock, request, count)

    def send_shard_assignments(self, step: int, total_samples: int) -> None:
        """Give each worker its share of the samples; the last one takes the remainder."""
        size = total_samples // max(1, self.worker_count)
        places = {worker: place for place, worker in enumerate(self._pool.workers)}

        def assignment(worker: Worker) -> messages.ShardAssignment:
            place = places[worker]
            end = total_samples if place == len(places) - 1 else (place + 1) * size
            return messages.ShardAssignment(step, place * size, end)

        self._pool.send(assignment, f"sending the shards of step {step}")

    def collect_and_reduce(self, step: int) -> Reduced:
        """The mean of everyone's whole gradient, with loss and accuracy over all samples."""
        _, gradients, tails, milliseconds = self._collect(messages.GradientPayload, step, "whole vector")
        total = sum(samples for _, _, samples in tails)
        loss = sum(loss * samples for loss, _, samples in tails) / total if total else 0.0
        correct = sum(correct for _, correct, _ in tails)
        return Reduced(gradients, loss, correct, total, milliseconds)

    def collect_and_reduce_block(self, step: int, block: int) -> ReducedBlock:
        """The mean of everyone's gradient of one block."""
        part = f"block {block}"
        head, gradients, _, milliseconds = self._collect(messages.BlockGradientPayload, step, part, block)
        return ReducedBlock(block, head.values[4], gradients, milliseconds)

    def collect_and_reduce_non_block(self, step: int, component: int) -> ReducedComponent:
        """The mean of everyone's gradient of the LM head (0), the final norm (1) or the embedding (2)."""
        part = f"component {component}"
        _, gradients, _, milliseconds = self._collect(messages.NonBlockGradientPayload, step, part, component)
        return ReducedComponent(component, gradients, milliseconds)

    def broadcast_averaged(self, step: int, result: Reduced) -> None:
        """Send everyone the mean of whole gradients."""
        self._broadcast(messages.AveragedGradient(step, result.gradients, result.global_loss))

    def broadcast_averaged_block(self, step: int, result: ReducedBlock) -> None:
        """Send everyone the mean gradient of a block."""
        self._broadcast(messages.AveragedBlockGradient(step, result.block, result.component_sizes, result.gradients))

    def broadcast_averaged_non_block(self, step: int, result: ReducedComponent) -> None:
        """Send everyone the mean gradient of a component."""
        self._broadcast(messages.AveragedNonBlockGradient(step, result.component, result.gradients))

    def shutdown_workers(self) -> None:
        """Tell everyone that the session is over."""
        self._broadcast(messages.Shutdown())

    def close(self) -> None:
        """Disconnect everyone and stop listening; safe to call twice."""
        self._pool.close()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _admit(self, sock: socket.socket, request: messages.JoinRequest, count: int) -> None:
        worker = Worker(self._joined, request.node_id, request.gpu_count, request.backend, sock)
        try:
            sock.send(frame(messages.JoinAccepted(worker.worker_id, count)))
        except OSError as error:
            log.warning("worker %d left while it joined: %s", worker.worker_id, error)
            sock.close()
            return
        self._pool.workers.append(worker)
        self._joined += 1

    def _broadcast(self, message: Message) -> None:
        self._pool.send(lambda _: message, f"sending {type(message).__name__}")

    def _collect(
        self, expected: type[Message], step: int, where: str, part: int | None = None
    ) -> tuple[messages.Head, Floats, list[tuple[Any, ...]], float]:
        """One gradient from everyone: a head, the mean, each worker's fields after the floats, milliseconds."""
        started = time.monotonic()
        operation = f"collecting {where} of step {step}"

        def accept(worker: Worker, head: messages.Head) -> None:
            if head.message is not expected:
                raise ProtocolError(f"{head.message.__name__} where {expected.__name__} was expected")
            if head.values[0] != step:
                raise ProtocolError(f"step {head.values[0]} where {step} was expected")
            if head.values[1] != worker.worker_id:
                raise ProtocolError(f"it calls itself worker {head.values[1]}")
            if part is not None and head.values[2] != part:
                raise ProtocolError(f"{where.split()[0]} {head.values[2]} where {part} was expected")
            if expected is messages.BlockGradientPayload and sum(head.values[4]) != head.count:
                raise ProtocolError(f"sizes for {sum(head.values[4]):,} of {head.count:,} floats")

        head = self._agree(self._pool.heads(accept, operation), operation)
        mean = self._mean(head.count, step, where, operation)
        tails = self._tails(head, step, operation)
        self._pool.raise_failure()
        return head, mean, tails, 1000 * (time.monotonic() - started)

    def _agree(self, heads: dict[Worker, messages.Head], operation: str) -> messages.Head:
        """The head that most workers sent; a worker that sent another shape is dropped."""
        shapes = {worker: (head.count, head.values[3:]) for worker, head in heads.items()}
        if not shapes:
            self._pool.raise_failure()
            raise ProtocolError(f"no worker is connected for {operation}")
        usual, _ = Counter(shapes.values()).most_common(1)[0]
        for worker, shape in shapes.items():
            if shape != usual:
                text = f"worker {worker.worker_id} sent another shape than the others in {operation}"
                self._pool.drop(worker.worker_id, ProtocolError(text))
        return next(heads[worker] for worker, shape in shapes.items() if shape == usual)

    def _mean(self, count: int, step: int, where: str, operation: str) -> Floats:
        mean = np.empty(count, np.float32)
        pieces = {worker: np.empty(min(PIECE_ELEMENTS, count), np.float32) for worker in self._pool.workers}
        for lo in range(0, count, PIECE_ELEMENTS):
            size = min(PIECE_ELEMENTS, count - lo)
            self._fill({worker: pieces[worker][:size] for worker in self._pool.workers}, operation)
            leaves = [pieces[worker][:size] for worker in self._pool.workers]
            for worker, leaf in zip(self._pool.workers, leaves, strict=True):
                if not np.isfinite(leaf).all():
                    self._pool.fail(NonFiniteGradient(worker.worker_id, step, where))
            if leaves:
                with np.errstate(over="ignore", invalid="ignore"):
                    for into, other in one_node_each(len(leaves)).adds:
                        np.add(leaves[into], leaves[other], out=leaves[into])
                np.divide(leaves[0], np.float32(len(leaves)), out=mean[lo : lo + size])
        return mean

    def _tails(self, head: messages.Head, step: int, operation: str) -> list[tuple[Any, ...]]:
        if not head.tail:
            return []
        tails = {worker: np.empty(head.tail, np.uint8) for worker in self._pool.workers}
        self._fill(tails, operation)
        values = [messages.decode_tail(head.message, tails[worker].data) for worker in self._pool.workers]
        for worker, (loss, _, _) in zip(self._pool.workers, values, strict=True):
            if not math.isfinite(loss):
                self._pool.fail(NonFiniteGradient(worker.worker_id, step, "loss"))
        return values

    def _fill(self, buffers: Mapping[Worker, npt.NDArray[Any]], operation: str) -> None:
        streams = [
            Incoming(worker.sock, worker.worker_id, 1, [buffer.view(np.uint8).data].__getitem__)
            for worker, buffer in buffers.items()
        ]
        self._pool.run(streams, operation)


def _read_join() -> Generator[memoryview, None, messages.JoinRequest]:
    request = decode((yield from read_frame(LONGEST_HEAD)), messages.VERSION_2)
    if not isinstance(request, messages.JoinRequest):
        raise ProtocolError(f"{type(request).__name__} where JoinRequest was expected")
    return request
