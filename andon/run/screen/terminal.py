"""The terminal: control characters of foreign text have no effect, and a run goes on when output fails. And numbers
with units."""

import os
import sys
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from andon.errors import harmless


def discard(stream: TextIO) -> None:
    """Redirect a stream that cannot be written to /dev/null: Python would fail when it flushes the buffer at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


class LastingOutput:
    """An output that discards everything after its first error (a full disk, a closed terminal)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write; an error is kept in `failure`."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Flush; an error is kept in `failure`."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.failure = self.failure or error
        discard(self._stream)


class Terminal(Console):
    """A console that spells control characters out; with `lasting`, it never raises `OSError`."""

    def __init__(self, stderr: bool = False, lasting: bool = False) -> None:
        stream = sys.stderr if stderr else sys.stdout
        super().__init__(file=LastingOutput(stream) if lasting else stream, highlight=False, emoji=False)  # type: ignore[arg-type]

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print; style and markup apply to these texts alone: rich would apply them to a live display below as well."""
        own = {"style": settings.pop("style", None) or "", "markup": settings.pop("markup", None)}
        texts = [self.render_str(each, **own) if isinstance(each, str) else each for each in objects]
        super().print(*texts, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Rich calls this for every text that it prints."""
        return super().render_str(harmless(text), **settings)

    @property
    def failure(self) -> OSError | None:
        """Why output is discarded, if it is."""
        return self.file.failure if isinstance(self.file, LastingOutput) else None


def human_bytes(count: float) -> str:
    """Bytes with a unit."""
    return _human(count, (" B", " KB", " MB", " GB", " TB"))


def human_age(seconds: float) -> str:
    """A time span in its largest whole unit."""
    seconds = max(0.0, seconds)
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def human_count(count: float) -> str:
    """A count with a unit."""
    return _human(count, ("", "K", "M", "B", "T"))


def counted(count: int, noun: str) -> str:
    """A count with its noun, which is in the plural unless there is one."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _human(count: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}{units[-1]}"
