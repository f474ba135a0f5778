"""Admission: how a worker that has proved that it knows the token gets a rank, or is refused with the reason.

The worker introduces itself, receives the job, prepares its data and reports that it is ready. Before the run begins it
gets a rank at once; later it waits for the next generation. A member whose link was lost, or whose coordinator was
restarted, takes its rank again. The messages are in `andon.control.link`.
"""

import threading
from pathlib import Path

from andon.control.files import send_files
from andon.control.generations.succession import Succession
from andon.control.link import ControlLink, Message
from andon.control.loop import Loop
from andon.control.members import Phase, Worker, free_local_rank, free_rank
from andon.run.records.events import Emit, event
from andon.transport.base import ProtocolError
from andon.version import VERSION


class Admission:
    """Admits the workers of one run; all methods run in the loop's thread."""

    def __init__(self, job: Message, succession: Succession, loop: Loop, emit: Emit) -> None:
        self.job = dict(job)
        self.workers: dict[ControlLink, Worker] = {}
        """All workers that are connected."""
        self.processes: set[int] = set()
        """The process ids of all workers that have introduced themselves."""
        self._succession, self._loop, self._emit = succession, loop, emit

    def members(self) -> list[Worker]:
        """The workers that have a rank."""
        return [worker for worker in self.workers.values() if worker.phase is Phase.MEMBER]

    def on_message(self, worker: Worker, message: Message) -> None:
        """Handle a message of a worker that has no rank yet."""
        match worker.phase, message["kind"]:
            case Phase.KNOWN, "hello":
                self._greet(worker, message)
            case Phase.KNOWN, "again":
                self._greet_again(worker, message)
            case Phase.PREPARING, "fetch":
                self._send_data(worker)
            case Phase.PREPARING, "failed":
                self._succession.strike(worker)
                self._refuse(worker, message["what"])
            case Phase.PREPARING, "ready":
                self._admit(worker, message)
            case _, kind:
                raise ProtocolError(f"it sent '{kind}' out of turn")

    def _greet(self, worker: Worker, hello: Message) -> None:
        self._introduce(worker, hello)
        succession = self._succession
        if hello["version"] != VERSION:
            self._refuse(worker, f"the coordinator runs Andon {VERSION}, it runs {hello['version'][:20]}")
        elif succession.begun and not succession.takes_more:
            self._refuse_surplus(worker)
        elif worker.place in succession.quarantine:
            self._refuse(worker, f"workers on {worker.host} were lost again and again")
        else:
            worker.phase, worker.local_rank = Phase.PREPARING, free_local_rank(self.workers.values(), worker)
            how = {"goes_on": succession.goes_on.possible, "joins": succession.begun, "local_rank": worker.local_rank}
            worker.link.queue("job", **self.job, **how)

    def _greet_again(self, worker: Worker, again: Message) -> None:
        """Give a member its rank again that was cut off, or whose coordinator was restarted."""
        self._introduce(worker, again)
        worker.sees_folder, worker.local_rank = again["folder"] == self.job["folder_mark"], again["local_rank"]
        generation = again["generation"]
        if known := self._succession.member_in(worker, generation):
            self._replace_link(known, worker.link, generation)
        elif again["version"] != VERSION or not self._succession.come_back(worker, generation, again["member"]):
            self._refuse(worker, f"the run has gone on without generation {generation}; start a new worker")

    def _introduce(self, worker: Worker, identity: Message) -> None:
        worker.introduce(identity)
        self.processes.add(worker.pid)

    def _replace_link(self, member: Worker, link: ControlLink, generation: int) -> None:
        """Give a member its new link, before its old one was found dead."""
        old, member.link = member.link, link
        del self.workers[old]
        self.workers[link] = member
        self._loop.drop(old)
        self._succession.resend(member, generation)
        if self._succession.stopping:
            link.queue("stop")

    def _send_data(self, worker: Worker) -> None:
        if "tokens" not in self.job or worker.fetches:
            raise ProtocolError("it asked for data that it has, or that this run does not have")
        worker.fetches = True
        arguments = (worker.link, self._loop, Path(self.job["tokens"]))
        threading.Thread(target=send_files, args=arguments, daemon=True).start()

    def _admit(self, worker: Worker, ready: Message) -> None:
        succession, world_size = self._succession, self._succession.generations.wanted
        worker.sees_folder = ready["folder"] == self.job["folder_mark"]
        if ready["data"] != self.job["data"]:
            self._refuse(worker, "its data is not the coordinator's")
        elif succession.begun:
            if succession.stopping or not succession.takes_more:
                self._refuse_surplus(worker)
                return
            worker.phase = Phase.WAITING
            worker.link.queue("welcome", rank=-1, world_size=world_size)
            succession.ready(worker)
        elif (rank := free_rank([member.rank for member in self.members()], world_size, worker)) is None:
            if len(self.members()) == world_size:
                self._refuse_surplus(worker)
                return
            folder = self.job.get("config", {}).get("run", {}).get("dir")
            blind = f"only rank 0 is left, which writes checkpoints, and it cannot see {folder}: give it --folder"
            self._refuse(worker, blind)
        else:
            worker.phase, worker.rank = Phase.MEMBER, rank
            worker.link.queue("welcome", rank=rank, world_size=world_size)
            self._emit(event("worker", rank=rank, pid=worker.pid, host=worker.host))
            if succession.stopping:
                worker.link.queue("stop")
            else:
                succession.ready(worker)

    def _refuse_surplus(self, worker: Worker) -> None:
        """Refuse a worker that is in order, but not needed."""
        if self._succession.over or self._succession.stopping:
            self._refuse(worker, "the run ends", remedy="Start the worker again if the run is started again")
        else:
            taken = f"all {self._succession.generations.wanted} ranks are taken"
            self._refuse(worker, taken, remedy="Start the worker again when one of them is free")

    def _refuse(self, worker: Worker, reason: str, **remedy: str) -> None:
        self._emit(event("note", text=f"a worker on {worker.host} was refused: {reason}"))
        worker.link.queue("refused", reason=reason, **remedy)
        del self.workers[worker.link]
        self._loop.dismiss(worker.link)
