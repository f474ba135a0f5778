"""The earlier run of a folder: moved aside for a new one, and put back if the new one ends before its first step.

Only what a run writes is moved: the user's own files stay where they are, and so does the token, of which workers on
other machines have copies. The folder is renamed as a whole, so that a kill leaves the earlier run in one piece.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from andon.run.records.folder import OWN_NAMES, RunFolder

MOVED: Final = {
    *OWN_NAMES,
    *("config.yaml", "summary.json", "halt.json", "workers"),
    *("adapter", "model", "merged", "metrics.csv", "tensorboard", "wandb"),  # results and exports
}


@contextlib.contextmanager
def moved_aside(folder: RunFolder, inputs: Sequence[str], report: Callable[[str], None]) -> Iterator[None]:
    """Move the folder's earlier run aside, if there is one, while a new run begins and lasts.

    `inputs` are paths that the new run reads, which must not move."""
    here, aside = folder.folder, folder.move_aside(inputs)
    if aside is None:
        yield
        return
    _move_foreign(aside, here)
    report(f"The earlier run is now in {aside}")
    try:
        yield
    finally:
        if not (here / "config.yaml").exists():  # the first event `start` writes it
            _put_back(aside, here)
            report(f"The new run has not begun, so the earlier one is in {here} again")


def _move_foreign(source: Path, target: Path) -> None:
    for path in list(source.iterdir()):
        if path.name not in MOVED:
            path.rename(target / path.name)


def _put_back(aside: Path, here: Path) -> None:
    """Replace what the new run has written by the earlier run; its logs, which may tell why it failed, are added."""
    for log in (here / "logs").glob("*"):
        (aside / "logs").mkdir(exist_ok=True)
        with open(aside / "logs" / log.name, "ab") as file:
            file.write(log.read_bytes())
    _move_foreign(here, aside)
    shutil.rmtree(here)
    aside.rename(here)
