"""How one generation of a run succeeds another, on the coordinator's side.

`andon.control.generations.generations` decides which workers are in which generation. This file sends the messages that
follow: members learn that one of them is lost or that a worker waits. When all have parted and the star's server is
ready, the next generation is written to the ledger, gets its keys, and begins. A run that cannot go on without a rank
has one generation.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from andon.control.generations.generations import Generations
from andon.control.generations.quarantine import STRIKES, Quarantine
from andon.control.generations.server import NextServer, Serve
from andon.control.link import Message
from andon.control.members import Phase, Place, Worker, addresses
from andon.control.store import Topics
from andon.control.token import Credentials
from andon.engine.gradients.order import MOST_SLOTS
from andon.errors import UserError, sentence
from andon.run.records.events import Emit, Event, event
from andon.run.records.ledger import Ledger, check_record
from andon.transport.base import ProtocolError

MAX_WITHOUT_PROGRESS: Final = 20
"""The run ends after this number of generations in a row without a committed step."""
RETURN_SECONDS: Final = 5.0
"""How long the other members of a generation get to come back to a restarted coordinator after the first one has."""


@dataclass(frozen=True)
class GoesOn:
    """What a run needs to go on when its members change: limits, the ledger, a server."""

    least: int
    """With fewer workers than this the run waits for more."""
    patience: float
    """Seconds that a member gets to leave its group after another one has."""
    ledger: Ledger
    server: Serve | None = None
    """Makes a star's server serve a generation; None: the transport has no server."""
    reported_step: Callable[[], int] = lambda: -1
    """Reads the newest step in the recorded events, for a restarted coordinator."""
    possible: bool = True
    """Whether the transport allows it; if not, the run has one generation, and a ledger."""


class Succession:
    """Begins the generations of a run; calls `wake` when `tick` has something to do."""

    def __init__(
        self, wanted: int, goes_on: GoesOn, credentials: Credentials, emit: Emit, wake: Callable[[], None]
    ) -> None:
        self.goes_on, self.ledger = goes_on, goes_on.ledger
        self.credentials, self._emit = credentials, emit
        self.generations: Generations[Worker] = Generations(wanted, goes_on.least if goes_on.possible else wanted)
        self.failures: list[UserError] = []
        """Why the run fails, the first reason first."""
        self.topics = Topics(wanted)
        self.quarantine = Quarantine()
        self.processes: set[int] = set()
        """The process ids of the last generation."""
        self.impossible = ""
        """Why the run cannot go on; empty if it can."""
        self.reported_step = -1
        """The newest step in the events."""
        self.stopping = False
        """Whether the workers were asked to save and leave."""
        self._first = self.ledger.generation + 1
        self._server = NextServer(goes_on.server, wake)
        self._awaits_server = False
        """Whether the next generation begins as soon as its server is ready."""
        self._parting_since = float("inf")
        self._recorded_before, self._without_progress, self._return_by = -1, 0, float("inf")
        self._unreported_losses: dict[int, Event] = {}
        """By rank: events that wait for a survivor's reason."""
        self._survivor_reasons: dict[int, str] = {}
        """By lost rank: the reason that the first survivor has sent."""

    @property
    def begun(self) -> bool:
        """Whether the first generation has begun."""
        return self.generations.number >= 0

    def come_back(self, worker: Worker, generation: int, rank: int) -> bool:
        """Take back a worker that claims a rank of a generation; False if that is not the last one, or it is taken.

        All members come back to a restarted coordinator, and then part: only the next generation has the keys, the
        server and the folder of this coordinator."""
        generations = self.generations
        if not self.goes_on.possible or self.over or generation != self.ledger.generation:
            return False
        if any(member.rank == rank for member in generations.members) or not 0 <= rank < len(self.ledger.hosts):
            return False
        if not self.begun:
            self._first, generations.renew, self.reported_step = generation, True, self.goes_on.reported_step()
        if not generations.members:
            generations.returning, self._return_by = True, time.monotonic() + RETURN_SECONDS
            self._emit(event("note", text=f"Workers of generation {generation} come back"))
        worker.phase, worker.rank = Phase.MEMBER, rank
        generations.come_back(worker)
        generations.members.sort(key=lambda member: member.rank)
        self.processes.add(worker.pid)
        if len(generations.members) == len(self.ledger.hosts):
            generations.returning = False
            self.advance()
        return True

    def member_in(self, worker: Worker, generation: int) -> Worker | None:
        """The member that is the same process as a worker whose last `begin` was of this generation."""
        if generation not in (self.ledger.generation, self.ledger.generation - 1):
            return None
        return next((member for member in self.generations.members if member.process == worker.process), None)

    def resend(self, member: Worker, generation: int) -> None:
        """Send what a member whose last `begin` was of this generation may have missed with its old link."""
        if generation != self.ledger.generation:
            member.link.queue("begin", **member.begin)
        if not self.generations.returning:
            why = "it was lost while the coordinator was out of reach"
            for rank, host in self._missing():
                member.link.queue("lost", rank=rank, host=host, why=why)
        if self.generations.change_is_due:
            member.link.queue("change", released=len(self.generations.released))

    def _end_return(self) -> None:
        """Count the members that have not come back by now as lost."""
        self.generations.returning = False
        why = "it has not come back to the coordinator"
        for rank, host in self._missing():
            self._emit(event("lost", rank=rank, host=host, why=why, text=f"Rank {rank} on {host} was lost: {why}"))
            self._broadcast("lost", rank=rank, host=host, why=why)
        self.advance()

    def _missing(self) -> list[tuple[int, str]]:
        """Ranks of the last generation, with their hosts, that are not connected."""
        present = {member.rank for member in self.generations.members}
        return [(rank, host) for rank, host in enumerate(self.ledger.hosts) if rank not in present]

    @property
    def over(self) -> bool:
        """Whether no further generation begins."""
        return self.generations.over

    @property
    def renews(self) -> bool:
        """Whether members have come back to this coordinator and still have to begin a generation with its folder."""
        return self.generations.renew and bool(self.generations.members) and not self.over

    @property
    def waits(self) -> bool:
        """Whether no worker trains: the members have parted, and are too few to go on."""
        parted = len(self.generations.parted) == len(self.generations.members)
        return parted and not self.over and not self._awaits_server

    @property
    def takes_more(self) -> bool:
        """Whether another worker can take part."""
        return not self.over and not self.generations.full and (self.goes_on.possible or not self.begun)

    def ready(self, worker: Worker) -> None:
        """A worker is ready to take part."""
        self.generations.ready(worker)
        self.advance()

    def strike(self, worker: Worker) -> None:
        """Count a worker that was lost, or that failed before it joined, against its place."""
        steps = self.ledger.chain.step - worker.since_step if worker.rank >= 0 else 0
        if self.goes_on.possible and self.begun and self.quarantine.strike(worker.place, steps):
            self._report_quarantined(worker.host)

    def strike_before_hello(self, place: Place) -> None:
        """Count a worker that ended before it sent anything."""
        if self.quarantine.strike(place):
            self._report_quarantined(place[0])

    def lose(self, worker: Worker, why: str, step: str) -> str:
        """Handle the loss of a member: the others leave their group. Returns the loss as a sentence.

        The event waits up to a second for a survivor's reason, which names the operation and the time waited."""
        text = f"{sentence(worker.name)} was lost{step}: {why}"
        lost = event("lost", rank=worker.rank, host=worker.host, why=why, text=text)
        self._unreported_losses[worker.rank] = lost
        if not self.goes_on.possible or worker.rank in self._survivor_reasons:
            self._report_lost(worker.rank)
        self.generations.lose(worker)
        self._broadcast("lost", rank=worker.rank, host=worker.host, why=why)
        if self.goes_on.possible:
            self.strike(worker)
            self.advance()
        return text

    def leave(self, worker: Worker, failed: bool) -> None:
        """A member has sent its exit code."""
        self.generations.leave(worker)
        if failed:
            self._end_parted()

    def resize(self, wanted: int) -> None:
        """Change the number of workers that are wanted."""
        self.generations.resize(wanted)
        self.advance()

    def end(self, why: str) -> None:
        """End the run, because it cannot go on; any thread may call it."""
        self.impossible, self.generations.over = self.impossible or why, True

    def on_message(self, worker: Worker, message: Message) -> None:
        """Handle a member's message about generations or committed steps."""
        if message["kind"] != "commit" and not self.goes_on.possible:
            raise ProtocolError(f"it sent '{message['kind']}', but this run has one generation")
        match message["kind"]:
            case "part":
                if message["generation"] == self.ledger.generation:  # it may be sent twice, the second time too late
                    self._part(worker, message["lost"], message["why"][:1000])
            case "back":
                self.ledger.go_back(message["generation"], message["number"], message["step"])
                self.reported_step = message["step"]
            case "commit":
                try:
                    for record in message["records"]:
                        self.ledger.commit(check_record(record, MOST_SLOTS))
                except ValueError as error:
                    raise ProtocolError(f"it reported {error}") from None

    def _report_lost(self, *ranks: int) -> None:
        for rank in ranks:
            lost = self._unreported_losses.pop(rank)
            self._emit({**lost, "text": self._survivor_reasons.get(rank, lost["text"])})

    def _part(self, worker: Worker, lost: int | None, why: str) -> None:
        self.generations.part(worker)
        if lost is not None:
            if lost not in self._survivor_reasons:
                self._survivor_reasons[lost] = sentence(why)
                if lost in self._unreported_losses:
                    self._report_lost(lost)
            # The others may be waiting for the lost rank: they need not find out by themselves.
            for other in self._not_parted():
                other.link.queue("lost", rank=lost, host="", why=why)
        self.advance()

    def tick(self) -> list[Worker]:
        """Called once a second, and after `wake`; returns the members that have not left their group in time, though
        others have."""
        self._report_lost(*self._unreported_losses)
        if self.over:
            self._end_parted()
        if self.generations.returning and time.monotonic() > self._return_by:
            self._end_return()
        if self._awaits_server and (self.begun or not self.stopping):
            self.advance()
        if not self.goes_on.possible or time.monotonic() - self._parting_since < self.goes_on.patience:
            return []
        self._parting_since = float("inf")
        return self._not_parted()

    def advance(self) -> None:
        """Begin the next generation if possible; if not, ask the members to part when a change is due."""
        generations = self.generations
        if self.over:
            self._end_parted()
            return
        if generations.parted and self._not_parted():
            self._parting_since = min(self._parting_since, time.monotonic())
        self._awaits_server = False
        if members := generations.following:
            self._begin_if_served(len(members))
        elif generations.change_is_due:
            self._broadcast("change", released=len(generations.released))
        elif self.begun and len(generations.parted) == len(generations.members) < generations.needed:
            present = f"{len(generations.members)} of at least {generations.needed} are there"
            self._emit(event("note", text=f"Waiting for workers: {present}"))

    def _begin_if_served(self, size: int) -> None:
        """Begin the next generation, unless its server still has to be started: then `tick` tries again."""
        try:
            self._awaits_server = not self._server.is_ready(self._first + self.generations.number + 1, size)
        except UserError as error:
            self.failures.append(error)
            self.end(error.what)
            self._end_parted()
            return
        if not self._awaits_server:
            for worker in self.generations.released:
                worker.link.queue("end", released=1)
            self._begin(self.generations.next())

    def _begin(self, members: list[Worker]) -> None:
        """Begin a generation; rank 0 is a worker that sees the run's folder, the others keep their order."""
        first = self.generations.number == 0
        members.sort(key=lambda worker: worker.rank if first else not worker.sees_folder)
        self._parting_since = float("inf")
        self._report_lost(*self._unreported_losses)
        self._survivor_reasons.clear()
        generation, size = self._first + self.generations.number, len(members)
        if first:
            self.ledger.start()
        recorded = self.ledger.chain.step
        if not self._makes_progress(recorded):
            return
        hosts = [worker.host for worker in members]
        self.ledger.begin(generation, hosts)
        self.topics, self.processes = Topics(size), {worker.pid for worker in members}
        for rank, worker in enumerate(members):
            joins, worker.phase, worker.rank = worker.phase is Phase.WAITING, Phase.MEMBER, rank
            if joins:
                worker.since_step = recorded
                self._emit(event("worker", rank=rank, pid=worker.pid, host=worker.host))
        common = {"generation": generation, "world_size": size, "hosts": hosts, "server": self._server.address}
        common |= {"recorded": recorded, "later": int(not first)}
        for worker, address in zip(members, addresses(members), strict=True):
            issued = self.credentials.issue(worker.rank, size, generation).keys
            keys = {str(peer): key.hex() for peer, key in issued.items()}
            own = {"rank": worker.rank, "host": address, "keys": keys}
            worker.begin = {**common, **own}
            worker.link.queue("begin", **worker.begin)

    def _makes_progress(self, recorded: int) -> bool:
        """Whether the last generations have committed a step; ends a run that has not for too long."""
        self._without_progress = 0 if recorded != self._recorded_before else self._without_progress + 1
        self._recorded_before = recorded
        if self._without_progress < MAX_WITHOUT_PROGRESS:
            return True
        self.end(f"{MAX_WITHOUT_PROGRESS} generations have begun without a committed step")
        self._broadcast("end", released=0)
        return False

    def _not_parted(self) -> list[Worker]:
        return [worker for worker in self.generations.members if worker not in self.generations.parted]

    def _end_parted(self) -> None:
        for worker in [*self.generations.parted, *self.generations.waiting]:
            worker.link.queue("end", released=0)
        self.generations.parted.clear()
        self.generations.waiting.clear()

    def _report_quarantined(self, host: str) -> None:
        text = f"A worker on {host} was lost {STRIKES} times in a row: it is quarantined, and not admitted any more"
        self._emit(event("note", text=text))

    def _broadcast(self, kind: str, **fields: Any) -> None:
        for member in self.generations.members:
            member.link.queue(kind, **fields)
