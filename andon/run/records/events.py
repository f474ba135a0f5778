"""Events: the record of a run; everything that shows a run reads them.

An event is a flat JSON object with its kind under `event` and the time in seconds under `time`. Kinds: `worker` ·
`note` · `start` · `step` · `sample` · `eval` · `checkpoint` · `save_failed` · `damaged` (a checkpoint) · `lost` (a
worker) · `generation` (the run goes on with other members) · `stopped` · `halt` · `done`. `metrics.jsonl` holds them
all. `summary.json` holds the last `done`, `halt.json` the last `halt`. A gradient server records its session in the
same way, with other fields in `start`, `step` and `done`.
"""

import json
import math
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from andon.errors import UserError, shown
from andon.files import write_whole
from andon.run.records.lines import LineWriter

Event = dict[str, Any]
Emit = Callable[[Event], None]
CLOSE_SECONDS = 10.0  # that the end of a run waits for the disk
TAIL_BYTES = 1 << 18  # of metrics.jsonl: enough for the last steps
OWN_FILES = {"done": "summary.json", "halt": "halt.json"}
MAX_INT: Final = 1 << 62
MAX_DEPTH: Final = 6
Fields = dict[str, type | tuple[type, ...]]
NUMBER: Final = (int, float)
FIELDS: Final[dict[str, Fields]] = {
    "worker": {"rank": int, "host": str},
    "note": {"text": str},
    "start": {"step": int, "transport": str, "floor": (int, float, type(None)), "data": str, "probe": dict},
    "step": {"step": int, **dict.fromkeys(("loss", "tokens", "tokens_per_s", "lr", "grad_norm"), NUMBER)},
    "sample": {"step": int, "text": str},
    "eval": {"step": int, "loss": NUMBER},
    "checkpoint": {"step": int},
    "save_failed": {"step": int, "reason": str, "folder": str, "again": bool},
    "damaged": {"step": int, "reason": str},
    "lost": {"rank": int, "host": str, "why": str, "text": str},
    "generation": {
        **dict.fromkeys(("generation", "workers", "step", "joined"), int),
        "seconds": NUMBER,
        "lost_state": bool,
    },
    "stopped": {"step": int},
    "halt": {"step": int, "committed": int, "cause": str, "findings": list, "sound": bool},
    "done": {
        **dict.fromkeys(("step", "tokens", "workers"), int),
        **dict.fromkeys(("loss", "validation_loss"), NUMBER),
        **dict.fromkeys(("weights_blake3", "transport"), str),
        "samples": list,
    },
}
"""The fields that every event of a kind has; most have more."""
FINDING: Final[Fields] = {
    **dict.fromkeys(("rank", "count", "first"), int),
    **dict.fromkeys(("host", "unit", "parameter", "kind"), str),
    "slot": (int, type(None)),
    "samples": list,
}
OPTIONAL: Final[Fields] = {
    **dict.fromkeys(("valid_share", "bits_per_byte", "mfu", "accuracy"), NUMBER),
    **dict.fromkeys(("known", "pid", "correct", "total"), int),
    **dict.fromkeys(("result", "frozen"), str),
}
FROM_ANY_RANK: Final = {"note"}


def depth(value: object, most: int = MAX_DEPTH) -> int:
    """How deep lists and objects are nested, up to `most`."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 0 if most == 0 else 1 + max((depth(each, most - 1) for each in inside), default=0)


def check_event(found: object, rank: int) -> Event:
    """Check an event that a rank reports; `ValueError` if it is not valid, or not for this rank to report."""
    if not isinstance(found, dict) or not isinstance(found.get("event"), str):
        raise ValueError("an event without a kind")
    kind = found["event"]
    if depth(found) >= MAX_DEPTH:
        raise ValueError("an event that is nested too deeply")
    if kind not in FIELDS:
        raise ValueError(f"an event of unknown kind {shown(kind)}")
    if rank and kind not in FROM_ANY_RANK:
        raise ValueError(f"a {kind!r} event, which only rank 0 reports")
    optional = {name: types for name, types in OPTIONAL.items() if name in found}
    _check_fields(f"a {kind!r} event", found, {"time": NUMBER, **FIELDS[kind], **optional})
    for finding in found["findings"] if kind == "halt" else ():
        _check_fields("a finding", finding, FINDING)
    if kind == "done" and not all(isinstance(text, str) for text in found["samples"]):
        raise ValueError("samples that are not text")
    return found


def _check_fields(what: str, found: object, fields: Fields) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{what} that is not an object")
    for name, kind in fields.items():
        value = found.get(name)
        wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        if wrong or (isinstance(value, int) and abs(value) >= MAX_INT):
            raise ValueError(f"{what} whose {name!r} is {shown(value)}")


def event(kind: str, **fields: Any) -> Event:
    """An event with the current time."""
    return {"event": kind, "time": round(time.time(), 3), **fields}


def no_event(event: Event) -> None:
    """Emit nothing; for ranks other than 0."""


class Recorder:
    """Writes the events of a run into its folder and passes them to the listeners; one that fails is removed.

    While the disk is full or fails, events wait in memory. `hold` is called when the folder was removed: it creates it
    again or raises `OSError`."""

    def __init__(self, folder: Path, *listeners: Emit, hold: Callable[[], None] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.listeners = folder, list(listeners)
        self.failure: UserError | None = None
        """Why events were lost, if any were; set by `close`."""
        self._notifying = threading.RLock()  # several threads emit events, and a listener may emit one, too
        self._path = folder / "metrics.jsonl"
        self._lines = LineWriter(self._path, hold or (lambda: folder.mkdir(parents=True, exist_ok=True)), self._report)

    def emit(self, event: Event) -> None:
        """Record one event; it raises `OSError` only when too many events wait for the disk."""
        then = None
        if name := OWN_FILES.get(event["event"]):
            fields = {key: value for key, value in event.items() if key not in ("event", "time")}
            then = partial(write_whole, self.folder / name, as_json(fields, indent=2) + "\n")
        self._lines.append(as_json(event), then)
        self._notify(event)

    def _notify(self, emitted: Event) -> None:
        with self._notifying:
            for listener in list(self.listeners):
                try:
                    listener(emitted)
                except OSError as error:  # a full disk behind the display, or a closed terminal
                    self.listeners.remove(listener)
                    reason = error.strerror or error
                    self.emit(event("note", text=f"Nothing is shown from here on: {reason}. Training continues"))

    def _report(self, error: OSError | None) -> None:
        text = f"{self._path} was removed: later events are in a new file"
        if error:
            text = f"Events wait in memory: {error.strerror or error} ({self.folder})"
        self._notify(event("note", text=text))

    def close(self) -> None:
        """Write the waiting events, if the disk answers in time, and close the file."""
        if error := self._lines.close(CLOSE_SECONDS):
            self.failure = cannot_write(error)


def cannot_write(error: OSError, lines: str = "events") -> UserError:
    """The error when events, or lines of the ledger, were lost."""
    remedy = "Free some space or choose another --run.dir; the checkpoints are intact"
    return UserError(f"The run's {lines} cannot be written", str(error), remedy)


def as_json(fields: Any, indent: int | None = None) -> str:
    """Render strict JSON; a number that is not finite becomes null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(fields), indent=indent, allow_nan=False)


def tail(path: Path) -> list[bytes]:
    """The last lines of a file, without an incomplete one."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        lines = file.read().split(b"\n")
    return lines[1 if size > TAIL_BYTES else 0 : -1]


def last_step(folder: Path) -> int:
    """The last step among the last events of a run; -1 if there is none."""
    try:
        found = [json.loads(line) for line in tail(folder / "metrics.jsonl")]
        return max((event["step"] for event in found if event["event"] == "step"), default=-1)
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in metrics.jsonl or ledger.jsonl, without an incomplete last line; `UserError` if one is damaged."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                found = None
            if not isinstance(found, dict):
                raise damaged_line(path, number)
            yield found


def damaged_line(path: Path, number: int) -> UserError:
    """The error for a line that is not what its file consists of."""
    cause = "The disk, or a program other than Andon, has changed it"
    remedy = f"Restore the file from a copy, or remove the line: sed -i {number}d {shlex.quote(str(path))}"
    return UserError(f"Line {number} of {path} is damaged", cause, remedy)


def read_events(run: Path) -> Iterator[Event]:
    """The events of a run; `UserError` if they cannot be read."""
    path = run / "metrics.jsonl"
    try:
        for number, found in enumerate(read(path), 1):
            if not isinstance(found.get("event"), str):
                raise damaged_line(path, number)
            yield found
    except OSError as error:
        raise UserError(f"{path} cannot be read", error.strerror or str(error), "Name the folder of a run") from None
