"""What happened in a run besides its curves: who took part and when, saves, samples, the halt, how it ended.

A *span* is the time in which a worker took part; several of them, with gaps, are its *lane*. A *generation* is one
membership of the run: it changes when a worker is lost or joins, and when the run is started again. Unknown events are
passed over, and so is what is missing in those that are known.
"""

import math
import time
from collections import deque
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from andon.board.text import integer, number, rank_named
from andon.run.events import Event

SLOW = 1.5  # × the median of the others, in forward and backward, counts as slow
SILENT = 30.0  # seconds without an event, at least, before a run counts as silent
SILENT_STEPS = 10  # and as many times the length of a step
MOST_SPANS, MOST_WORKERS = 64, 4096
SAMPLES = 6


@dataclass
class Span:
    """A worker's part in the run, from a time to a time; `end` is None while it lasts."""

    start: float
    end: float | None = None
    how: str = ""


@dataclass
class Worker:
    """What the lamp of a worker shows."""

    rank: int
    host: str
    lamp: str = "waiting"
    """waiting · running · slow · lost · cord (it pulled the cord) · stopped · done · silent"""
    detail: str = ""


class Story:
    """Follows the events of a run."""

    def __init__(self) -> None:
        self.workers: dict[int, Worker] = {}
        self.lanes: dict[int, list[Span]] = {}
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
        """The last step."""
        self.time, self.started = 0.0, 0.0
        self._intervals: deque[float] = deque(maxlen=32)
        self._times: deque[dict[str, Any]] = deque(maxlen=12)
        self._last_step = 0.0

    def add(self, event: Event) -> None:
        """Learn one event that is not a step."""
        moment = number(event.get("time"))
        self.time = moment if moment == moment else self.time
        if handler := getattr(self, f"_on_{event['event']}", None):
            handler(event)

    def add_step(self, event: Event, step: int) -> None:
        """Learn a step."""
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
        """How long a step takes, as the last ones did; NaN before there are any."""
        return median(self._intervals) if self._intervals else math.nan

    def state_now(self, now: float | None = None) -> str:
        """running, waiting, silent, halted, stopped or done."""
        quiet = (time.time() if now is None else now) - self.time
        patience = max(SILENT, SILENT_STEPS * (self.step_seconds if self._intervals else 0.0))
        return "silent" if self.state in ("running", "waiting") and self.time and quiet > patience else self.state

    def lamps(self, state: str) -> list[Worker]:
        """The lamp of every worker; one for each that is expected and has not come yet."""
        slow = self._slow() if state == "running" else {}
        for rank in range(min(integer(self.facts.get("workers")), MOST_WORKERS)):
            self.workers.setdefault(rank, Worker(rank, "", "waiting"))
        shown = []
        for _, worker in sorted(self.workers.items()):
            lamp, detail = worker.lamp, worker.detail
            if lamp in ("running", "waiting") and state == "silent":
                lamp, detail = "silent", "no event since then"
            elif lamp == "running" and worker.rank in slow:
                lamp, detail = "slow", f"{slow[worker.rank]:.1f} × the others: they wait for it"
            shown.append(Worker(worker.rank, worker.host, lamp, detail))
        return shown

    def _slow(self) -> dict[int, float]:
        """Ranks whose forward and backward take much longer than the others' in most of the last steps."""
        found: dict[int, list[float]] = {}
        for times in map(_compute_ms, self._times):
            for rank, took in enumerate(times if len(times) > 1 else []):
                usual = median(times[:rank] + times[rank + 1 :])
                if usual > 0 and took > SLOW * usual:
                    found.setdefault(rank, []).append(took / usual)
        return {rank: median(ratios) for rank, ratios in found.items() if 2 * len(ratios) > len(self._times)}

    def _on_worker(self, event: Event) -> None:
        rank = integer(event.get("rank"))
        if self.lanes.get(rank) and self.lanes[rank][-1].end is None:  # it cannot be here twice: all began anew
            ended = self._last_step or self.lanes[rank][-1].start
            for spans in self.lanes.values():
                if spans[-1].end is None and spans[-1].start <= ended:
                    spans[-1].end, spans[-1].how = ended, "killed"
        self._enter(rank, event, "waiting")
        self.state = "waiting" if self.state in ("waiting", "done", "stopped", "halted") else self.state

    def _enter(self, rank: int, event: Event, lamp: str) -> None:
        if not 0 <= rank < MOST_WORKERS:
            return
        host = event.get("host")
        self.workers[rank] = Worker(rank, host if isinstance(host, str) else "", lamp)
        spans = self.lanes.setdefault(rank, [])
        if not spans or spans[-1].end is not None:
            spans.append(Span(self.time))
            del spans[:-MOST_SPANS]

    def _on_start(self, event: Event) -> None:
        keys = ("transport", "floor", "steps", "workers", "parameters", "model", "device")
        self.facts = {key: event[key] for key in keys if key in event}
        self.started, self._last_step = self.time, 0.0
        self.step, self.state, self.halt, self.done = integer(event.get("step")), "running", None, None
        again = integer(event.get("step"))
        known = integer(event.get("workers"))
        for rank in [rank for rank in self.workers if known and rank >= known]:
            del self.workers[rank]
        for worker in self.workers.values():
            worker.lamp, worker.detail = "running", ""
        why = f"resumed after step {again:,}" if again else "started"
        self._new_generation(event, why)

    def _new_generation(self, event: Event, why: str) -> None:
        number = integer(event.get("generation")) or (self.generations[-1]["generation"] + 1 if self.generations else 1)
        here = sum(worker.lamp in ("running", "waiting") for worker in self.workers.values())
        workers = integer(event.get("workers")) or here
        entry = {"generation": number, "time": self.time, "step": self.step, "workers": workers, "why": why}
        if self.generations and self.generations[-1]["generation"] == number:
            entry["why"] = self.generations.pop()["why"]
        self.generations.append(entry)

    def _on_generation(self, event: Event) -> None:
        self._new_generation(event, "new membership")

    def _on_lost(self, event: Event) -> None:
        rank = integer(event.get("rank"))
        worker = self.workers.setdefault(rank, Worker(rank, ""))
        worker.lamp, worker.detail = "lost", f"since step {integer(event.get('step')) or self.step:,}"
        self._leave([rank], "lost")
        self._new_generation(event, f"rank {rank} was lost")

    def _on_joined(self, event: Event) -> None:
        rank = integer(event.get("rank"))
        self._enter(rank, event, "running")
        self._new_generation(event, f"rank {rank} joined")

    def _leave(self, ranks: list[int], how: str) -> None:
        for rank in ranks:
            if (spans := self.lanes.get(rank)) and spans[-1].end is None:
                spans[-1].end, spans[-1].how = self.time, how

    def _end(self, state: str, lamp: str) -> None:
        self.state = state
        self._leave(list(self.lanes), state)
        for worker in self.workers.values():
            if worker.lamp != "lost":
                worker.lamp, worker.detail = lamp, ""

    def _on_halt(self, event: Event) -> None:
        self._end("halted", "stopped")
        self.halt = event
        found = event.get("findings")
        findings = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
        guilty = {integer(each.get("rank")) for each in findings}
        named = rank_named(str(event.get("cause")))
        for rank in guilty or ({named} if named is not None else set()):
            if rank in self.workers:
                self.workers[rank].lamp, self.workers[rank].detail = "cord", "pulled the cord"

    def _on_stopped(self, event: Event) -> None:
        self._end("stopped", "stopped")

    def _on_done(self, event: Event) -> None:
        self._end("done", "done")
        self.done = event
        texts = event.get("samples")
        for text in texts[:3] if isinstance(texts, list) else []:
            self._sample(event, text)

    def _on_eval(self, event: Event) -> None:
        fields = [number(event.get(key)) for key in ("loss", "bits_per_byte", "valid_share")]
        step = integer(event.get("step"))
        while self.evals and self.evals[-1][0] >= step:
            self.evals.pop()
        self.evals.append([step, *fields])

    def _on_sample(self, event: Event) -> None:
        self._sample(event, event.get("text"))

    def _sample(self, event: Event, text: Any) -> None:
        """Keep the first sample, the last ones, and some between, so that one sees them improve."""
        self.samples.append({"step": integer(event.get("step")), "text": str(text)})
        if len(self.samples) > 2 * SAMPLES:
            self.samples = [*self.samples[:-SAMPLES:2], *self.samples[-SAMPLES:]]

    def _on_checkpoint(self, event: Event) -> None:
        self._save(event, "verified", "written by all, digests equal")

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
        if len(self.saves) > 2000:
            del self.saves[next(iter(self.saves))]

    def _on_note(self, event: Event) -> None:
        self.notes.append({"time": self.time, "text": str(event.get("text"))})

    def lanes_now(self) -> list[dict[str, Any]]:
        """Every worker's lane."""
        return [{"rank": rank, "spans": [asdict(span) for span in spans]} for rank, spans in sorted(self.lanes.items())]


def _compute_ms(times: dict[str, Any]) -> list[float]:
    """What forward and backward took together, by rank."""
    parts = [times[name] for name in ("forward", "backward") if isinstance(times.get(name), list)]
    return [sum(value for value in map(number, ranks) if value == value) for ranks in zip(*parts, strict=False)]
