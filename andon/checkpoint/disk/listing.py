"""Which checkpoints there are, from their names alone: no torch needed."""

import re
from pathlib import Path

NAME = re.compile(r"checkpoint-(0|[1-9]\d*)")
REPLACED = ".replaced"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"checkpoint-{step}"


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, ascending."""
    if not folder.is_dir():
        return []
    names = (NAME.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in names if match)


def newest(folder: Path) -> Path | None:
    """The newest checkpoint."""
    found = steps(folder)
    return checkpoint_path(folder, found[-1]) if found else None


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's name tells; -1 if it tells none."""
    match = NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def should_save(step: int, every: int, last: bool) -> bool:
    """Whether to save a step: at every interval, and always the last; an interval of 0 saves only that."""
    return step > 0 and (last or (every > 0 and step % every == 0))


def kept(found: list[int], keep: int, every: int) -> set[int]:
    """Of ascending steps, those that are kept: the last `keep`, and every `every`-th step (0: none)."""
    return set(found[-keep:]) | {step for step in found if every and step % every == 0}


def put_back(folder: Path) -> None:
    """A checkpoint that was set aside for one that did not come, because of a kill, gets its name again."""
    for aside in folder.glob(f".checkpoint-*{REPLACED}"):
        checkpoint = folder / aside.name.removeprefix(".").removesuffix(REPLACED)
        if not checkpoint.exists():
            aside.rename(checkpoint)
