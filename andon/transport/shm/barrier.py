"""A barrier in shared memory that is quick when the wait is short and idle when it is long.

Every rank has a *line*: 64 bytes of shared memory that only it writes, with a counter of the barriers at which it has
arrived. A rank is *late* while its counter still shows the previous barrier. A rank that waits first polls the late
rank's counter. Between polls it yields the core, which the late rank may need. It polls for somewhat longer than going
to sleep and waking up take: with less, two ranks fall into a rhythm in which each sleeps while the other wakes. Then it
sleeps in the kernel on the counter of the late rank (a futex). A rank that arrives wakes the others only if one of them
sleeps. Sleepers check several times a second whether a late peer has died (its pidfd becomes readable, also for a
zombie), has left, or has timed out.
"""

import mmap
import os
import platform
import select
import threading
import time
from collections.abc import Sequence
from ctypes import CDLL, byref, c_int, c_long, c_uint32, c_void_p
from typing import Final

from andon.transport.base import GroupError, GroupTimeout, PeerLost

LINE_BYTES: Final = 64
SPINS: Final = 50  # about 3 microseconds
YIELDS: Final = 400  # about 200 microseconds if no other thread wants the core
CHECK_SECONDS: Final = 0.1
SYS_FUTEX: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)  # 0: unknown
STRONGLY_ORDERED: Final = platform.machine() == "x86_64"
_WAIT, _WAKE = 0, 1

_syscall = CDLL(None, use_errno=True).syscall
_syscall.argtypes = [c_long, c_void_p, c_int, c_uint32, c_void_p, c_void_p, c_uint32]
_syscall.restype = c_long


def sleep_on(address: int, value: int, seconds: float) -> None:
    """Sleep until `wake_all` on the same address, unless the u32 there is no longer `value`."""
    timespec = (c_long * 2)(int(seconds), int(seconds % 1 * 1e9))  # seconds, nanoseconds
    _syscall(SYS_FUTEX, address, _WAIT, value, byref(timespec), None, 0)


def wake_all(address: int) -> None:
    """Wake every process that sleeps on `address`."""
    _syscall(SYS_FUTEX, address, _WAKE, 0x7FFFFFFF, None, None, 0)


def lines_size(world_size: int) -> int:
    """Bytes of the lines of all ranks, and of one flag per rank each for `asleep` and `left`."""
    return world_size * LINE_BYTES + LINE_BYTES * -(-2 * world_size // LINE_BYTES)


class Barrier:
    """The barrier of one rank; `address` is that of `memory`, which begins with the lines."""

    def __init__(self, memory: mmap.mmap, address: int, rank: int, processes: Sequence[int], timeout: float) -> None:
        self.rank, self.timeout, self.turn = rank, timeout, 0
        self.failure: GroupError | None = None
        self._known_lost: tuple[int, str] | None = None
        world_size = len(processes)
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._address, self._closed = address, False
        view, flags = memoryview(memory), world_size * LINE_BYTES
        self._counters = view[:flags].cast("I")[:: LINE_BYTES // 4]
        self._asleep = view[flags : flags + world_size]
        self._left = view[flags + world_size : flags + 2 * world_size]
        self._nobody = bytes(world_size)
        self._lock = threading.Lock()
        self._descriptors = {_pidfd(peer, processes[peer]): peer for peer in self._peers}
        self._poll = select.poll()
        for descriptor in self._descriptors:
            self._poll.register(descriptor, select.POLLIN)

    def check(self) -> None:
        """Raise if a wait has failed before, a rank is known to be lost, or this rank has left."""
        if self.failure is not None:
            raise self.failure
        if self._known_lost:
            raise PeerLost(self._known_lost[0], "the next operation", 0.0, self._known_lost[1])

    def abort(self, rank: int, detail: str) -> None:
        """Make this rank's waits fail, now and later, because another rank is known to be lost."""
        self._known_lost = rank, detail

    def wait(self, operation: str) -> None:
        """Wait until every rank has arrived."""
        counters, before = self._counters, self.turn
        if not STRONGLY_ORDERED:
            self._fence()
        self.turn = turn = (before + 1) & 0xFFFFFFFF
        counters[self.rank] = turn
        self._fence()
        if self._asleep != self._nobody:
            wake_all(self._address + self.rank * LINE_BYTES)
        for peer in self._peers:
            if counters[peer] == before:
                self._wait_for(peer, before, operation)
        if not STRONGLY_ORDERED:
            self._fence()

    def _fence(self) -> None:
        """A memory fence: other ranks see this rank's reads and writes before it as earlier than those after it.

        Taking and releasing a lock uses atomic instructions. On x86 one of them is a full fence, needed only between
        the arrival and the check for sleepers; on aarch64 a release followed by an acquire is one.
        """
        self._lock.acquire()
        self._lock.release()
        if not STRONGLY_ORDERED:
            self._lock.acquire()
            self._lock.release()

    def leave(self) -> None:
        """Mark this rank as left and wake the ranks that wait for it; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._left[self.rank] = 1
        wake_all(self._address + self.rank * LINE_BYTES)
        for descriptor in self._descriptors:
            os.close(descriptor)
        for view in (self._counters, self._asleep, self._left):
            view.release()
        self.failure = self.failure or GroupError(f"rank {self.rank} has left the group")

    def _wait_for(self, peer: int, before: int, operation: str) -> None:
        counters = self._counters
        for _ in range(SPINS):
            if counters[peer] != before:
                return
        for _ in range(YIELDS):
            os.sched_yield()
            if counters[peer] != before:
                return
        self._sleep(peer, before, operation)

    def _sleep(self, peer: int, before: int, operation: str) -> None:
        counters, started = self._counters, time.monotonic()
        self._asleep[self.rank] = 1
        try:
            while counters[peer] == before:
                left = started + self.timeout - time.monotonic()
                sleep_on(self._address + peer * LINE_BYTES, before, max(0.001, min(left, CHECK_SECONDS)))
                if counters[peer] == before:
                    self._check_late(before, operation, started)
        except GroupError as failure:
            self.failure = failure
            raise
        finally:
            self._asleep[self.rank] = 0

    def _check_late(self, before: int, operation: str, started: float) -> None:
        late = [peer for peer in self._peers if self._counters[peer] == before]
        dead = {self._descriptors[descriptor] for descriptor, _ in self._poll.poll(0)}
        seconds = time.monotonic() - started
        if self._known_lost:
            raise PeerLost(self._known_lost[0], operation, seconds, self._known_lost[1])
        for peer in late:
            if peer in dead:
                raise PeerLost(peer, operation, seconds, "its process has ended")
            if self._left[peer]:
                raise PeerLost(peer, operation, seconds, "it left the group")
        if late and seconds >= self.timeout:
            raise GroupTimeout(late[0], operation, seconds)


def _pidfd(peer: int, process: int) -> int:
    try:
        return os.pidfd_open(process)
    except ProcessLookupError as error:
        raise PeerLost(peer, "opening shared memory", 0.0, "its process has ended") from error
