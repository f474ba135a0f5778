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
WHOLE = {"done": "summary.json", "halt": "halt.json"}


def event(kind: str, **fields: Any) -> Event:
    """An event, stamped."""
    return {"event": kind, "time": round(time.time(), 3), **fields}


class Recorder:
    """Writes the events of a run into its folder and passes them on to those who listen."""

    def __init__(self, folder: Path, *listeners: Emit) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.listeners = folder, listeners
        self._path = folder / "metrics.jsonl"
        cut_last_line(self._path)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        self._unwritten = b""
        self._unwritten_files: dict[str, str] = {}
        self.failure: UserError | None = None
        self._turn = threading.RLock()  # workers speak at the same time, and listeners may speak again

    def emit(self, said: Event) -> None:
        """Record one event; while the disk is full or fails, events wait in memory."""
        with self._turn:
            self._emit(said)

    def _emit(self, said: Event) -> None:
        waiting = bool(self._unwritten or self._unwritten_files)
        self._unwritten += as_json(said).encode() + b"\n"
        if name := WHOLE.get(said["event"]):
            fields = {key: value for key, value in said.items() if key not in ("event", "time")}
            self._unwritten_files[name] = as_json(fields, indent=2) + "\n"
        try:
            self._flush()
        except OSError as error:
            if len(self._unwritten) > LONGEST_WAIT:
                raise
            if not waiting:
                self._tell(event("note", text=f"Events wait in memory: {error.strerror} ({self.folder})"))
        self._tell(said)

    def _flush(self) -> None:
        if not self._is_there():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file.close()
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
            self._tell(event("note", text=f"{self._path} was gone: events from here on are in a new one"))
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        for name in list(self._unwritten_files):
            write_whole(self.folder / name, self._unwritten_files[name])
            del self._unwritten_files[name]

    def _is_there(self) -> bool:
        """Whether what we write still has its name: a folder may be removed while we write into it."""
        return self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))

    def _tell(self, said: Event) -> None:
        for listener in self.listeners:
            listener(said)

    def close(self) -> None:
        """Write what still waits, and close the file; `failure` is why that could not be done."""
        try:
            self._flush()
        except OSError as error:
            self.failure = cannot_write(error)
        finally:
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
