"""Which checkpoints exist, by the names of their folders; without torch."""

import re
from pathlib import Path

NAME = re.compile(r"checkpoint-(0|[1-9]\d*)")
REPLACED = ".replaced"


def checkpoint_path(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
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
    """The step in a checkpoint's name; -1 if there is none."""
    match = NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def should_save(step: int, every: int, last: bool) -> bool:
    """Whether to save a step: each `every`-th (0: none), and always the last."""
    return step > 0 and (last or (every > 0 and step % every == 0))


def kept(found: list[int], keep: int, every: int) -> set[int]:
    """The steps to keep, of ascending ones: the last `keep`, and each `every`-th (0: none)."""
    return set(found[-keep:]) | {step for step in found if every and step % every == 0}


def aside_of(folder: Path) -> Path:
    """Where a folder is set aside while a new one takes its name."""
    return folder.with_name(f".{folder.name}{REPLACED}")


def put_back_one(folder: Path) -> None:
    """Rename a folder back that was set aside for a new one, if a kill came before the new one had the name."""
    aside = aside_of(folder)
    if aside.exists() and not folder.exists():
        aside.rename(folder)


def put_back(folder: Path) -> None:
    """Put back all checkpoints of a run that a kill left set aside."""
    for aside in folder.glob(f".checkpoint-*{REPLACED}"):
        put_back_one(folder / aside.name.removeprefix(".").removesuffix(REPLACED))
