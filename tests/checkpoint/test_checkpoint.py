"""C-CKPT-001: checkpoints are complete, verified, and resume exactly at any number of workers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from andon.checkpoint.disk.listing import REPLACED, checkpoint_path, steps
from andon.checkpoint.disk.manifest import NAME, read, verify, verify_named
from andon.checkpoint.disk.store import load_state
from andon.config.schema import Config
from andon.data.token_set import TokenSet
from andon.errors import UserError
from andon.integrity.faults import SAVE_PLACES
from andon.integrity.halt import JidokaHalt
from andon.run.pretraining import Pretraining
from andon.run.records.events import Event, no_event
from andon.run.records.folder import RunFolder
from andon.transport.base import Group
from andon.transport.local import LocalGroup
from tests.checkpoint.saving import STEPS, newest_good, quick_config, run_alone, run_to_end
from tests.kit import runs
from tests.kit.group_harness import World, busy
from tests.kit.training import make_trainer, small_tokens

SEED = int(os.environ.get("ANDON_SOAK_SEED", "1"))
COUNT = int(os.environ.get("ANDON_SOAK_COUNT") or "0")
TRANSPORTS = ("shm", "star", "torch")
POLICIES = ("off", "even")
Place = tuple[str, int, str]
"""Transport, workers, ZeRO policy."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokens(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def answer(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the run that nothing interrupts, on one worker."""
    return run_alone(tokens, quick_config(tmp_path_factory.mktemp("answer")))[0]


# Save at N, resume at M


def run_each(group: Group, tokens: Path, folder: Path, policies: list[str], sources: list[Path | None]) -> list[str]:
    """Train to the end under each policy, from each checkpoint; the digests."""
    found = []
    for number, (policy, source) in enumerate(itertools.product(policies, sources)):
        name = f"{policy}-{number}" if source else policy
        config = quick_config(folder / name, zero__policy=policy)
        found.append(run_to_end(group, tokens, config, source))
    return found


def save_and_resume(folder: Path, tokens: Path, answer: str, places: list[Place], resume_at: list[Place]) -> None:
    """Train at each place, then go on from the middle of each of these at every other place."""
    saved: list[Path | None] = []
    for transport, size, policy in places:
        at = folder / f"{transport}-{size}"
        with World(transport, size) as world:
            results = world.run(run_each, tokens, at, [policy], [None])
        assert results == [[answer]] * size
        assert load_state(checkpoint_path(at / policy / "checkpoints", 2))["world_size"] == size
        saved.append(checkpoint_path(at / policy / "checkpoints", 2))
    for transport, size, policy in resume_at:
        at = folder / f"from-{transport}-{size}-{policy}"
        with World(transport, size) as world:
            results = world.run(run_each, tokens, at, [policy], saved, deadline=170)
        assert results == [[answer] * len(saved)] * size


@pytest.mark.timeout(180)
def test_save_at_n_workers_and_resume_at_m(tmp_path: Path, tokens: Path, answer: str) -> None:
    places = [("shm", 4, "even"), ("torch", 2, "off")]
    save_and_resume(tmp_path, tokens, answer, places, [("star", 3, "round_robin"), ("local", 1, "off")])


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_save_at_n_workers_and_resume_at_m_in_all_pairs(tmp_path: Path, tokens: Path, answer: str, size: int) -> None:
    places = list(itertools.product(TRANSPORTS, (1, 2, 3, 4), POLICIES))
    resume_at = [place for place in places if place[1] == size]
    save_and_resume(tmp_path, tokens, answer, places, resume_at)


# Kills


def die_and_go_on(folder: Path, tokens: Path, answer: str, kills: int, seed: int) -> None:
    """Kill ranks around saves, always go on from the newest good checkpoint, and look at every end."""
    chance, done, runs = random.Random(seed), 0, 0
    while done < kills:
        runs += 1
        at, ended = folder / f"run-{runs}", False
        while not ended:
            size = chance.randint(1, 3)
            transport = chance.choice(["shm", "torch"] if size > 1 else ["local"])
            policy = chance.choice(["off", "even"])
            resume, notes = newest_good(at)
            assert not notes, notes
            config = quick_config(at, zero__policy=policy, checkpoint__keep=2, fault=faults(chance, size))
            with World(transport, size) as world:
                world.run(meet)
                world.start(run_to_end, tokens, config, resume)
                if not config.fault:
                    time.sleep(chance.random() * 0.4)  # any moment, then kill -9
                    for process in chance.sample(world._processes, chance.randint(1, size)):
                        process.kill()
                outcomes = world.finish(30)
            if all(outcome.value == answer for outcome in outcomes):
                ended = True
            else:
                assert any(outcome.error == "Dead" for outcome in outcomes), outcomes
                done += 1
                ended = done >= kills and bool(chance.randrange(2))
        resume, notes = newest_good(at)
        assert not notes
        with World("local", 1) as world:
            assert world.run(run_to_end, tokens, quick_config(at), resume) == [answer]
        shutil.rmtree(at)


def meet(group: Group) -> None:
    """So that the group is open before someone dies."""
    group.barrier()


def faults(chance: random.Random, size: int) -> list[str]:
    """A death in a phase of a save, of one rank or of all; or none, for a kill from outside."""
    if not chance.randrange(3):
        return []
    place, step = chance.choice(SAVE_PLACES), chance.choice([2, 4, 6])
    ranks = range(size) if chance.randrange(2) else [chance.randrange(size)]
    return [f"die:rank={rank},step={step},at={place}" for rank in ranks]


def test_kill_9_around_saves_never_costs_a_checkpoint(tmp_path: Path, tokens: Path, answer: str) -> None:
    die_and_go_on(tmp_path, tokens, answer, kills=3, seed=SEED)


@pytest.mark.soak
def test_kill_9_at_many_moments_around_saves(tmp_path: Path, tokens: Path, answer: str) -> None:
    die_and_go_on(tmp_path, tokens, answer, kills=COUNT or 300, seed=SEED)


@pytest.mark.parametrize("place", ["snapshot", "write", "rename", "renamed", "prune"])
def test_a_death_in_each_phase_leaves_a_good_checkpoint(tmp_path: Path, tokens: Path, answer: str, place: str) -> None:
    fault = [f"die:rank=0,step=4,at={place}"]
    with World("local", 1) as world:
        died = quick_config(tmp_path, fault=fault, checkpoint__keep=1)
        (outcome,) = world.outcomes(run_to_end, tokens, died)
    assert outcome.error == "Dead"
    found, notes = newest_good(tmp_path)
    assert not notes and found is not None
    assert found.name == ("checkpoint-4" if place in ("renamed", "prune") else "checkpoint-2")
    with World("local", 1) as world:
        assert world.run(run_to_end, tokens, quick_config(tmp_path), found) == [answer]
    assert not list((tmp_path / "checkpoints").glob(".*"))


# Damage


@pytest.fixture(scope="module")
def saved(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers with ZeRO, and two checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    with World("shm", 2) as world:
        config = quick_config(folder, zero__policy="even", checkpoint__keep=2)
        world.run(run_to_end, tokens, config)
    return folder


@contextlib.contextmanager
def restored(path: Path) -> Iterator[bytes]:
    data = path.read_bytes()
    try:
        yield data
    finally:
        path.write_bytes(data)


def damage_and_look(run: Path, count: int, seed: int) -> None:
    """Flip a bit of, or cut, a random file at a random place: always refused, named, and passed over."""
    chance = random.Random(seed)
    newest = checkpoint_path(run / "checkpoints", STEPS)
    known = read(newest)
    files = sorted(path for path in newest.iterdir())
    assert {path.name for path in files} == {*known.files, NAME} and len(files) == 8
    for _ in range(count):
        path = chance.choice(files)
        cut = chance.randrange(4) == 0
        with restored(path) as data:
            at = chance.randrange(len(data))
            if cut:
                os.truncate(path, at)
            else:
                path.write_bytes(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :])
            found, notes = newest_good(run)
            assert found == checkpoint_path(run / "checkpoints", STEPS - 2), (path, at, cut)
            places = known.files[path.name].tensors if path.name in known.files else {}
            tensor = next((name for name, (lo, hi, _) in places.items() if lo <= at < hi), "")
            if cut:
                tensor = next((name for name, (_, hi, _) in places.items() if at < hi), "")
            (note,) = notes
            assert f"{path.name}{f', tensor {tensor}' if tensor else ''}:" in note, (note, at)
            with pytest.raises(UserError, match="is damaged"):
                verify_named(newest)
    assert newest_good(run) == (newest, [])


def test_damage_is_refused_named_and_passed_over(saved: Path) -> None:
    damage_and_look(saved, 60, SEED)


@pytest.mark.soak
def test_damage_at_many_places(saved: Path) -> None:
    damage_and_look(saved, COUNT or 2000, SEED)


def test_a_file_that_is_missing_or_planted_is_refused(saved: Path) -> None:
    newest = checkpoint_path(saved / "checkpoints", STEPS)
    for name in (NAME, "model.safetensors", "tokenizer.json"):
        with restored(newest / name):
            (newest / name).unlink()
            found, (note,) = newest_good(saved)
            assert found == checkpoint_path(saved / "checkpoints", STEPS - 2) and name in note
    planted = newest / "model-00002.safetensors"
    planted.write_bytes((newest / "model.safetensors").read_bytes())
    assert planted.name in newest_good(saved)[1][0]
    planted.unlink()


def test_a_run_that_resumes_twice_names_a_damaged_checkpoint_once_each_time(saved: Path) -> None:
    newest, run = checkpoint_path(saved / "checkpoints", STEPS), RunFolder(saved)
    with restored(newest / NAME):
        (newest / NAME).unlink()
        for _ in range(2):
            run.resume_from("auto")
            (note,) = run.notes
            assert newest.name in note


def test_moments_are_verified_by_the_rank_that_reads_them(saved: Path, tokens: Path) -> None:
    """Rank 0 has verified its copy; that of another machine may be another."""
    newest = checkpoint_path(saved / "checkpoints", STEPS)
    file, record = next((name, each) for name, each in read(newest).files.items() if "optimizer" in name)
    tensor, (lo, _, _) = next(iter(record.tensors.items()))
    trainer = make_trainer(LocalGroup(), tokens, quick_config(saved))
    try:
        with restored(newest / file) as data:
            (newest / file).write_bytes(data[:lo] + bytes([data[lo] ^ 1]) + data[lo + 1 :])
            with pytest.raises(UserError, match=rf"{file}, tensor {re.escape(tensor)}: its bytes are not"):
                trainer.resume(newest)
        trainer.resume(newest)
    finally:
        trainer.close()


def test_a_checkpoint_that_a_kill_left_set_aside_gets_its_name_again(saved: Path) -> None:
    newest = checkpoint_path(saved / "checkpoints", STEPS)
    newest.rename(newest.with_name(f".{newest.name}{REPLACED}"))
    run = RunFolder(saved)
    run.take()
    assert run.resume_from("auto") == newest
    run.close()


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", NAME, "a\\b"])
def test_a_manifest_that_points_elsewhere_is_refused(saved: Path, name: str) -> None:
    from andon.checkpoint.disk.manifest import Damaged, render

    newest = checkpoint_path(saved / "checkpoints", STEPS)
    with restored(newest / NAME) as data:
        body = json.loads(data)
        body["files"][name] = {"size": 1, "blake3": "00"}
        (newest / NAME).write_bytes(render(body["step"], body["files"], body["units"]))
        with pytest.raises(Damaged, match="is not the name of a file"):
            verify(newest)


def test_when_nothing_is_good_the_run_does_not_begin_again_by_itself(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    for step in steps(run / "checkpoints"):
        (checkpoint_path(run / "checkpoints", step) / NAME).unlink()
    with pytest.raises(UserError, match="No checkpoint in"):
        newest_good(run)


def test_what_four_workers_with_zero_saved_is_a_model_for_transformers(tmp_path: Path, tokens: Path) -> None:
    from transformers import AutoModelForCausalLM

    from andon.model.hub import load_model

    with World("shm", 4) as world:
        world.run(run_to_end, tokens, quick_config(tmp_path, zero__policy="even"))
    checkpoint = checkpoint_path(tmp_path / "checkpoints", STEPS)
    assert len(list(checkpoint.glob("optimizer-*-of-00004.safetensors"))) == 4
    x = torch.arange(32).view(2, 16)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(checkpoint)(x).logits
        torch.testing.assert_close(theirs, load_model(checkpoint).logits(x), atol=1e-5, rtol=1e-5)


# The halt, and digests that differ


def test_a_halt_leaves_the_last_committed_step_behind(tmp_path: Path, tokens: Path) -> None:
    config = quick_config(tmp_path, fault=["nan:rank=0,step=4"], checkpoint__every=0)
    with pytest.raises(JidokaHalt):
        run_alone(tokens, config)
    assert newest_good(tmp_path) == (checkpoint_path(tmp_path / "checkpoints", 3), [])


def test_a_checkpoint_under_the_name_of_another_step_is_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint_path(saved / "checkpoints", 4), tmp_path / "checkpoint-9")
    with pytest.raises(UserError, match="it is the manifest of checkpoint-4"):
        verify_named(tmp_path / "checkpoint-9")


def flip_then_save(group: Group, tokens: Path, folder: Path) -> tuple[str, bool]:
    """A bit of rank 1's weights flips between the fingerprints and the snapshot: what the halt says."""
    trainer = make_trainer(group, tokens, quick_config(folder))
    assert trainer.checkpointer
    trainer.train_step()
    arena = trainer.model.arena
    if group.rank == 1:
        arena.layout.view(arena.weights, "model.norm.weight").view(torch.int32)[3] ^= 1
    trainer.checkpointer.save(1)
    try:
        trainer.train_step()
    except JidokaHalt as halt:
        return halt.cause, halt.sound
    finally:
        trainer.close()
    return "nothing", True


def test_weights_that_differ_halt_before_anything_is_written(tmp_path: Path, tokens: Path) -> None:
    with World("torch", 3) as world:
        found = world.run(flip_then_save, tokens, tmp_path)
    cause = "the weights of model.norm differ on rank 1 (found when step 1 was to be saved)"
    assert found == [(cause, False)] * 3
    assert not steps(tmp_path / "checkpoints")


# A rank that is late


def events_of(group: Group, tokens: Path, config: Config) -> list[Event]:
    heard: list[Event] = []
    run_to_end(group, tokens, config, None, lambda said, trainer: heard.append(said))
    return heard


def test_a_rank_that_is_late_is_named_and_its_save_given_up_and_later_ones_succeed(
    tmp_path: Path, tokens: Path
) -> None:
    limit = round(2 * busy())
    late = [f"stall:rank=1,step=2,at=write,seconds={limit + 1}"]
    config = quick_config(tmp_path, fault=late, checkpoint__timeout=float(limit))
    with World("shm", 2) as world:
        heard, _ = world.run(events_of, tokens, config)
    failed = [said for said in heard if said["event"] == "save_failed"]
    assert [said["again"] for said in failed if said["step"] == 2] == [True, False]
    assert failed[0]["reason"] == f"rank 1 did not finish writing within {limit} s"
    assert [said["step"] for said in heard if said["event"] == "checkpoint"][-1] == STEPS
    assert steps(tmp_path / "checkpoints")[0] > 2
    assert newest_good(tmp_path) == (checkpoint_path(tmp_path / "checkpoints", STEPS), [])


def test_a_disk_that_hangs_holds_neither_training_nor_the_process(tmp_path: Path) -> None:
    options = ("--workers=2", "--checkpoint.every=2", "--checkpoint.timeout=0.5", "--train.steps=60")
    started = time.monotonic()
    found = runs.train(*options, "--fault=stall:rank=0,step=2,at=sync,seconds=3600", cwd=tmp_path)
    assert found["step"] == 60 and time.monotonic() - started < 60
    failed = runs.events(tmp_path / "run", "save_failed")
    assert {said["step"] for said in failed} == {2} and [said["again"] for said in failed] == [True, False]
    assert newest_good(tmp_path / "run")[1] == []


# A folder that not all ranks see


def in_own_folder(group: Group, tokens: Path, folder: Path, resume: bool) -> str:
    """A run whose ranks are on machines without a common disk."""
    mine = folder / f"machine-{group.rank}"
    mine.mkdir(exist_ok=True)
    (mine / ".lock").write_text(f"mark {group.rank}")
    source = checkpoint_path(folder / "machine-0" / "checkpoints", 2)
    if resume and group.rank:
        source = checkpoint_path(mine / "checkpoints", 2)
    config = quick_config(mine, zero__policy="even")
    trainer = make_trainer(group, tokens, config)
    try:
        if resume:
            trainer.resume(source)
        Pretraining(config, TokenSet.open(tokens), trainer, no_event).train()
        from tests.kit.training import digest

        return digest(trainer)
    finally:
        trainer.close()


def test_ranks_without_a_common_folder_save_and_resume_through_rank_0(
    tmp_path: Path, tokens: Path, answer: str
) -> None:
    with World("star", 3) as world:
        assert world.run(in_own_folder, tokens, tmp_path, False) == [answer] * 3
    assert [folder.name for folder in tmp_path.glob("*/checkpoints")] == ["checkpoints"]
    assert len(list((tmp_path / "machine-0").glob("checkpoints/checkpoint-2/optimizer*"))) == 1
    with World("torch", 2) as world:
        assert world.run(in_own_folder, tokens, tmp_path, True) == [answer] * 2


def test_a_halt_publishes_nothing_that_was_copied_from_what_differs(tmp_path: Path) -> None:
    options = ("--workers=2", "--zero.policy=off", "--checkpoint.every=3")
    clean = runs.train(*options, cwd=tmp_path, name="clean")
    fault = "--fault=bitflip:rank=0,step=4,buffer=second,bit=29"
    code, output = runs.andon("train", *runs.SMALL, "--run.dir=run", *options, fault, cwd=tmp_path)
    assert code == 3, output
    assert not (tmp_path / "run" / "checkpoints" / "checkpoint-3").exists()
    assert runs.train(*options, cwd=tmp_path)["weights_blake3"] == clean["weights_blake3"]
