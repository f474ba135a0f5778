"""A worker of `andon run`: opens the group of each generation, and moves from one to the next.

A worker that replaces a lost one runs the script from its first line, alone, and becomes a member where the script's
loop begins (`model.steps`). Only then is it ready, so that the others do not wait for it before.
"""

import atexit
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from blake3 import blake3

from andon.control.worker.client import CoordinatorClient
from andon.engine.membership import Membership
from andon.errors import EXIT_USER_ERROR, UserError
from andon.run.records.events import event
from andon.run.script_recovery import enter_generation, leave_generation
from andon.transport.base import SOMEONE, Group, GroupError, GroupTimeout, PeerLost, ProtocolError, Settings
from andon.transport.changing import ChangingGroup
from andon.transport.local import LocalGroup
from andon.transport.registry import fastest_here, open_group

LOOP = "loop over steps"
"""How messages call a `Loop`; also the key under which the coordinator keeps the last one."""


class ScriptGroup(ChangingGroup):
    """The group of one worker, generation by generation."""

    def __init__(self, client: CoordinatorClient, settings: Settings, joins: bool, edited: bool) -> None:
        """`joins`: the run has begun without this worker. `edited`: its script is not that of the run's start."""
        super().__init__(LocalGroup(settings.wire), joins)
        self.client, self.settings, self._edited = client, settings, edited
        self._is_member = not joins
        self.stop_wanted, self.change_wanted = client.stop.is_set, client.change.is_set
        atexit.register(self._leave_run)
        if edited and not joins:
            self._end("The script has changed since the start")
        if not joins:
            self.become(self._open())

    def _leave_run(self) -> None:
        """Leave the run at the end of the script, whose exit code the launcher takes from the process."""
        error = getattr(sys, "last_value", None)
        if (self.loop[0] and isinstance(error, PeerLost)) or (self.in_loop and isinstance(error, GroupTimeout)):
            self.client.close()  # this worker is lost, too: the others go on, and the launcher starts it again
        else:
            self.client.leave(0)

    def report(self, records: Sequence[Any]) -> None:
        self.client.report(records)

    def went_back(self, generation: int, step: int) -> None:
        self.client.went_back(generation, step)

    def publish_loop(self) -> None:
        self.client.ask_store("set", LOOP, json.dumps(self.loop))

    def _open(self) -> Group:
        client = self.client
        settings = replace(self.settings, keys=client.keys, host=client.host, watch=client.watch)
        group = open_group(fastest_here(client.world_size), client, settings)
        group.generation = client.keys.generation if client.keys else 0
        client.watch(group)
        return group

    def _compare(self, optimizer: Any) -> None:
        """A worker that joins leaves the run if it would compute something else than the members."""
        model = optimizer.model
        units = model.arena.layout.units
        mine = {
            LOOP: list(self.loop),
            "number of slots": model.membership.order.slots,
            "seed": model.seed,
            "set of parameters": blake3(repr([(unit.name, unit.sizes) for unit in units]).encode()).hexdigest(),
            "value of parameters that are not trained": model.frozen,
        }
        everyone = self.all_gather_json([self.joins, mine])
        members = [fields for joins, fields in everyone if not joins]
        theirs = members[0] if members else mine
        if not members and self.client.ask_store("check", LOOP):  # the lost workers have begun a loop
            theirs = {**mine, LOOP: json.loads(self.client.ask_store("get", LOOP))}
        other = ["script"] * self._edited + [name for name, value in mine.items() if theirs[name] != value]
        other += ["result of andon.mean, computed alone"] * self.reduced_alone
        if not (self.joins and other):
            return
        differs = f"another {' and another '.join(other)}"
        if not members:
            self._end(f"All workers were lost, and those that were started again have {differs}")
        what = f"A worker cannot join: it has {differs}"
        cause = "The script or its files have changed, or it cannot be repeated by one worker while the others train"
        self.client.emit(event("note", text=f"{what}. {cause}"))
        self.client.close()
        raise UserError(what, cause, "The others go on. To use what has changed, stop the run and start it again")

    def _end(self, cause: str) -> NoReturn:
        """End the run."""
        what, remedy = "The run cannot go on", "Run the same command again: it resumes from the newest checkpoint"
        self.client.fail(what, cause, remedy)
        self.client.leave(EXIT_USER_ERROR)
        raise UserError(what, cause, remedy)

    def go_on(self, optimizer: Any, why: Exception | None) -> None:
        client = self.client
        slots = optimizer.model.membership.order.slots
        while True:
            if isinstance(why, ProtocolError):  # the next generation would fail in the same way
                raise why
            if self._is_member:
                if isinstance(why, GroupError):
                    self.abort(getattr(why, "rank", SOMEONE), "the generation has ended")
                leave_generation(optimizer)
                self.leave()
                lost = getattr(why, "rank", SOMEONE) if why else None
                begins = client.part(str(why or "a worker joins or leaves"), lost)
            else:
                optimizer.is_new = True
                client.enter({"data": "", "folder": ""})
                begins = client.wait_for_generation()
            if not begins:
                raise why if isinstance(why, GroupError) else GroupError("the run has ended")
            self._is_member = True
            try:
                self.become(self._open())
                self._compare(optimizer)
                recovery = optimizer.enter(Membership.of(self, slots), client.recorded)
                went_back = enter_generation(optimizer, recovery.lost, client.recorded)
            except GroupError as failure:
                why = failure
                continue
            self.joins = False
            step = self.reported = optimizer.progress.step
            if self.rank == 0 or went_back:
                self.report([record for number, record in recovery.records.items() if number <= step])
            if went_back:  # the steps before stay committed
                self.went_back(self.generation, step)
            return
