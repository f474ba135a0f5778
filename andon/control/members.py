"""The members of a run: who has which rank, and where the others reach it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from andon.control.link import ControlLink, Message
from andon.transport.tcp.connect import is_loopback

Place = tuple[str, int | None]
"""What is the same when a worker is started again: its host, and which of a launcher's workers it is."""


class Phase(Enum):
    """How far a worker has come."""

    KNOWN = "it knows the token"
    PREPARING = "it has the job and prepares its data"
    WAITING = "it is ready, and waits for the next generation"
    MEMBER = "it has a rank"


@dataclass(eq=False)
class Worker:
    """A process that knows the token, and its link."""

    link: ControlLink
    phase: Phase = Phase.KNOWN
    host: str = ""
    machine: str = ""
    pid: int = 0
    wanted: int | None = None
    rank: int = -1
    fetches: bool = False
    """Whether it was sent the data."""
    sees_folder: bool = False
    since_step: int = 0
    """The last committed step when it joined."""
    compute_ms: float = 0.0
    """What the last step's forward and backward took."""
    begin: Message = field(default_factory=dict)
    """What it was told of its generation."""

    def introduce(self, hello: Message) -> None:
        """Take over what it says of itself."""
        self.host, self.machine = hello["host"][:64], hello["machine"][:200]
        self.pid, self.wanted = hello["pid"], hello["rank"]

    @property
    def place(self) -> Place:
        """Where it runs."""
        return self.host, self.wanted

    @property
    def process(self) -> tuple[str, int, int | None]:
        """What is the same when it connects again."""
        return self.machine, self.pid, self.wanted

    @property
    def name(self) -> str:
        """As messages name it."""
        return f"rank {self.rank} on {self.host}" if self.rank >= 0 else f"a worker on {self.host or self.link.remote}"


class Seat(NamedTuple):
    """Where a worker sits: its rank, its place among the workers of its machine, its address for the others."""

    rank: int
    local_rank: int
    address: str


def free_rank(taken: Iterable[int], world_size: int, worker: Worker, sees_folder: bool) -> int | None:
    """A rank for a worker; only one that sees the run's folder can be rank 0, which writes the checkpoints."""
    free = sorted(set(range(world_size)) - set(taken))
    if not sees_folder:
        free = [rank for rank in free if rank]
    if worker.wanted in free:
        return worker.wanted
    return free[0 if sees_folder else -1] if free else None


def seats(members: Iterable[Worker]) -> list[Seat]:
    """Where everyone sits, by rank. A worker that came over the loopback of the coordinator's machine is reached, from
    other machines, at the address at which those reached the coordinator."""
    workers = sorted(members, key=lambda worker: worker.rank)
    outside = [worker.link.local for worker in workers if not is_loopback(worker.link.remote)]
    found = []
    for worker in workers:
        address = outside[0] if outside and is_loopback(worker.link.remote) else worker.link.remote
        before = sum(other.machine == worker.machine for other in workers[: worker.rank])
        found.append(Seat(worker.rank, before, address))
    return found
