"""Generations, commit and catch-up, model-checked: every interleaving of up to three workers with deaths at every
message, and long random lives of more. The objects are those that drive the real processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.control.generations.generations import Generations
from andon.engine.recovery.commit import CHUNK_ELEMENTS, Commit, Standing, plan_recovery
from andon.run.records.chain import Chain

SIZE = 8
WHOLE = ((0, SIZE),)


def shallow(thing: Any) -> Any:
    """`copy.copy` of a plain object, in a third of its time: hundreds of thousands are made."""
    other = object.__new__(type(thing))
    other.__dict__.update(thing.__dict__)
    return other


class Worker:
    """A worker of the model: its weights are the list of the steps that were applied to them."""

    def __init__(self, name: int) -> None:
        self.name, self.phase = name, "waiting"
        self.alive, self.has_state, self.change = True, False, False
        self.generation = self.rank = -1
        self.commit = Commit()
        self.weights: tuple[int, ...] = ()
        self.sent: tuple[Any, ...] = (("ready",),)
        self.received: tuple[Any, ...] = ()

    def clone(self) -> Worker:
        other: Worker = shallow(self)
        other.commit = shallow(self.commit)
        other.commit.records = dict(self.commit.records)
        return other

    def key(self) -> tuple[Any, ...]:
        commit = self.commit
        mine = (
            self.phase,
            self.alive,
            self.has_state,
            self.change,
            self.generation,
            self.rank,
            tuple(self.commit.records),
        )
        return (*mine, commit.step, commit.reduced, self.weights, self.sent, self.received)


class Model:
    """Workers, the coordinator's state machine, and the links between them."""

    def __init__(self, workers: int, joiners: int, deaths: int, steps: int, needed: int = 1) -> None:
        self.workers = [Worker(name) for name in range(workers)]
        self.joiners, self.deaths, self.steps, self.shrinks = joiners, deaths, steps, 0
        self.coordinator: Generations[int] = Generations(workers, needed)
        self.ledger: tuple[int, ...] = ()
        self.chain = Chain()
        self.told: frozenset[int] = frozenset()
        """Who was told in this generation that somebody waits."""
        self.went_back = False
        """Whether all who had the state were lost, and the others began again from the checkpoint of step 0."""
        self.groups: dict[int, tuple[int, ...]] = {}
        self.arrived: dict[tuple[int, str, int], dict[int, Any]] = {}

    def clone(self) -> Model:
        other: Model = shallow(self)
        other.workers = [worker.clone() for worker in self.workers]
        other.coordinator = shallow(self.coordinator)
        other.coordinator.members = list(self.coordinator.members)
        other.coordinator.parted = set(self.coordinator.parted)
        other.coordinator.waiting = list(self.coordinator.waiting)
        other.chain = shallow(self.chain)
        other.chain._early = dict(self.chain._early)
        other.groups = dict(self.groups)
        other.arrived = {place: dict(found) for place, found in self.arrived.items()}
        return other

    def key(self) -> tuple[Any, ...]:
        there = self.coordinator
        mine = (there.number, tuple(there.members), frozenset(there.parted), tuple(there.waiting), there.over)
        now = {worker.generation for worker in self.workers if worker.alive}
        places = frozenset((place, frozenset(found)) for place, found in self.arrived.items() if place[0] in now)
        return (
            *mine,
            self.ledger,
            self.chain.cut_in,
            tuple(self.chain._early),
            self.told,
            self.joiners,
            self.deaths,
            places,
            *(worker.key() for worker in self.workers),
        )

    # What a worker does

    def place(self, worker: Worker) -> tuple[int, str, int]:
        """The collective in which a worker waits; when a generation begins, their steps may differ."""
        return worker.generation, worker.phase, -1 if worker.phase == "enter" else worker.commit.step

    def arrive(self, worker: Worker, phase: str, data: Any) -> None:
        worker.phase = phase
        self.arrived.setdefault(self.place(worker), {})[worker.name] = data

    def can_pass(self, worker: Worker) -> bool:
        found = self.arrived.get(self.place(worker), {})
        return len(found) == len(self.groups[worker.generation])

    def can_fail(self, worker: Worker) -> bool:
        others = [self.workers[name] for name in self.groups[worker.generation] if name != worker.name]
        return any(not other.alive or self.has_left(other, worker.generation) for other in others)

    def has_left(self, worker: Worker, generation: int) -> bool:
        return worker.generation > generation or (worker.generation == generation and worker.phase == "parted")

    def step_on(self, worker: Worker) -> None:
        """Begin the next step, or end the run."""
        worker.commit.begin()
        if worker.commit.step == self.steps:
            self.arrive(worker, "end", None)
        else:
            self.arrive(worker, "tell", worker.change)

    def pass_on(self, worker: Worker) -> None:
        """The collective is complete for this worker."""
        found = self.arrived[self.place(worker)]
        everyone = [found[name] for name in self.groups[worker.generation]]
        match worker.phase:
            case "enter":
                self.recover(worker, everyone)
                self.step_on(worker)
            case "tell":
                self.report(worker, [worker.commit.step])
                worker.change = any(everyone)
                worker.commit.enter_last_exchange()
                self.arrive(worker, "verdict", None)
            case "verdict":
                worker.commit.decide(worker.commit.step + 1)
                worker.weights += (worker.commit.step,)
                if worker.change:
                    self.part(worker)
                else:
                    self.step_on(worker)
            case "end":
                worker.rank = 0  # everyone reports: rank 0 may be gone before its report has left it
                self.report(worker, worker.commit.records)
                worker.phase = "gone"
                worker.sent += (("bye",),)

    def recover(self, worker: Worker, standings: list[Standing]) -> None:
        recovery = plan_recovery(standings, SIZE)
        rank = self.groups[worker.generation].index(worker.name)
        worker.rank = rank
        if recovery.lost:
            self.went_back = True
            worker.commit.go_back(0)
            worker.weights = ()
            worker.sent += (("back", worker.generation),)
        else:
            worker.commit.catch_up(recovery, rank)
            late, new = rank in recovery.late, rank in recovery.new
            if new:
                worker.weights = tuple(range(1, recovery.step + 1))
            elif late:
                worker.weights += (recovery.step,)
            self.report(worker, recovery.records)
        worker.has_state = True

    def report(self, worker: Worker, steps: Iterable[int]) -> None:
        found = tuple(step for step in steps if step in worker.commit.records)
        if worker.rank == 0 and found:
            worker.sent += (("commit", *found),)

    def part(self, worker: Worker) -> None:
        worker.phase, worker.change = "parted", False
        worker.sent += (("part", worker.generation),)

    # What the coordinator does

    def coordinate(self, worker: Worker) -> None:
        (kind, *rest), worker.sent = worker.sent[0], worker.sent[1:]
        there = self.coordinator
        match kind:
            case "ready":
                there.ready(worker.name)
            case "part":
                there.part(worker.name)
            case "bye":
                there.leave(worker.name)
            case "lost":
                there.lose(worker.name)
            case "back":
                self.ledger = () if self.chain.cut(rest[0], 1, 0) else self.ledger
            case "commit":
                for step in rest:
                    self.ledger += tuple(self.chain.add(step, step))
        self.begin_or_change()

    def begin_or_change(self) -> None:
        there = self.coordinator
        released = there.released
        if there.following:
            members = there.next()
            for name in released:
                self.workers[name].received += (("end",),)
            self.groups[there.number], self.told = tuple(members), frozenset()
            for name in members:
                self.workers[name].received += (("begin", there.number, self.chain.step),)
        elif there.change_is_due:
            for name in there.members:
                if name not in self.told:
                    self.told |= {name}
                    self.workers[name].received += (("change",),)

    def hear(self, worker: Worker) -> None:
        (kind, *rest), worker.received = worker.received[0], worker.received[1:]
        if kind == "end":
            assert worker.phase == "parted", "a worker is released that takes part"
            worker.phase = "released"
        elif kind == "change":
            worker.change = worker.phase not in ("parted", "waiting", "gone")
        else:
            assert worker.phase in ("parted", "waiting"), "a generation begins for someone who is in another one"
            assert rest[0] > worker.generation
            worker.generation, worker.change = rest[0], False
            self.arrive(worker, "enter", worker.commit.standing(WHOLE if worker.has_state else (), rest[1]))

    # Everything that could happen next

    def actions(self) -> list[tuple[str, int]]:
        found = []
        for worker in self.workers:
            if worker.alive and worker.phase not in ("waiting", "parted", "gone", "released"):
                found += [("pass", worker.name)] if self.can_pass(worker) else []
                found += [("fail", worker.name)] if self.can_fail(worker) else []
            if worker.alive and worker.received:
                found.append(("hear", worker.name))
            if worker.sent:
                found.append(("coordinate", worker.name))
            if worker.alive and worker.phase not in ("gone", "released") and self.deaths:
                found += [("die", worker.name), ("die silently", worker.name)]
        if self.joiners and len([worker for worker in self.workers if worker.alive]) < self.coordinator.wanted:
            found.append(("join", len(self.workers)))
        if self.shrinks and self.coordinator.wanted > self.coordinator.needed and self.coordinator.number >= 0:
            found.append(("shrink", 0))
        return found

    def act(self, kind: str, name: int) -> None:
        if kind == "shrink":
            self.shrinks -= 1
            self.coordinator.resize(self.coordinator.wanted - 1)
            self.begin_or_change()
            return
        if kind == "join":
            self.joiners -= 1
            self.workers.append(Worker(name))
            return
        worker = self.workers[name]
        match kind:
            case "pass":
                self.pass_on(worker)
            case "fail":
                self.part(worker)
            case "hear":
                self.hear(worker)
            case "coordinate":
                self.coordinate(worker)
            case "die" | "die silently":
                self.deaths -= 1
                worker.alive, worker.received = False, ()
                worker.sent = (*(worker.sent if kind == "die" else ()), ("lost",))

    def check(self) -> None:
        """What must always hold."""
        assert self.ledger == tuple(range(1, len(self.ledger) + 1))
        for worker in self.workers:
            steps = worker.commit.step
            assert worker.weights == tuple(range(1, steps + 1)), f"{worker.name} applied {worker.weights}"
            if worker.alive and worker.has_state and worker.phase != "enter" and not self.went_back:
                assert steps >= len(self.ledger), f"step {len(self.ledger)} is committed, {worker.name} has {steps}"

    def check_end(self) -> None:
        """Nothing can happen any more: everyone who lives is done, or the run waits for more workers."""
        living = [worker for worker in self.workers if worker.alive and worker.phase != "released"]
        done = [worker for worker in living if worker.phase == "gone"]
        if done:
            assert self.ledger == tuple(range(1, self.steps + 1))
        else:
            assert len(living) < max(1, self.coordinator.needed) or self.coordinator.number < 0, "they wait for ever"


def explore(first: Model, most: int = 400_000) -> int:
    """Every state that can be reached."""
    seen, frontier = {first.key()}, [first]
    while frontier:
        model = frontier.pop()
        actions = model.actions()
        if not [kind for kind, _ in actions if not kind.startswith(("die", "join"))]:
            model.check_end()
        for action in actions:
            after = model.clone()
            after.act(*action)
            after.check()
            if (found := after.key()) not in seen:
                seen.add(found)
                frontier.append(after)
        assert len(seen) < most, "the model is too large"
    return len(seen)


@pytest.mark.parametrize(
    ("workers", "joiners", "deaths", "steps"), [(1, 1, 1, 2), (2, 0, 1, 2), (2, 1, 1, 1), (3, 0, 1, 1)]
)
def test_every_interleaving_keeps_the_promises(workers: int, joiners: int, deaths: int, steps: int) -> None:
    assert explore(Model(workers, joiners, deaths, steps)) > 50


@pytest.mark.soak
@pytest.mark.parametrize(
    ("workers", "joiners", "deaths", "steps"), [(2, 1, 1, 3), (2, 1, 2, 1), (2, 2, 2, 1), (3, 0, 2, 1), (3, 1, 1, 1)]
)
def test_every_interleaving_of_longer_lives(workers: int, joiners: int, deaths: int, steps: int) -> None:
    assert explore(Model(workers, joiners, deaths, steps), most=10_000_000) > 1000


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.integers(0, 6), st.integers(0, 8), st.integers(1, 3), st.randoms(use_true_random=False))
def test_long_random_lives_keep_the_promises(workers: int, joiners: int, deaths: int, needed: int, chance: Any) -> None:
    model = Model(workers, joiners, deaths, steps=6, needed=min(needed, workers))
    model.shrinks = chance.randrange(3)
    while actions := model.actions():
        rare = [action for action in actions if action[0].startswith(("die", "join", "shrink"))]
        usual = [action for action in actions if action not in rare]
        model.act(*chance.choice(rare if not usual or (rare and chance.random() < 0.05) else usual))
        model.check()
    model.check_end()


def held(*ranges: tuple[int, int], step: int = 3, reduced: bool = False) -> Standing:
    return Standing(step, f"verdict of {step}", reduced, ranges)


def test_a_late_worker_takes_over_the_verdict_and_a_new_one_receives_everything() -> None:
    recovery = plan_recovery([held((0, 8)), held((0, 8), step=2, reduced=True), Standing()], 8)
    assert recovery.step == 3 and recovery.verdict == "verdict of 3" and not recovery.lost
    assert recovery.late == {1} and recovery.new == {2}
    assert [transfer[:2] for transfer in recovery.transfers] == [(0, 8)]


def test_no_generation_begins_after_a_member_has_come_to_the_end() -> None:
    there: Generations[str] = Generations(2)
    for name in ("first", "second"):
        there.ready(name)
    assert there.next() == ["first", "second"]
    there.leave("first")
    there.part("second")
    there.ready("third")
    assert there.following is None


def test_nothing_is_sent_when_everyone_has_everything() -> None:
    assert plan_recovery([held((0, 8)), held((0, 8))], 8).transfers == ()


def test_parts_come_from_those_who_hold_them_and_a_missing_part_is_lost() -> None:
    recovery = plan_recovery([held((0, 4), (2, 6)), held((4, 8))], 8)
    assert not recovery.lost and {rank for lo, _, rank in recovery.transfers if lo < 4} == {0}
    assert plan_recovery([held((0, 4)), held((5, 8))], 8).lost
    assert plan_recovery([Standing(), Standing()], 8).lost


def test_a_worker_that_is_further_behind_than_it_can_be_is_new() -> None:
    recovery = plan_recovery([held((0, 8)), held((0, 8), step=2), held((0, 8), step=1, reduced=True)], 8)
    assert recovery.new == {1, 2} and not recovery.late


def test_several_holders_share_what_is_sent() -> None:
    size = 8 * CHUNK_ELEMENTS
    recovery = plan_recovery([held((0, size)), held((0, size)), Standing()], size)
    assert [rank for *_, rank in recovery.transfers] == [0, 1] * 4
