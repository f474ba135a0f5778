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
from rich.console import Console
from typer.testing import CliRunner

from andon.cli import app
from andon.cluster import launch
from andon.cluster.bf16 import ATTEMPT, check_bf16
from andon.config.load import load
from andon.errors import UserError
from andon.numerics import has_avx2
from tests.kit.group_harness import busy
from tests.kit.runs import SMALL, andon, environment, summary, train

TEXT = "The cat sat on the mat and looked at the moon.\n" * 200


def refused(*arguments: str, cwd: Path) -> str:
    code, output = andon("train", *SMALL, "--run.dir=run", *arguments, cwd=cwd)
    assert code == 1, output
    assert "Traceback" not in output
    return output


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--optim.lrr", "3"], ["config", "show", "--seed=x"]])
def test_help_and_configuration_errors_come_at_once_and_without_torch(tmp_path: Path, arguments: list[str]) -> None:
    script = "import sys; from andon.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    command = [sys.executable, "-c", script, *arguments]
    # Processor time, of which a busy machine takes more; the first try may compile.
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.stdout.strip().endswith("False"), done
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if seconds[-1] < 0.5:
            break
    assert min(seconds) < 0.5 * busy()


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_the_help_tells_the_exit_codes(arguments: list[str]) -> None:
    text = " ".join(CliRunner().invoke(app, arguments).output.split())
    assert "0 done, 1 user error, 2 usage, 3 halted, 4 stopped and saved" in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train", "--device=cuda", "--preset=40m"], "'40m' is not a preset"),
        (["train", "--device=cuda", "--ranks=2"], "--ranks has no meaning with --device cuda"),
        (["checkpoint", "--device=tpu"], "--device tpu is not cpu or cuda"),
        (["checkpoint", "--device=cuda", "--ranks=2"], "--ranks has no meaning with --device cuda"),
        (["train", "--device=cuda", "--tokens=512,4096"], "--tokens 512,4096 is not one number"),
        (["numerics", "--presets=tiny,40m"], "'40m' is not a preset"),
        (["cnn", "--images=0"], "--images 0 is not a list of numbers"),
    ],
)
def test_a_benchmark_names_a_bad_option(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    code, output = andon("bench", *arguments, cwd=tmp_path)
    assert code == 1 and complaint in output and "Traceback" not in output, output


@pytest.mark.parametrize(
    ("arguments", "ignored"),
    [
        (["tune.yaml", "b.jsonl", "c.jsonl"], "b.jsonl c.jsonl"),
        (["a.txt", "b.txt", "--data.corpus=c.txt"], "a.txt b.txt"),
        (["--finetune", "model", "a.jsonl", "--data.files=b.jsonl"], "a.jsonl"),
        (["--finetune", "model", "a.jsonl", "--model=other"], "model"),
    ],
)
def test_a_path_that_would_be_ignored_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], ignored: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tune.yaml").write_text("{model: model, data: {files: [a.jsonl]}, lora: {}}")
    with pytest.raises(UserError, match=f"^{ignored} would be ignored\n"):
        app(["config", "show", *arguments], standalone_mode=False)


def test_no_files(tmp_path: Path) -> None:
    assert "nothing-here" in refused("nothing-here", cwd=tmp_path)


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    refused("empty.txt", cwd=tmp_path)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_text_shorter_than_one_window(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    output = refused("short.txt", "--data.tokenizer=bytes", cwd=tmp_path)
    assert "fewer than one window" in output and "1 document · " in output and "Each window is read" not in output


def test_invalid_utf_8_is_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(TEXT.encode() + b"\xff\xfe" + TEXT.encode())
    code, output = andon("train", *SMALL, "--run.dir=run", "bad.txt", cwd=tmp_path)
    assert code == 0 and "not valid UTF-8" in output, output


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
    output = refused("--train.steps=4", "--data.stories=200", cwd=tmp_path)
    assert "was trained on other data: data.stories 300 → 200" in output
    assert "was trained with other settings: seed 1 → 2" in refused("--train.steps=4", "--seed=2", cwd=tmp_path)


def test_another_batch_than_the_checkpoint_was_trained_with(tmp_path: Path) -> None:
    train("--train.steps=2", cwd=tmp_path)
    config = (tmp_path / "run" / "config.yaml").read_text()
    output = refused("--train.steps=4", "--train.slots=2", "--train.micro_batch=1", cwd=tmp_path)
    assert "train.slots 4 → 2" in output and "train.micro_batch 2 → 1" in output
    assert (tmp_path / "run" / "config.yaml").read_text() == config


def test_settings_that_may_change_are_named_when_a_run_goes_on(tmp_path: Path) -> None:
    train("--train.steps=2", "--optim.lr=0.004", cwd=tmp_path)
    options = ["--train.steps=3", "--optim.lr=0.001", "--optim.schedule=constant", "--threads=2"]
    code, output = andon("train", *SMALL, "--run.dir=run", *options, cwd=tmp_path)
    changes = "optim.lr 0.004 → 0.001, optim.schedule cosine → constant, threads 1 → 2, train.steps 2 → 3"
    assert code == 0 and f"Going on with other settings: {changes}" in output.splitlines(), output


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
    branch = train(older, "--train.steps=4", cwd=tmp_path, name="branch")
    took = {"seconds", "tokens_per_s", "peak_memory"}
    assert (
        branch.keys() - took == {key for key, value in summary(tmp_path / "run").items() if branch[key] == value} - took
    )
    seconds, own_tokens = branch["seconds"], branch["tokens"] / 2  # seconds are rounded to one digit
    least, most = ((seconds + error) * branch["tokens_per_s"] for error in (-0.051, 0.051))
    assert least <= own_tokens <= most, branch


def test_a_device_that_is_not_there(tmp_path: Path) -> None:  # F-DP-004
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


@pytest.mark.parametrize("argument", ["--run.dir=~nobody-here/x", "--data.tokenizer=~nobody-here/x", "~nobody-here/x"])
def test_the_home_of_a_user_that_does_not_exist(tmp_path: Path, argument: str) -> None:
    output = refused(argument, cwd=tmp_path)
    assert "~nobody-here/x cannot be used" in output and "Write the path in full" in output


def test_a_run_folder_with_an_odd_name_and_behind_a_link(tmp_path: Path) -> None:
    odd = tmp_path / "{0} {rank} [/b]"  # for Python's formatting, and the end of a style for the display
    odd.mkdir(parents=True)
    (tmp_path / "run").symlink_to(odd)
    train("--train.steps=1", "--workers=2", cwd=tmp_path)
    assert (odd / "logs" / "rank-1.log").exists()


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "ledger.jsonl", "checkpoints", "logs"])
def test_a_link_inside_a_run_folder_is_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "precious").write_text("stays as it is")
    is_file = name in (".lock", "metrics.jsonl", "ledger.jsonl")
    (tmp_path / "run" / name).symlink_to(tmp_path / ("precious" if is_file else "elsewhere"))
    output = refused(cwd=tmp_path)
    assert f"{tmp_path / 'run' / name} is a symbolic link" in output
    assert (tmp_path / "precious").read_text() == "stays as it is" and not list((tmp_path / "elsewhere").iterdir())


def test_a_demo_can_begin_again(tmp_path: Path) -> None:
    options = [*SMALL, "--workers=1", "--train.steps=1", "--run.dir=run"]
    train("--train.steps=1", cwd=tmp_path)
    (tmp_path / "run" / "summary.json").unlink()  # as if it had not finished
    code, output = andon("demo", *options, "--resume", "none", cwd=tmp_path)
    assert code == 0 and "The earlier run is now in" in output, output


def test_bf16_on_a_cpu_that_dies_of_it_is_refused_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die = "import os, sys; os.environ.get('ONEDNN_MAX_CPU_ISA') == 'AVX2' or os.kill(os.getpid(), 4)"
    monkeypatch.setattr("andon.cluster.bf16.ATTEMPT", [sys.executable, "-c", die])
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    settings = {"device": "cpu", "train.precision": "bf16", "run.dir": str(tmp_path / "run")}
    with pytest.raises(UserError, match="does not work on this CPU with native kernels") as caught:
        launch.train(load(None, {**settings, "numerics": "native"}), "auto", Console(quiet=True))
    assert "killed by SIGILL" in caught.value.cause and "--numerics portable" in caught.value.remedy
    assert not (tmp_path / "run").exists()
    if has_avx2():
        check_bf16(load(None, settings))
    check_bf16(load(None, {**settings, "numerics": "native", "train.precision": "auto"}))


def test_bf16_on_this_cpu_is_tried_with_a_real_step(tmp_path: Path) -> None:
    """Whatever comes of it here: the step itself ends with 0, or is killed."""
    done = subprocess.run([*ATTEMPT, "cpu"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode <= 0, done.stderr


def test_a_checkpoint_that_is_none(tmp_path: Path) -> None:
    code, output = andon("generate", "nowhere", cwd=tmp_path)
    assert code == 1 and "nowhere is not a checkpoint" in output, output
    assert "is not a checkpoint" in refused("--resume=nowhere", cwd=tmp_path)


def test_a_fresh_run_moves_the_earlier_one_aside_and_nothing_else(tmp_path: Path) -> None:
    first = train("--train.steps=2", cwd=tmp_path)
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    again = train("--train.steps=2", "--resume=none", cwd=tmp_path)
    assert again["weights_blake3"] == first["weights_blake3"]
    assert (tmp_path / "run.1" / "summary.json").exists() and not (tmp_path / "run.1" / "thesis.txt").exists()
    assert (tmp_path / "run" / "thesis.txt").read_text() == "mine"


def test_a_fresh_run_that_cannot_begin_leaves_the_earlier_one_where_it_is(tmp_path: Path) -> None:
    train("--train.steps=2", cwd=tmp_path)
    for name in ("token", "thesis.txt"):
        (tmp_path / "run" / name).write_text("mine")
    before = {path.name for path in (tmp_path / "run").iterdir()}
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    for wrong in ("--model.vocab=10", "nowhere.txt"):
        output = refused("--resume=none", wrong, cwd=tmp_path)
        assert "the earlier one is in" in output, output
        assert {path.name for path in tmp_path.iterdir()} == {"cache", "run"}
        assert {path.name for path in (tmp_path / "run").iterdir()} == before
    assert (tmp_path / "run" / "logs" / "rank-0.log").read_text().startswith(log)
    assert train("--train.steps=2", cwd=tmp_path)["step"] == 2


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
