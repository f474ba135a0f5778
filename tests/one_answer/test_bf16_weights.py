"""bf16 weights with an f32 master in the optimizer's shard: one answer, 2 + 12/N bytes, exact resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import andon
from andon.checkpoint.disk.listing import checkpoint_path
from andon.commands import checkpoint as checkpoints
from andon.commands import generate as inference
from andon.config.load import load
from andon.config.sections import RunConfig
from andon.engine.gradients.arena import CELL, Arena
from andon.errors import UserError
from andon.integrity.halt import JidokaHalt
from andon.model.hub import load_model
from andon.model.layers import Embedding, Linear
from andon.optim.sharding import Zero
from andon.run.plan import changes, make_plan
from andon.transport.base import Group
from andon.transport.local import LocalGroup
from tests.checkpoint.saving import STEPS, quick_config, run_alone, run_to_end
from tests.kit.group_harness import World, world
from tests.kit.training import digest, make_trainer, small_config, small_tokens

SETTINGS = ["off", "even", "round_robin", "contiguous", "even*2"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokens(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def saved(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The digest of a run on one worker that nothing interrupts, and its folder."""
    folder = tmp_path_factory.mktemp("alone")
    return run_alone(tokens, quick_config(folder, train__weights="bf16"))[0], folder


def train_all(group: Group, tokens: Path, policies: list[str]) -> list[str]:
    """The digest of weights, moments and master after training under each policy."""
    found = []
    for policy in policies:
        name, _, replicas = policy.partition("*")
        zero = {"zero__policy": name, "zero__replicas": int(replicas or 1)}
        trainer = make_trainer(group, tokens, quick_config(RunConfig().dir, train__weights="bf16", **zero))
        for _ in range(STEPS):
            trainer.train_step()
        found.append(digest(trainer))
        trainer.close()
    return found


@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("shm", 3), ("shm", 4), ("star", 2), ("torch", 2)])
def test_every_policy_world_and_transport_gives_the_answer(
    tokens: Path, saved: tuple[str, Path], transport: str, size: int
) -> None:
    settings = SETTINGS if transport == "shm" else SETTINGS[:2]
    with World(transport, size) as ranks:
        results = ranks.run(train_all, tokens, settings, deadline=100)
    assert results == [[saved[0]] * len(settings)] * size


def test_alone_every_policy_gives_the_answer(tokens: Path, saved: tuple[str, Path]) -> None:
    assert train_all(LocalGroup(), tokens, SETTINGS) == [saved[0]] * len(SETTINGS)


def held(group: Group, tokens: Path, policy: str) -> tuple[int, int, bool]:
    """Bytes of the weights and of the optimizer state, and whether the weights are the rounded master."""
    keys = {"train.context": 16, "train.slots": 4, "train.micro_batch": 1, "train.weights": "bf16"}
    trainer = make_trainer(group, tokens, load(None, {**keys, "zero.policy": policy, "device": "cpu"}))
    trainer.train_step()
    moments, weights = trainer.optimizer.rule.state, trainer.model.arena.weights
    whole = torch.cat([weights[start:stop] for start, stop in trainer.optimizer.owned_parts])
    trainer.close()
    memory = sum(flat.untyped_storage().nbytes() for flat in moments.values())
    return weights.nbytes, memory, torch.equal(moments["master"].bfloat16(), whole)


def test_a_rank_holds_two_bytes_a_weight_and_its_share_of_twelve(tokens: Path) -> None:
    config = load(None, {"train.weights": "bf16", "workers": 4, "zero.policy": "even"})
    plan, padding = make_plan(config.on_this_machine()), CELL * (config.shape.layers + 3)
    with world("threads", 4) as ranks:
        for weights, state, rounded in ranks.run(held, tokens, "even"):
            assert rounded
            assert 0 <= weights - 2 * plan.parameters <= 2 * padding
            assert abs(state - 12 * plan.parameters / 4) <= 12 * padding
    assert plan.memory.weights == 2 * plan.parameters
    assert plan.memory.optimizer == 3 * plan.parameters
    other = next(plan for keys, plan in changes(config.on_this_machine(), make_plan) if "train.weights" in keys)
    assert other.memory.weights + other.memory.optimizer == 6 * plan.parameters
    assert (other.sent, plan.sent) == (6 * plan.parameters, 4.5 * plan.parameters)


def test_the_loss_goes_down_as_with_f32(tokens: Path) -> None:
    losses: dict[str, list[float]] = {}
    for weights in ("f32", "bf16"):
        trainer = make_trainer(LocalGroup(), tokens, small_config(train__weights=weights, train__slots=2))
        losses[weights] = [trainer.train_step().loss for _ in range(50)]
        trainer.close()
    assert losses["bf16"][-1] < losses["bf16"][0] - 1
    assert losses["bf16"][-1] == pytest.approx(losses["f32"][-1], rel=0.01)


# Checkpoints


def resumed(group: Group, tokens: Path, folder: Path, policies: list[str], source: Path) -> list[str]:
    """Go on from a checkpoint to the end under each policy: the digests."""
    configs = [quick_config(folder / name, train__weights="bf16", zero__policy=name) for name in policies]
    return [run_to_end(group, tokens, config, source) for config in configs]


def test_save_at_three_workers_and_resume_at_two_and_one(tmp_path: Path, tokens: Path, saved: tuple[str, Path]) -> None:
    answer, alone = saved
    config = quick_config(tmp_path / "three", train__weights="bf16", zero__policy="even")
    with World("shm", 3) as ranks:
        assert ranks.run(run_to_end, tokens, config) == [answer] * 3
    two, six = (checkpoint_path(tmp_path / "three" / "checkpoints", step) for step in (2, STEPS))
    with World("star", 2) as ranks:
        found = ranks.run(resumed, tokens, tmp_path, ["round_robin", "off"], two)
    assert found == [[answer, answer]] * 2
    assert resumed(LocalGroup(), tokens, tmp_path / "one", ["off"], two) == [answer]
    console = Console(quiet=True)
    assert checkpoints.verify(tmp_path / "three", console) == 0
    assert checkpoints.diff(six, checkpoint_path(alone / "checkpoints", STEPS), console) == 0
    assert checkpoints.diff(six, two, console) == 1


def in_own_folder(group: Group, tokens: Path, folder: Path, source: Path) -> str:
    """Resume and save where only rank 0 sees the checkpoint."""
    mine = folder / f"machine-{group.rank}"
    mine.mkdir()
    (mine / ".lock").write_text(f"mark {group.rank}")
    trainer = make_trainer(group, tokens, quick_config(mine, train__weights="bf16", zero__policy="even"))
    trainer.resume(source if group.rank == 0 else mine / "nothing")
    while trainer.progress.step < STEPS:
        trainer.train_step()
    trainer.close()
    return digest(trainer)


def test_ranks_that_do_not_see_the_checkpoint_get_the_master_from_rank_0(
    tmp_path: Path, tokens: Path, saved: tuple[str, Path]
) -> None:
    answer, folder = saved
    with world("threads", 3) as ranks:
        found = ranks.run(in_own_folder, tokens, tmp_path, checkpoint_path(folder / "checkpoints", 2))
    assert found == [answer] * 3


def test_the_other_setting_does_not_resume(tmp_path: Path, tokens: Path, saved: tuple[str, Path]) -> None:
    source = checkpoint_path(saved[1] / "checkpoints", 2)
    with pytest.raises(UserError, match=r"train\.weights bf16 → f32"):
        run_to_end(LocalGroup(), tokens, quick_config(tmp_path), source)


def test_transformers_loads_what_was_saved_and_agrees(saved: tuple[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = checkpoint_path(saved[1] / "checkpoints", STEPS)
    ours = load_model(checkpoint)
    theirs: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert theirs.dtype == torch.bfloat16
    for name, weight in theirs.named_parameters():
        assert torch.equal(weight.float(), ours.get_parameter(name))
    x = torch.arange(32).view(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(theirs.float()(x).logits, ours.logits(x), atol=1e-5, rtol=1e-5)


def test_a_checkpoint_generates_text(saved: tuple[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = checkpoint_path(saved[1] / "checkpoints", STEPS)
    inference.generate(checkpoint, "Once", count=1, length=4, temperature=1.0, seed=1)
    assert capsys.readouterr().out.startswith("Once")


# Flipped bits


def flip(group: Group, tokens: Path, policy: str, buffer: str, bit: int) -> str:
    """What the halt says when a bit of rank 1 flips in step 2."""
    fault = [f"bitflip:rank=1,step=2,unit=model.norm,buffer={buffer},bit={bit}"]
    config = quick_config(RunConfig().dir, train__weights="bf16", zero__policy=policy, fault=fault)
    trainer = make_trainer(group, tokens, config)
    try:
        trainer.train_step()
        trainer.train_step()
    except JidokaHalt as halt:
        return halt.cause
    finally:
        trainer.close()
    return "nothing"


@pytest.mark.parametrize(
    ("policy", "buffer", "bit"),
    [("off", "weights", 0), ("even", "weights", 15), ("even", "weights", 500), ("off", "master", 31)],
)
def test_a_flipped_bit_is_found_before_the_update(tokens: Path, policy: str, buffer: str, bit: int) -> None:
    with world("threads", 3) as ranks:
        causes = ranks.run(flip, tokens, policy, buffer, bit)
    assert causes == [f"the {buffer} of model.norm differ on rank 1"] * 3


# Any module


class Rows(nn.Module):
    """Our layers, and a bf16 scale that autograd alone takes care of."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.scale, self.out = Embedding(11, 8), nn.Parameter(torch.ones(8)), Linear(8, 11)
        chance = torch.Generator().manual_seed(3)  # of its own: ranks that are threads share torch's
        for weight in (self.rows.weight, self.out.weight):
            weight.data.normal_(0, 0.5, generator=chance)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.rows(x) * self.scale)
        return out


def train_module(group: Group, zero: bool) -> tuple[str, float, float]:
    """A few steps of a bf16 module: digest, first and last loss."""
    from andon.checkpoint.disk.store import weights_blake3

    model = Rows().bfloat16()
    parallel, losses = andon.DataParallel(model, group, slots=4), []
    optimizer = andon.AdamW(parallel, lr=1e-2, zero=Zero("even" if zero else "off"))
    for _ in range(4):
        for slot in parallel.slots:
            x = torch.arange(11)[slot : slot + 4]
            parallel.backward(nn.functional.cross_entropy(parallel(x), x), count=4)
        losses.append(optimizer.step(clip=1.0).loss)
    parallel.close()
    return weights_blake3(parallel.arena.parameters), losses[0], losses[-1]


def test_a_module_in_bf16_has_one_answer_through_the_python_door() -> None:
    results = [train_module(LocalGroup(), zero=False)]
    for zero in (False, True):
        with world("threads", 3) as ranks:
            results += ranks.run(train_module, zero)
    assert len(set(results)) == 1
    assert results[0][2] < results[0][1]


def test_gradients_are_those_of_f32_weights_and_not_rounded() -> None:
    tokens, gradients = torch.arange(11), []
    for dtype in (torch.float32, torch.bfloat16):
        model = Rows().bfloat16().to(dtype)
        arena = Arena(model)
        nn.functional.cross_entropy(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
        gradients.append([arena.parameters[name].grad for name in ("rows.weight", "out.weight")])
    for exact, found in zip(*gradients, strict=True):
        assert found is not None and found.dtype == torch.float32
        assert torch.equal(exact, found)


def test_parameters_of_two_dtypes_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1).bfloat16())
    with pytest.raises(ValueError, match="all trained parameters must be float32, or all bfloat16"):
        andon.DataParallel(model, LocalGroup(), slots=1)
