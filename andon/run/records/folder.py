"""The folder of a run: its lock, and the checkpoint to resume from."""

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from andon.checkpoint.disk.listing import checkpoint_path, newest, put_back, step_of, steps
from andon.checkpoint.disk.manifest import Damaged, verify, verify_named
from andon.config.schema import RunSettings
from andon.errors import UserError
from andon.files import expand, no_follow, write_whole

OWN_NAMES = (".lock", "metrics.jsonl", "ledger.jsonl", "checkpoints", "logs")
"""Files and folders that a run writes to."""
RETRY_SECONDS = 0.1  # between attempts to lock a folder
LOOK_SECONDS = 0.15  # in which `andon status` certainly ends its look at a lock, which holds it for a moment


class NoLocks(OSError):
    """The file system of a folder has no locks."""


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint that is skipped, and what is wrong with it."""

    path: Path
    reason: str

    @property
    def note(self) -> str:
        """What the user reads about it."""
        show = f"`andon checkpoint verify {self.path}` shows all of it"
        return f"{self.path.name} is damaged and skipped: {self.reason} ({show})"


class RunFolder:
    """A run's folder, locked by one process at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: IO[str] | None = None
        self._mark = f"{os.getpid()} {secrets.token_hex(8)}"  # in the lock file
        self.damaged: list[DamagedCheckpoint] = []
        """Checkpoints that the last `resume_from` has skipped."""

    def take(self, seconds: float = 0.0) -> None:
        """Create the folder and lock it for this process; another process gets `seconds` to unlock it."""
        for name in OWN_NAMES:
            if (self.folder / name).is_symlink():
                cause = "A run writes only into its own folder, so it does not follow links"
                remedy = "Remove the link, or choose another --run.dir"
                raise UserError(f"{self.folder / name} is a symbolic link", cause, remedy)
        until = time.monotonic() + max(seconds, LOOK_SECONDS)
        while not self._try_to_hold():
            if time.monotonic() >= until:
                process = read_mark(self.folder).partition(" ")[0]
                cause = f"Process {process} is training there" if process else "Another process is training there"
                raise UserError(f"{self.folder} is in use", cause, "Wait for it, or choose another --run.dir")
            time.sleep(RETRY_SECONDS)
        put_back(self.folder / "checkpoints")

    def _try_to_hold(self) -> bool:
        try:
            self.hold()
        except OSError as error:
            if error.errno == errno.EBUSY:
                return False
            remedy = "Choose another --run.dir"
            if isinstance(error, NoLocks):
                remedy += ", or mount the file system with locks (Lustre: -o flock)"
            raise UserError(f"{self.folder} cannot be used", str(error.strerror), remedy) from None
        return True

    def hold(self) -> None:
        """Lock the folder, again if it was removed; `OSError` (EBUSY) if another run has locked it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = open(self.folder / ".lock", "a+", encoding="utf-8", opener=no_follow)  # noqa: SIM115 (held for the run)
        if self._lock and os.path.sameopenfile(lock.fileno(), self._lock.fileno()):
            lock.close()
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise OSError(errno.EBUSY, "another run has taken the folder", str(self.folder)) from None
        except OSError as error:
            lock.close()
            cause = f"The file system has no locks: {error.strerror}"
            raise NoLocks(error.errno, cause, str(self.folder)) from None
        lock.truncate(0)
        lock.write(self._mark)
        lock.flush()
        self.close()
        self._lock = lock

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock:
            self._lock.close()
            self._lock = None

    def move_aside(self, inputs: Sequence[str] = ()) -> Path | None:
        """Rename the folder if it holds a run, and create an empty one; returns the new name of the old one.

        `inputs` are paths that the new run reads, which must not move."""
        if not (self.folder / "metrics.jsonl").exists() and not newest(self.folder / "checkpoints"):
            return None
        for each in inputs:
            if expand(each).resolve().is_relative_to(self.folder.resolve()):
                cause = f"A new run would rename the folder of the earlier one, and {each} with it"
                raise UserError(f"{each} is in the run's own folder", cause, "Choose another --run.dir")
        number = 1
        while (aside := self.folder.with_name(f"{self.folder.name}.{number}")).exists():
            number += 1
        self.folder.rename(aside)
        self.close()
        self.take()
        return aside

    def resume_from(self, resume: str) -> Path | None:
        """The checkpoint that `--resume` asks for: `auto` (the newest, if any), `none`, or a path."""
        if resume == "none":
            return None
        if resume == "auto":
            self.damaged = []
            return newest_good(self.folder / "checkpoints", self.damaged)
        folder = Path(resume)
        known, found = verify_named(folder), newest(self.folder / "checkpoints")
        if known and found and step_of(found) > known.step:
            cause = f"{folder.name} is older: the new branch would be pruned before the later checkpoints"
            remedy = "Choose another --run.dir for the new branch"
            raise UserError(f"{self.folder} already has {found.name}", cause, remedy)
        if known is None:
            remedy = "Name a folder checkpoint-STEP, or use --resume auto"
            raise UserError(f"{folder} is not a checkpoint", "It has no manifest.json", remedy)
        return folder

    @property
    def notes(self) -> list[str]:
        """What the user should know about the resume."""
        return [damage.note for damage in self.damaged]

    def begin(self, config: RunSettings) -> None:
        """Write the configuration, and remove the summary and the halt of an earlier part of the run."""
        write_whole(self.folder / "config.yaml", config.to_yaml())
        for name in ("summary.json", "halt.json"):
            (self.folder / name).unlink(missing_ok=True)


def newest_good(checkpoints: Path, damaged: list[DamagedCheckpoint]) -> Path | None:
    """The newest checkpoint whose bytes are all verified; damaged ones are skipped and added to `damaged`."""
    for step in reversed(steps(checkpoints)):
        found = checkpoint_path(checkpoints, step)
        try:
            verify(found)
            return found
        except Damaged as error:
            damaged.append(DamagedCheckpoint(found, str(error)))
    if damaged:
        cause = "; ".join(f"{damage.path.name} is damaged: {damage.reason}" for damage in damaged)
        remedy = f"`andon checkpoint verify {checkpoints}` shows it; restore one, or start anew with --resume none"
        raise UserError(f"No checkpoint in {checkpoints} is good", cause, remedy)
    return None


def read_mark(folder: Path) -> str:
    """The mark of the process that locked a folder; empty if this machine does not see the folder."""
    try:
        return (folder / ".lock").read_text(encoding="utf-8")
    except OSError:
        return ""
