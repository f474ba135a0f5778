"""Starts real processes, one per rank, that open a group and then do as they are told.

    with World("shm", 3) as world:
        world.run(function, *arguments)      # function(group, *arguments) in every rank; results by rank

A function must be importable (it travels by name). What it raises comes back as an `Outcome`; nothing waits
for ever, and no process outlives the `with`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from andon.transport.base import Group, GroupError, Settings
from andon.transport.keys import SERVER, LinkKeys
from andon.transport.registry import TRANSPORTS, open_group
from andon.transport.rows import Wire
from andon.transport.torch_backend import StoreRendezvous
from tests import ROOT
from tests.kit import prefork
from tests.kit.thread_group import thread_groups

Work = Callable[..., Any]
SIZES: dict[str, tuple[int, ...]] = {
    "local": (1,),
    "shm": (1, 2, 3, 4, 5),
    "star": (1, 2, 3, 4, 5),
    "ring": (1, 2, 3, 4, 5),
    "torch": (1, 2, 3, 4, 5),
    "protocol2": (1, 2, 3, 4, 5),
}
"""Every transport with the world sizes that the contract suite tests it with."""
_CLOSE = "close"


@dataclass
class Outcome:
    """What a rank returned or raised, and how long it took."""

    value: Any = None
    error: str = ""
    message: str = ""
    seconds: float = 0.0


def link_keys(rank: int, size: int) -> LinkKeys:
    """The keys of a rank, from a secret that all ranks of the tests know."""
    return LinkKeys.derive(b"the secret of the tests", rank, size)


def busy() -> float:
    """By how much deadlines stretch here: others' work on the same cores is not our slowness."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def reach_barrier(group: Group) -> None:
    """Do nothing but wait for all: afterwards every rank has started and opened its group."""
    group.barrier()


class World:
    """The ranks of one group, each a process."""

    def __init__(self, transport: str, size: int, wire: Wire = "f32", timeout: float = 10.0) -> None:
        self.size = size
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        server = self._start_server(size, timeout) if TRANSPORTS[transport].needs_server else 0
        server = start_gradient_server(size) if TRANSPORTS[transport].joins_server else server
        self._pipes: list[Connection[Any, Any]] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = socket.socketpair()
            place = json.dumps((transport, rank, size, wire, timeout, self._store.port, server))
            with theirs:
                command = [sys.executable, "-m", "tests.kit.group_harness", place]
                self._processes.append(prefork.popen(command, stdin=theirs, cwd=ROOT))
            self._pipes.append(Connection(ours.detach()))

    def run(self, work: Work | str, *arguments: Any, deadline: float = 60.0) -> list[Any]:
        """Do the same in every rank, and expect it to succeed."""
        outcomes = self.outcomes(work, *arguments, deadline=deadline)
        for rank, outcome in enumerate(outcomes):
            assert not outcome.error, f"rank {rank}: {outcome.error}: {outcome.message}"
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, work: Work | str, *arguments: Any, deadline: float = 60.0, silent: int | None = None
    ) -> list[Outcome]:
        """Do the same in every rank; what came of it, by rank. A `silent` rank is not waited for."""
        self.start(work, *arguments)
        return self.finish(deadline, silent)

    def start(self, work: Work | str, *arguments: Any) -> None:
        """Have every rank begin."""
        for pipe in self._pipes:
            pipe.send((work, arguments))

    def finish(self, deadline: float = 60.0, silent: int | None = None) -> list[Outcome]:
        """Wait until each rank that has begun is done, or dead."""
        until = time.monotonic() + deadline * busy()
        outcomes = [Outcome(error="Late", message=f"nothing for {deadline:.0f} s") for _ in self._pipes]
        open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank != silent}
        while open_pipes and (left := until - time.monotonic()) > 0:
            for pipe in wait_for_any(list(open_pipes), left):
                assert isinstance(pipe, Connection)
                rank = open_pipes.pop(pipe)
                try:
                    outcomes[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    outcomes[rank] = Outcome(error="Dead")
        return outcomes

    def close(self) -> list[str]:
        """Have every rank close its group; what is left behind that was not there before it was opened."""
        left = self.run(_CLOSE)
        return [f"rank {rank}: {thing}" for rank, things in enumerate(left) for thing in things]

    def _start_server(self, size: int, timeout: float) -> int:
        from andon.transport.tcp.star_server import StarServer

        server = StarServer(("127.0.0.1", 0), size, timeout, link_keys(SERVER, size))

        def serve() -> None:
            with contextlib.suppress(GroupError):  # the ranks tell
                server.serve()

        threading.Thread(target=serve, daemon=True).start()
        return server.address[1]

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        until = time.monotonic() + 1
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()
            process.wait()


def start_gradient_server(size: int) -> int:
    """A server of protocol 2 that serves as long as somebody is there; its port."""
    from andon.protocol2.server import GradientServer
    from andon.protocol2.wire.dialogue import Dialogue

    server, dialogue = GradientServer(), Dialogue()

    def serve() -> None:
        with server, contextlib.suppress(GroupError):  # the ranks tell
            server.wait_for_workers(size, 60.0)
            while True:
                server.broadcast(server.collect(dialogue))

    threading.Thread(target=serve, daemon=True).start()
    return server.address[1]


def worlds(*sizes: int, processes_only: bool = False) -> list[tuple[str, int]]:
    """Every transport, and threads unless processes are asked for, with each of the sizes it can have."""
    named = SIZES if processes_only else {**SIZES, "threads": (1, 2, 3, 4, 5)}
    return [(name, size) for name, possible in named.items() for size in sizes if size in possible]


def world(transport: str, size: int, wire: Wire = "f32", timeout: float = 10.0) -> World | ThreadWorld:
    """A world of processes, or of threads."""
    return ThreadWorld(size, timeout) if transport == "threads" else World(transport, size, wire, timeout)


class ThreadWorld:
    """The ranks of one group, each a thread of this process."""

    def __init__(self, size: int, timeout: float = 10.0) -> None:
        self._groups = thread_groups(size, timeout)

    def run(self, work: Work, *arguments: Any, deadline: float = 60.0) -> list[Any]:
        """Do the same in every rank, and expect it to succeed."""
        with ThreadPoolExecutor(len(self._groups)) as pool:
            futures = [pool.submit(work, group, *arguments) for group in self._groups]
            return [future.result(deadline) for future in futures]

    def __enter__(self) -> ThreadWorld:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._groups:
            group.close()


def _serve(
    pipe: Connection[Any, Any], transport: str, rank: int, size: int, wire: Wire, timeout: float, port: int, server: int
) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, wait_for_workers=False)
    rendezvous = StoreRendezvous(store, rank, size, 30.0)
    group: Group | None = None
    before = _held()
    while True:
        try:
            work, arguments = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        started = time.monotonic()
        try:
            settings = Settings(timeout, wire, server=("127.0.0.1", server), keys=link_keys(rank, size))
            group = group or open_group(transport, rendezvous, settings)
            started = time.monotonic()
            if work == _CLOSE:
                group.close()
                group.close()
                group = None
                outcome = Outcome(_left_over(before))
            else:
                outcome = Outcome(work(group, *arguments))
        except Exception as error:
            outcome = Outcome(error=type(error).__name__, message=str(error))
        outcome.seconds = time.monotonic() - started
        pipe.send(outcome)
    if group:
        group.close()


def _held() -> Counter[str]:
    """The threads, sockets and shared memory of this process, and the segments of this machine."""
    gc.collect()
    held = [f"thread {(task / 'comm').read_text().strip()}" for task in Path("/proc/self/task").iterdir()]
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this very listing
            target = str(descriptor.readlink())
            held += ["socket"] if target.startswith("socket:") else []
    maps = Path("/proc/self/maps").read_text()
    held += ["shared memory" for line in maps.splitlines() if "memfd" in line or "/dev/shm" in line]
    held += [str(path) for path in Path("/dev/shm").iterdir()]
    return Counter(held)


def _left_over(before: Counter[str], seconds: float = 2.0) -> list[str]:
    until = time.monotonic() + seconds
    while (left := _held() - before) and time.monotonic() < until:
        time.sleep(0.02)  # native threads end a moment after they are told to
    return sorted(left.elements())


if __name__ == "__main__":
    from tests.kit import group_harness  # the messages must be of that module, not of __main__

    group_harness._serve(Connection(os.dup(0)), *json.loads(sys.argv[1]))
