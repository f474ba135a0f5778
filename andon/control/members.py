"""The workers of a run as the coordinator knows them: identity, phase, rank, and the address for the other ranks."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from andon.control.link import ControlLink, Message
from andon.transport.tcp.connect import is_loopback

Place = tuple[str, int | None]
"""A host, and a number among the workers of its launcher; a worker that is started again has the same place."""


class Phase(Enum):
    """How far a worker has got."""

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
    local_rank: int = 0
    """Its number among the workers of its machine, which selects its GPU; the same in every generation."""
    rank: int = -1
    fetches: bool = False
    """Whether it was sent the data."""
    sees_folder: bool = False
    since_step: int = 0
    """The last committed step when it joined."""
    compute_ms: float = 0.0
    """How long forward and backward of its last step took."""
    begin: Message = field(default_factory=dict)
    """The `begin` message of its generation."""

    def introduce(self, hello: Message) -> None:
        """Store the identity that it reports."""
        self.host, self.machine = hello["host"][:64], hello["machine"][:200]
        self.pid, self.wanted = hello["pid"], hello["rank"]

    @property
    def place(self) -> Place:
        """Its host, and its number there."""
        return self.host, self.wanted

    @property
    def process(self) -> tuple[str, int, int | None]:
        """Identifies its process when it connects again."""
        return self.machine, self.pid, self.wanted

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"rank {self.rank} on {self.host}" if self.rank >= 0 else f"a worker on {self.host or self.link.remote}"


def free_rank(taken: Iterable[int], world_size: int, worker: Worker) -> int | None:
    """Choose a rank for a worker; only a worker that sees the run's folder can be rank 0, which writes checkpoints."""
    free = sorted(set(range(world_size)) - set(taken))
    if not worker.sees_folder:
        free = [rank for rank in free if rank]
    if worker.wanted in free:
        return worker.wanted
    return free[0 if worker.sees_folder else -1] if free else None


def free_local_rank(workers: Iterable[Worker], worker: Worker) -> int:
    """Number a worker on its machine. A launcher has numbered its own workers, and gives the number of a lost one to
    the worker that replaces it; another worker gets the lowest number that nobody on its machine has."""
    if worker.wanted is not None:
        return worker.wanted
    taken = {other.local_rank for other in workers if other.machine == worker.machine and other is not worker}
    return next(number for number in count() if number not in taken)


def addresses(members: Iterable[Worker]) -> list[str]:
    """The address of each member for the other ranks, by rank. If some members are on other machines, a worker that
    connected over the coordinator's loopback gets the address at which those machines reached the coordinator."""
    workers = sorted(members, key=lambda worker: worker.rank)
    outside = [worker.link.local for worker in workers if not is_loopback(worker.link.remote)]
    return [outside[0] if outside and is_loopback(worker.link.remote) else worker.link.remote for worker in workers]
