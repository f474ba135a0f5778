"""Memory that every rank of one machine maps.

A segment has no name: it is a memfd of rank 0 that the others open through /proc, so no exit, not even kill
-9, can leave one behind. The first segment of a group begins with what the ranks need to meet and to talk:
the lines of `andon.transport.shm.barrier`, then for each of two *halves* (used in turn, so that a fast rank
does not overwrite what a slow one still reads) a word, a mailbox and a staging area per rank.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Final

import torch

from andon.transport.base import PeerLost
from andon.transport.shm.barrier import lines_size

PAGE: Final = 4096
WORD: Final = 64
MAIL: Final = 64 << 10  # bytes of a small message that are exchanged at one meeting
STAGE: Final = 1 << 20  # bytes of one staging area


class Segment:
    """A mapped segment; it lives until the last tensor in it is gone."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.memory = mmap.mmap(descriptor, size)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.address, self.size = self.bytes.data_ptr(), size

    @classmethod
    def of_rank_0(cls, rank: int, processes: Sequence[int], descriptor: int, size: int) -> Segment:
        """Map what rank 0 holds under a descriptor."""
        if rank == 0:
            return cls(descriptor, size)
        try:
            mine = os.open(f"/proc/{processes[0]}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise PeerLost(0, "mapping shared memory", 0.0, str(error)) from error
        try:
            return cls(mine, size)
        finally:
            os.close(mine)


class Layout:
    """Where things lie in the first segment of a group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.words_at = lines_size(world_size)
        self.mail_at = _pages(self.words_at + 2 * world_size * WORD)
        self.stage_at = _pages(self.mail_at + 2 * world_size * MAIL)
        self.size = self.stage_at + 2 * world_size * STAGE

    def words(self, half: int) -> slice:
        """The words of all ranks."""
        start = self.words_at + half * self.world_size * WORD
        return slice(start, start + self.world_size * WORD)

    def word(self, half: int, rank: int) -> slice:
        """The word of a rank."""
        start = self.words_at + (half * self.world_size + rank) * WORD
        return slice(start, start + WORD)

    def mail(self, half: int, rank: int) -> int:
        """Where a rank's mailbox starts."""
        return self.mail_at + (half * self.world_size + rank) * MAIL

    def stage(self, half: int, rank: int) -> int:
        """Where a rank's staging area starts."""
        return self.stage_at + (half * self.world_size + rank) * STAGE


def new_memory(size: int) -> int:
    """A descriptor of fresh zeroed memory."""
    descriptor = os.memfd_create("andon", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
