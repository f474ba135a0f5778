"""Memory that every rank of one machine maps.

A segment has no name: it is a memfd of rank 0 that the others open through /proc, so that no exit, not even kill -9,
can leave one behind. The first segment of a group begins with the lines of the barrier (`andon.transport.shm.barrier`);
then, for each of two *halves*, it has a header, a mailbox and a staging area per rank. Operations alternate between the
halves, so that a fast rank does not overwrite bytes that a slow one still reads.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Self

import torch

from andon.transport.base import PeerLost
from andon.transport.shm.barrier import lines_size

PAGE_BYTES: Final = 4096
HEADER_BYTES: Final = 64
MAILBOX_BYTES: Final = 64 << 10
"""The longest message that takes only one barrier."""
STAGE_BYTES: Final = 1 << 20


class Segment:
    """A mapped segment; it is unmapped when the last tensor in it is gone."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.memory = mmap.mmap(descriptor, size)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.address, self.size = self.bytes.data_ptr(), size

    @classmethod
    def of_rank_0(cls, rank: int, processes: Sequence[int], descriptor: int, size: int) -> Self:
        """Map the memory behind a file descriptor of rank 0."""
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


class SegmentLayout:
    """The layout of a group's first segment, as offsets in bytes."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.headers_at = lines_size(world_size)
        self.mailboxes_at = whole_pages(self.headers_at + 2 * world_size * HEADER_BYTES)
        self.stages_at = whole_pages(self.mailboxes_at + 2 * world_size * MAILBOX_BYTES)
        self.size = self.stages_at + 2 * world_size * STAGE_BYTES

    def headers(self, half: int) -> slice:
        """The headers of all ranks."""
        start = self.headers_at + half * self.world_size * HEADER_BYTES
        return slice(start, start + self.world_size * HEADER_BYTES)

    def header(self, half: int, rank: int) -> slice:
        """The header of a rank."""
        start = self.headers_at + (half * self.world_size + rank) * HEADER_BYTES
        return slice(start, start + HEADER_BYTES)

    def mailbox(self, half: int, rank: int) -> int:
        """Where a rank's mailbox starts."""
        return self.mailboxes_at + (half * self.world_size + rank) * MAILBOX_BYTES

    def stage(self, half: int, rank: int) -> int:
        """Where a rank's staging area starts."""
        return self.stages_at + (half * self.world_size + rank) * STAGE_BYTES


@contextmanager
def new_memory(rank: int, size: int) -> Iterator[int]:
    """Create zeroed memory. Yields its file descriptor on rank 0, open until all ranks have mapped it; -1 elsewhere."""
    if rank != 0:
        yield -1
        return
    descriptor = os.memfd_create("andon", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        yield descriptor
    finally:
        os.close(descriptor)


def whole_pages(size: int) -> int:
    """Round a size in bytes up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES
