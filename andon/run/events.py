"""Events: the one record of a run, from which everything that shows it is fed.

An event is a flat JSON object with its kind under `event` and the time in seconds under `time`. Kinds:
`worker` · `note` · `start` · `step` · `sample` · `eval` · `checkpoint` · `save_failed` · `stopped` · `halt` ·
`done`.
`metrics.jsonl` holds them all; the last `done` is also `summary.json`, a `halt` is also `halt.json`.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from andon.errors import UserError

Event = dict[str, Any]
Emit = Callable[[Event], None]
LONGEST_WAIT = 64 << 20  # bytes of events that may wait for a disk
RETRY = 1.0  # seconds until a disk that failed is tried again
CLOSING = 10.0  # seconds that it has to take what is left at the end
WHOLE = {"done": "summary.json", "halt": "halt.json"}


def event(kind: str, **fields: Any) -> Event:
    """An event, stamped."""
    return {"event": kind, "time": round(time.time(), 3), **fields}


class Recorder:
    """Writes the events of a run into its folder and passes them on to those who listen.

    A thread writes, so that a disk that hangs holds up nobody; while it is full or fails, events wait in
    memory. `hold` is called when the folder has been removed: it makes it again, or raises `OSError`."""

    def __init__(self, folder: Path, *listeners: Emit, hold: Callable[[], None] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.listeners = folder, listeners
        self.failure: UserError | None = None
        """Why some events were lost, if they were; known when it is closed."""
        self._hold = hold or (lambda: folder.mkdir(parents=True, exist_ok=True))
        self._path = folder / "metrics.jsonl"
        cut_last_line(self._path)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        self._lines, self._files = bytearray(), dict[str, str]()
        self._error: OSError | None = None
        self._closing = False
        self._turn = threading.Condition()
        self._telling = threading.RLock()  # workers speak at the same time, and listeners may speak again
        self._writer = threading.Thread(target=self._write, name="andon-events", daemon=True)
        self._writer.start()

    def emit(self, said: Event) -> None:
        """Record one event; it raises only after a very long time without a disk."""
        with self._turn:
            if len(self._lines) > LONGEST_WAIT:
                raise self._error or OSError(f"{self.folder} does not answer")
            self._lines += as_json(said).encode() + b"\n"
            if name := WHOLE.get(said["event"]):
                fields = {key: value for key, value in said.items() if key not in ("event", "time")}
                self._files[name] = as_json(fields, indent=2) + "\n"
            self._turn.notify_all()
        self._tell(said)

    def _tell(self, said: Event) -> None:
        with self._telling:
            for listener in self.listeners:
                listener(said)

    def _write(self) -> None:
        """Write whatever there is, until the end; after an error, try again now and then."""
        closing = False
        while not closing:
            with self._turn:
                pause = RETRY if self._error else None
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
            file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
            self._file.close()
            self._file = file
            self._tell(event("note", text=f"{self._path} was gone: events from here on are in a new one"))
        while lines := bytes(self._lines):
            count = self._file.write(lines)
            with self._turn:
                del self._lines[:count]
        for name, text in list(self._files.items()):
            write_whole(self.folder / name, text)
            with self._turn:
                self._files = {key: value for key, value in self._files.items() if value is not text}

    def _is_there(self) -> bool:
        """Whether what we write still has its name: a folder may be removed while we write into it."""
        return self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))

    def close(self) -> None:
        """Write what still waits, if the disk answers, and close the file."""
        with self._turn:
            self._closing = True
            self._turn.notify_all()
        self._writer.join(CLOSING)
        if self._waiting and not self.failure:
            self.failure = cannot_write(self._error or OSError(f"{self.folder} does not answer"))
        if not self._writer.is_alive():
            self._file.close()


def cannot_write(error: OSError) -> UserError:
    """What a person is told when events are lost."""
    return UserError(
        "The run's events cannot be written",
        str(error),
        "Free some space or choose another --run.dir; the checkpoints are intact",
    )


def as_json(fields: Any, indent: int | None = None) -> str:
    """JSON as everybody reads it: a number that is not finite becomes null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(fields), indent=indent, allow_nan=False)


def cut_last_line(path: Path) -> None:
    """Remove a last line that a kill cut short, so that the next event begins a line of its own."""
    if path.exists():
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)


def read(folder: Path) -> Iterator[Event]:
    """The events of a run, skipping a last line that a kill cut short."""
    with open(folder / "metrics.jsonl", encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one go."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
