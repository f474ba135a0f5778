"""What happened in a run besides its curves: which workers took part when, saves, samples, the halt, how it ended.

A *seat* is a worker's place on the board, with its lamp and its *spans*: the times in which a worker had it. When a
worker is lost, the ranks of the others close the gap, but their seats stay; a worker that joins takes a free seat. A
*generation* is one membership of the run: it changes when a worker is lost or joins, and when the run is started again.
Unknown events are ignored, and missing fields have defaults.
"""

import math
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from andon.board.text import integer, number, rank_named
from andon.control.stragglers import SLOW
from andon.run.records.events import Event

SILENT_SECONDS, SILENT_STEPS = 30.0, 10  # a run without an event for longer than both is silent
MOST_SPANS, MOST_WORKERS, MOST_SAVES = 64, 4096, 2000
LAST_SAMPLES = 6


@dataclass
class Span:
    """A time in which a worker took part; `end` is None while it lasts."""

    start: float
    end: float | None = None
    how: str = ""
    """How it ended: killed, lost, released, halted, stopped or done."""


@dataclass
class Worker:
    """A worker and its lamp."""

    rank: int
    """Of a lost worker, its last rank."""
    host: str
    lamp: str = "waiting"
    """waiting · running · slow · lost · cord (it pulled the cord) · stopped · done · silent"""
    detail: str = ""


@dataclass
class Seat:
    """A worker's place on the board."""

    worker: Worker
    spans: list[Span]

    @property
    def taken(self) -> bool:
        return bool(self.spans) and self.spans[-1].end is None

    def enter(self, worker: Worker, moment: float) -> None:
        self.worker = worker
        self.spans = [*self.spans[-MOST_SPANS:], Span(moment)]

    def leave(self, moment: float, how: str) -> None:
        if self.taken:
            self.spans[-1].end, self.spans[-1].how = moment, how


class Story:
    """The state of a run, updated event by event."""

    def __init__(self) -> None:
        self.seats: list[Seat] = []
        self._arrived: dict[int, tuple[float, str]] = {}
        """Time of arrival and host of workers that are in no generation yet, by rank."""
        self.generations: deque[dict[str, Any]] = deque(maxlen=200)
        self.facts: dict[str, Any] = {}
        self.evals: deque[list[float]] = deque(maxlen=2000)
        self.saves: dict[int, dict[str, Any]] = {}
        self.samples: list[dict[str, Any]] = []
        self.notes: deque[dict[str, Any]] = deque(maxlen=40)
        self.halt: Event | None = None
        self.done: Event | None = None
        self.state = "waiting"
        self.step, self.tokens, self.skipped = 0, 0, 0
        self.last: Event = {}
        """The event of the last step."""
        self.time, self.started = 0.0, 0.0
        self._intervals: deque[float] = deque(maxlen=32)
        self._times: deque[dict[str, Any]] = deque(maxlen=12)
        self._last_step = 0.0
        self._lost: list[int] = []
        """Ranks that were lost since the current generation began."""

    def add(self, event: Event) -> None:
        """Add an event that is not a step."""
        moment = number(event.get("time"))
        self.time = moment if moment == moment else self.time
        if handler := getattr(self, f"_on_{event['event']}", None):
            handler(event)

    def add_step(self, event: Event, step: int) -> None:
        """Add a step."""
        moment = number(event.get("time"))
        if moment == moment:
            if self._last_step and moment > self._last_step and step == self.step + 1:
                self._intervals.append(moment - self._last_step)
            self.time = self._last_step = moment
        self.step, self.last, self.state = step, event, "running"
        self.tokens += integer(event.get("tokens"))
        self.skipped += bool(event.get("skipped"))
        times = event.get("rank_ms")
        if isinstance(times, dict):
            self._times.append(times)

    @property
    def step_seconds(self) -> float:
        """Median duration of the last steps; NaN before there are any."""
        return median(self._intervals) if self._intervals else math.nan

    def state_now(self) -> str:
        """running, waiting, silent, halted, stopped or done."""
        quiet = time.time() - self.time
        patience = max(SILENT_SECONDS, SILENT_STEPS * (self.step_seconds if self._intervals else 0.0))
        return "silent" if self.state in ("running", "waiting") and self.time and quiet > patience else self.state

    def lamps(self, state: str) -> list[Worker]:
        """The workers to show: one per seat or, before the run starts, those that have arrived."""
        slow = self._slow() if state == "running" else {}
        if state == "waiting":
            return [Worker(rank, host) for rank, (_, host) in sorted(self._arrived.items())]
        shown = []
        for seat in self.seats:
            worker = replace(seat.worker)
            if worker.lamp == "running" and state == "silent":
                worker.lamp, worker.detail = "silent", "no event since then"
            elif worker.lamp == "running" and worker.rank in slow:
                worker.lamp, worker.detail = "slow", f"{slow[worker.rank]:.1f} × the others"
            shown.append(worker)
        return shown

    def _slow(self) -> dict[int, float]:
        """Ranks that were slow in most of the last steps, with their time over the others' median."""
        found: dict[int, list[float]] = {}
        for times in map(_compute_ms, self._times):
            for rank, took in enumerate(times if len(times) > 1 else []):
                usual = median(times[:rank] + times[rank + 1 :])
                if usual > 0 and took > SLOW * usual:
                    found.setdefault(rank, []).append(took / usual)
        return {rank: median(ratios) for rank, ratios in found.items() if 2 * len(ratios) > len(self._times)}

    def _on_worker(self, event: Event) -> None:
        rank, host = integer(event.get("rank")), event.get("host")
        if 0 <= rank < MOST_WORKERS:
            self._arrived[rank] = (self.time, host if isinstance(host, str) else "")

    def _on_start(self, event: Event) -> None:
        """The run starts or resumes: all earlier workers are gone."""
        keys = ("transport", "floor", "steps", "workers", "parameters", "model", "device")
        self.facts = {key: event[key] for key in keys if key in event}
        for seat in self.seats:
            seat.leave(self._last_step or seat.spans[-1].start, "killed")
        step, known = integer(event.get("step")), min(integer(event.get("workers")), MOST_WORKERS)
        ranks = range(known or max(self._arrived, default=-1) + 1)
        self.seats = [*self.seats[: len(ranks)], *(Seat(Worker(rank, ""), []) for rank in ranks[len(self.seats) :])]
        for rank, seat in zip(ranks, self.seats, strict=True):
            moment, host = self._arrived.get(rank, (self.time, ""))
            seat.enter(Worker(rank, host, "running"), moment)
        self._arrived.clear()
        self.started, self._last_step = self.time, 0.0
        self.step, self.state, self.halt, self.done = step, "running", None, None
        self._new_generation(event, f"resumed after step {step:,}" if step else "started")

    def _new_generation(self, event: Event, why: str) -> None:
        before: int = self.generations[-1]["generation"] if self.generations else -1
        number = integer(event["generation"]) if "generation" in event else before + 1
        here = sum(seat.taken for seat in self.seats)
        workers = integer(event.get("workers")) or here
        entry = {"generation": number, "time": self.time, "step": self.step, "workers": workers, "why": why}
        self.generations.append(entry)

    def _on_generation(self, event: Event) -> None:
        """Close the gaps in the ranks that lost workers have left; workers that have arrived take free seats."""
        staying = sorted((seat for seat in self.seats if seat.taken), key=lambda seat: seat.worker.rank)
        came = len(self._arrived)
        stay = max(0, (integer(event.get("workers")) or len(staying) + came) - came)
        for seat in staying[stay:]:
            seat.leave(self.time, "released")
            seat.worker.lamp, seat.worker.detail = "stopped", "released"
        for rank, seat in enumerate(staying[:stay]):
            seat.worker.rank = rank
        for rank, (_, host) in sorted(self._arrived.items()):
            self._take_seat(Worker(rank, host, "running"))
        self._arrived.clear()
        self.facts["workers"] = stay + came
        lost, self._lost = self._lost, []
        parts = [f"rank {rank} was lost" for rank in lost] + ([f"{came} joined"] if came else [])
        if len(staying) > stay:
            parts.append(f"{len(staying) - stay} left")
        self.step = integer(event.get("step")) if "step" in event else self.step
        if event.get("lost_state") is True:
            parts.append(f"back to step {self.step:,}")
        self._new_generation(event, ", ".join(parts) or "new membership")

    def _take_seat(self, worker: Worker) -> None:
        free = next((seat for seat in self.seats if not seat.taken), None)
        if free is None:
            free = Seat(worker, [])
            self.seats.append(free)
        free.enter(worker, self.time)

    def _on_lost(self, event: Event) -> None:
        rank = integer(event.get("rank"))
        self._arrived.pop(rank, None)
        for seat in self.seats:
            if seat.taken and seat.worker.rank == rank:
                seat.leave(self.time, "lost")
                seat.worker.lamp, seat.worker.detail = "lost", f"since step {integer(event.get('step')) or self.step:,}"
                self._lost.append(rank)

    def _end(self, state: str, lamp: str) -> None:
        self.state = state
        for seat in self.seats:
            if seat.taken:
                seat.worker.lamp, seat.worker.detail = lamp, ""
            seat.leave(self.time, state)

    def _on_halt(self, event: Event) -> None:
        self._end("halted", "stopped")
        self.halt = event
        found = event.get("findings")
        findings = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
        guilty = {integer(each.get("rank")) for each in findings}
        named = rank_named(str(event.get("cause")))
        for rank in guilty or ({named} if named is not None else set()):
            for seat in self.seats:
                if seat.worker.rank == rank and seat.worker.lamp == "stopped":
                    seat.worker.lamp, seat.worker.detail = "cord", "pulled the cord"

    def _on_stopped(self, event: Event) -> None:
        self._end("stopped", "stopped")

    def _on_done(self, event: Event) -> None:
        self._end("done", "done")
        self.done = event
        texts = event.get("samples")
        for text in texts[:3] if isinstance(texts, list) else []:
            self._sample(event, text)

    def _on_eval(self, event: Event) -> None:
        fields = [number(event.get(key)) for key in ("loss", "bits_per_byte", "valid_share", "accuracy")]
        step = integer(event.get("step"))
        while self.evals and self.evals[-1][0] >= step:
            self.evals.pop()
        self.evals.append([step, *fields])

    def _on_sample(self, event: Event) -> None:
        self._sample(event, event.get("text"))

    def _sample(self, event: Event, text: Any) -> None:
        """Keep the first sample, the last ones and some in between, to show how they improve."""
        self.samples.append({"step": integer(event.get("step")), "text": str(text)})
        if len(self.samples) > 2 * LAST_SAMPLES:
            self.samples = [*self.samples[:-LAST_SAMPLES:2], *self.samples[-LAST_SAMPLES:]]

    def _on_checkpoint(self, event: Event) -> None:
        self._save(event, "verified", "written by all ranks, digests equal")

    def _on_save_failed(self, event: Event) -> None:
        self._save(event, "retrying" if event.get("again") is True else "failed", str(event.get("reason")))

    def _on_damaged(self, event: Event) -> None:
        self._save(event, "damaged", str(event.get("reason")))

    def _save(self, event: Event, verdict: str, reason: str) -> None:
        step = integer(event.get("step"))
        seconds, stall = number(event.get("seconds")), number(event.get("stall_ms"))
        fields = {"step": step, "time": self.time, "verdict": verdict, "reason": reason}
        self.saves.pop(step, None)
        self.saves[step] = fields | {"seconds": seconds, "stall_ms": stall}
        if len(self.saves) > MOST_SAVES:
            del self.saves[next(iter(self.saves))]

    def _on_note(self, event: Event) -> None:
        self.notes.append({"time": self.time, "text": str(event.get("text"))})

    def lanes_now(self) -> list[dict[str, Any]]:
        """The spans of every seat."""
        return [{"rank": seat.worker.rank, "spans": [asdict(span) for span in seat.spans]} for seat in self.seats]


def _compute_ms(times: dict[str, Any]) -> list[float]:
    """Milliseconds of forward and backward together, by rank."""
    parts = [times[name] for name in ("forward", "backward") if isinstance(times.get(name), list)]
    return [sum(value for value in map(number, ranks) if value == value) for ranks in zip(*parts, strict=False)]
