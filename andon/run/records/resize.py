"""Changing the number of workers of a running run: `andon resize` writes it into the file `workers` in the run's
folder, and the run's launcher reads it."""

import json
from pathlib import Path

from andon.config.load import load_run
from andon.errors import UserError
from andon.files import write_whole
from andon.transport.registry import TRANSPORTS

FILE = "workers"


class RequestedWorkers:
    """The launcher's view of the file; one that an earlier part of the run left is removed."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._path.unlink(missing_ok=True)
        self._known = 0

    def changed(self, workers: int, most: int) -> int | None:
        """The number of workers in the file, if it has changed since the last call, and is at most `most`."""
        try:
            wanted = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(wanted, int) or not 1 <= wanted <= most or wanted == (self._known or workers):
            return None
        self._known = wanted
        return wanted


def request_workers(folder: Path, workers: int) -> None:
    """`andon resize`: let a run go on with this number of workers."""
    config = load_run(folder / "config.yaml")
    if fixed := TRANSPORTS[config.group.transport].fixed:
        raise UserError(f"{folder} cannot be resized", fixed, "Stop it, and start it again with other --workers")
    slots = config.train.slots
    if not 1 <= workers <= slots:
        cause = f"Each worker needs at least one of the {slots} slots of a step"
        raise UserError(f"{folder} cannot go on with {workers} workers", cause, f"Give a number from 1 to {slots}")
    write_whole(folder / FILE, f"{workers}\n")
