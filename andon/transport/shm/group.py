"""Workers of one machine exchange through shared memory.

A *segment* is memory that every rank maps; `allocate` returns tensors in it. A tensor in a segment is *direct*: the
other ranks read and write it in place. For a collective each rank publishes a *header* (the operation, and the
*location* of its tensor), then all wait at the barrier (`andon.transport.shm.barrier`). To reduce, each rank takes its
share of the elements, cuts it into *chunks* that fit the cache, adds all ranks' rows of a chunk in the one order, and
writes the sum into the first row of every rank; then all wait at the barrier again. Nothing is copied in or out. To
gather, each rank copies the others' parts.

Any other tensor is *staged*: it is copied piece by piece through two staging areas in turn, so that the next piece is
copied in while the current one is summed, with one barrier per piece.

A bf16 wire saves nothing in shared memory; it rounds only to give the same bits as other transports.
"""

import os
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, pairwise
from typing import Final, NamedTuple, Self
from zlib import crc32

import torch

from andon.engine.gradients.order import Order, shares
from andon.errors import UserError
from andon.machine import machine_id
from andon.transport.base import Group, ProtocolError, Rendezvous, Settings
from andon.transport.rows import Wire, first_row, one_node_each, rows_of, sum_rounded
from andon.transport.shm.barrier import SYS_FUTEX, Barrier
from andon.transport.shm.segment import MAILBOX_BYTES, STAGE_BYTES, Segment, SegmentLayout, new_memory, whole_pages

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, GATHER_BYTES = range(4)
OPERATIONS: Final = ("all-reduce", "reduce-scatter", "all-gather", "gather of bytes")
HEADER: Final = struct.Struct("<IIqqqq24x")  # operation, agreement, location (segment, offset, stride), length
CHUNK_BYTES: Final = 512 << 10  # over all rows: they stay in a core's cache while they are summed
CALLS_KEPT: Final = 4096

Chunk = tuple[torch.Tensor, ...]


class Location(NamedTuple):
    """Where a tensor's rows are: the segment, the offset in bytes, and the stride of rows in elements."""

    segment: int
    offset: int
    stride: int


STAGED: Final = Location(-1, 0, 0)


class Call:
    """A collective on a tensor, kept for the next time: this rank's header, and the work that all headers imply."""

    def __init__(self, operation: int, order: Order | None, location: Location, header: bytes) -> None:
        self.name, self.order, self.location, self.header = OPERATIONS[operation], order, location, header
        self.headers = b""
        self.locations: list[Location] = []
        self.direct = False  # no rank's tensor has to be staged
        self.chunks: list[Chunk] = []
        self.moved = 0  # bytes between this rank's memory and others'


class ShmGroup(Group):
    """The ranks of one machine."""

    transport = "shm"

    def __init__(self, rank: int, processes: Sequence[int], first: Segment, timeout: float, wire: Wire) -> None:
        self.rank, self.world_size, self.wire = rank, len(processes), wire
        self._barrier = Barrier(first.memory, first.address, rank, processes, timeout)
        self._processes, self._segments, self._pinned = processes, [first], False
        self._layout = SegmentLayout(self.world_size)
        self._calls: dict[object, Call] = {}

    @classmethod
    def open(cls, rendezvous: Rendezvous, settings: Settings) -> Self:
        """Open the group with all ranks at the rendezvous; all must run on this machine."""
        if sys.platform != "linux" or not SYS_FUTEX:
            raise _unavailable("it needs Linux on x86_64 or aarch64")
        rank, size = rendezvous.rank, SegmentLayout(rendezvous.world_size).size
        with new_memory(rank, size) as descriptor:
            values = rendezvous.exchange("shm", f"{machine_id()} {os.getpid()} {descriptor}")
            machines, processes, descriptors = zip(*(value.split() for value in values), strict=True)
            if len(set(machines)) > 1:
                raise _unavailable("it connects workers of one machine and container; these run in several")
            pids = [int(process) for process in processes]
            try:
                first = Segment.of_rank_0(rank, pids, int(descriptors[0]), size)
            except PermissionError as error:
                raise _unavailable("the workers run as different users") from error
            group = cls(rank, pids, first, settings.timeout, settings.wire)
            settings.watch(group)
            try:
                group._barrier.wait("opening shared memory")
            except BaseException:
                group.leave()
                raise
            return group

    def allocate(self, rows: int, size: int) -> torch.Tensor:
        """A zeroed buffer of (rows, size) floats in shared memory; every rank calls it, in the same order."""
        need = rows * size * 4
        sizes = [whole_pages(int(each)) for each in self.all_gather_bytes(b"%d" % need)]
        total = max(1, sum(sizes))
        with new_memory(self.rank, total) as descriptor:
            source = int(self.all_gather_bytes(b"%d" % descriptor)[0])
            segment = Segment.of_rank_0(self.rank, self._processes, source, total)
            self._barrier.wait("allocating shared memory")
        self._segments.append(segment)
        self._calls.clear()
        start = sum(sizes[: self.rank])
        return segment.bytes[start : start + need].view(torch.float32).view(rows, size)

    def all_reduce(self, nodes: torch.Tensor, order: Order | None = None) -> None:
        self._reduce(ALL_REDUCE, nodes, None, order or one_node_each(self.world_size))

    def reduce_scatter(self, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None = None) -> None:
        self._reduce(REDUCE_SCATTER, nodes, tuple(bounds), order or one_node_each(self.world_size))

    def _reduce(self, operation: int, nodes: torch.Tensor, bounds: tuple[int, ...] | None, order: Order) -> None:
        call = self._call(operation, nodes, bounds, order)
        if call.location is STAGED:
            self._fill(rows_of(nodes, order, self.rank), 0, 0, _piece_elements(nodes, order))
        if self._publish(call):
            cut = bounds if bounds and call.direct else shares(nodes.shape[-1], self.world_size)
            lo, hi = cut[self.rank : self.rank + 2]
            receivers = [self.rank] if cut is bounds else range(self.world_size)
            others = [rank for rank, _ in order.leaves if rank != self.rank]
            call.moved = (hi - lo) * nodes.element_size() * (len(others) + len(receivers) - 1)
            if call.direct:
                call.chunks = list(self._chunks(call.locations, order, nodes.dtype, (lo, hi), receivers))
        self.bytes_sent += call.moved
        if call.direct:
            self._sum(call.chunks, order)
            self._barrier.wait(call.name)
        else:
            self._reduce_pieces(call, nodes, bounds, order)

    def _reduce_pieces(self, call: Call, nodes: torch.Tensor, bounds: tuple[int, ...] | None, order: Order) -> None:
        rows, first = rows_of(nodes, order, self.rank), first_row(nodes)
        size, piece = first.numel(), _piece_elements(nodes, order)
        mine = bounds[self.rank : self.rank + 2] if bounds else (0, size)
        for half, start in zip(cycle((0, 1)), range(0, size, piece)):
            end = min(size, start + piece)
            locations = self._staged_locations(call, half, [start] * self.world_size, piece, nodes.element_size())
            lo, hi = (start + bound for bound in shares(end - start, self.world_size)[self.rank :][:2])
            self._sum(self._chunks(locations, order, nodes.dtype, (lo, hi), range(self.world_size)), order)
            if call.location is STAGED:
                self._fill(rows, 1 - half, end, piece)
            self._barrier.wait(call.name)
            lo, hi = max(start, mine[0]), min(end, mine[1])
            if call.location is STAGED and lo < hi:
                first[lo:hi].copy_(self._view(locations[self.rank], 0, lo, hi, nodes.dtype))

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        bounds = tuple(bounds)
        call = self._call(ALL_GATHER, flat, bounds, None)
        piece = STAGE_BYTES // flat.element_size()
        mine = [flat[: bounds[self.rank + 1]]]
        if call.location is STAGED:
            self._fill(mine, 0, bounds[self.rank], piece)
        others = [(rank, lo, hi) for rank, (lo, hi) in enumerate(pairwise(bounds)) if rank != self.rank]
        self.bytes_sent += flat.element_size() * sum(hi - lo for _, lo, hi in others)
        if self._publish(call) and call.direct:
            call.chunks = [
                (flat[lo:hi], self._view(call.locations[rank], 0, lo, hi, flat.dtype)) for rank, lo, hi in others
            ]
        if call.direct:
            for to, source in call.chunks:
                to.copy_(source)
            self._barrier.wait(call.name)
            return
        longest = max(hi - lo for lo, hi in pairwise(bounds))
        for half, step in zip(cycle((0, 1)), range(0, longest, piece)):
            starts = [lo + step for lo in bounds[:-1]]
            locations = self._staged_locations(call, half, starts, 0, flat.element_size())
            for rank, lo, hi in others:
                lo, hi = lo + step, min(hi, lo + step + piece)
                if lo < hi:
                    flat[lo:hi].copy_(self._view(locations[rank], 0, lo, hi, flat.dtype))
            if call.location is STAGED:
                self._fill(mine, 1 - half, starts[self.rank] + piece, piece)
            self._barrier.wait(call.name)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        self._barrier.check()
        memory, half = self._segments[0].memory, self._half()
        mailboxes = [self._layout.mailbox(half, rank) for rank in range(self.world_size)]
        mine = data[:MAILBOX_BYTES]
        memory[mailboxes[self.rank] : mailboxes[self.rank] + len(mine)] = mine
        call = Call(GATHER_BYTES, None, STAGED, HEADER.pack(GATHER_BYTES, 0, *STAGED, len(data)))
        self._publish(call)
        lengths = [length for *_, length in HEADER.iter_unpack(call.headers)]
        if max(lengths) > MAILBOX_BYTES:
            return super().all_gather_bytes(data)
        self.bytes_sent += sum(lengths) - len(data)
        return [memory[at : at + length] for at, length in zip(mailboxes, lengths, strict=True)]

    def abort(self, rank: int, detail: str) -> None:
        self._barrier.abort(rank, detail)

    def leave(self) -> None:
        self._barrier.leave()
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._segments[0].address)  # type: ignore[no-untyped-call]
            self._pinned = False
        self._calls.clear()
        self._segments.clear()

    def _call(self, operation: int, nodes: torch.Tensor, bounds: tuple[int, ...] | None, order: Order | None) -> Call:
        self._barrier.check()
        # The key contains the id of the order; the call keeps the order alive, so that the id is not reused.
        key = (operation, nodes.data_ptr(), nodes.shape, nodes.stride(), nodes.dtype, id(order), bounds)
        call = self._calls.get(key)
        if call is None:
            if order is not None:
                rows_of(nodes, order, self.rank)
            if nodes.is_cuda:
                self._pin()
            length, terms = nodes.shape[-1], order and (order.slots, order.bounds, self.wire)
            agreement = crc32(repr((length, nodes.dtype, bounds, terms)).encode())
            location = self._locate(nodes)
            call = Call(operation, order, location, HEADER.pack(operation, agreement, *location, length))
            if len(self._calls) >= CALLS_KEPT:
                self._calls.clear()
            self._calls[key] = call
        return call

    def _half(self) -> int:
        return (self._barrier.turn + 1) & 1

    def _publish(self, call: Call) -> bool:
        """Publish this rank's header, wait, and read all headers; returns whether they differ from the last time."""
        memory, half = self._segments[0].memory, self._half()
        memory[self._layout.header(half, self.rank)] = call.header
        self._barrier.wait(call.name)
        headers = memory[self._layout.headers(half)]
        if headers == call.headers:
            return False
        mine = HEADER.unpack(call.header)
        call.locations = []
        for rank, (operation, agreement, *location, length) in enumerate(HEADER.iter_unpack(headers)):
            if (operation, agreement) != mine[:2]:
                self._barrier.failure = ProtocolError(
                    f"rank {rank} calls {OPERATIONS[operation]} of {length:,}, rank {self.rank} {call.name} of "
                    f"{mine[-1]:,}: all ranks must call the same collective, with the same length, bounds and order"
                )
                raise self._barrier.failure
            call.locations.append(STAGED if location[0] < 0 else Location(*location))
        call.headers, call.direct = headers, STAGED not in call.locations
        return True

    def _chunks(
        self, locations: list[Location], order: Order, dtype: torch.dtype, share: tuple[int, int], to: Iterable[int]
    ) -> Iterator[Chunk]:
        """For each chunk of a share: its leaves, then the first rows that receive the sum."""
        lo, hi = share
        leaves = [self._view(locations[rank], row, lo, hi, dtype) for rank, row in order.leaves]
        sums = [self._view(locations[rank], 0, lo, hi, dtype) for rank in to]
        size = max(1, CHUNK_BYTES // dtype.itemsize // len(leaves))
        return zip(*(torch.split(view, size) for view in leaves + sums), strict=True)

    def _sum(self, chunks: Iterable[Chunk], order: Order) -> None:
        adds, leaves = order.adds, len(order.leaves)
        for chunk in chunks:
            values, total = list(chunk[:leaves]), chunk[leaves]
            if self.wire == "bf16" and total.dtype == torch.float32:
                total.copy_(sum_rounded(values, order))
            else:
                # Partial sums get separate memory: the rows later show whose value was not finite.
                for into, other in adds[:-1]:
                    values[into] = values[into] + values[other]
                if adds:
                    torch.add(values[adds[-1][0]], values[adds[-1][1]], out=total)
                else:
                    total.copy_(values[0])
            for row in chunk[leaves + 1 :]:
                row.copy_(total)

    def _view(self, location: Location, row: int, lo: int, hi: int, dtype: torch.dtype) -> torch.Tensor:
        start = location.offset + (row * location.stride + lo) * dtype.itemsize
        return self._segments[location.segment].bytes[start : start + (hi - lo) * dtype.itemsize].view(dtype)

    def _locate(self, nodes: torch.Tensor) -> Location:
        for number, segment in enumerate(self._segments):
            offset = nodes.data_ptr() - segment.address
            if 0 <= offset < segment.size and nodes.stride(-1) == 1:
                return Location(number, offset, nodes.stride(0) if nodes.dim() > 1 else 0)
        return STAGED

    def _staged_locations(self, call: Call, half: int, starts: list[int], stride: int, itemsize: int) -> list[Location]:
        """All ranks' locations of a piece that starts at the given elements."""
        return [
            Location(0, self._layout.stage(half, rank) - start * itemsize, stride) if location is STAGED else location
            for rank, (location, start) in enumerate(zip(call.locations, starts, strict=True))
        ]

    def _fill(self, rows: list[torch.Tensor], half: int, start: int, piece: int) -> None:
        """Copy the piece of this rank's rows that starts at an element into its staging area."""
        for number, row in enumerate(rows):
            part = row[start : start + piece]
            at = self._layout.stage(half, self.rank) + number * piece * row.element_size()
            self._view(Location(0, at, 0), 0, 0, part.numel(), row.dtype).copy_(part)

    def _pin(self) -> None:
        """Let the GPU copy directly to and from the staging areas."""
        if not self._pinned:
            first = self._segments[0]
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(cudart.cudaHostRegister(first.address, first.size, 0))
            self._pinned = True


def _piece_elements(nodes: torch.Tensor, order: Order) -> int:
    """The number of elements of each row that are staged at a time."""
    return STAGE_BYTES // nodes.element_size() // max(1, *(len(own) for own in order.nodes))


def _unavailable(cause: str) -> UserError:
    return UserError("transport 'shm' cannot connect these workers", cause, "choose another group.transport")
