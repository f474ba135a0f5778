"""Events: the one record of a run; everything that shows a run reads them.

An event is a flat JSON object with its kind under `event` and the time in seconds under `time`. Kinds: `worker` ·
`note` · `start` · `step` · `sample` · `eval` · `checkpoint` · `save_failed` · `damaged` (a checkpoint) · `lost` (a
worker) · `generation` (the run goes on with other members) · `stopped` · `halt` · `done`. `metrics.jsonl` holds them
all. `summary.json` holds the last `done`, `halt.json` the last `halt`. A gradient server records its session in the
same way; its `start`, `step` and `done` say what such a server knows.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from andon.errors import UserError, shown
from andon.files import no_follow, write_whole

Event = dict[str, Any]
Emit = Callable[[Event], None]
MOST_WAITING = 64 << 20  # bytes of events that may wait for a disk
RETRY_SECONDS = 1.0  # until a disk that failed is tried again
CLOSE_SECONDS = 10.0  # that the disk gets at the end of the run
TAIL_BYTES = 1 << 18  # in which the last step of a run is looked for
OWN_FILES = {"done": "summary.json", "halt": "halt.json"}


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
        "generation": int,
        "workers": int,
        "step": int,
        "seconds": NUMBER,
        "joined": int,
        "lost_state": bool,
    },
    "stopped": {"step": int},
    "halt": {"step": int, "committed": int, "cause": str, "findings": list, "sound": bool},
    "done": {
        **{"step": int, "tokens": int, "loss": NUMBER, "validation_loss": NUMBER},
        **{"weights_blake3": str, "transport": str, "workers": int, "samples": list},
    },
}
"""What every event of a kind says; most say more."""
FINDING: Final[Fields] = {
    **{"rank": int, "host": str, "slot": (int, type(None)), "unit": str, "parameter": str},
    **{"kind": str, "count": int, "first": int, "samples": list},
}
FROM_ANY_RANK: Final = {"note"}


LARGEST: Final = 1 << 62
DEEPEST: Final = 6


def depth(value: object, most: int = DEEPEST) -> int:
    """How deep lists and objects are nested; looks no deeper than `most`."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 0 if most == 0 else 1 + max((depth(each, most - 1) for each in inside), default=0)


def check_event(found: object, rank: int) -> Event:
    """An event that a rank reports; `ValueError` for anything that is none, or not for this rank to say."""
    if not isinstance(found, dict) or not isinstance(found.get("event"), str):
        raise ValueError("an event without a kind")
    kind = found["event"]
    if depth(found) >= DEEPEST:
        raise ValueError("an event that is nested too deeply")
    if kind not in FIELDS:
        raise ValueError(f"an event of unknown kind {shown(kind)}")
    if rank and kind not in FROM_ANY_RANK:
        raise ValueError(f"a {kind!r} event, which only rank 0 reports")
    _check_fields(f"a {kind!r} event", found, {"time": NUMBER, **FIELDS[kind]})
    optional: Fields = {"valid_share": NUMBER, "known": int, "bits_per_byte": NUMBER, "pid": int}
    optional |= {"mfu": NUMBER, "accuracy": NUMBER, "correct": int, "total": int, "result": str, "frozen": str}
    _check_fields(f"a {kind!r} event", found, {key: value for key, value in optional.items() if key in found})
    for finding in found["findings"] if kind == "halt" else ():
        _check_fields("a finding", finding, FINDING)
    if kind == "done" and not all(isinstance(text, str) for text in found["samples"]):
        raise ValueError("samples that are not text")
    return found


def _check_fields(what: str, found: object, fields: Fields) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{what} that is no object")
    for name, kind in fields.items():
        value = found.get(name)
        wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        if wrong or (isinstance(value, int) and abs(value) >= LARGEST):
            raise ValueError(f"{what} whose {name!r} is {shown(value)}")


def event(kind: str, **fields: Any) -> Event:
    """An event of now."""
    return {"event": kind, "time": round(time.time(), 3), **fields}


def no_event(event: Event) -> None:
    """Emit nothing: only rank 0 reports events."""


class Recorder:
    """Writes the events of a run into its folder and passes them to the listeners; one that fails hears no more.

    A background thread writes, so that training does not wait for a disk that hangs. While the disk is full or fails,
    events wait in memory. `hold` is called when the folder was removed: it creates it again or raises `OSError`."""

    def __init__(self, folder: Path, *listeners: Emit, hold: Callable[[], None] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.listeners = folder, list(listeners)
        self.failure: UserError | None = None
        """Why events were lost, if any were; set by `close`."""
        self._hold = hold or (lambda: folder.mkdir(parents=True, exist_ok=True))
        self._path = folder / "metrics.jsonl"
        cut_last_line(self._path)
        self._file = open(self._path, "ab", buffering=0, opener=no_follow)  # noqa: SIM115 (closed by close)
        self._lines, self._files = bytearray(), dict[str, str]()
        self._error: OSError | None = None
        self._closing = False
        self._turn = threading.Condition()
        self._telling = threading.RLock()  # workers report at the same time, and a listener may emit events
        self._writer = threading.Thread(target=self._write, name="andon-events", daemon=True)
        self._writer.start()

    def emit(self, event: Event) -> None:
        """Record one event; it raises `OSError` only when too many events wait for the disk."""
        with self._turn:
            if len(self._lines) > MOST_WAITING:
                raise self._error or OSError(f"{self.folder} does not answer")
            self._lines += as_json(event).encode() + b"\n"
            if name := OWN_FILES.get(event["event"]):
                fields = {key: value for key, value in event.items() if key not in ("event", "time")}
                self._files[name] = as_json(fields, indent=2) + "\n"
            self._turn.notify_all()
        self._tell(event)

    def _tell(self, event: Event) -> None:
        with self._telling:
            for listener in list(self.listeners):
                try:
                    listener(event)
                except OSError as error:  # a full disk behind the display, or a closed terminal
                    self.listeners.remove(listener)
                    self.emit(_nothing_shown(error))

    def _write(self) -> None:
        """Write events until `close`; after an error, retry every `RETRY_SECONDS`."""
        closing = False
        while not closing:
            with self._turn:
                pause = RETRY_SECONDS if self._error else None
                self._turn.wait_for(lambda: self._closing or (not self._error and self._waiting), pause)
                closing = self._closing
            try:
                self._flush()
                self._error = None
            except OSError as error:
                if not self._error:
                    reason = error.strerror or str(error)
                    self._tell(event("note", text=f"Events wait in memory: {reason} ({self.folder})"))
                self._error = error

    @property
    def _waiting(self) -> bool:
        return bool(self._lines or self._files)

    def _flush(self) -> None:
        if not self._is_there():
            self._hold()
            file = open(self._path, "ab", buffering=0, opener=no_follow)  # noqa: SIM115 (closed by close)
            self._file.close()
            self._file = file
            self._tell(event("note", text=f"{self._path} was removed: later events are in a new file"))
        while lines := bytes(self._lines):
            count = self._file.write(lines)
            with self._turn:
                del self._lines[:count]
        for name, text in list(self._files.items()):
            write_whole(self.folder / name, text)
            with self._turn:
                self._files = {key: value for key, value in self._files.items() if value is not text}

    def _is_there(self) -> bool:
        """Whether the open file still has its name: the folder may have been removed."""
        return self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))

    def close(self) -> None:
        """Write the waiting events, if the disk answers in time, and close the file."""
        with self._turn:
            self._closing = True
            self._turn.notify_all()
        self._writer.join(CLOSE_SECONDS)
        if self._waiting and not self.failure:
            self.failure = cannot_write(self._error or OSError(f"{self.folder} does not answer"))
        if not self._writer.is_alive():
            self._file.close()


def _nothing_shown(error: OSError) -> Event:
    return event("note", text=f"Nothing is shown from here on: {error.strerror or error}. Training continues")


def cannot_write(error: OSError) -> UserError:
    """The error for lost events."""
    remedy = "Free some space or choose another --run.dir; the checkpoints are intact"
    return UserError("The run's events cannot be written", str(error), remedy)


def as_json(fields: Any, indent: int | None = None) -> str:
    """Strict JSON: a number that is not finite becomes null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(fields), indent=indent, allow_nan=False)


def cut_last_line(path: Path) -> None:
    """Remove an incomplete last line, left by a kill, so that the next event starts a new line."""
    if path.exists():
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)


def last_step(folder: Path) -> int:
    """The step that the last events of a run tell of; -1 if they tell of none."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            found = [json.loads(line) for line in file.read().split(b"\n")[1:-1]]
        return max((event["step"] for event in found if event["event"] == "step"), default=-1)
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def read(folder: Path) -> Iterator[Event]:
    """The events of a run, without an incomplete last line."""
    with open(folder / "metrics.jsonl", encoding="utf-8") as file:
        yield from (json.loads(line) for line in file if line.endswith("\n"))
