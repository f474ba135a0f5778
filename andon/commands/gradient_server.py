"""`andon gradient-server`: averages gradients for workers of any language that speak protocol 2 (`andon.protocol2`).

A session begins when all workers have joined and follows the dialogue that they speak. It ends after `steps` steps, or
when all workers have left. It is recorded like a training run: events in metrics.jsonl, summary.json, halt.json. Steps
have the workers' own numbers, which begin with 0.
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
from andon.errors import EXIT_HALTED, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from andon.files import expand
from andon.protocol2.connections import Network, WorkerGone
from andon.protocol2.mean import NonFiniteGradient
from andon.protocol2.server import GradientServer, Mean, WorkersDisagree
from andon.protocol2.wire.dialogue import WHOLE, Dialogue
from andon.protocol2.worker import Worker
from andon.run.display import human_bytes, show_error
from andon.run.events import Emit, Event, Recorder, event
from andon.run.folder import RunFolder
from andon.transport.address import address_text
from andon.transport.tcp.connect import is_loopback

PORT: Final = 29412
"""Where a gradient server listens, unless told otherwise."""
LINE_EVERY: Final = 2.0
"""Seconds between lines about steps."""
MOST_LINES: Final = 100
"""Lines about workers that come and go before the session begins."""
LEAVE_SECONDS: Final = 5.0
"""How long the workers have at the end to read what they were sent."""


@dataclass(frozen=True)
class Service:
    """What a gradient server is asked to do."""

    bind: tuple[str, int]
    workers: int
    steps: int
    """0: until the workers leave."""
    samples: int
    """Samples that are shared out in every step; 0: workers get no assignments."""
    allow: Sequence[Network]
    folder: Path


def parse_networks(texts: Sequence[str]) -> list[Network]:
    """The networks that `--allow` names."""
    try:
        return [ip_network(text) for text in texts]
    except ValueError as error:
        raise UserError("--allow names no network", str(error), "For example --allow 10.0.0.0/24") from None


def serve(service: Service, console: Console) -> int:
    """Serve one session; gives the exit code."""
    host, port = service.bind
    if not is_loopback(host) and not service.allow:
        cause = f"{host} can be reached from other machines, and protocol 2 has no authentication"
        remedy = "Give --allow NETWORK, for example 10.0.0.0/24, or --bind 127.0.0.1:PORT"
        raise UserError("A gradient server would take gradients from anyone", cause, remedy)
    with ExitStack() as stack:
        folder = stack.enter_context(closing(RunFolder(expand(service.folder).resolve())))
        folder.take()
        if aside := folder.move_aside():
            console.print(f"The earlier session is now in {aside}", style="dim", markup=False)
        recorder = stack.enter_context(closing(Recorder(folder.folder, _Lines(console, service), hold=folder.hold)))
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
            text = f"Nobody is authenticated: whoever is in {networks} can take part and sees every gradient"
            console.print(f"WARNING: {text}", style="bold yellow", markup=False)
        code = session.run()
    if recorder.failure:
        show_error(console, recorder.failure)
        return code or EXIT_USER_ERROR
    return code


class _Stop(Exception):
    """Ctrl-C, SIGTERM or SIGHUP."""


class Session:
    """One session of a server, from the first worker to the last mean."""

    def __init__(self, service: Service, emit: Emit) -> None:
        self.service, self.emit = service, emit
        self.server = GradientServer(service.bind, service.allow, on_lost=self.lost, say=self.note)
        self.dialogue = Dialogue(0 if service.samples else None)
        self.steps, self.step = 0, 0
        """How many steps are done, and the number of the one that is next or under way."""
        self.begun = self.in_step = self.ended = False
        self.last: Event = {}
        self.lost_workers: list[int] = []
        self._said = 0
        self._lost_at = -1
        """The step in which a worker was lost last."""

    def note(self, text: str) -> None:
        """Record a line for the user."""
        self.emit(event("note", text=text))

    def joined(self, worker: Worker) -> None:
        """Say who has joined; it is recorded when all have, because anyone may come and go until then."""
        self._say_early(f"{_sentence(worker)} joined: {worker.gpu_count} GPUs, {worker.backend}")

    def _say_early(self, text: str) -> None:
        self._said += 1
        if self._said <= MOST_LINES:
            self.note(text)
        elif self._said == MOST_LINES + 1:
            self.note("Many workers come and go: nothing more is said of them until all have joined")

    def lost(self, gone: WorkerGone) -> None:
        """Record at once that a worker is gone: it left when all had done the same steps, or was lost."""
        worker = gone.worker
        if not self.begun:
            self._say_early(_sentence(gone))
            return
        begun = self.in_step or any(each.gradients for each in (worker, *self.server.workers))
        left = self.ended or (gone.cause == "lost" and not begun and self.steps >= max(1, self.service.steps))
        if not left:
            self.lost_workers.append(worker.worker_id)
            self._lost_at = self.steps
        self.emit(
            event("lost", rank=worker.worker_id, host=worker.node_id, step=self.step, left=left, reason=str(gone))
        )

    def run(self) -> int:
        """Serve to the end; gives the exit code."""
        server = self.server
        stop: list[bool] = []

        def stop_if_wanted() -> None:
            if stop:
                stop.clear()
                raise _Stop

        save_on_signal(lambda: stop.append(True))
        server.interrupt_with(stop_if_wanted)
        began = time.monotonic()
        try:
            server.wait_for_workers(self.service.workers, joined=self.joined)
            self._begin()
            while self.steps < (self.service.steps or math.inf) and server.workers:
                self._serve_step()
            self._say_goodbye()
        except _Stop:
            self.emit(event("stopped", step=self.step))
            self._say_goodbye()
            return EXIT_STOPPED
        except NonFiniteGradient as halt:
            return self._halt(halt)
        except WorkersDisagree as error:
            self._say_goodbye()
            cause = "Nobody can tell which of them is right, so the session ended before a mean was sent"
            raise UserError(_sentence(error), cause, "Give all workers the same model") from None
        except WorkerGone as gone:
            if self.in_step or self._lost_at == self.steps or self.steps < self.service.steps:
                remedy = "Look at the workers' own messages; then start server and workers again"
                raise UserError(f"Every worker is gone in step {self.step}", _sentence(gone), remedy) from None
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
        """One step: assignments, if there are any, and then part by part, until the dialogue begins a new step."""
        totals = _Totals(self.server.workers)
        if self.service.samples:
            self.in_step = True
            self.server.send_shard_assignments(self.step, self.service.samples)
        while True:
            mean = self.server.collect(self.dialogue)
            self.step, self.in_step = mean.part.step, True
            totals.add(mean)
            sending = time.monotonic()
            self.server.broadcast(mean)
            totals.send_ms += 1000 * (time.monotonic() - sending)
            if self.dialogue.between_steps:
                break
        self.last = event("step", step=self.step, **totals.fields(self.server.workers))
        self.steps, self.step, self.in_step = self.steps + 1, self.step + 1, False
        self.emit(self.last)

    def _halt(self, halt: NonFiniteGradient) -> int:
        """Stop the line: no mean of this step is sent any more."""
        self.server.interrupt_with(_ignore)
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
        self._say_goodbye()
        return EXIT_HALTED

    def _say_goodbye(self) -> None:
        """End the session for the workers: whole vectors know a message for it, pretraining only disconnects."""
        self.ended = True
        self.server.interrupt_with(_ignore)
        if self.dialogue.tag == WHOLE:
            self.server.shutdown_workers()
        self.server.wait_until_left(LEAVE_SECONDS)


def _ignore() -> None:
    """A wish to stop, where the session ends anyway."""


def _sentence(said: object) -> str:
    text = str(said)
    return text[:1].upper() + text[1:]


class _Totals:
    """What a step took, over all its parts."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._began, self._before = time.monotonic(), {worker: (worker.received, worker.sent) for worker in workers}
        self.parts = self.floats = 0
        self.wait_ms = self.reduce_ms = self.send_ms = 0.0
        self.mean: Mean | None = None

    def add(self, mean: Mean) -> None:
        self.parts, self.floats = self.parts + 1, self.floats + len(mean.gradients)
        self.wait_ms, self.reduce_ms, self.mean = self.wait_ms + mean.wait_ms, self.reduce_ms + mean.reduce_ms, mean

    def fields(self, workers: Sequence[Worker]) -> dict[str, Any]:
        """The fields of a `step` event."""
        assert self.mean
        whole, total = self.mean.part.tag == WHOLE, self.mean.total
        before = [self._before.get(worker, (0, 0)) for worker in workers]
        return {
            "loss": self.mean.loss if whole and total else None,
            "accuracy": self.mean.correct / total if whole and total else None,
            "correct": self.mean.correct if whole else None,
            "total": total if whole else None,
            "workers": len(self.mean.workers),
            "parts": self.parts,
            "floats": self.floats,
            "bytes_received": sum(worker.received - old for worker, (old, _) in zip(workers, before, strict=True)),
            "bytes_sent": sum(worker.sent - old for worker, (_, old) in zip(workers, before, strict=True)),
            "step_ms": round(1000 * (time.monotonic() - self._began), 3),
            **{key: round(getattr(self, key), 3) for key in ("wait_ms", "reduce_ms", "send_ms")},
        }


class _Lines:
    """Shows the events of a session, a line each; steps at most every two seconds."""

    def __init__(self, console: Console, service: Service) -> None:
        self.console, self.service = console, service
        self._last = 0.0
        self._done = 0

    def __call__(self, event: Event) -> None:
        if shows := getattr(self, f"_on_{event['event']}", None):
            style, text = shows(event)
            if text:
                self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _on_note(self, event: Event) -> tuple[str, str]:
        return "dim", event["text"]

    def _on_start(self, event: Event) -> tuple[str, str]:
        return "", f"All {event['workers']} workers have joined"

    def _on_step(self, event: Event) -> tuple[str, str]:
        self._done += 1
        if time.monotonic() - self._last < LINE_EVERY and self._done != self.service.steps:
            return "", ""
        self._last = time.monotonic()
        loss = "" if event["loss"] is None else f"loss {event['loss']:.4f}  accuracy {event['accuracy']:.1%}  "
        times = f"wait {event['wait_ms']:.0f} ms  mean {event['reduce_ms']:.0f} ms  send {event['send_ms']:.0f} ms"
        moved = f"in {human_bytes(event['bytes_received'])}  out {human_bytes(event['bytes_sent'])}"
        of = f"/{self.service.steps}" if self.service.steps else ""
        return "", f"step {self._done}{of}  {loss}workers {event['workers']}  {moved}  {times}"

    def _on_lost(self, event: Event) -> tuple[str, str]:
        if event["left"]:
            return "dim", f"Worker {event['rank']} ({event['host']}) left before step {event['step']}"
        return "bold red", f"Step {event['step']}: {event['reason']}"

    def _on_stopped(self, event: Event) -> tuple[str, str]:
        return "yellow", f"Stopped in step {event['step']}"

    def _on_halt(self, event: Event) -> tuple[str, str]:
        return "bold red", f"THE LINE STOPPED at step {event['step']}: {event['cause']}\nNo mean of it was sent."

    def _on_done(self, event: Event) -> tuple[str, str]:
        return "bold", f"Done: {event['step']} steps in {event['seconds']:.1f} s, {event['workers']} workers"
