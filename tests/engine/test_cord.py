"""The cord: bad gradients (F-DP-003) and flipped bits (C-DDP-001, F-DP-001) stop every rank at once, and are named."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from andon.engine.gradients.order import make_order
from andon.engine.optimizer import AdamW
from andon.engine.parallel import DataParallel
from andon.engine.trainer import StepSettings, Trainer
from andon.errors import UserError
from andon.integrity.faults import parse
from andon.integrity.halt import JidokaHalt
from andon.transport.base import Group
from andon.transport.local import LocalGroup
from andon.transport.registry import TRANSPORTS
from tests.kit.group_harness import World, worlds
from tests.kit.runs import SMALL, andon
from tests.kit.training import digest, make_trainer, small_config, small_tokens

SEED = int(os.environ.get("ANDON_SOAK_SEED", "1"))
COUNT = int(os.environ.get("ANDON_SOAK_COUNT") or "200")
STEPS = 4
# A gradient server of protocol 2 halts at the first bad gradient, too: `test_protocol2_group.py`.
WORLDS = [
    *(("local", 1), ("shm", 2)),
    *(each for each in worlds(3, processes_only=True) if not TRANSPORTS[each[0]].joins_server),
]
PARAMETERS = [
    "lm_head.weight",
    "model.norm.weight",
    "model.embed_tokens.weight",
    *(f"model.layers.{layer}.{part}.weight" for layer in (0, 1) for part in ("self_attn.k_proj", "mlp.down_proj")),
    *(f"model.layers.{layer}.{part}.weight" for layer in (0, 1) for part in ("input_layernorm", "mlp.gate_proj")),
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokens(tmp_path_factory.mktemp("cache"))


def clean_digests(group: Group, tokens: Path) -> list[str]:
    """The digest of weights and moments after 0, 1, … steps."""
    trainer = make_trainer(group, tokens, small_config())
    found = [digest(trainer)]
    for _ in range(STEPS):
        trainer.train_step()
        found.append(digest(trainer))
    trainer.close()
    return found


def run_to_halt(
    group: Group, tokens: Path, faults: tuple[str, ...], policy: str = "auto"
) -> tuple[dict[str, Any], str]:
    """Train with faults until the line stops: what the halt says, and the digest of what is left."""
    trainer = make_trainer(group, tokens, small_config(fault=faults, zero__policy=policy))
    try:
        for _ in range(STEPS):
            trainer.train_step()
    except JidokaHalt as halt:
        return halt.fields(), digest(trainer)
    finally:
        trainer.close()
    raise AssertionError(f"{faults} did not halt")


def many_halts(
    group: Group, tokens: Path, cases: list[tuple[str, ...]], policy: str = "auto"
) -> list[tuple[dict[str, Any], str]]:
    return [run_to_halt(group, tokens, faults, policy) for faults in cases]


Expected = tuple[int, int, str, str]


def injection(chance: random.Random, size: int) -> tuple[tuple[str, ...], int, set[Expected]]:
    """Faults of one or two ranks in one step: their texts, the step, and what must be found."""
    step = chance.randint(1, STEPS)
    texts, expected = [], set()
    for rank in chance.sample(range(size), min(size, chance.choice([1, 1, 2]))):
        kind, parameter = chance.choice(["nan", "inf"]), chance.choice(PARAMETERS)
        slot = chance.choice(make_order(8, size).range_of(rank))
        texts.append(f"{kind}:rank={rank},step={step},slot={slot},parameter={parameter}")
        expected.add((rank, slot, parameter, "NaN" if kind == "nan" else "Inf"))
    return tuple(texts), step, expected


def inject(transport: str, size: int, tokens: Path, count: int, seed: int) -> None:
    chance = random.Random(f"{seed} {transport} {size}")
    cases = [injection(chance, size) for _ in range(count)]
    with World(transport, size) as world:
        clean = world.run(clean_digests, tokens)[0]
        results = world.run(many_halts, tokens, [faults for faults, _, _ in cases], deadline=30 + 3 * count)
    for rank, halts in enumerate(results):
        for (faults, step, expected), (said, left) in zip(cases, halts, strict=True):
            found = {(f["rank"], f["slot"], f["parameter"], f["kind"]) for f in said["findings"]}
            assert (said["step"], found) == (step, expected), (rank, faults, said)
            assert all(f["count"] == 1 and f["samples"] and f["host"] for f in said["findings"])
            if TRANSPORTS[transport].one_order or size <= 2:
                assert left == clean[step - 1], (rank, faults)


def flip(transport: str, size: int, tokens: Path, count: int, seed: int, policy: str) -> None:
    chance = random.Random(f"{seed} {transport} {size}")
    units = ["lm_head", "model.norm", "model.layers.0", "model.layers.1", "model.embed_tokens"]
    cases = []
    for _ in range(count):
        case = (chance.randrange(size), chance.randint(1, STEPS), chance.choice(units))
        buffers = ["weights"] if policy == "even" else ["weights", "first", "second"]
        cases.append((*case, chance.choice(buffers), chance.randrange(32 * 32)))
    texts = [(f"bitflip:rank={r},step={s},unit={u},buffer={b},bit={k}",) for r, s, u, b, k in cases]
    with World(transport, size) as world:
        results = world.run(many_halts, tokens, texts, policy, deadline=30 + 3 * count)
    for halts in results:
        for (rank, step, unit, buffer, _), (said, _) in zip(cases, halts, strict=True):
            assert said["step"] == step and not said["sound"]
            where = f"on rank {rank}" if size > 2 else "between ranks 0, 1"
            assert said["cause"] == f"the {buffer} of {unit} differ {where}"


@pytest.mark.parametrize(("transport", "size"), WORLDS)
def test_a_bad_gradient_halts_before_the_update_and_is_named(transport: str, size: int, tokens: Path) -> None:
    inject(transport, size, tokens, count=4, seed=SEED)


@pytest.mark.parametrize("policy", ["off", "even"])
@pytest.mark.parametrize(("transport", "size"), [("torch", 2), ("shm", 3)])
def test_a_flipped_bit_is_found_in_the_same_step(transport: str, size: int, policy: str, tokens: Path) -> None:
    flip(transport, size, tokens, count=6, seed=SEED, policy=policy)


@pytest.mark.soak
@pytest.mark.parametrize(("transport", "size"), WORLDS)
def test_many_bad_gradients(transport: str, size: int, tokens: Path) -> None:
    inject(transport, size, tokens, count=-(-COUNT // len(WORLDS)), seed=SEED)


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["off", "even"])
@pytest.mark.parametrize(("transport", "size"), [("torch", 2), ("shm", 2), ("shm", 3), ("star", 3)])
def test_many_flipped_bits(transport: str, size: int, policy: str, tokens: Path) -> None:
    flip(transport, size, tokens, count=-(-COUNT // 4), seed=SEED, policy=policy)


def passing_fault(group: Group, tokens: Path, culprit: int, at: int) -> dict[str, Any]:
    """One element of a gradient is bad, but not when it is computed again: what the halt says."""
    trainer = make_trainer(group, tokens, small_config())
    seen: list[int] = []

    def spoil(slot: int, name: str, gradient: torch.Tensor) -> None:
        if group.rank == culprit and name == "lm_head.weight" and not seen:
            gradient.view(-1)[at] = float("nan")
            seen.append(slot)

    trainer.model.gradients.on_gradient = spoil
    try:
        trainer.train_step()
    except JidokaHalt as halt:
        return halt.fields()
    finally:
        trainer.close()
    raise AssertionError("nothing halted")


@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_a_fault_that_passes_is_still_blamed_on_its_rank(transport: str, tokens: Path) -> None:
    with World(transport, 3) as world:
        for culprit in range(3):
            for at in (0, -1):  # in a part that one rank owns, and in one that another does
                for said in world.run(passing_fault, tokens, culprit, at):
                    assert said["cause"] == f"rank {culprit} computed a bad gradient of lm_head"
                    (found,) = said["findings"]
                    assert (found["rank"], found["unit"], found["slot"]) == (culprit, "lm_head", None)


def clean_steps(group: Group, tokens: Path, count: int) -> int:
    trainer = make_trainer(group, tokens, small_config(train__steps=count))
    for _ in range(count):
        trainer.train_step()
    trainer.close()
    return trainer.progress.step


@pytest.mark.soak
def test_no_false_alarm_in_two_thousand_clean_steps(tokens: Path) -> None:
    with World("shm", 3) as world:
        assert world.run(clean_steps, tokens, 2000, deadline=900) == [2000] * 3


def skipping(group: Group, tokens: Path, faults: tuple[str, ...]) -> tuple[str, int, int]:
    trainer = make_trainer(group, tokens, small_config(fault=faults, on_nonfinite="skip"))
    for _ in range(STEPS):
        trainer.train_step()
    trainer.close()
    return digest(trainer), trainer.progress.skipped, trainer.progress.step


def test_skip_drops_the_step_on_every_rank_alike(tokens: Path) -> None:
    faults = ("nan:rank=1,step=2",)
    with World("torch", 2) as world:
        results = world.run(skipping, tokens, faults)
        clean = world.run(clean_digests, tokens)[0]
    assert len(set(results)) == 1
    left, skipped, step = results[0]
    assert (skipped, step) == (1, STEPS) and left not in clean


def test_too_many_dropped_steps_in_a_row_halt_after_all(tokens: Path) -> None:
    faults = tuple(f"inf:rank=0,step={step}" for step in (2, 3, 4))
    with World("torch", 2) as world:
        outcomes = world.outcomes(skipping, tokens, faults)
    assert all(outcome.error == "JidokaHalt" and "halted at step 4" in outcome.message for outcome in outcomes)


class Buffered(nn.Module):
    """Its loss is not finite from the second step on, and forward changes a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return (self.weight * x.float()).sum() * (1.0 if self.calls == 1 else torch.nan)


class Ones:
    """Batches that do not matter."""

    def __call__(self, step: int, slot: int) -> tuple[Any, Any]:
        return np.ones((2, 4), np.int64), np.ones((2, 4), np.int64)

    def windows(self, step: int, slot: int) -> list[int]:
        return [0, 1]

    def name(self, window: int) -> int:
        return window


def test_a_halt_stays_a_halt_if_a_stop_is_asked_for_in_the_same_step_and_leaves_the_buffers_alone() -> None:
    group = LocalGroup()
    trainer = Trainer(
        AdamW(DataParallel(module := Buffered(), group, slots=2)), Ones(), StepSettings(lambda step: 0.1, 9)
    )
    trainer.train_step()
    group.stop_wanted = lambda: True
    with pytest.raises(JidokaHalt) as halt:
        trainer.train_step()
    assert [finding.slot for finding in halt.value.findings] == [0, 0, 1, 1]
    assert module.calls == 1 and trainer.progress.step == 1
    trainer.close()


def test_a_run_that_diverges_halts_with_the_first_of_its_findings(tmp_path: Path) -> None:
    many = ("--model.layers=24", "--train.slots=32", "--train.micro_batch=1", "--optim.lr=1e30", "--optim.warmup=0")
    code, output = andon("train", *SMALL, *many, "--workers=2", "--run.dir=run", cwd=tmp_path)
    assert code == 3 and "THE LINE STOPPED at step 2" in output and "The first findings" in output, output
    halt = json.loads((tmp_path / "run" / "halt.json").read_text())
    assert {finding["rank"] for finding in halt["findings"]} == {0, 1}
    assert halt["left_out"] > 1000 and halt["sound"]


@pytest.mark.parametrize(
    "text",
    ["nun:rank=1,step=2", "nan:rank=1", "nan:rank=x,step=2", "die:rank=1,step=2,at=home", "nan:rank=0,step=1,bit=3"],
)
def test_a_fault_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is refused"):
        parse(text)
