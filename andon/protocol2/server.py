"""The gradient server of wire version 2: workers join, receive their shards, send gradients, receive the mean.

One thread serves all connections; each method serves all of them until it is done. A worker that disconnects, stalls or
breaks the protocol is dropped and reported at once, also while the others still compute. The others receive the mean
over the remaining workers, because a worker of another implementation waits for it; then the session continues with the
next step. If the workers' gradients have different shapes, the majority decides; without a majority it is unknown which
is wrong, and the session ends. A gradient that is not finite also ends it (F-DP-003).
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from andon.protocol2.connections import Connections, Network, WorkerGone
from andon.protocol2.mean import NonFinite, NonFiniteGradient, find_non_finite, global_loss, mean_of
from andon.protocol2.wire.dialogue import Dialogue, Part, answer
from andon.protocol2.wire.extension import PIECE_FLOATS, Abilities, Halted
from andon.protocol2.wire.messages import JoinAccepted, ShardAssignment, Shutdown
from andon.protocol2.worker import Gradient, Worker
from andon.transport.base import GroupTimeout, ProtocolError
from andon.transport.tcp.frames import Floats, Message

FLUSH_SECONDS: Final = 5.0
"""How long sending the last messages of a session may take."""


class WorkersDisagree(ProtocolError):
    """The workers sent gradients of different shapes, and no shape has a majority."""


@dataclass(frozen=True, eq=False)
class Mean:
    """The mean of a part over the workers that sent it; loss and accuracy come with whole vectors only."""

    part: Part
    gradients: Floats
    workers: tuple[int, ...]
    loss: float
    correct: int
    total: int
    wait_ms: float
    """Until all workers had sent the part."""
    reduce_ms: float
    """To compute the mean."""


class GradientServer:
    """Serves version-2 workers at `bind` (port 0: any free port). This machine and the networks in `allow` may connect.

    `on_lost` is called at once when a worker is lost, `report` with a line about a connection that was refused."""

    def __init__(
        self,
        bind: tuple[str, int] = ("127.0.0.1", 0),
        allow: Sequence[Network] = (),
        dead_after: float = 30.0,
        heartbeat: float = 5.0,
        on_lost: Callable[[WorkerGone], None] = lambda gone: None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._on_lost, self._report = on_lost, report
        self._connections = Connections(bind, allow, (dead_after, heartbeat), self._check_gradient, self._lost)
        self.address = self._connections.address
        self._dialogue: Dialogue | None = None
        """That of `collect`, while it runs."""
        self._halt: NonFiniteGradient | None = None
        self._last_loss: WorkerGone | None = None

    @property
    def workers(self) -> list[Worker]:
        """The workers that have joined and are connected, in the order of their ids."""
        return self._connections.workers

    def interrupt_with(self, check: Callable[[], None]) -> None:
        """Have `check` called about ten times a second; an exception that it raises ends the method that runs."""
        self._connections.interrupt = check

    def wait_for_workers(
        self, count: int, deadline: float = math.inf, joined: Callable[[Worker], None] = lambda worker: None
    ) -> None:
        """Wait until `count` workers have joined, at most `deadline` seconds; no other worker can join afterwards."""
        until = time.monotonic() + deadline
        self._connections.start_accepting(self._report)
        while len(self.workers) < count:
            if time.monotonic() > until:
                raise GroupTimeout(self._connections.free_id(), "joining", deadline, f"{count} workers were expected")
            for sock, join in self._connections.run_once():
                worker = self._connections.admit(sock, join) if len(self.workers) < count else None
                if worker is None:
                    sock.close()
                    continue
                if worker.is_andon:
                    self._connections.send(worker, Abilities(PIECE_FLOATS))
                self._connections.send(worker, JoinAccepted(worker.worker_id, count))
                if worker in self.workers:
                    joined(worker)
        self._connections.stop_accepting()

    def send_shard_assignments(self, step: int, total_samples: int) -> None:
        """Send each worker its share of the samples; the last one takes the remainder (C-SHARD-001)."""
        self._connections.operation = f"sending the shards of step {step}"
        workers = self.workers
        size = total_samples // max(1, len(workers))
        for place, worker in enumerate(workers):
            end = total_samples if place == len(workers) - 1 else (place + 1) * size
            self._connections.send(worker, ShardAssignment(step, place * size, end))
        self._connections.flush(math.inf)

    def collect(self, dialogue: Dialogue) -> Mean:
        """Receive the next part from all workers, which must be the one that the dialogue expects, and average it."""
        self._connections.operation = f"collecting {dialogue.name}"
        self._dialogue, started = dialogue, time.monotonic()
        try:
            for worker in self.workers:
                with self._connections.dropping(worker):
                    if worker.gradients:
                        self._check_gradient(worker, worker.gradients[0])
            while self._halt or not (sent := self._all_sent()):
                if not self.workers:
                    raise self._last_loss or ProtocolError("no worker is connected")
                if self._halt:
                    raise self._halt
                self._connections.run_once()
            return self._average(sent, started)
        finally:
            self._dialogue = self._halt = None

    def broadcast(self, mean: Mean) -> None:
        """Send a mean to all workers."""
        self._connections.operation = f"sending the mean of {mean.part.name} of step {mean.part.step}"
        self._send_to_all(answer(mean.part, mean.gradients, mean.loss))
        self._connections.flush(math.inf)

    def halt(self, step: int, cause: str) -> None:
        """Notify the Andon workers why there will be no mean."""
        self._connections.operation = "halting"
        for worker in self.workers:
            if worker.is_andon:
                self._connections.send(worker, Halted(step, cause))
        self._connections.flush(FLUSH_SECONDS)

    def shutdown_workers(self) -> None:
        """Notify all workers that the session is over."""
        self._connections.operation = "ending the session"
        self._send_to_all(Shutdown())
        self._connections.flush(FLUSH_SECONDS)

    def wait_until_left(self, seconds: float) -> None:
        """Stop sending and wait until the workers have closed their connections: by then they have read everything."""
        self._connections.operation = "ending the session"
        until = time.monotonic() + seconds
        for worker in self.workers:
            worker.finish()
        while self.workers and time.monotonic() < until:
            self._connections.run_once()

    def close(self) -> None:
        """Disconnect all workers and stop listening; safe to call twice."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send_to_all(self, message: Message) -> None:
        for worker in self.workers:
            self._connections.send(worker, message)

    def _lost(self, gone: WorkerGone) -> None:
        self._last_loss = gone
        self._on_lost(gone)

    def _check_gradient(self, worker: Worker, gradient: Gradient) -> None:
        """Check a gradient whose head has arrived, or all of it; `ProtocolError` if it may not come now."""
        if self._dialogue is None or gradient is not worker.gradients[0]:
            return
        if not gradient.accepted:
            self._dialogue.check(gradient.part)
            gradient.accepted = True
        if gradient.complete and not self._halt:
            flaw, where = find_non_finite(gradient.floats), gradient.part.name
            if not flaw and gradient.tail and not math.isfinite(gradient.tail[0]):
                flaw, where = NonFinite(1, 0, "NaN" if math.isnan(gradient.tail[0]) else "Inf"), "loss"
            if flaw:
                self._halt = NonFiniteGradient(worker.worker_id, gradient.part.step, where, flaw)

    def _all_sent(self) -> dict[Worker, Part]:
        """All workers' parts, once they have arrived and have the same shape."""
        sent = {worker: worker.gradients[0].part for worker in self.workers if worker.gradients}
        if not sent or len(sent) < len(self.workers) or not all(worker.gradients[0].complete for worker in sent):
            return {}
        (usual, votes), *others = Counter(sent.values()).most_common()
        if others and 2 * votes <= len(sent):
            shapes = "; ".join(f"worker {worker.worker_id}: {_shape(part)}" for worker, part in sent.items())
            raise WorkersDisagree(f"the workers sent gradients of different shapes ({shapes})")
        for worker, part in list(sent.items()):
            if part != usual:
                self._connections.drop(worker, "protocol", f"{_shape(part)} where the others sent {_shape(usual)}")
                del sent[worker]
        return sent

    def _average(self, sent: dict[Worker, Part], started: float) -> Mean:
        part, reducing = next(iter(sent.values())), time.monotonic()
        gradients = {worker.worker_id: worker.take() for worker in sent}
        mean = mean_of({number: each.floats for number, each in gradients.items()}, part.step, part.name)
        tails = {number: each.tail for number, each in gradients.items() if each.tail}
        loss = global_loss({number: (loss, total) for number, (loss, _, total) in tails.items()}, part.step)
        assert self._dialogue
        self._dialogue.advance(part)
        correct, total = (sum(tail[place] for tail in tails.values()) for place in (1, 2))
        wait_ms, reduce_ms = 1000 * (reducing - started), 1000 * (time.monotonic() - reducing)
        return Mean(part, mean, tuple(sorted(gradients)), loss, correct, total, wait_ms, reduce_ms)


def _shape(part: Part) -> str:
    sizes = f" in sizes {list(part.sizes[:16])}" if part.sizes else ""
    return f"{part.name} of step {part.step} with {part.count:,} floats{sizes}"
