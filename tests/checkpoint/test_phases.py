"""The save protocol, model-checked: every order of words for up to three ranks, and long random lives."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from andon.checkpoint.protocol import Phase, Save

SECONDS = 10.0
Action = tuple[str, Callable[[Save], object]]


def begun(world: int, step: int = 1) -> Save:
    save = Save(world, SECONDS)
    assert save.request(step)
    save.check_deadline(0.0)
    return save


def phase(save: Save) -> Phase:
    return save.phase


def test_a_save_goes_through_its_phases_in_order() -> None:
    save = Save(3, SECONDS)
    assert phase(save) is Phase.TRAINING and save.request(100)
    assert phase(save) is Phase.REQUESTED and save.step == 100 and not save.request(101)
    for rank in (2, 0, 1):
        assert phase(save) is Phase.REQUESTED
        save.ack(rank, save.turn, ("a", "b"))
    assert phase(save) is Phase.SYNCED and not save.request(101)
    save.begin_writing()
    for rank in (1, 2, 0):
        assert phase(save) is Phase.WRITING and not save.all_wrote
        save.wrote(rank, save.turn)
    assert save.all_wrote and phase(save) is Phase.WRITING
    save.complete(save.turn)
    assert phase(save) is Phase.COMPLETE and not save.request(101)
    save.resume()
    assert phase(save) is Phase.TRAINING and save.reason == "" and save.request(101)


def test_one_rank_acking_many_times_is_one_ack() -> None:
    save = begun(2)
    for _ in range(5):
        save.ack(1, save.turn, ("a",))
    assert phase(save) is Phase.REQUESTED and save.awaited == [0]


def test_a_late_ack_of_an_earlier_save_does_not_count() -> None:
    save = begun(2)
    save.abort("rank 1 was lost")
    assert save.request(2)
    save.ack(0, save.turn, ("a",))
    save.ack(1, save.turn - 1, ("a",))
    assert save.awaited == [1]


def test_digests_that_differ_abort_and_are_named() -> None:
    save = begun(3)
    for rank, digests in enumerate([("a", "b"), ("a", "x"), ("a", "b")]):
        save.ack(rank, save.turn, digests)
    assert phase(save) is Phase.TRAINING and save.differing == (1,) and save.acks[1] == ("a", "x")


def test_a_failure_aborts_once_nobody_is_writing_any_more() -> None:
    save = begun(2)
    for rank in (0, 1):
        save.ack(rank, save.turn, ())
    save.begin_writing()
    save.fail(1, save.turn, "No space left on device")
    assert phase(save) is Phase.WRITING and save.awaited == [0]
    save.wrote(0, save.turn)
    assert phase(save) is Phase.TRAINING and save.reason == "rank 1: No space left on device"


def test_a_save_that_takes_too_long_is_given_up_and_names_who_is_late() -> None:
    save = begun(3)
    save.ack(0, save.turn, ())
    save.check_deadline(SECONDS)
    assert phase(save) is Phase.REQUESTED
    save.check_deadline(SECONDS + 0.1)
    assert phase(save) is Phase.TRAINING and "rank 1, 2 did not finish requested within 10 s" in save.reason


def test_a_save_after_one_that_failed_starts_afresh() -> None:
    save = begun(2)
    save.fail(1, save.turn, "No space left on device")
    save.ack(0, save.turn, ())
    assert phase(save) is Phase.TRAINING and save.request(2)
    assert save.awaited == [0, 1] and save.reason == ""
    for rank in (0, 1):
        save.ack(rank, save.turn, ())
    assert phase(save) is Phase.SYNCED


def test_what_is_complete_is_not_given_up() -> None:
    save = begun(1)
    save.ack(0, save.turn, ())
    save.begin_writing()
    save.wrote(0, save.turn)
    save.complete(save.turn)
    save.abort("rank 1 was lost")
    save.check_deadline(10 * SECONDS)
    assert phase(save) is Phase.COMPLETE and save.reason == ""


class Oracle:
    """What must hold, from the words alone: who acked with what, who wrote, whether anything failed."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.acks: dict[int, tuple[str, ...]] = {}
        self.wrote: set[int] = set()
        self.published = False

    def check(self, save: Save) -> None:
        if save.phase in (Phase.SYNCED, Phase.WRITING, Phase.COMPLETE):
            assert set(self.acks) == set(range(self.world)), "synced without every rank's ack"
            assert len(set(self.acks.values())) == 1, "synced though digests differ"
        if save.phase is Phase.COMPLETE or save.all_wrote:
            assert self.wrote == set(range(self.world)), "complete before every rank wrote"
        if save.phase is Phase.COMPLETE:
            assert self.published and not save.reason
        if save.phase is Phase.TRAINING and save.turn:
            assert self.published or save.reason, "back in training without an end or a reason"
        if save.phase is not Phase.TRAINING:
            assert not copy.deepcopy(save).request(99), "a second save while one runs"


def moves(save: Save, world: int) -> list[tuple[str, int]]:
    """Every word that could come next, sensible or not."""
    found = [("die", 0), ("late", 0), ("request", 0), ("stale", 0), ("complete", 0)]
    found += [(kind, rank) for kind in ("good", "bad", "wrote", "fail") for rank in range(world)]
    found += [("begin", 0)] if save.phase is Phase.SYNCED else []
    return found


def play(save: Save, oracle: Oracle, kind: str, rank: int) -> None:
    before, awaited, turn = save.phase, save.awaited, save.turn
    match kind:
        case "good" | "bad":
            save.ack(rank, turn, (kind,))
            if before is Phase.REQUESTED and rank in awaited:
                oracle.acks[rank] = (kind,)
        case "wrote":
            save.wrote(rank, turn)
            if before is Phase.WRITING and rank in awaited:
                oracle.wrote.add(rank)
        case "fail":
            save.fail(rank, turn, "disk")
        case "begin":
            save.begin_writing()
        case "complete":
            save.complete(turn)
            oracle.published |= save.phase is Phase.COMPLETE
        case "die":
            save.abort("lost")
        case "late":
            save.check_deadline(1e9)
        case "request":
            if before is not Phase.TRAINING:
                assert not save.request(7)
        case "stale":
            for each in range(save.world_size):
                save.ack(each, turn - 1, ("bad",))
                save.wrote(each, turn - 1)
                save.fail(each, turn - 1, "old")
            save.complete(turn - 1)
            assert save.phase is before and save.awaited == awaited


def key(save: Save, oracle: Oracle) -> tuple[object, ...]:
    """States that behave alike from here on."""
    acks = tuple(sorted(save.acks.items()))
    return save.phase, acks, tuple(save.awaited), tuple(sorted(save.failures)), tuple(sorted(oracle.wrote))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_order_of_words_keeps_the_promises(world: int) -> None:
    first = (begun(world), Oracle(world))
    seen, frontier, ended, states = {key(*first)}, [first], set(), 0
    while frontier:
        save, oracle = frontier.pop()
        states += 1
        for kind, rank in moves(save, world):
            after = copy.deepcopy((save, oracle))
            play(*after, kind, rank)
            after[1].check(after[0])
            if after[0].phase in (Phase.TRAINING, Phase.COMPLETE):
                ended.add((after[0].phase, bool(after[0].differing), bool(after[0].failures)))
            elif key(*after) not in seen:
                seen.add(key(*after))
                frontier.append(after)
    assert states > 5 * 3 ** (world - 1)
    assert (Phase.COMPLETE, False, False) in ended and (Phase.TRAINING, False, True) in ended
    assert ((Phase.TRAINING, True, False) in ended) == (world > 1)


class Lives(RuleBasedStateMachine):
    """Many saves one after another, with every word at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.world, self.now = 3, 0.0
        self.save, self.oracle = Save(self.world, SECONDS), Oracle(self.world)

    @precondition(lambda self: self.save.phase is Phase.TRAINING)
    @rule()
    def request(self) -> None:
        turn = self.save.turn
        assert self.save.request(turn + 1) and self.save.turn == turn + 1
        self.save.check_deadline(self.now)
        self.oracle = Oracle(self.world)

    @rule(
        kind=st.sampled_from(["good"] * 4 + ["bad", "fail", "stale", "request"] + ["wrote"] * 4 + ["complete"]),
        rank=st.integers(0, 2),
    )
    def word(self, kind: str, rank: int) -> None:
        play(self.save, self.oracle, kind, rank)

    @precondition(lambda self: self.save.phase is Phase.SYNCED)
    @rule()
    def begin(self) -> None:
        self.save.begin_writing()

    @precondition(lambda self: self.save.phase is Phase.COMPLETE)
    @rule()
    def resume(self) -> None:
        self.save.resume()

    @rule(seconds=st.floats(0, 1.5 * SECONDS))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        before = self.save.phase
        self.save.check_deadline(self.now)
        assert self.save.phase in (before, Phase.TRAINING)

    @invariant()
    def promises_hold(self) -> None:
        self.oracle.check(self.save)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
