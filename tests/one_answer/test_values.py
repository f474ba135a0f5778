"""The numbers of a run are those of plain PyTorch, and the ones written down here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.kit import oracle
from tests.kit.runs import andon, events, summary

# The first two steps, as plain PyTorch computed them when this was written.
LOSSES = [5.538548, 5.397115]
NORMS = [1.1053487, 1.4883343]
WEIGHTS = {
    "lm_head.weight": [[-0.002910, 0.019090, 0.032066], [0.015685, 0.038220, 0.041603]],
    "model.norm.weight": [[0.990004, 1.009997, 1.009998], [0.998601, 1.027435, 1.028709]],
    "model.layers.0.self_attn.o_proj.weight": [[-0.000302, 0.000063, 0.006586], [0.000757, 0.003325, 0.015791]],
    "model.layers.1.mlp.gate_proj.weight": [[0.018802, -0.001663, 0.018604], [0.034168, 0.014623, 0.030391]],
    # No byte of the text is 0: weight decay alone, a factor of 1 - 0.01 * 0.3, then 1 - 0.02 * 0.3.
    "model.embed_tokens.weight": [[-0.016353, 0.007889, 0.017924], [-0.016255, 0.007842, 0.017817]],
}


def run(cwd: Path, *options: str, name: str = "run", expected: int = 0) -> Path:
    """Train with the oracle's settings; the folder of the run."""
    (cwd / "text.txt").write_text(oracle.TEXT)
    code, output = andon("train", *oracle.OPTIONS, f"--run.dir={name}", *options, cwd=cwd)
    assert code == expected, output
    return cwd / name


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"checkpoint-{step}" / "model.safetensors")


def state(folder: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "checkpoints" / f"checkpoint-{step}" / "state.json").read_text())
    return found


def assert_trained_as(folder: Path, expected: oracle.Trained) -> None:
    """The weights after every step are the oracle's."""
    for step in range(1, oracle.STEPS + 1):
        found = weights(folder, step)
        assert found.keys() == expected.weights[step - 1].keys()
        for name, weight in found.items():
            torch.testing.assert_close(
                weight, expected.weights[step - 1][name], atol=1e-5, rtol=0, msg=f"{name} after step {step}"
            )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers, with a checkpoint after every step."""
    return run(tmp_path_factory.mktemp("values"), "--workers=2")


@pytest.fixture(scope="module")
def expected() -> oracle.Trained:
    return oracle.train()


def test_the_weights_after_every_step_are_those_of_plain_pytorch(folder: Path, expected: oracle.Trained) -> None:
    assert_trained_as(folder, expected)


def test_loss_norm_rate_and_tokens_of_every_step_are_those_of_plain_pytorch(
    folder: Path, expected: oracle.Trained
) -> None:
    steps = events(folder, "step")
    assert [said["loss"] for said in steps] == pytest.approx(expected.losses, rel=1e-6)
    assert [said["grad_norm"] for said in steps] == pytest.approx(expected.norms, rel=1e-5)
    assert [said["lr"] for said in steps] == pytest.approx([0.01, 0.02, 0.0155, 0.011, 0.0065, 0.002])
    assert [said["tokens"] for said in steps] == [96] * 6
    assert summary(folder)["tokens"] == 576 and summary(folder)["loss"] == steps[-1]["loss"]


def test_the_first_two_steps_have_the_numbers_that_are_written_down(folder: Path) -> None:
    steps = events(folder, "step")
    assert [said["loss"] for said in steps[:2]] == pytest.approx(LOSSES, abs=2e-6)
    assert [said["grad_norm"] for said in steps[:2]] == pytest.approx(NORMS, abs=2e-6)
    for name, rows in WEIGHTS.items():
        found = [weights(folder, step)[name].flatten()[:3].tolist() for step in (1, 2)]
        for row, values in zip(found, rows, strict=True):
            assert row == pytest.approx(values, abs=1e-5), name


def test_validation_is_the_mean_over_the_tokens_of_the_held_out_windows(folder: Path) -> None:
    with torch.no_grad():
        # Seven windows in micro-batches of two: a mean of means would count the last window twice.
        loss = oracle.loss_of(weights(folder, 6), oracle.HELD_OUT, "mean").item()
    (said,) = events(folder, "eval")
    assert said["loss"] == pytest.approx(loss, rel=1e-6)
    nats_in_a_bit, bytes_per_token = 0.6931471805599453, 4108 / 4109
    assert said["bits_per_byte"] == pytest.approx(loss / nats_in_a_bit / bytes_per_token, rel=1e-6)
    assert summary(folder)["validation_loss"] == said["loss"]
    assert summary(folder)["bits_per_byte"] == said["bits_per_byte"]


def test_a_checkpoint_says_where_the_run_was(folder: Path) -> None:
    for step in (1, 4):
        found = state(folder, step)
        assert (found["step"], found["tokens"], found["skipped"]) == (step, 96 * step, 0)
        assert found["loss"] == events(folder, "step")[step - 1]["loss"]
        assert (found["seed"], found["slots"], found["world_size"]) == (7, 3, 2)


# Resumes


def test_a_resumed_run_goes_on_with_its_numbers(folder: Path) -> None:
    source = folder / "checkpoints" / "checkpoint-4"
    resumed = run(folder.parent, f"--resume={source}", name="resumed")
    whole = events(folder, "step")
    for said, before in zip(events(resumed, "step"), whole[4:], strict=True):
        assert [said[key] for key in ("step", "loss", "lr", "grad_norm", "tokens")] == [
            before[key] for key in ("step", "loss", "lr", "grad_norm", "tokens")
        ]
    kept = ("step", "tokens", "loss", "validation_loss", "weights_blake3", "skipped")
    assert {key: summary(resumed)[key] for key in kept} == {key: summary(folder)[key] for key in kept}


def test_a_step_that_is_skipped_changes_nothing_and_does_not_count_as_an_update(tmp_path: Path) -> None:
    options = ("--on_nonfinite=skip", "--fault=nan:rank=0,step=3")
    skipped = run(tmp_path, *options, "--workers=2", name="skipped")
    assert_trained_as(skipped, oracle.train(skipped=[3]))
    assert summary(skipped)["skipped"] == 1 and summary(skipped)["tokens"] == 576
    assert [state(skipped, step)["skipped"] for step in (2, 3, 4)] == [0, 1, 1]
    assert [state(skipped, step)["skips_in_a_row"] for step in (2, 3, 4)] == [0, 1, 0]
    for step in (3, 4):
        source = f"--resume={skipped / 'checkpoints' / f'checkpoint-{step}'}"
        resumed = run(tmp_path, *options, source, name=f"resumed-{step}")
        for key in ("weights_blake3", "tokens", "skipped"):
            assert summary(resumed)[key] == summary(skipped)[key], (step, key)


def test_skips_in_a_row_are_counted_over_a_resume(tmp_path: Path) -> None:
    faults = [f"--fault=inf:rank=0,step={step}" for step in (2, 3, 4)]
    options = ("--on_nonfinite=skip", "--max_skips=3", *faults)
    halted = run(tmp_path, *options, name="halted", expected=3)
    assert json.loads((halted / "halt.json").read_text())["step"] == 4
    source = f"--resume={halted / 'checkpoints' / 'checkpoint-2'}"
    resumed = run(tmp_path, *options, source, name="resumed", expected=3)
    assert json.loads((resumed / "halt.json").read_text())["step"] == 4


@pytest.mark.parametrize(
    ("option", "said"), [("--seed=8", "seed 7 → 8"), ("--data.validation=0.1", "data.validation 0.2 → 0.1")]
)
def test_another_seed_or_validation_share_is_refused_on_resume(folder: Path, option: str, said: str) -> None:
    (folder.parent / "text.txt").write_text(oracle.TEXT)
    source = f"--resume={folder / 'checkpoints' / 'checkpoint-4'}"
    arguments = ["train", *oracle.OPTIONS, option, source, "--run.dir=other"]
    code, output = andon(*arguments, cwd=folder.parent)
    assert code == 1 and said in output, output
