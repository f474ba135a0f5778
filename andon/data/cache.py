"""The cache on disk: folders of tokenized data, each built once and shared by all runs.

A folder is named by the digest of its sources, so the same text under another path finds it again. It is built in a
temporary folder and renamed at the end: a folder with its final name is complete. If two processes build the same one,
the slower process discards its own.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol, TypeVar

from blake3 import blake3

from andon.data.sources import stamp
from andon.errors import UserError
from andon.files import expand, sync
from andon.machine import machine_id

DAY = 86_400


class Prepared(Protocol):
    """The data that workers train on: a folder of the cache with a digest, such as a token set."""

    folder: Path
    digest: str

    def verify(self) -> None:
        """Compare the digest of every file with the recorded one."""
        ...


D = TypeVar("D", bound=Prepared)


def find_or_build(
    cache: Path, files: Sequence[Path], prefix: str, key: Callable[[Path], list[Any]], build: Callable[[Path], None]
) -> Path:
    """Find the folder of the cache named by a prefix and the digest of `key`; `build` fills it if it is missing."""
    with _writing(expand(cache).absolute()) as cache:
        stamps = [stamp(file) for file in files]
        folder = cache / f"{prefix}{blake3(json.dumps(key(cache)).encode()).hexdigest(length=16)}"
        if not folder.exists():
            with _temporary(cache) as fresh:
                build(fresh)
                if stamps != [stamp(file) for file in files]:
                    what = "The input files changed while they were being tokenized"
                    raise UserError(what, "Another program writes to them", "Wait until they are complete, then retry")
                _publish(fresh, folder)
    return folder


def find(cache: Path, digest: str, open_folder: Callable[[Path], D]) -> D | None:
    """Find the undamaged data with this digest in a cache."""
    for meta in sorted(expand(cache).absolute().glob("*/meta.json")):
        if found := open_sound(meta.parent, digest, open_folder):
            return found
    return None


def open_sound(folder: Path, digest: str, open_folder: Callable[[Path], D]) -> D | None:
    """Open the data in a folder, if it can be read, has this digest and is undamaged."""
    with suppress(UserError, OSError):
        found = open_folder(folder)
        if found.digest == digest:
            found.verify()
            return found
    return None


def receive(cache: Path, digest: str, fill: Callable[[Path], object], open_folder: Callable[[Path], D]) -> D:
    """Keep data in the cache whose files `fill` downloads into a folder; they must have this digest."""
    with _writing(expand(cache).absolute()) as cache, _temporary(cache) as fresh:
        folder = cache / f"received-{digest[:32]}"
        fill(fresh)
        if open_sound(fresh, digest, open_folder) is None:
            cause = "Its digest is not the one that the coordinator named"
            raise UserError("The data did not arrive intact", cause, "Start the worker again")
        # Another worker may have received it meanwhile and read it now; only a damaged one is replaced.
        if open_sound(folder, digest, open_folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
            _publish(fresh, folder)
    return open_folder(folder)


def damaged(folder: Path, cause: str, file: str = "") -> UserError:
    """The error for a damaged folder of the cache, or a file in it."""
    return UserError(f"{folder / file} is damaged", cause, f"rm -r {folder}, then start again: it will be built again")


@contextmanager
def _writing(cache: Path) -> Iterator[Path]:
    """Create a cache and remove leftovers of interrupted builds; an error on the way names the cache."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_stale(cache)
        yield cache
    except OSError as error:
        cause = f"{error.strerror or error} ({error.filename or 'while writing'})"
        remedy = "Free some space there, make it writable, or choose another with --data.cache or XDG_CACHE_HOME"
        raise UserError(f"The token cache {cache} cannot be written", cause, remedy) from error


@contextmanager
def _temporary(cache: Path) -> Iterator[Path]:
    """Create a folder in the cache to build in; it is removed at the end, unless it was published."""
    folder = cache / f".tmp-{_machine()}-{os.getpid()}-{token_hex(4)}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(fresh: Path, folder: Path) -> None:
    """Give a complete folder its final name."""
    for path in (*fresh.iterdir(), fresh):
        sync(path)
    try:
        fresh.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise  # these two mean that another process has published the same folder
    sync(folder.parent)


def _remove_stale(cache: Path) -> None:
    """Remove the temporary folders of interrupted builds."""
    for folder in cache.glob(".tmp-*-*-*"):
        _, machine, pid, _ = folder.name.split("-")
        # Whether a process on another machine is alive can only be seen from its writes.
        stale = not _alive(int(pid)) if machine == _machine() else _untouched(folder) > DAY
        if stale:
            shutil.rmtree(folder, ignore_errors=True)


def _machine() -> str:
    """The machine's id, as part of a file name."""
    return blake3(machine_id().encode()).hexdigest(length=6)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _untouched(folder: Path) -> float:
    """Seconds since the last write in a folder."""
    with suppress(FileNotFoundError):  # another process has just removed it
        return time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    return 0.0
