"""How one generation of a run succeeds another: the coordinator's part in it.

`andon.control.generations.generations` decides who is in which generation. Here its decisions become messages: members
are told that one of them is lost or that somebody waits; when all have parted, the next generation is written to the
ledger, gets its keys and its server, and begins. A run that cannot go on without a rank has one generation.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from andon.control.generations.generations import Generations
from andon.control.generations.quarantine import STRIKES, Quarantine
from andon.control.link import Message
from andon.control.members import Phase, Worker, seats
from andon.control.store import Topics
from andon.control.token import Credentials
from andon.run.records.events import Emit, Event, event
from andon.run.records.ledger import Ledger, check_record
from andon.transport.base import ProtocolError

WITHOUT_PROGRESS: Final = 20
"""Generations in a row that commit nothing, after which the run ends."""
MOST_SLOTS: Final = 1 << 16
RETURN_SECONDS: Final = 5.0
"""That the members of a generation get to come back, once one of them has."""


@dataclass(frozen=True)
class GoesOn:
    """What a run needs in order to go on when its members change, and to keep its books."""

    least: int
    """The number of workers without which it waits."""
    patience: float
    """Seconds that a member gets to leave its group when another one is lost."""
    ledger: Ledger
    server: Callable[[int, int], tuple[str, int] | None] = lambda generation, world_size: None
    """Has a star's server serve a generation of so many; its address."""
    told_step: Callable[[], int] = lambda: -1
    """The newest step that the events of the run tell of, if the coordinator has come back."""
    possible: bool = True
    """Whether its transport can go on: otherwise there is the ledger, but only one generation."""


class Succession:
    """Begins the generations of a run."""

    def __init__(self, wanted: int, goes_on: GoesOn | None, credentials: Credentials, emit: Emit) -> None:
        self.goes_on = goes_on if goes_on and goes_on.possible else None
        self.ledger = goes_on.ledger if goes_on else None
        self.credentials, self._emit = credentials, emit
        self.generations: Generations[Worker] = Generations(wanted, self.goes_on.least if self.goes_on else wanted)
        self.topics = Topics(wanted)
        self.quarantine = Quarantine()
        self.processes: set[int] = set()
        """Those of the last generation."""
        self.impossible = ""
        """Why the run cannot go on, if it cannot."""
        self.told_step = -1
        """The newest step that events tell of."""
        self._first = self.ledger.generation + 1 if self.ledger else 0
        self._parting_since = float("inf")
        self._begun_at, self._without_progress, self._return_by = -1, 0, float("inf")
        self._unsaid: dict[int, Event] = {}
        """Losses, by rank, that nobody was told of yet."""
        self._seen: dict[int, str] = {}
        """By lost rank: what the first survivor has said of it."""

    @property
    def begun(self) -> bool:
        """Whether the first generation has begun."""
        return self.generations.number >= 0

    def come_back(self, worker: Worker, generation: int, rank: int) -> bool:
        """A worker says that it is a member of a generation; whether that is the last one, and it takes part again.

        To a new coordinator all members come back, and then part: the next generation has the keys, the server and the
        folder of this coordinator."""
        generations = self.generations
        if not self.goes_on or not self.ledger or self.over or generation != self.ledger.generation:
            return False
        if any(member.rank == rank for member in generations.members) or not 0 <= rank < len(self.ledger.hosts):
            return False
        if not self.begun:
            self._first, generations.renew, self.told_step = generation, True, self.goes_on.told_step()
        if not generations.members:
            generations.returning, self._return_by = True, time.monotonic() + RETURN_SECONDS
            self._emit(event("note", text=f"Workers of generation {generation} come back"))
        generations.come_back(worker, rank)
        worker.phase, worker.rank = Phase.MEMBER, rank
        generations.members.sort(key=lambda member: member.rank)
        self.processes.add(worker.pid)
        if len(generations.members) == len(self.ledger.hosts):
            generations.returning = False
            self.advance()
        return True

    def member_in(self, worker: Worker, generation: int) -> Worker | None:
        """The member that is the same process; it knows this generation, or has not heard yet of the one after it."""
        if not self.ledger or generation not in (self.ledger.generation, self.ledger.generation - 1):
            return None
        return next((member for member in self.generations.members if member.process == worker.process), None)

    def say_again(self, member: Worker, generation: int) -> None:
        """What a member may not have heard through its old link; it knows this generation."""
        assert self.ledger
        if generation != self.ledger.generation:
            member.link.queue("begin", **member.begin)
        there = {each.rank for each in self.generations.members}
        for rank, host in enumerate(self.ledger.hosts):
            if rank not in there and not self.generations.returning:
                member.link.queue(
                    "lost", rank=rank, host=host, why="it was lost while the coordinator was out of reach"
                )
        if self.generations.change_is_due:
            member.link.queue("change", released=len(self.generations.released))

    def _end_return(self) -> None:
        """Those who have not come back by now are lost."""
        assert self.ledger
        self.generations.returning = False
        there = {member.rank for member in self.generations.members}
        for rank, host in enumerate(self.ledger.hosts):
            if rank not in there:
                why = "it has not come back to the coordinator"
                text = f"Rank {rank} on {host} was lost: {why}"
                self._emit(event("lost", rank=rank, host=host, why=why, text=text))
                self._tell("lost", rank=rank, host=host, why=why)
        self.advance()

    @property
    def over(self) -> bool:
        """Whether no other generation will begin."""
        return self.generations.over

    @property
    def renews(self) -> bool:
        """Whether members have come back to this coordinator, and write to its folder only in the next generation."""
        return self.generations.renew and bool(self.generations.members) and not self.over

    @property
    def waits(self) -> bool:
        """Whether nobody trains: the members have parted, and are too few to go on."""
        return not self.over and len(self.generations.parted) == len(self.generations.members)

    @property
    def takes_more(self) -> bool:
        """Whether another worker could take part."""
        return not self.over and not self.generations.full and (bool(self.goes_on) or not self.begun)

    def ready(self, worker: Worker) -> None:
        """A worker is ready to take part."""
        self.generations.ready(worker)
        self.advance()

    def strike(self, worker: Worker) -> None:
        """A worker was lost, or has failed before it could join."""
        steps = self.ledger.chain.step - worker.since_step if self.ledger else 0
        if self.goes_on and self.begun and self.quarantine.strike(worker.place, steps if worker.rank >= 0 else 0):
            self._say_quarantined(worker.host)

    def strike_unheard(self, place: tuple[str, int | None]) -> None:
        """A worker has ended that never said anything."""
        if self.quarantine.strike(place):
            self._say_quarantined(place[0])

    def lose(self, worker: Worker, why: str, step: str) -> None:
        """A member is lost: the others leave their group. What one of them says of it is told to the user, if it comes
        soon: in which operation it was missed, and after how long."""
        name = f"{worker.name[0].upper()}{worker.name[1:]}"
        said = event("lost", rank=worker.rank, host=worker.host, why=why, text=f"{name} was lost{step}: {why}")
        self._unsaid[worker.rank] = said
        if not self.goes_on or worker.rank in self._seen:
            self._say_lost(worker.rank)
        self.generations.lose(worker)
        self._tell("lost", rank=worker.rank, host=worker.host, why=why)
        if self.goes_on:
            self.strike(worker)
            self.advance()

    def leave(self, worker: Worker, failed: bool) -> None:
        """A member has left for good."""
        self.generations.leave(worker)
        if failed:
            self._end_parted()

    def resize(self, wanted: int) -> None:
        """From now on so many workers are wanted."""
        self.generations.resize(wanted)
        self.advance()

    def end(self, why: str) -> None:
        """The run cannot go on; from any thread."""
        self.impossible, self.generations.over = self.impossible or why, True

    def hear(self, worker: Worker, message: Message) -> None:
        """What a member says about generations and committed steps."""
        if not self.ledger or (message["kind"] != "commit" and not self.goes_on):
            raise ProtocolError(f"it sent '{message['kind']}', but this run has one generation, or no ledger")
        match message["kind"]:
            case "part":
                if message["generation"] == self.ledger.generation:  # it may be said twice, the second time too late
                    self._part(worker, message["lost"], message["why"][:1000])
            case "back":
                self.ledger.go_back(message["generation"], message["step"])
                self.told_step = message["step"]
            case "commit":
                try:
                    for record in message["records"]:
                        self.ledger.commit(check_record(record, MOST_SLOTS))
                except ValueError as error:
                    raise ProtocolError(f"it reported {error}") from None

    def _say_lost(self, rank: int) -> None:
        said = self._unsaid.pop(rank)
        self._emit({**said, "text": self._seen.get(rank, said["text"])})

    def _part(self, worker: Worker, lost: int | None, why: str) -> None:
        self.generations.part(worker)
        if lost is not None and lost not in self._seen:
            self._seen[lost] = f"{why[:1].upper()}{why[1:]}"
            if lost in self._unsaid:
                self._say_lost(lost)
        if lost is not None:  # the others may wait for it, and need not find out by themselves
            for other in self._not_parted():
                other.link.queue("lost", rank=lost, host="", why=why)
        self.advance()

    def tick(self) -> list[Worker]:
        """To be called once a second: the members that do not leave their group, though others have had to."""
        for rank in list(self._unsaid):
            self._say_lost(rank)
        if self.over:
            self._end_parted()
        if self.generations.returning and time.monotonic() > self._return_by:
            self._end_return()
        if not self.goes_on or time.monotonic() - self._parting_since < self.goes_on.patience:
            return []
        self._parting_since = float("inf")
        return self._not_parted()

    def advance(self) -> None:
        """Begin the next generation, if it can; otherwise tell the members that somebody waits."""
        generations = self.generations
        if self.over:
            self._end_parted()
            return
        if generations.parted and self._not_parted():
            self._parting_since = min(self._parting_since, time.monotonic())
        released = generations.released
        if members := generations.next():
            for worker in released:
                worker.link.queue("end", released=1)
            self._begin(members)
        elif generations.change_is_due:
            self._tell("change", released=len(generations.released))
        elif self.begun and len(generations.parted) == len(generations.members) < generations.needed:
            there = f"{len(generations.members)} of at least {generations.needed} are there"
            self._emit(event("note", text=f"Waiting for workers: {there}"))

    def _begin(self, members: list[Worker]) -> None:
        """Begin a generation; a worker that sees the run's folder is rank 0, and otherwise ranks stay in order."""
        first = self.generations.number == 0
        members.sort(key=lambda worker: worker.rank if first else not worker.sees_folder)
        self._parting_since = float("inf")
        for rank in list(self._unsaid):
            self._say_lost(rank)
        self._seen.clear()
        generation, size = self._first + self.generations.number, len(members)
        if first and self.ledger:
            self.ledger.start()
        recorded = self.ledger.chain.step if self.ledger else 0
        if not self._makes_progress(recorded):
            return
        if self.ledger:
            self.ledger.begin(generation, [worker.host for worker in members])
        server = self.goes_on.server(generation, size) if self.goes_on else None
        self.topics, self.processes = Topics(size), {worker.pid for worker in members}
        for rank, worker in enumerate(members):
            joins, worker.phase, worker.rank = worker.phase is Phase.WAITING, Phase.MEMBER, rank
            if joins:
                worker.since_step = recorded
                self._emit(event("worker", rank=rank, pid=worker.pid, host=worker.host))
        hosts = [worker.host for worker in members]
        for seat, worker in zip(seats(members), members, strict=True):
            keys = self.credentials.issue(worker.rank, size, generation).keys
            worker.begin = {
                **{"generation": generation, "rank": worker.rank, "world_size": size, "recorded": recorded},
                **{"later": int(not first), "hosts": hosts, "host": seat.address, "local_rank": seat.local_rank},
                **{"keys": {str(peer): key.hex() for peer, key in keys.items()}, "server": server},
            }
            worker.link.queue("begin", **worker.begin)

    def _makes_progress(self, recorded: int) -> bool:
        """End a run whose generations follow each other without a committed step."""
        self._without_progress = 0 if recorded != self._begun_at else self._without_progress + 1
        self._begun_at = recorded
        if self._without_progress < WITHOUT_PROGRESS:
            return True
        self.end(f"{WITHOUT_PROGRESS} generations have begun without a committed step")
        self._tell("end", released=0)
        return False

    def _not_parted(self) -> list[Worker]:
        return [worker for worker in self.generations.members if worker not in self.generations.parted]

    def _end_parted(self) -> None:
        for worker in [*self.generations.parted, *self.generations.waiting]:
            worker.link.queue("end", released=0)
        self.generations.parted.clear()
        self.generations.waiting.clear()

    def _say_quarantined(self, host: str) -> None:
        text = f"A worker on {host} was lost {STRIKES} times in a row: it is quarantined, and not let in any more"
        self._emit(event("note", text=text))

    def _tell(self, kind: str, **fields: Any) -> None:
        for member in self.generations.members:
            member.link.queue(kind, **fields)
