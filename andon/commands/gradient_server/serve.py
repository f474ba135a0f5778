"""`andon gradient-server`: averages gradients for workers of any language that speak protocol 2 (`andon.protocol2`).

A session begins when all workers have joined, and follows the dialogue that they use. It ends after `steps` steps, or
when all workers have left. It is recorded like a training run, in metrics.jsonl, summary.json and halt.json. Steps have
the workers' numbers, which begin with 0.
"""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from andon.cluster.signals import save_on_signal
from andon.commands.gradient_server.steps import Lines, Totals
from andon.errors import EXIT_HALTED, EXIT_STOPPED, EXIT_USER_ERROR, UserError, sentence
from andon.files import expand
from andon.protocol2.connections import Network, WorkerGone
from andon.protocol2.mean import NonFiniteGradient
from andon.protocol2.server import GradientServer, WorkersDisagree
from andon.protocol2.wire.dialogue import WHOLE, Dialogue
from andon.protocol2.worker import Worker
from andon.run.records.events import Emit, Event, Recorder, event
from andon.run.records.folder import RunFolder
from andon.run.screen.display import show_error
from andon.transport.address import address_text
from andon.transport.tcp.connect import is_loopback

PORT: Final = 29412
"""The default port of a gradient server."""
MOST_EARLY_NOTES: Final = 100
"""Notes about workers that come and go before the session begins."""
LEAVE_SECONDS: Final = 5.0
"""Time for the workers to receive the last messages at the end."""


@dataclass(frozen=True)
class Service:
    """The options of a gradient server."""

    bind: tuple[str, int]
    workers: int
    steps: int
    """0: until the workers leave."""
    samples: int
    """Samples per step to assign to the workers; 0: no assignments."""
    allow: Sequence[Network]
    folder: Path


def parse_networks(texts: Sequence[str]) -> list[Network]:
    """Parse the networks of `--allow`."""
    try:
        return [ip_network(text) for text in texts]
    except ValueError as error:
        raise UserError("--allow is not a network", str(error), "For example --allow 10.0.0.0/24") from None


def serve(service: Service, console: Console) -> int:
    """Serve one session; returns the exit code."""
    host, port = service.bind
    if not is_loopback(host) and not service.allow:
        cause = f"{host} can be reached from other machines, and protocol 2 has no authentication"
        remedy = "Give --allow NETWORK, for example 10.0.0.0/24, or --bind 127.0.0.1:PORT"
        raise UserError("A gradient server would accept gradients from anyone", cause, remedy)
    with ExitStack() as stack:
        folder = stack.enter_context(closing(RunFolder(expand(service.folder).resolve())))
        folder.take()
        if aside := folder.move_aside():
            console.print(f"The earlier session is now in {aside}", style="dim", markup=False)
        lines = Lines(console, service.steps)
        recorder = stack.enter_context(closing(Recorder(folder.folder, lines, hold=folder.hold)))
        try:
            session = Session(service, recorder.emit)
        except OSError as error:
            what = f"The gradient server cannot listen at {address_text(host, port)}"
            remedy = "Choose another --bind: an address of this machine, and port 0 for a free one"
            raise UserError(what, str(error.strerror or error).partition(" (")[0], remedy) from None
        stack.enter_context(session.server)
        place = address_text(*session.server.address)
        console.print(f"Listening at {place} for {service.workers} workers", markup=False, highlight=False)
        if service.allow:
            networks = ", ".join(map(str, service.allow))
            text = f"There is no authentication: any host in {networks} can take part and receives every gradient"
            console.print(f"WARNING: {text}", style="bold yellow", markup=False)
        code = session.run()
    if recorder.failure:
        show_error(console, recorder.failure)
        return code or EXIT_USER_ERROR
    return code


class _Stop(Exception):
    """Ctrl-C, SIGTERM or SIGHUP."""


class Session:
    """One session of a server, from the first worker that joins to the last mean."""

    def __init__(self, service: Service, emit: Emit) -> None:
        self.service, self.emit = service, emit
        self.server = GradientServer(service.bind, service.allow, on_lost=self.lost, report=self.note)
        self.dialogue = Dialogue(0 if service.samples else None)
        self.steps, self.step = 0, 0
        """The number of steps done, and the number of the current or next step."""
        self.begun = self.in_step = self.ended = False
        self.last: Event = {}
        self.lost_workers: list[int] = []
        self._early_notes = 0
        self._finishing = False
        """Whether the last mean of a step is being sent: a worker that has received it may leave."""
        self._left: list[int] = []
        """Workers that left between two steps, as all do at the end of pretraining."""
        self._accuracy_noted = False
        self._lost_at = -1
        """The number of steps done when a worker was last lost."""

    def note(self, text: str) -> None:
        """Record a note for the user."""
        self.emit(event("note", text=text))

    def joined(self, worker: Worker) -> None:
        """Note that a worker has joined. It may still leave, so its `worker` event is recorded when all have joined."""
        self._note_early(f"{sentence(worker)} joined: {worker.gpu_count} GPUs, {worker.backend}")

    def _note_early(self, text: str) -> None:
        self._early_notes += 1
        if self._early_notes <= MOST_EARLY_NOTES:
            self.note(text)
        elif self._early_notes == MOST_EARLY_NOTES + 1:
            self.note("Many workers come and go: no more notes about them until all have joined")

    def lost(self, gone: WorkerGone) -> None:
        """Record that a worker is gone: it left when all had done the same steps, or it was lost."""
        worker = gone.worker
        if not self.begun:
            self._note_early(sentence(gone))
            return
        has_all = self._finishing and not worker.may_write
        begun = (self.in_step and not has_all) or any(each.gradients for each in (worker, *self.server.workers))
        steps = self.steps + has_all
        orderly = gone.cause == "lost" and worker.may_leave
        left = self.ended or (orderly and not begun and steps >= max(1, self.service.steps))
        if left:
            self._left.append(worker.worker_id)
            text = f"Worker {worker.worker_id} ({worker.node_id}) left before step {self.step}"
        else:
            self.lost_workers.append(worker.worker_id)
            self._lost_at = self.steps
            text = f"Step {self.step}: {gone}"
        who = {"rank": worker.worker_id, "host": worker.node_id}
        self.emit(event("lost", **who, why=str(gone), text=text, step=self.step, left=left))

    def run(self) -> int:
        """Serve to the end; returns the exit code."""
        server = self.server
        stop: list[bool] = []

        def raise_if_stopped() -> None:
            if stop:
                stop.clear()
                raise _Stop

        save_on_signal(lambda: stop.append(True))
        server.interrupt_with(raise_if_stopped)
        began = time.monotonic()
        try:
            server.wait_for_workers(self.service.workers, joined=self.joined)
            self._begin()
            while self.steps < (self.service.steps or math.inf) and server.workers:
                self._serve_step()
            self._end_session()
        except _Stop:
            self.emit(event("stopped", step=self.step))
            self._end_session()
            return EXIT_STOPPED
        except NonFiniteGradient as halt:
            return self._halt(halt)
        except WorkersDisagree as error:
            cause = "The server cannot tell which of them is right, so the session ended before a mean was sent"
            raise self._failed(sentence(error), cause, "Give all workers the same model") from None
        except WorkerGone as gone:
            if self.in_step or self._lost_at == self.steps or self.steps < self.service.steps:
                remedy = "Look at the workers' own messages; then start server and workers again"
                raise self._failed(f"Every worker is gone in step {self.step}", sentence(gone), remedy) from None
        summary = {key: self.last.get(key) for key in ("loss", "accuracy")}
        seconds = round(time.monotonic() - began, 3)
        self.emit(event("done", step=self.steps, lost=self.lost_workers, seconds=seconds, **summary, **self._service()))
        return 0

    def _begin(self) -> None:
        self.begun = True
        for worker in self.server.workers:
            facts = {"address": worker.address, "gpus": worker.gpu_count, "backend": worker.backend}
            self.emit(event("worker", rank=worker.worker_id, host=worker.node_id, **facts))
        self.emit(event("start", step=0, **self._service()))

    def _service(self) -> dict[str, Any]:
        return {"workers": self.service.workers, "samples": self.service.samples}

    def _serve_step(self) -> None:
        """Serve one step: send assignments, if any; then collect and broadcast parts until the dialogue ends it."""
        totals = Totals(self.server.workers)
        if self.service.samples:
            self.in_step = True
            self.server.send_shard_assignments(self.step, self.service.samples)
        while not self._finishing:
            mean = self.server.collect(self.dialogue)
            self.step, self.in_step, self._finishing = mean.part.step, True, self.dialogue.between_steps
            if self._finishing:
                self._note_departures()
            totals.add(mean)
            sending = time.monotonic()
            self.server.broadcast(mean)
            totals.send_ms += 1000 * (time.monotonic() - sending)
        self._finishing = False
        self.last = event("step", step=self.step, **totals.fields(self.server.workers))
        self._check_accuracy()
        self.steps, self.step, self.in_step = self.steps + 1, self.step + 1, False
        self.emit(self.last)

    def _check_accuracy(self) -> None:
        """Note once that there is no accuracy, if workers report more correct samples than samples."""
        correct, total = self.last["correct"] or 0, self.last["total"] or 0
        if correct > total and not self._accuracy_noted:
            self._accuracy_noted = True
            self.note(f"Step {self.step}: no accuracy, because workers count {correct:,} of {total:,} as correct")

    def _note_departures(self) -> None:
        """Count workers that left between steps as lost: the session continues without them."""
        if self._left:
            names = ", ".join(map(str, self._left))
            self.note(f"The others go on without worker {names}: means are over {len(self.server.workers)} workers")
            self.lost_workers += self._left
            self._left.clear()

    def _halt(self, halt: NonFiniteGradient) -> int:
        """Stop the line: no further mean of this step is sent."""
        self.server.interrupt_with(lambda: None)
        names = {worker.worker_id: worker.node_id for worker in self.server.workers}
        finding = {
            "rank": halt.rank,
            "host": names.get(halt.rank, ""),
            "unit": halt.where,
            "parameter": halt.where,
            **asdict(halt.flaw),
            "slot": None,
            "samples": [],
        }
        committed = self.last.get("step", halt.step - 1)
        cause = str(halt).removeprefix("halt: ")
        self.emit(event("halt", step=halt.step, committed=committed, cause=cause, findings=[finding], sound=True))
        self.server.halt(halt.step, cause)
        self._end_session()
        return EXIT_HALTED

    def _failed(self, what: str, cause: str, remedy: str) -> UserError:
        """End the session and record why; returns the error to raise."""
        self.emit(event("stopped", step=self.step, reason=f"{what}: {cause}"))
        self._end_session()
        return UserError(what, cause, remedy)

    def _end_session(self) -> None:
        """Disconnect the workers; the dialogue of whole vectors has a message for it."""
        self.ended = True
        self.server.interrupt_with(lambda: None)
        if self.dialogue.tag == WHOLE:
            self.server.shutdown_workers()
        self.server.wait_until_left(LEAVE_SECONDS)
