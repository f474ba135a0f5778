"""Fingerprints: in every step all ranks compare what they hold in common (C-DDP-001, F-DP-001).

They compare before the update, before a difference can spread. With ZeRO a flipped bit in the part that a rank owns
would otherwise reach every rank with the next gather, and no comparison could find it.

Each *cell* of a buffer (1,024 elements) is read as 64-bit integers and summed, so any flipped bit changes its sum. A
unit's fingerprint is a hash of its cell sums; it takes one pass over the memory. The facts of the step (its number, the
learning rate, the configuration) have a fingerprint, too. With three ranks or more, the majority shows which rank is
wrong.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from torch import Tensor

from andon.engine.gradients.arena import CELL, Arena
from andon.integrity.halt import JidokaHalt
from andon.transport.base import Group

WIDTH = 8  # bytes of one fingerprint


class Fingerprints:
    """Compares buffers that have the arena's layout and are equal on every rank."""

    def __init__(self, arena: Arena, buffers: Callable[[], Mapping[str, Tensor]]) -> None:
        self.arena, self.buffers = arena, buffers
        units = arena.layout.units
        self.labels = [
            "facts of the step",
            "buffers of the model",
            *(f"{name} of {unit.name}" for name in buffers() for unit in units),
        ]

    def take(self, facts: str, small: Iterable[bytes] = ()) -> bytes:
        """This rank's fingerprints: of the facts of the step, of small buffers, and of each unit of each buffer."""
        prints = [blake3(facts.encode()).digest(WIDTH), blake3(b"".join(small)).digest(WIDTH)]
        for buffer in self.buffers().values():
            sums = cell_sums(buffer)
            for unit in self.arena.layout.units:
                prints.append(blake3(sums[unit.start // CELL : unit.stop // CELL].tobytes()).digest(WIDTH))
        return b"".join(prints)

    def compare(self, step: int, everyone: list[bytes]) -> None:
        """Halt if the fingerprints of the ranks differ; names the unit and, by majority, the rank."""
        if len(set(everyone)) > 1:
            found = [f"the {label} differ{blame}" for label, blame in differences(self.labels, everyone)]
            raise JidokaHalt(step, "; ".join(found), sound=False)


def compare_replicas(group: Group, step: int, own: Sequence[Tensor], replica: Sequence[Tensor]) -> None:
    """Halt if a rank's optimizer state differs from the replica that the next rank keeps of it."""
    mine, kept = (blake3(b"".join(cell_sums(each).tobytes() for each in held)).digest(WIDTH) for held in (own, replica))
    everyone = group.all_gather_bytes(mine + kept)
    for rank, prints in enumerate(everyone):
        keeper = (rank + 1) % group.world_size
        if prints[:WIDTH] != everyone[keeper][WIDTH:]:
            cause = f"the optimizer state that rank {rank} owns differs from its replica on rank {keeper}"
            raise JidokaHalt(step, cause, sound=False)


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy if it is contiguous and in this machine's memory."""
    flat = tensor.detach().cpu().resolve_conj().contiguous().reshape(-1)
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data


def cell_sums(buffer: Tensor) -> npt.NDArray[np.int64]:
    """The sum of each cell, read as 64-bit integers that wrap around."""
    sums = buffer.view(torch.int64).view(-1, CELL * buffer.element_size() // 8).sum(1)
    return np.asarray(sums.cpu().numpy())


def differences(labels: Iterable[str], everyone: Sequence[bytes]) -> Iterator[tuple[str, str]]:
    """(label, blame) of each fingerprint that differs, from the concatenated fingerprints of every rank."""
    for index, label in enumerate(labels):
        prints = [of_rank[index * WIDTH : (index + 1) * WIDTH] for of_rank in everyone]
        if len(set(prints)) > 1:
            yield label, blame_by_majority(prints)


def blame_by_majority(prints: Sequence[bytes | str]) -> str:
    """Which rank is wrong, by majority, as the end of a sentence."""
    (common, votes), *_ = Counter(prints).most_common(1)
    if len(prints) < 3 or votes * 2 <= len(prints):
        return " between ranks " + ", ".join(str(rank) for rank in range(len(prints)))
    wrong = [str(rank) for rank, found in enumerate(prints) if found != common]
    return f" on rank {', '.join(wrong)}"
