"""The whole product in seconds: train on two workers, look at what it left, use it, go on from it."""

from __future__ import annotations

from pathlib import Path

import torch

from andon.checkpoint.disk.store import weights_blake3
from andon.model.hub import load_model
from tests.kit.runs import andon, events, summary, train


def test_from_nothing_to_a_model_that_writes(tmp_path: Path) -> None:
    done = train("--workers=2", "--eval.every=3", "--checkpoint.every=2", cwd=tmp_path, executed=True)
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "checkpoint-6"

    assert done["step"] == 6 and done["workers"] == 2 and done["tokens"] == 6 * 4 * 2 * 32
    assert done["weights_blake3"] == weights_blake3(dict(load_model(checkpoint).named_parameters()))
    assert 0 <= done["valid_share"] <= 1

    assert [event["step"] for event in events(run, "step")] == [1, 2, 3, 4, 5, 6]
    assert {event["rank"] for event in events(run, "worker")} == {0, 1}
    assert [event["step"] for event in events(run, "checkpoint")] == [2, 4, 6]
    assert [event["step"] for event in events(run, "eval")] == [3, 6]
    first, last = events(run, "step")[0], events(run, "step")[-1]
    assert last["loss"] < first["loss"]
    assert {
        "tokens_per_s",
        "lr",
        "grad_norm",
        "forward_ms",
        "backward_ms",
        "exchange_ms",
        "optimizer_ms",
    } <= first.keys()

    code, text = andon("generate", str(checkpoint), "Once", "--length=5", cwd=tmp_path, executed=True)
    assert code == 0 and text.startswith("Once"), text
    code, text = andon("evaluate", str(checkpoint), cwd=tmp_path)
    assert code == 0 and "bits per byte" in text and "floor of the loss" in text, text

    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    x = torch.tensor([tokenizer("Once there was").input_ids])
    with torch.no_grad():
        torch.testing.assert_close(theirs(x).logits, load_model(checkpoint).logits(x), atol=1e-4, rtol=0)


def test_one_answer_for_one_two_and_three_workers(tmp_path: Path) -> None:  # C-ONE-001
    digests = {
        workers: train(f"--workers={workers}", cwd=tmp_path, name=f"run-{workers}")["weights_blake3"]
        for workers in (1, 2, 3)
    }
    assert len(set(digests.values())) == 1, digests


def test_a_finished_run_is_not_repeated_and_a_longer_one_goes_on(tmp_path: Path) -> None:
    whole = train("--train.steps=9", "--optim.schedule=constant", cwd=tmp_path, name="whole")
    part = train("--train.steps=5", "--optim.schedule=constant", cwd=tmp_path, name="parts")
    again = train("--train.steps=5", "--optim.schedule=constant", cwd=tmp_path, name="parts")
    assert again["weights_blake3"] == part["weights_blake3"]
    assert len(events(tmp_path / "parts", "step")) == 5
    longer = train("--train.steps=9", "--workers=2", "--optim.schedule=constant", cwd=tmp_path, name="parts")
    assert longer["weights_blake3"] == whole["weights_blake3"]
    assert len(events(tmp_path / "parts", "step")) == 9
    assert summary(tmp_path / "parts")["step"] == 9
