"""A disk that is full, read-only or gone: said at once, the last good checkpoint intact, training goes on."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from andon.checkpoint.disk.listing import checkpoint_path, steps
from andon.checkpoint.disk.manifest import Manifest, verify
from andon.checkpoint.saver import CANCEL_SECONDS
from andon.config.schema import Config
from andon.engine.trainer import Trainer
from andon.errors import UserError
from andon.run.records.events import Event, Recorder, event, read
from andon.run.records.folder import RunFolder, read_mark
from andon.run.records.ledger import Ledger
from andon.transport.base import Group
from andon.transport.local import LocalGroup
from tests.checkpoint.saving import STEPS, newest_good, quick_config, run_alone, run_to_end
from tests.kit.group_harness import World, busy
from tests.kit.runs import SMALL, andon, events, finish, start, summary, wait_for_step
from tests.kit.training import make_trainer, small_tokens


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokens(tmp_path_factory.mktemp("cache"))


def mount(*arguments: str) -> None:
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(["mount", *arguments]).returncode:
        pytest.skip("cannot mount here")


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A disk of 700 KB, or of the size given: room for one checkpoint of the small model, not for two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={getattr(request, 'param', '700k')}", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def names(events: list[Event], kind: str) -> list[int]:
    return [said["step"] for said in events if said["event"] == kind]


def fill_after_step_2(disk: Path, said: Event) -> None:
    if said["event"] == "checkpoint" and said["step"] == 2:
        (disk / "ballast").write_bytes(bytes(400 << 10))


@pytest.mark.parametrize("small_disk", ["1200k"], indirect=True)
def test_a_full_disk_is_reported_tried_again_and_training_goes_on(
    tmp_path: Path, tokens: Path, small_disk: Path
) -> None:
    def fill_then_free(said: Event, trainer: Trainer) -> None:
        fill_after_step_2(small_disk, said)
        if said["event"] == "save_failed" and not said["again"]:
            assert "No space left on device" in said["reason"]
            verify(checkpoint_path(small_disk / "checkpoints", 2))
            (small_disk / "ballast").unlink()

    config = quick_config(small_disk, checkpoint__keep=1)
    digest, heard = run_alone(tokens, config, fill_then_free)
    assert names(heard, "save_failed") == [4, 4] and names(heard, "checkpoint") == [2, 6]
    assert names(heard, "step") == list(range(1, STEPS + 1))
    assert digest == run_alone(tokens, quick_config(tmp_path / "whole"))[0]
    assert steps(small_disk / "checkpoints") == [6] and newest_good(small_disk)[1] == []


@pytest.mark.parametrize("small_disk", ["1200k"], indirect=True)
def test_what_failed_is_saved_at_the_second_attempt_as_it_was(tmp_path: Path, tokens: Path, small_disk: Path) -> None:
    def fill_then_free(said: Event, trainer: Trainer) -> None:
        fill_after_step_2(small_disk, said)
        if said["event"] == "save_failed" and said["again"]:
            (small_disk / "ballast").unlink()
        if said["event"] == "checkpoint" and said["step"] == 4:
            kept.append(verify(checkpoint_path(small_disk / "checkpoints", 4)))

    kept: list[Manifest] = []
    config = quick_config(small_disk, checkpoint__keep=1, train__steps=8)
    _, heard = run_alone(tokens, config, fill_then_free)
    assert names(heard, "save_failed") == [4] and names(heard, "checkpoint") == [2, 4, 6, 8]
    run_alone(tokens, quick_config(tmp_path / "whole", train__steps=8))
    assert kept[0].units == verify(checkpoint_path(tmp_path / "whole" / "checkpoints", 4)).units


@pytest.mark.parametrize("small_disk", ["1200k"], indirect=True)
def test_a_save_waits_for_the_room_of_what_is_being_removed(tokens: Path, small_disk: Path) -> None:
    slow = ["stall:rank=0,step=4,at=prune,seconds=1"]
    _, heard = run_alone(tokens, quick_config(small_disk, checkpoint__keep=1, fault=slow))
    assert names(heard, "save_failed") == [] and names(heard, "checkpoint") == [2, 4, 6]


def saves(group: Group, tokens: Path, config: Config) -> list[tuple[str, int, bool]]:
    """One rank's run: which saves it heard to have ended how, and whether they were tried again."""
    heard: list[tuple[str, int, bool]] = []

    def listen(said: Event, trainer: Trainer) -> None:
        if said["event"] in ("checkpoint", "save_failed"):
            heard.append((said["event"], said["step"], said.get("again", False)))

    run_to_end(group, tokens, config, None, listen)
    return heard


@pytest.mark.parametrize("small_disk", ["1000k"], indirect=True)
def test_ranks_that_find_no_room_find_it_at_the_second_attempt(tokens: Path, small_disk: Path) -> None:
    slow = ["stall:rank=0,step=4,at=prune,seconds=1"]
    config = quick_config(small_disk, checkpoint__keep=1, zero__policy="even", fault=slow)
    with World("shm", 2) as world:
        heard, _ = world.run(saves, tokens, config)
    assert [step for kind, step, _ in heard if kind == "checkpoint"] == [2, 4, 6]
    assert all(again for kind, _, again in heard if kind == "save_failed")


def test_a_save_that_has_room_waits_for_no_removal(tokens: Path, tmp_path: Path) -> None:
    hangs = ["stall:rank=0,step=2,at=prune,seconds=30", "stall:rank=0,step=4,at=prune,seconds=30"]
    config = quick_config(tmp_path, checkpoint__keep=1, checkpoint__timeout=4 * busy(), fault=hangs)
    started = time.monotonic()
    _, heard = run_alone(tokens, config)
    assert names(heard, "save_failed") == [] and names(heard, "checkpoint") == [2, 4, 6]
    assert time.monotonic() - started < CANCEL_SECONDS + 8 * busy()


def test_a_full_disk_stops_the_run_where_that_is_configured(tmp_path: Path, tokens: Path, small_disk: Path) -> None:
    heard: list[Event] = []
    config = quick_config(small_disk, checkpoint__on_failure="stop", train__steps=40, checkpoint__every=2)

    def listen(said: Event, trainer: Trainer) -> None:
        heard.append(said)

    with pytest.raises(UserError, match=r"could not be written(.|\n)*No space left on device"):
        run_alone(tokens, config, listen)
    assert names(heard, "save_failed") == [4, 4] and max(names(heard, "step")) < 10
    verify(checkpoint_path(small_disk / "checkpoints", 2))


def test_a_full_disk_under_the_whole_command_stops_nothing_but_the_last_save(tmp_path: Path, small_disk: Path) -> None:
    options = ["--checkpoint.every=4", "--train.steps=12", "--workers=2", f"--run.dir={small_disk}/run"]
    code, output = andon("train", *SMALL, *options, cwd=tmp_path)
    assert code == 1 and "Checkpoint 12 could not be written" in output and "No space left" in output, output
    run = small_disk / "run"
    assert names(events(run, "save_failed"), "save_failed")[:2] == [8, 8]
    assert names(events(run, "step"), "step") == list(range(1, 13))
    assert steps(run / "checkpoints") == [4]
    verify(checkpoint_path(run / "checkpoints", 4))


def test_a_read_only_folder_is_reported_and_training_goes_on(tmp_path: Path, tokens: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"

    def close_then_open(said: Event, trainer: Trainer) -> None:
        if said["event"] == "checkpoint" and said["step"] == 2:
            mount("--bind", str(checkpoints), str(checkpoints))
            mount("-o", "remount,bind,ro", str(checkpoints))
        if said["event"] == "save_failed" and not said["again"]:
            assert "Read-only file system" in said["reason"]
            verify(checkpoint_path(checkpoints, 2))
            subprocess.run(["umount", str(checkpoints)], check=True)

    _, heard = run_alone(tokens, quick_config(tmp_path / "run"), close_then_open)
    assert names(heard, "save_failed") == [4, 4] and names(heard, "checkpoint") == [2, 6]


def test_a_folder_that_is_removed_is_made_again_and_that_is_said(tmp_path: Path, tokens: Path) -> None:
    run = tmp_path / "run"

    def remove(said: Event, trainer: Trainer) -> None:
        if said["event"] == "checkpoint" and said["step"] == 2:
            shutil.rmtree(run)

    _, heard = run_alone(tokens, quick_config(run), remove)
    assert names(heard, "checkpoint") == [2, 4, 6]
    assert [said["text"] for said in heard if said["event"] == "note"] == [
        f"{run / 'checkpoints'} was gone and has been made again"
    ]
    assert newest_good(run)[0] == checkpoint_path(run / "checkpoints", 6)


def test_a_run_whose_folder_is_removed_goes_on_in_a_new_one(tmp_path: Path) -> None:
    options = ["--train.steps=30", "--workers=2", "--checkpoint.every=5", "--run.dir=run"]
    process = start("train", *SMALL, *options, "--fault=stall:rank=1,step=9,seconds=2", cwd=tmp_path)
    wait_for_step(tmp_path / "run", 8, process)
    (tmp_path / "run").rename(tmp_path / "gone")  # at once; file by file, they would come back meanwhile
    shutil.rmtree(tmp_path / "gone")
    output = finish(process)
    assert process.returncode == 0, output
    assert "was removed: later events are in a new file" in output
    assert summary(tmp_path / "run")["step"] == 30 and newest_good(tmp_path / "run")[1] == []
    assert names(list(read(tmp_path / "run" / "metrics.jsonl")), "step")[-1] == 30
    recorded = [line["step"] for line in read(tmp_path / "run" / "ledger.jsonl") if "step" in line]
    assert recorded == list(range(recorded[0], 31))


def test_a_halt_on_a_full_disk_is_told_all_the_same(tmp_path: Path, small_disk: Path) -> None:
    options = ["--workers=2", "--checkpoint.every=0", f"--run.dir={small_disk / 'run'}"]
    faults = ["--fault=stall:rank=1,step=5,seconds=2", "--fault=nan:rank=1,step=6"]
    process = start("train", *SMALL, *options, *faults, cwd=tmp_path)
    wait_for_step(small_disk / "run", 4, process)
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "ballast").write_bytes(bytes(1 << 20))
    output = finish(process)
    assert "Events wait in memory" in output and "THE LINE STOPPED at step 6" in output, output
    assert "was lost" not in output, output
    assert process.returncode == 3 and "events cannot be written" in output, output


def test_events_wait_in_memory_while_the_disk_is_full(small_disk: Path) -> None:
    heard: list[Event] = []
    recorder = Recorder(small_disk / "run", heard.append)
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(1 << 20))
    for number in range(200):
        recorder.emit(event("step", step=number, text="x" * 100))
    until = time.monotonic() + 10
    while not (notes := [said["text"] for said in heard if said["event"] == "note"]):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert notes == [f"Events wait in memory: No space left on device ({small_disk / 'run'})"]
    ballast.unlink()
    recorder.emit(event("step", step=200))
    recorder.close()
    assert recorder.failure is None
    assert names(list(read(small_disk / "run" / "metrics.jsonl")), "step") == list(range(201))


FILLS_THE_DISK = """
import contextlib
import torch
import andon

group = andon.init()
model = andon.DataParallel(torch.nn.Linear(2, 1), group, slots=2)
optimizer = andon.AdamW(model)
for step in model.steps(0, 200):  # longer than the last page of its ledger
    if step == 1 and group.rank == 0:
        with contextlib.suppress(OSError), open("big", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    for slot in model.slots:
        model.backward(model(torch.ones(1, 2)).sum(), count=1)
    optimizer.step()
group.close()
"""


def test_a_script_whose_ledger_finds_no_room_says_so(small_disk: Path) -> None:
    (small_disk / "mine.py").write_text(FILLS_THE_DISK)
    code, output = andon("run", "--workers=2", "mine.py", cwd=small_disk)
    assert code == 0 and "The run's ledger cannot be written" in output and "No space left" in output, output


def test_what_a_full_disk_takes_from_the_ledger_is_a_failure(small_disk: Path) -> None:
    ledger = Ledger(small_disk, 0)
    ledger.begin(0, ["here"])
    fill(small_disk)
    for step in range(1, 201):
        ledger.commit({"step": step, "generation": 0, "shares": [0, 1], "samples": [7]})
    ledger.close()
    assert ledger.failure and "No space left" in ledger.failure.cause
    steps = [line["step"] for line in read(small_disk / "ledger.jsonl") if "step" in line]
    assert steps == list(range(1, len(steps) + 1)) and 0 < len(steps) < 200


def test_a_line_that_was_written_in_part_is_whole_in_a_new_file(small_disk: Path) -> None:
    recorder = Recorder(small_disk / "run")
    fill(small_disk)
    recorder.emit(event("step", step=1, text="x" * 10_000))
    path, until = small_disk / "run" / "metrics.jsonl", time.monotonic() + 10
    while not path.stat().st_size:
        assert time.monotonic() < until
        time.sleep(0.01)
    path.unlink()
    (small_disk / "ballast").unlink()
    recorder.close()
    assert recorder.failure is None and names(list(read(path)), "step") == [1]


def fill(disk: Path) -> None:
    """Fill a disk, except for its last page."""
    with pytest.raises(OSError, match="No space left"):
        (disk / "ballast").write_bytes(bytes(1 << 20))
    os.truncate(disk / "ballast", (disk / "ballast").stat().st_size - 4096)


def test_whatever_happens_to_the_file_of_events_the_others_hear_them(tmp_path: Path) -> None:
    heard: list[Event] = []
    recorder = Recorder(tmp_path, heard.append)
    recorder.emit(event("step", step=1))
    path, until = tmp_path / "metrics.jsonl", time.monotonic() + 10
    while not path.read_bytes().endswith(b"\n"):  # until the writer has nothing left to write
        assert time.monotonic() < until
        time.sleep(0.01)
    path.unlink()
    path.mkdir()
    for number in range(2, 5):
        recorder.emit(event("step", step=number))
    recorder.close()
    assert names(heard, "step") == [1, 2, 3, 4]
    assert recorder.failure and "Is a directory" in recorder.failure.cause


def test_a_folder_that_was_removed_is_held_again_unless_another_run_has_it(tmp_path: Path) -> None:
    mine, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    mine.take()
    mark = read_mark(mine.folder)
    mine.hold()  # nothing has happened
    shutil.rmtree(mine.folder)
    mine.hold()
    assert read_mark(mine.folder) == mark
    with pytest.raises(UserError, match="is in use"):
        other.take()
    shutil.rmtree(mine.folder)
    other.take()
    with pytest.raises(OSError, match="another run has taken"):
        mine.hold()
    assert read_mark(mine.folder) not in ("", mark)
    mine.close()
    other.close()


def test_a_file_system_without_locks_is_not_called_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(UserError, match="run cannot be used") as caught:
        RunFolder(tmp_path / "run").take()
    assert caught.value.cause == "The file system has no locks: Function not implemented"
    assert "mount the file system with locks" in caught.value.remedy


def test_a_run_whose_folder_another_has_taken_writes_nothing_there(tmp_path: Path, tokens: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").write_text("mine")

    def take(said: Event, trainer: Trainer) -> None:
        if said["event"] == "checkpoint" and said["step"] == 2:
            shutil.rmtree(run)
            run.mkdir()
            (run / ".lock").write_text("another's")

    with pytest.raises(UserError, match="another run has taken"):
        run_alone(tokens, quick_config(run), take)
    assert [path.name for path in run.iterdir()] == [".lock"]


def test_training_goes_on_beside_a_save_that_does_not_end(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("andon.checkpoint.checkpointer.PATIENCE_SECONDS", 0.2)
    config = quick_config(tmp_path, fault=["stall:rank=0,step=2,at=wrote,seconds=2"], train__steps=40)
    _, heard = run_alone(tokens, config)
    notes = [said["text"] for said in heard if said["event"] == "note"]
    assert notes[0] == "Step 4 is not saved: the save of step 2 has not ended"
    assert names(heard, "checkpoint")[0] == 2 and names(heard, "checkpoint")[-1] == 40
    assert names(heard, "save_failed") == []


def test_a_save_is_not_late_because_the_steps_are_long(tmp_path: Path, tokens: Path) -> None:
    slow = [f"stall:rank=0,step={step},at=forward,seconds={math.ceil(2 * busy())}" for step in (3, 4)]
    config = quick_config(tmp_path, fault=slow, checkpoint__timeout=1.5 * busy(), train__steps=4)
    _, heard = run_alone(tokens, config)
    assert names(heard, "save_failed") == [] and names(heard, "checkpoint") == [2, 4]


def test_a_snapshot_that_changes_in_memory_is_not_published(tmp_path: Path, tokens: Path) -> None:
    failed: list[str] = []

    def emit(said: Event) -> None:
        failed.extend([said["reason"]] if said["event"] == "save_failed" else [])

    folder = tmp_path / "checkpoints"
    trainer = make_trainer(LocalGroup(), tokens, quick_config(tmp_path, checkpoint__every=0), emit)
    assert trainer.checkpointer
    try:
        trainer.train_step()
        trainer.checkpointer.save(1, wait=True)
        trainer.train_step()
        trainer.checkpointer.save(2)
        trainer.checkpointer.status()  # the snapshot is there
        trainer.checkpointer._saver.snapshot.weights["lm_head.weight"].view(-1)[0] += 1.0
        trainer.checkpointer.finish()
    finally:
        trainer.close()
    reason = "rank 0: OSError: lm_head.weight has changed in memory since it was copied"
    assert failed == [reason, reason]
    assert steps(folder) == [1] and newest_good(tmp_path) == (checkpoint_path(folder, 1), [])


def test_old_checkpoints_that_cannot_be_removed_are_told_of(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(checkpoint: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(checkpoint))

    monkeypatch.setattr("andon.checkpoint.disk.store.remove", refuse)
    _, heard = run_alone(tokens, quick_config(tmp_path, checkpoint__keep=2))
    notes = [said["text"] for said in heard if said["event"] == "note"]
    where = checkpoint_path(tmp_path / "checkpoints", 2)
    assert notes == [f"Old checkpoints could not be removed: Operation not permitted ({where})"]
    assert names(heard, "checkpoint") == [2, 4, 6] and names(heard, "save_failed") == []


def test_a_look_at_the_lock_does_not_keep_a_run_from_its_folder(tmp_path: Path) -> None:
    with closing(RunFolder(tmp_path)) as folder:
        folder.take()
    with open(tmp_path / ".lock", "rb") as lock, closing(RunFolder(tmp_path)) as folder:
        fcntl.flock(lock, fcntl.LOCK_SH)
        threading.Timer(0.05, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        folder.take()
