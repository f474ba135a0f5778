"""Faults in transports and wire protocol 2."""

from __future__ import annotations

from tests.mutants import Mutant

MUTANTS: list[Mutant] = []
