"""The steps of a gradient server's session: their totals, and the lines that a user sees."""

import time
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console

from andon.protocol2.server import Mean
from andon.protocol2.wire.dialogue import WHOLE
from andon.protocol2.worker import Worker
from andon.run.records.events import Event
from andon.run.screen.terminal import human_bytes

LINE_SECONDS: Final = 2.0
"""Time between lines about steps."""


class Totals:
    """Times, bytes and counts of a step, over all its parts."""

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
        whole, correct, total = self.mean.part.tag == WHOLE, self.mean.correct, self.mean.total
        before = [self._before.get(worker, (0, 0)) for worker in workers]
        return {
            "loss": self.mean.loss if whole and total else None,
            "accuracy": correct / total if whole and total and correct <= total else None,
            "correct": correct if whole else None,
            "total": total if whole else None,
            "workers": len(self.mean.workers),
            "parts": self.parts,
            "floats": self.floats,
            "bytes_received": sum(worker.received - old for worker, (old, _) in zip(workers, before, strict=True)),
            "bytes_sent": sum(worker.sent - old for worker, (_, old) in zip(workers, before, strict=True)),
            "step_ms": round(1000 * (time.monotonic() - self._began), 3),
            **{key: round(getattr(self, key), 3) for key in ("wait_ms", "reduce_ms", "send_ms")},
        }


class Lines:
    """Prints a line for each event of a session, for steps at most one every two seconds; `steps` 0: unknown number."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console, self.steps = console, steps
        self._last = 0.0
        self._done = 0

    def __call__(self, event: Event) -> None:
        if handler := getattr(self, f"_on_{event['event']}", None):
            style, text = handler(event)
            if text:
                self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _on_note(self, event: Event) -> tuple[str, str]:
        return "dim", event["text"]

    def _on_start(self, event: Event) -> tuple[str, str]:
        return "", f"All {event['workers']} workers have joined"

    def _on_step(self, event: Event) -> tuple[str, str]:
        self._done += 1
        if time.monotonic() - self._last < LINE_SECONDS and self._done != self.steps:
            return "", ""
        self._last = time.monotonic()
        loss = "" if event["loss"] is None else f"loss {event['loss']:.4f}  "
        loss += "" if event["accuracy"] is None else f"accuracy {event['accuracy']:.1%}  "
        times = f"wait {event['wait_ms']:.0f} ms  mean {event['reduce_ms']:.0f} ms  send {event['send_ms']:.0f} ms"
        moved = f"in {human_bytes(event['bytes_received'])}  out {human_bytes(event['bytes_sent'])}"
        of = f"/{self.steps}" if self.steps else ""
        return "", f"step {self._done}{of}  {loss}workers {event['workers']}  {moved}  {times}"

    def _on_lost(self, event: Event) -> tuple[str, str]:
        return "dim" if event["left"] else "bold red", event["text"]

    def _on_stopped(self, event: Event) -> tuple[str, str]:
        return "yellow", "" if "reason" in event else f"Stopped in step {event['step']}"

    def _on_halt(self, event: Event) -> tuple[str, str]:
        return "bold red", f"THE LINE STOPPED at step {event['step']}: {event['cause']}\nNo mean of this step was sent."

    def _on_done(self, event: Event) -> tuple[str, str]:
        return "bold", f"Done: {event['step']} steps in {event['seconds']:.1f} s, {event['workers']} workers"
