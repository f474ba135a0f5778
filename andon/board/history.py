"""A run's metrics.jsonl as columns; after the first reading, only appended lines are read.

Rows are in the order of steps. When a run resumes from an earlier step, the later rows move from the curve to `redone`,
so that the curve has each step once. With a `stride` above 1 only every n-th step is parsed, and all other events: so a
file of a million steps opens at once, and is then read whole in the background.
"""

import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import FileIO
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np

from andon.board.curves import Curve, Floats, downsample
from andon.board.story import Story
from andon.board.text import integer, number
from andon.run.records.events import Event, tail

OPTIONAL = ("mfu", "accuracy")
"""Columns that only some kinds of runs have, each as the last number of its steps."""
COLUMNS = ("loss", "tokens_per_s", "grad_norm", "lr", *OPTIONAL)
STEP = b'{"event": "step"'
NEWLINE = ord("\n")
INTEGER = rb"(0|[1-9][0-9]{0,14})"
NUMBER = rb"(-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,22})?(?:e[-+]?[0-9]{1,2})?)"
"""JSON numbers of up to `DIGITS` characters; a line with others is parsed as JSON."""
DIGITS = 46
FIELDS = {b"time": NUMBER, b"step": INTEGER, b"loss": NUMBER, b"tokens": INTEGER}
FIELDS |= dict.fromkeys((b"tokens_per_s", b"lr", b"grad_norm"), NUMBER)
PLAIN_STEP = re.compile(STEP + b"".join(b', "%b": %b' % each for each in FIELDS.items()) + b"[,}]")
LAST = re.compile(rb', "([a-z_]+)": %b}$' % NUMBER)
LAST_BYTES = DIGITS + 40  # of a line, in which `LAST` is found
CHUNK_BYTES = 4 << 20
LARGE_BYTES = 24 << 20  # a larger file is first read with a stride
STEP_BYTES = 300  # of a line, about
PARSED_AT_ONCE = 6_000  # steps of such a file, at most
BULK_LINES = 400  # from here on, lines are parsed in bulk
STRIP_STEPS = 160  # whose phases are kept
MOST_REDONE, POINTS_REDONE = 24, 200


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return (folder / "metrics.jsonl").is_file()


def runs_in(folders: Iterable[Path]) -> list[Path]:
    """The runs among these folders, and the runs that the other folders contain."""
    return [
        run for folder in folders for run in ([folder] if is_run(folder) else sorted(filter(is_run, folder.glob("*"))))
    ]


class History:
    """The steps of a run in columns, and all other events as a `Story`."""

    def __init__(self, path: Path, stride: int = 1) -> None:
        self.path, self.stride = path, stride
        self.story = Story()
        self.count = 0
        """Number of rows of the curve."""
        self.redone: list[Curve] = []
        """Curves of steps that were done again later."""
        self.strip: deque[tuple[int, dict[str, list[float]]]] = deque(maxlen=STRIP_STEPS)
        """(step, milliseconds by phase and rank) of the last steps."""
        self.cut: float | None = None
        """The lowest step to which the curve went back since this was last reset."""
        self.replaced = False
        """Whether the path now leads to a different file."""
        self._rows = np.empty((len(COLUMNS) + 1, 1024))
        self._offset, self._identity, self._skipped = 0, (0, 0), 0

    @classmethod
    def quick(cls, path: Path) -> "History":
        """Open and read a file, with a stride if it is large."""
        try:
            size = path.stat().st_size
        except OSError:
            size = 0
        history = cls(path, max(1, size // STEP_BYTES // PARSED_AT_ONCE) if size > LARGE_BYTES else 1)
        history.advance()
        if history.stride > 1:
            for event in parse(tail(path)):
                history._add_times(event, integer(event.get("step")) if isinstance(event, dict) else 0)
        return history

    @property
    def steps(self) -> Floats:
        return self._rows[0, : self.count]

    def column(self, name: str) -> Floats:
        return self._rows[1 + COLUMNS.index(name), : self.count]

    def advance(self) -> None:
        """Read the lines that were appended since the last call."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                if self._offset and (identity != self._identity or status.st_size < self._offset):
                    self.replaced = True
                    return
                self._identity = identity
                file.seek(self._offset)
                for lines in self._chunks(file) if self.stride == 1 else [list(chain(*self._chunks(file)))]:
                    self._add_lines(lines)
        except FileNotFoundError:
            self.replaced = bool(self._offset)
        except OSError:  # the disk does not answer, or the file is not readable: the next call tries again
            return

    def _chunks(self, file: FileIO) -> Iterator[list[bytes]]:
        """The complete lines of a file from its position on, one chunk at a time."""
        while chunk := file.read(CHUNK_BYTES):
            end = chunk.rfind(b"\n") + 1
            if not end:
                return
            self._offset += end
            file.seek(self._offset)
            yield chunk[:end].split(b"\n") if self.stride == 1 else self._every_nth(chunk, end)

    def _add_lines(self, lines: list[bytes]) -> None:
        if len(lines) > BULK_LINES:
            self._add_many(lines[:-STRIP_STEPS])
            lines = lines[-STRIP_STEPS:]
        self._add(parse(lines))

    def _every_nth(self, chunk: bytes, end: int) -> list[bytes]:
        """Every n-th step and all other lines, without parsing the rest."""
        data = np.frombuffer(chunk, np.uint8, end)
        starts = np.concatenate([[0], np.flatnonzero(data == NEWLINE) + 1])
        whole = starts[:-1] + len(STEP) < len(data)
        at = np.where(whole, starts[:-1], 0)
        is_step = whole & (data[at + len(STEP) - 1] == STEP[-1])
        for back in (2, 3, 4):  # these characters distinguish `step` from all other kinds
            is_step &= data[at + len(STEP) - back] == STEP[-back]
        numbers = np.cumsum(is_step) + self._skipped
        self._skipped = int(numbers[-1]) % self.stride
        chosen = np.flatnonzero(~is_step | (numbers % self.stride == 0))
        return [chunk[starts[line] : starts[line + 1] - 1] for line in chosen]

    def _add_many(self, lines: list[bytes]) -> None:
        """Add steps in the format of this version in bulk, and all other lines one by one."""
        for is_plain, group in groupby(((plain_step(line), line) for line in lines), lambda each: bool(each[0])):
            found = list(group)
            table = np.array([fields for fields, _ in found if fields], f"S{DIGITS}").astype(np.float64).T
            is_next = bool(is_plain and table[1, 0] > (self.steps[-1] if self.count else 0))
            if not is_next or not (np.diff(table[1]) > 0).all():
                self._add(parse([line for _, line in found]))
                continue
            _, steps, loss, tokens, tokens_per_s, lr, norm, *optional = table
            self._append(np.stack([steps, loss, tokens_per_s, norm, lr, *optional]))
            self.story.tokens += int(tokens[:-1].sum())
            for event in parse([found[-1][1]]):
                self.story.add_step(event, int(steps[-1]))

    def _append(self, rows: Floats) -> None:
        end = self.count + rows.shape[1]
        while end > self._rows.shape[1]:
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)], axis=1)
        self._rows[:, self.count : end] = rows
        self.count = end

    def _add(self, events: Iterable[Any]) -> None:
        for event in filter(is_event, events):
            if event["event"] == "step":
                self._add_step(event)
            else:
                if event["event"] == "start":
                    self._go_back(integer(event.get("step")))
                self.story.add(event)

    def _add_step(self, event: Event) -> None:
        step = integer(event.get("step"))
        if self.count and step <= self._rows[0, self.count - 1]:
            self._go_back(step - 1)
        self._append(np.array([[step], *([number(event.get(name))] for name in COLUMNS)]))
        self.story.add_step(event, step)
        if self.stride == 1:
            self._add_times(event, step)

    def _add_times(self, event: Any, step: int) -> None:
        times = event.get("rank_ms") if isinstance(event, dict) else None
        if isinstance(times, dict):
            self.strip.append((step - 1, {str(name): by_rank(each) for name, each in list(times.items())[:12]}))

    def _go_back(self, step: int) -> None:
        """The run resumes after `step`: move the later rows to `redone`."""
        keep = int(np.searchsorted(self.steps, step, "right"))
        if keep == self.count:
            return
        first = max(0, keep - 1)
        self.redone.append(downsample(self.steps[first:], {"loss": self.column("loss")[first:]}, POINTS_REDONE))
        del self.redone[:-MOST_REDONE]
        self.count = keep
        self.cut = min(step, self.cut if self.cut is not None else step)


def end_of(run: Path) -> Story:
    """The state of a run, from its last events alone."""
    story = Story()
    with suppress(OSError):  # it was removed
        for event in filter(is_event, parse(tail(run / "metrics.jsonl"))):
            if event["event"] == "step":
                story.add_step(event, integer(event.get("step")))
            else:
                story.add(event)
    return story


def is_event(found: Any) -> bool:
    """Whether a parsed line is an event."""
    return isinstance(found, dict) and isinstance(found.get("event"), str)


def plain_step(line: bytes) -> tuple[bytes, ...] | None:
    """The numbers of a step in the format of this version, optional ones (or NaN) last; None for other lines."""
    if line.endswith(b'"}') or not (found := PLAIN_STEP.match(line)):  # a skipped step ends with the reason
        return None
    last = LAST.search(line, max(0, len(line) - LAST_BYTES))
    if not last and not line.endswith(b"}}"):  # it may be an optional number that is damaged or has many digits
        return None
    return *found.groups(), *(last[2] if last and last[1] == name.encode() else b"nan" for name in OPTIONAL)


def by_rank(values: Any) -> list[float]:
    """Milliseconds of each rank; 0 for a value that is not a number."""
    found = [number(value) for value in values[:4096]] if isinstance(values, list) else []
    return [max(0.0, value) if value == value else 0.0 for value in found]


def parse(lines: list[bytes]) -> Iterable[Any]:
    """Parse lines into events; a line that is not JSON is skipped."""
    lines = [line for line in lines if line]
    try:
        found: list[Any] = json.loads(b"[" + b",".join(lines) + b"]")  # twice as fast as line by line
        return found
    except (ValueError, RecursionError):
        return _one_by_one(lines)


def _one_by_one(lines: list[bytes]) -> Iterable[Any]:
    for line in lines:
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            continue
