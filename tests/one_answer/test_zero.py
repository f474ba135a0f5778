"""C-ZERO-001: a sharded step equals the full one, bit for bit, and holds 1/N of the optimizer state."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from andon.config.load import load
from andon.config.schema import Config
from andon.engine.gradients.arena import CELL, Arena
from andon.integrity.halt import JidokaHalt
from andon.model.llama import Llama
from andon.optim.shard_map import Policy
from andon.optim.sharding import Ownership, Zero
from andon.run.plan import make_plan
from andon.transport.base import Group, PeerLost
from andon.transport.local import LocalGroup
from andon.transport.registry import TRANSPORTS
from tests.kit.group_harness import World, worlds
from tests.kit.training import digest, make_trainer, small_config, small_tokens

POLICIES: list[Policy] = ["even", "round_robin", "contiguous"]
SETTINGS = ["off", *POLICIES, "even*2", "contiguous*2"]
STEPS = 4


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokens(tmp_path_factory.mktemp("cache"))


def train_all(group: Group, tokens: Path, policies: list[str]) -> dict[str, str]:
    """The digest of weights and moments after training under each policy (`even*2`: with two replicas)."""
    found: dict[str, str] = {}
    for policy in policies:
        name, _, replicas = policy.partition("*")
        zero = {"zero__policy": name, "zero__replicas": int(replicas or 1)}
        trainer = make_trainer(group, tokens, small_config(train__steps=STEPS, **zero))
        for _ in range(STEPS):
            trainer.train_step()
        found[policy] = digest(trainer)
        trainer.close()
    return found


@pytest.fixture(scope="module")
def answer(tokens: Path) -> str:
    return train_all(LocalGroup(), tokens, ["off"])["off"]


@pytest.mark.parametrize(
    ("transport", "size"),
    [("local", 1), *(w for w in worlds(2, 3, 4, processes_only=True) if TRANSPORTS[w[0]].one_order)],
)
def test_every_policy_gives_the_answer(tokens: Path, answer: str, transport: str, size: int) -> None:
    settings = SETTINGS if transport == "shm" else SETTINGS[size - 1 :: 2]  # who owns what is nothing to a transport
    with World(transport, size) as world:
        results = world.run(train_all, tokens, settings, deadline=100)
    # The moments are gathered on every rank, so every rank can be asked.
    for result in results:
        assert result == dict.fromkeys(settings, answer)


def train_overlapped(group: Group, tokens: Path, tied: bool) -> tuple[str, str]:
    """The digests after training with the gather at once, and while the next forward computes."""
    digests = []
    for overlap in (False, True):
        trainer = make_trainer(group, tokens, small_config(zero__policy="even", model__tied=tied))
        trainer.model.gather.hook(trainer.model.module, overlap)
        for _ in range(STEPS):
            trainer.train_step()
        digests.append(digest(trainer))
        trainer.close()
    return digests[0], digests[1]


@pytest.mark.parametrize(
    ("transport", "size", "tied"),
    [
        *((*world, False) for world in worlds(2, processes_only=True)),
        ("shm", 3, True),
        ("star", 3, True),
        ("ring", 3, True),
    ],
)
def test_a_gather_during_the_next_forward_gives_the_answer(tokens: Path, transport: str, size: int, tied: bool) -> None:
    with World(transport, size) as world:
        results = world.run(train_overlapped, tokens, tied)
    assert len({each for pair in results for each in pair}) == 1


def test_forward_waits_for_its_unit_and_tells_what_went_wrong_with_the_gather(tokens: Path) -> None:
    trainer = make_trainer(LocalGroup(), tokens, small_config(zero__policy="even"))
    model, x = trainer.model, trainer.batch(1, 0)[:2]
    model.gather.hook(model.module, overlap=True)
    asked, may_go_on = [], threading.Event()

    def all_gather(flat: torch.Tensor, bounds: Sequence[int]) -> None:
        may_go_on.wait(10)
        asked.append(flat.data_ptr())
        if len(asked) == 3:
            raise PeerLost(1, "all-gather", 0.0)

    model.group.all_gather = all_gather  # type: ignore[method-assign]
    model.gather.begin(trainer.optimizer.ownership)
    assert not asked
    may_go_on.set()
    with pytest.raises(PeerLost):  # in the second block
        model(*x)
    units = [model.arena.buffer[unit.start :].data_ptr() for unit in model.arena.layout.units]
    assert asked == units[::-1][:3]
    with pytest.raises(PeerLost):
        trainer.close()


def tiny(policy: str, replicas: int = 1) -> Config:
    """The tiny preset on short windows: large enough that a cell per unit is little."""
    keys = {"train.context": 16, "train.slots": 4, "train.micro_batch": 1, "device": "cpu"}
    return load(None, {**keys, "zero.policy": policy, "zero.replicas": replicas})


def moment_bytes(group: Group, tokens: Path, policy: Policy, replicas: int) -> tuple[int, int]:
    """The memory of the moments after a step, each buffer counted whole, and the number of units."""
    trainer = make_trainer(group, tokens, tiny(policy, replicas))
    trainer.train_step()
    memory = {flat.untyped_storage() for flat in trainer.optimizer.rule.state.values()}
    trainer.close()
    return sum(storage.nbytes() for storage in memory), len(trainer.model.arena.layout.units)


def sent_in_a_step(group: Group, tokens: Path, policies: list[str]) -> dict[str, int]:
    """What this rank sends in the second step under each policy; the model is the tiny preset."""
    found = {}
    for policy in policies:
        trainer = make_trainer(group, tokens, tiny(policy))
        trainer.train_step()
        before = trainer.model.group.bytes_sent
        trainer.train_step()
        found[policy] = trainer.model.group.bytes_sent - before
        trainer.close()
    return found


@pytest.mark.parametrize(("transport", "size"), [*worlds(4, processes_only=True), ("star", 3), ("shm", 2)])
def test_a_step_sends_what_is_planned_and_zero_no_more_than_an_all_reduce(
    tokens: Path, transport: str, size: int
) -> None:
    with World(transport, size) as world:
        by_rank = world.run(sent_in_a_step, tokens, ["off", *POLICIES])
    total = {policy: sum(sent[policy] for sent in by_rank) for policy in by_rank[0]}
    keys = {"train.slots": 4, "workers": size, "group.transport": transport}
    keys |= {"group.server": "127.0.0.1:1"} if TRANSPORTS[transport].joins_server else {}
    for policy in ("off", "even"):
        config = load(None, {**keys, "zero.policy": policy})
        assert total[policy] == pytest.approx(size * make_plan(config).sent, rel=0.02)
    if not TRANSPORTS[transport].zero_pays:
        return
    for policy in POLICIES:
        assert total[policy] <= 1.02 * total["off"], (policy, total)
    if size in (2, 4):  # the ranks have as many slots each: none sends more than another
        assert all(sent["even"] <= 1.02 * sent["off"] for sent in by_rank), by_rank


def flip_replica(group: Group, tokens: Path) -> str:
    """A bit of the replica that rank 1 keeps for rank 0 flips: what the halt says."""
    trainer = make_trainer(group, tokens, small_config(zero__policy="even", zero__replicas=2))
    trainer.train_step()
    if group.rank == 1:
        trainer.optimizer.rule.state["second"].view(torch.int32)[-7] ^= 1 << 20
    try:
        trainer.train_step()
    except JidokaHalt as halt:
        return halt.cause
    finally:
        trainer.close()
    return "nothing"


def test_a_replica_that_differs_halts_and_is_named(tokens: Path) -> None:
    with World("shm", 3) as world:
        causes = world.run(flip_replica, tokens)
    assert causes == ["the optimizer state that rank 0 owns differs from its replica on rank 1"] * 3


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_holds_its_share_of_the_optimizer_state(tokens: Path, size: int) -> None:
    total = 8 * tiny("even").shape.parameters
    with World("torch", size) as world:
        for replicas in (1, 2):
            share = total * replicas / size
            for held, units in world.run(moment_bytes, tokens, "even", replicas):
                assert abs(held - share) <= 0.05 * share + replicas * 8 * CELL * units


@pytest.mark.parametrize("policy", ["off", *POLICIES])
@pytest.mark.parametrize("world", range(1, 6))
def test_parts_are_complete_and_disjoint_and_start_on_cells(policy: Policy, world: int) -> None:
    layout = Arena(Llama(small_config().shape)).layout
    ownership = Ownership.of(layout, world, Zero(policy))
    covered = [part for rank in range(1 if policy == "off" else world) for part in ownership.parts(rank)]
    assert all(start % CELL == 0 for start, _ in covered)
    at = 0
    for start, stop in sorted(covered):
        assert start == at
        at = stop
    assert at == layout.size
    cells = sorted(span for rank in range(world) for span in ownership.spans(rank) if span[0] < span[1])
    assert cells[0][0] == 0 and cells[-1][1] == layout.size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cells))


def test_whole_unit_policies_put_blocks_where_their_names_say() -> None:
    layout = Arena(Llama(small_config(model__layers=4).shape)).layout
    owners = {
        policy: {
            unit.name: next(rank for rank in range(2) if bounds[rank] < bounds[rank + 1])
            for unit, bounds in zip(layout.units, Ownership.of(layout, 2, Zero(policy)).bounds or (), strict=True)
        }
        for policy in ("round_robin", "contiguous")
    }
    blocks = [f"model.layers.{block}" for block in range(4)]
    assert [owners["round_robin"][name] for name in blocks] == [0, 1, 0, 1]
    assert [owners["contiguous"][name] for name in blocks] == [0, 0, 1, 1]
    others = {owners["contiguous"][name] for name in ("lm_head", "model.embed_tokens")}
    assert others == {0, 1}
