"""What a page receives about a run: everything once, and then, once a second, only what is new.

A *section* is a part of the page (lamps, saves, samples, …); it is sent again when it has changed. A *delta* is one
message with new rows of the curve and changed sections; it is encoded once for all viewers of a run. A viewer that
reconnects receives the deltas that it missed, or a request to reload.
"""

import json
import math
import time
from collections import deque
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from andon.board.curves import Curve, downsample
from andon.board.history import COLUMNS, OPTIONAL, History, end_of
from andon.board.text import plain
from andon.run.records.events import as_json

POINTS = 900
ROWS_OF_DELTA = 200
KEPT_DELTAS = 64
PAGE_FIRST_SECONDS = 1.0  # for the page to open, before the rest of a large file is read
SHOWN_EVALS, SHOWN_SAVES, SHOWN_NOTES, SHOWN_GENERATIONS = 400, 40, 12, 40


class Feed:
    """One run, read for any number of viewers."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        self.history = History.quick(folder / "metrics.jsonl")
        self.number = 0
        """The number of the last delta."""
        self.edition = 0
        """Counts replacements of the history: a viewer of an earlier edition has to reload."""
        self.lock = Lock()
        """Held while the history is changed or read, by different threads."""
        self._deltas: deque[tuple[int, str]] = deque(maxlen=KEPT_DELTAS)
        self._sections: dict[str, str] = self._encode_sections()
        self._rows, self._strip_step = self.history.count, self._newest_strip()
        self._whole: History | None = None
        if self.history.stride > 1:
            Thread(target=self._read_whole, name="andon-board-history", daemon=True).start()

    def _read_whole(self) -> None:
        time.sleep(PAGE_FIRST_SECONDS)
        whole = History(self.history.path)
        whole.advance()
        self._whole = whole

    def advance(self) -> None:
        """Read what was appended, and make a delta if anything has changed."""
        with self.lock:
            if self._whole:
                self._replace(self._whole)
            history = self.history
            history.advance()
            if history.replaced:
                self._replace(History.quick(history.path))
                return
            changed = {name: text for name, text in self._encode_sections().items() if self._sections[name] != text}
            self._sections |= changed
            rows = self._new_rows()
            if changed or rows:
                parts = [f'"{name}":{text}' for name, text in (changed | rows).items()]
                self.number += 1
                self._deltas.append((self.number, "{" + ",".join(parts) + "}"))

    def _replace(self, history: History) -> None:
        history.advance()
        self.history, self._whole = history, None
        self.edition += 1
        self._deltas.clear()
        self._sections = self._encode_sections()
        self._rows, self._strip_step = history.count, self._newest_strip()

    def _new_rows(self) -> dict[str, str]:
        """New rows of the curve and of the strip; `cut` is the step to which the curve went back before them."""
        history, result = self.history, dict[str, str]()
        first = self._rows
        if history.cut is not None:
            result["cut"] = as_json(history.cut)
            first = min(first, int((history.steps <= history.cut).sum()))
            history.cut = None
        if history.count > first:
            columns = {name: history.column(name)[first:] for name in COLUMNS}
            result["rows"] = _dumps(downsample(history.steps[first:], columns, ROWS_OF_DELTA))
        new = [each for each in history.strip if each[0] > self._strip_step or result.get("cut")]
        if new:
            result["strip"] = _dumps(new)
        self._rows, self._strip_step = history.count, self._newest_strip()
        return result

    def _newest_strip(self) -> int:
        return self.history.strip[-1][0] if self.history.strip else -1

    def everything(self) -> str:
        """Everything that a page needs when it opens."""
        self.advance()
        with self.lock:
            history = self.history
            parts = {
                **self._sections,
                "cursor": f'"{self.edition}.{self.number}"',
                "curve": _dumps(self._curve(0.0, math.inf, POINTS)),
                "strip": _dumps(list(history.strip)),
                "partial": "true" if history.stride > 1 else "false",
            }
            return "{" + ",".join(f'"{name}":{text}' for name, text in parts.items()) + "}"

    def curve(self, first: float, last: float, points: int) -> Curve:
        """The curve between two steps, in at most `points` points."""
        with self.lock:
            return self._curve(first, last, points)

    def _curve(self, first: float, last: float, points: int) -> Curve:
        steps = self.history.steps
        low, high = (steps < first).sum(), (steps <= last).sum()
        columns = {name: self.history.column(name)[low:high] for name in COLUMNS}
        used = {name: each for name, each in columns.items() if name not in OPTIONAL or (each == each).any()}
        return downsample(steps[low:high], used, points)

    def since(self, cursor: str) -> list[tuple[str, str]] | None:
        """The deltas after a viewer's cursor, each with its own cursor; None if the viewer has to reload."""
        edition, _, number = cursor.partition(".")
        with self.lock:
            if edition != str(self.edition) or not number.isdecimal():
                return None
            missed = [(f"{edition}.{each}", text) for each, text in self._deltas if each > int(number)]
            return missed if len(missed) == self.number - int(number) else None

    def _encode_sections(self) -> dict[str, str]:
        return {name: _dumps(plain(value)) for name, value in self.sections().items()}

    def sections(self) -> dict[str, Any]:
        """The sections of the page."""
        story, history = self.history.story, self.history
        state = story.state_now()
        # The status is sent whenever it changes, so what varies with every step is rounded or sent with the rows.
        status = {
            "name": self.folder.name or str(self.folder),
            "folder": str(self.folder),
            "state": state,
            "step": story.step,
            "time": story.time,
            "started": story.started,
            "step_seconds": float(f"{story.step_seconds:.3g}"),
            "skipped": story.skipped,
            **story.facts,
        }
        return {
            "status": status,
            "workers": [vars(worker) for worker in story.lamps(state)],
            "evals": list(story.evals)[:: max(1, len(story.evals) // SHOWN_EVALS)],
            "saves": list(story.saves.values())[-SHOWN_SAVES:],
            "samples": list(story.samples),
            "notes": list(story.notes)[-SHOWN_NOTES:],
            "halt": story.halt,
            "done": {key: each for key, each in (story.done or {}).items() if key != "samples"} or None,
            "lanes": story.lanes_now(),
            "generations": list(story.generations)[-SHOWN_GENERATIONS:],
            "redone": history.redone,
        }


def glance(folder: Path, key: str) -> dict[str, Any]:
    """A run in the list of runs, from the end of its file."""
    story = end_of(folder)
    fields = {"key": key, "name": folder.name, "state": story.state_now(), "step": story.step}
    entry: dict[str, Any] = plain({**fields, "loss": story.last.get("loss"), "time": story.time})
    return entry


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
