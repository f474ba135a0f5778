"""Appends lines to a file of a run in a background thread, so that nothing waits for a disk that hangs.

While the disk is full or fails, lines wait in memory, and the thread tries again every `RETRY_SECONDS`. If the file was
removed, it is made again with the lines that follow.
"""

import os
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from andon.files import no_follow

MAX_WAITING_BYTES = 64 << 20  # of lines that wait for the disk
RETRY_SECONDS = 1.0  # between attempts to write to a disk that fails
CHUNK_BYTES = 1 << 16  # of the end of a file that are read at once


class LineWriter:
    """A file to which any thread may append lines."""

    def __init__(
        self, path: Path, hold: Callable[[], None], report: Callable[[OSError | None], None] = lambda error: None
    ) -> None:
        """`hold` is called if the file was removed: it creates the folder or raises `OSError`.

        `report` is called when lines begin to wait because of an error, and with None when the file was made again."""
        self._path, self._hold, self._report = path, hold, report
        self._file = self._open()
        self._lines, self._then = bytearray(), list[Callable[[], object]]()
        self._begun = 0  # bytes of the first waiting line that are in the file
        self._error: OSError | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._writer = threading.Thread(target=self._write, name=f"andon-{path.stem}", daemon=True)
        self._writer.start()

    def append(self, line: str, then: Callable[[], object] | None = None) -> None:
        """Append a line; call `then` when it is written, again if that fails. `OSError` if too many lines wait."""
        with self._changed:
            if len(self._lines) > MAX_WAITING_BYTES:
                raise self._error or self._no_answer()
            self._lines += line.encode() + b"\n"
            self._then += [then] if then else []
            self._changed.notify_all()

    def sync(self) -> None:
        """Wait until what is written has reached the disk; for `then`."""
        os.fsync(self._file.fileno())

    def wait(self, seconds: float) -> None:
        """Wait until all lines are written, but no longer than `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, seconds)

    def close(self, seconds: float) -> OSError | None:
        """Write the waiting lines, if the disk answers in time, and close the file; returns why lines were lost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._writer.join(seconds)
        if not self._writer.is_alive():
            self._file.close()
        return (self._error or self._no_answer()) if self._waiting else None

    @property
    def _waiting(self) -> bool:
        return bool(self._lines or self._then)

    def _no_answer(self) -> OSError:
        return OSError(f"{self._path.parent} does not answer")

    def _open(self) -> FileIO:
        file = open(self._path, "a+b", buffering=0, opener=no_follow)  # noqa: SIM115 (closed by close)
        _cut_last_line(file)
        return file

    def _write(self) -> None:
        """Write lines until `close`."""
        closing = False
        while not closing:
            with self._changed:
                pause = RETRY_SECONDS if self._error else None
                self._changed.wait_for(lambda: self._closing or (not self._error and self._waiting), pause)
                closing = self._closing
            try:
                if self._waiting:
                    self._flush()
                self._error = None
            except OSError as error:
                if not self._error:
                    self._report(error)
                self._error = error

    def _flush(self) -> None:
        if not self._is_there():
            self._hold()
            file = self._open()
            self._file.close()
            self._file, self._begun = file, 0
            self._report(None)
        while lines := bytes(self._lines):
            written = self._begun + self._file.write(lines[self._begun :])
            whole = lines.rfind(b"\n", 0, written) + 1
            self._begun = written - whole
            with self._changed:
                del self._lines[:whole]
        while self._then:
            self._then[0]()
            with self._changed:
                del self._then[0]
        with self._changed:
            self._changed.notify_all()

    def _is_there(self) -> bool:
        """Whether the open file still exists under its name: the folder may have been removed."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False


def _cut_last_line(file: FileIO) -> None:
    """Remove an incomplete last line, left by a kill, so that the next line is a new one."""
    size = end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - CHUNK_BYTES)
        file.seek(start)
        if at := file.read(end - start).rfind(b"\n") + 1:
            end = start + at
            break
        end = start
    if end < size:
        file.truncate(end)
