"""Small faults that the tests must notice: `make mutants` puts each into a copy of the code and runs them.

A *mutant* is one fault: the text that it replaces (which occurs once in its file), the text that it puts
there, and the tests that should fail. One that changes nothing that anyone could see stays in the list with
the reason, as `equivalent`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """One fault, told in one sentence."""

    id: str
    says: str
    file: str
    """below `andon/`"""
    old: str
    new: str
    tests: tuple[str, ...]
    """files or node ids below `tests/`; the narrower, the faster"""
    equivalent: str = ""
    """why nobody could notice it"""

    @property
    def path(self) -> Path:
        return Path("andon") / self.file


def everything() -> list[Mutant]:
    """All mutants, by room."""
    from tests.mutants import (
        checkpoints,
        foundations,
        generations,
        numbers,
        protocol2,
        runs,
        scripts,
        steps,
        tools,
        transports,
        tuning,
    )

    rooms = (foundations, runs, numbers, steps, checkpoints, transports, generations, scripts, tools, protocol2, tuning)
    return [mutant for room in rooms for mutant in room.MUTANTS]
