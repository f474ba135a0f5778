"""Fingerprints: in every step all ranks compare what they hold in common (C-DDP-001, F-DP-001).

They do so before they update it: what differs then has not yet spread. With ZeRO a flipped bit in the part
that a rank owns would otherwise become everyone's weight with the next gather, and be the same everywhere.

Each *cell* of a buffer (1,024 elements) is read as integers of 64 bits and summed, so that any flipped bit
changes its cell; a unit's fingerprint is a hash of its cell sums. One pass at the speed of memory. With the
units go the facts of the step (its number, the learning rate, the configuration). By majority, three ranks or
more also tell which one is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from torch import Tensor

from andon.engine.arena import CELL, Arena
from andon.integrity.halt import JidokaHalt
from andon.transport.base import Group

WIDTH = 8  # bytes of one fingerprint


class Fingerprints:
    """Compares buffers that have the arena's layout and are the same on every rank."""

    def __init__(self, arena: Arena, buffers: Mapping[str, Tensor], group: Group) -> None:
        self.arena, self.buffers, self.group = arena, buffers, group
        units = arena.layout.units
        self.labels = ["facts of the step", *(f"{name} of {unit.name}" for name in buffers for unit in units)]

    def take(self, facts: str) -> bytes:
        """This rank's fingerprints, and that of the facts of the step."""
        prints = [blake3(facts.encode()).digest(WIDTH)]
        for buffer in self.buffers.values():
            sums = cell_sums(buffer)
            for unit in self.arena.layout.units:
                prints.append(blake3(sums[unit.start // CELL : unit.stop // CELL].tobytes()).digest(WIDTH))
        return b"".join(prints)

    def compare(self, step: int, mine: bytes) -> None:
        """Halt on every rank if any rank holds other bits; names unit and, by majority, rank."""
        everyone = self.group.all_gather_bytes(mine)
        if all(words == everyone[0] for words in everyone):
            return
        raise JidokaHalt(step, "; ".join(self._differences(everyone)), sound=False)

    def _differences(self, everyone: list[bytes]) -> list[str]:
        said = []
        for index, label in enumerate(self.labels):
            prints = [words[index * WIDTH : (index + 1) * WIDTH] for words in everyone]
            if len(set(prints)) > 1:
                said.append(f"the {label} differ{who(prints)}")
        return said


def compare_replicas(group: Group, step: int, own: Sequence[Tensor], replica: Sequence[Tensor]) -> None:
    """Halt if a rank's moments are not those that the next rank keeps for it."""
    mine, kept = (
        blake3(b"".join(cell_sums(each).tobytes() for each in held)).digest(WIDTH) for held in (own, replica)
    )
    words = group.all_gather_bytes(mine + kept)
    for rank, word in enumerate(words):
        keeper = (rank + 1) % group.world_size
        if word[:WIDTH] != words[keeper][WIDTH:]:
            cause = f"the moments that rank {rank} owns differ from their replica on rank {keeper}"
            raise JidokaHalt(step, cause, sound=False)


def cell_sums(buffer: Tensor) -> npt.NDArray[np.int64]:
    """The sum of each cell, read as 64-bit integers that wrap around."""
    sums = buffer.view(torch.int64).view(-1, CELL * buffer.element_size() // 8).sum(1)
    return np.asarray(sums.cpu().numpy())


def who(prints: Sequence[bytes | str]) -> str:
    """Which rank is wrong, by majority, as the end of a sentence."""
    (common, votes), *_ = Counter(prints).most_common(1)
    if len(prints) < 3 or votes * 2 <= len(prints):
        return " between ranks " + ", ".join(str(rank) for rank in range(len(prints)))
    wrong = [str(rank) for rank, found in enumerate(prints) if found != common]
    return f" on rank {', '.join(wrong)}"
