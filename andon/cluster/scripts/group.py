"""A worker of `andon run`: opens the group of each generation, and moves from one to the next.

A worker that replaces a lost one runs the script from its first line, alone, and becomes a member where the script's
loop begins (`model.steps`). Only then is it ready, so that the others do not wait for it before.
"""

import atexit
import json
import sys
from dataclasses import replace
from typing import Any, NoReturn

from blake3 import blake3

from andon.control.worker.client import CoordinatorClient
from andon.engine.membership import Membership
from andon.errors import EXIT_USER_ERROR, UserError
from andon.run.records.events import event
from andon.run.script import enter_generation, leave_generation
from andon.transport.base import SOMEONE, Group, GroupError, GroupTimeout, PeerLost, ProtocolError, Settings
from andon.transport.changing import ChangingGroup, Loop
from andon.transport.local import LocalGroup
from andon.transport.registry import fastest_here, open_group

LOOP = "loop over steps"
"""How messages call a `Loop`; also the key under which the coordinator keeps the last one."""


class ScriptWorker:
    """Opens the groups of one worker, generation by generation."""

    def __init__(self, client: CoordinatorClient, settings: Settings, joins: bool, edited: bool) -> None:
        """`joins`: the run has begun without this worker. `edited`: its script is not that of the run's start."""
        self.client, self.settings, self._edited = client, settings, edited
        self._is_member = not joins
        alone = LocalGroup(settings.wire)
        self.group = ChangingGroup(alone, self.go_on, client.report, client.went_back, self._begin_loop, joins)
        self.group.stop_wanted, self.group.change_wanted = client.stop.is_set, client.change.is_set
        atexit.register(self._leave)
        if edited and not joins:
            self._end("The script has changed since the start")
        if not joins:
            self.group.become(self._open())

    def _leave(self) -> None:
        """Leave the run at the end of the script, whose exit code the launcher takes from the process."""
        error, group = getattr(sys, "last_value", None), self.group
        if (group.loop[0] and isinstance(error, PeerLost)) or (group.in_loop and isinstance(error, GroupTimeout)):
            self.client.close()  # this worker is lost, too: the others go on, and the launcher starts it again
        else:
            self.client.leave(0)

    def _begin_loop(self, loop: Loop) -> None:
        self.client.ask_store("set", LOOP, json.dumps(loop))

    def _open(self) -> Group:
        client = self.client
        settings = replace(self.settings, keys=client.keys, host=client.host, watch=client.watch)
        group = open_group(fastest_here(client.world_size), client, settings)
        group.generation = client.keys.generation if client.keys else 0
        client.watch(group)
        return group

    def _compare(self, optimizer: Any) -> None:
        """A worker that joins leaves the run if it would compute something else than the members."""
        group, model = self.group, optimizer.model
        units = model.arena.layout.units
        mine = {
            LOOP: list(group.loop),
            "number of slots": model.membership.order.slots,
            "seed": model.seed,
            "set of parameters": blake3(repr([(unit.name, unit.sizes) for unit in units]).encode()).hexdigest(),
            "value of parameters that are not trained": model.frozen,
        }
        everyone = group.all_gather_json([group.joins, mine])
        members = [fields for joins, fields in everyone if not joins]
        theirs = members[0] if members else mine
        if not members and self.client.ask_store("check", LOOP):  # the lost workers have begun a loop
            theirs = {**mine, LOOP: json.loads(self.client.ask_store("get", LOOP))}
        other = ["script"] * self._edited + [name for name, value in mine.items() if theirs[name] != value]
        other += ["result of andon.mean, computed alone"] * group.reduced_alone
        if not (group.joins and other):
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
        """Leave the group, if there is one, and enter the next generation; `GroupError` if there is none."""
        client, group = self.client, self.group
        slots = optimizer.model.membership.order.slots
        while True:
            if isinstance(why, ProtocolError):  # the next generation would fail in the same way
                raise why
            if self._is_member:
                if isinstance(why, GroupError):
                    group.abort(getattr(why, "rank", SOMEONE), "the generation has ended")
                leave_generation(optimizer)
                group.leave()
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
                group.become(self._open())
                self._compare(optimizer)
                recovery = optimizer.enter(Membership.of(group, slots), client.recorded)
                went_back = enter_generation(optimizer, recovery.lost, client.recorded)
            except GroupError as failure:
                why = failure
                continue
            group.joins = False
            step = group.reported = optimizer.progress.step
            if group.rank == 0 or went_back:
                client.report([record for number, record in recovery.records.items() if number <= step])
            if went_back:  # the steps before stay committed
                client.went_back(group.generation, step)
            return
