"""Bad input: three lines, exit code 1, nothing harmed; and how fast the command line answers."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import SMALL, andon, environment, summary, train

TEXT = "The cat sat on the mat and looked at the moon.\n" * 200


def refused(*arguments: str, cwd: Path) -> str:
    code, output = andon("train", *SMALL, "--run.dir=run", *arguments, cwd=cwd)
    assert code == 1, output
    assert "Traceback" not in output
    return output


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--optim.lrr", "3"], ["config", "show", "--seed=x"]])
def test_help_and_configuration_errors_come_at_once_and_without_torch(tmp_path: Path, arguments: list[str]) -> None:
    script = "import sys; from andon.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.strip().endswith("False"), done
    # Processor time, so that a busy machine does not fail the promise of half a second.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_no_files(tmp_path: Path) -> None:
    assert "nothing-here" in refused("nothing-here", cwd=tmp_path)


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    refused("empty.txt", cwd=tmp_path)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_text_shorter_than_one_window(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    assert "fewer than one window" in refused("short.txt", "--data.tokenizer=bytes", cwd=tmp_path)


def test_invalid_utf_8_is_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(TEXT.encode() + b"\xff\xfe" + TEXT.encode())
    code, output = andon("train", *SMALL, "--run.dir=run", "bad.txt", cwd=tmp_path)
    assert code == 0 and "no valid UTF-8" in output, output


def test_a_vocabulary_that_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    output = refused("text.txt", "--data.tokenizer=bytes", "--model.vocab=100", cwd=tmp_path)
    assert "vocabulary of 257 does not fit model.vocab = 100" in output


def test_a_checkpoint_of_another_shape_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    train("--train.steps=2", cwd=tmp_path)
    weights = tmp_path / "run" / "checkpoints" / "checkpoint-2" / "model.safetensors"
    before = weights.read_bytes()
    output = refused("--train.steps=4", "--model.hidden=64", "--model.intermediate=64", cwd=tmp_path)
    assert "was trained with other settings: model." in output
    assert weights.read_bytes() == before


def test_other_data_than_the_checkpoint_was_trained_on(tmp_path: Path) -> None:
    train("--train.steps=2", cwd=tmp_path)
    assert "was trained on other data" in refused("--train.steps=4", "--data.stories=200", cwd=tmp_path)


def test_another_batch_than_the_checkpoint_was_trained_with(tmp_path: Path) -> None:
    train("--train.steps=2", cwd=tmp_path)
    config = (tmp_path / "run" / "config.yaml").read_text()
    output = refused("--train.steps=4", "--train.slots=2", "--train.micro_batch=1", cwd=tmp_path)
    assert "train.slots 4 → 2" in output and "train.micro_batch 2 → 1" in output
    assert (tmp_path / "run" / "config.yaml").read_text() == config


def test_a_damaged_checkpoint_and_a_damaged_cache_are_named(tmp_path: Path) -> None:
    train("--train.steps=2", cwd=tmp_path)
    weights = tmp_path / "run" / "checkpoints" / "checkpoint-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "checkpoint-2 is damaged" in refused("--train.steps=4", cwd=tmp_path)
    (shard,) = (tmp_path / "cache" / "andon").glob("*/tokens-00000.bin")
    data = bytearray(shard.read_bytes())
    data[500] ^= 1
    shard.write_bytes(data)
    assert "tokens-00000.bin is damaged" in refused("--train.steps=4", "--resume=none", cwd=tmp_path)


@pytest.mark.parametrize(
    "fault", ["nan:rank=0,step=1,parameter=nope", "bitflip:rank=0,step=1,unit=nope", "nan:rank=7,step=1", "nun:rank=0"]
)
def test_a_fault_that_can_never_happen(tmp_path: Path, fault: str) -> None:
    assert f"--fault {fault} is refused" in refused(f"--fault={fault}", cwd=tmp_path)


def test_a_branch_of_an_older_checkpoint_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    train("--train.steps=4", "--checkpoint.every=2", cwd=tmp_path)
    older = "--resume=run/checkpoints/checkpoint-2"
    assert "already has checkpoint-4" in refused(older, "--train.steps=6", cwd=tmp_path)
    assert train(older, "--train.steps=4", cwd=tmp_path, name="branch") == summary(tmp_path / "run")


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert "torch sees no CUDA device" in refused("--device=cuda", cwd=tmp_path)
    code, output = andon("train", *SMALL, "--run.dir=auto", "--device=auto", "--train.steps=1", cwd=tmp_path)
    assert code == 0 and "Training on the CPU" in output, output


def test_a_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file in the way")
    refused(cwd=tmp_path)
    assert (tmp_path / "run").read_text() == "a file in the way"


def test_a_checkpoint_that_is_none(tmp_path: Path) -> None:
    code, output = andon("generate", "nowhere", cwd=tmp_path)
    assert code == 1 and "nowhere is not a checkpoint" in output, output
    assert "is not a checkpoint" in refused("--resume=nowhere", cwd=tmp_path)


def test_a_fresh_run_moves_the_earlier_one_aside(tmp_path: Path) -> None:
    first = train("--train.steps=2", cwd=tmp_path)
    again = train("--train.steps=2", "--resume=none", cwd=tmp_path)
    assert again["weights_blake3"] == first["weights_blake3"]
    assert (tmp_path / "run.1" / "summary.json").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("needs root to mount a small disk")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)])
    if done.returncode:
        pytest.skip("cannot mount here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_the_earlier_checkpoint_intact(tmp_path: Path, small_disk: Path) -> None:
    sizes = ["--checkpoint.every=1", "--train.steps=3"]
    code, output = andon("train", *SMALL, *sizes, f"--run.dir={small_disk}/run", cwd=tmp_path)
    assert code == 1 and "could not be written" in output and "No space left" in output, output
    kept = small_disk / "run" / "checkpoints"
    assert [folder.name for folder in kept.iterdir()] == ["checkpoint-1"]
    assert (kept / "checkpoint-1" / "state.json").exists()
