"""Atomic and durable writing: a file exists as a whole or not at all, and survives a loss of power. And paths."""

import os
from pathlib import Path

from andon.errors import UserError


def expand(path: str | Path) -> Path:
    """Expand `~` and `~user` in a path."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path} cannot be used", f"{error}", "Write the path in full") from None


def no_follow(path: str, flags: int) -> int:
    """An opener that refuses a symbolic link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def sync(path: Path) -> None:
    """Wait until a file's data, or a folder's entries, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
