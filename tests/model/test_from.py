"""`andon train --model.from`: pretraining goes on from a Hugging Face Llama model, with its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from andon.config.load import load
from andon.data.build import Corpus, prepare
from andon.errors import UserError
from andon.run.prepare import build_batches
from tests.finetune.tuning import VOCAB, make_model
from tests.kit.runs import andon, events, soak, summary

OPTIONS = [
    *("--train.context=48", "--train.micro_batch=2", "--train.slots=4", "--train.steps=3", "--data.stories=200"),
    *("--eval.windows=8", "--eval.stories=0", "--eval.sample_every=0", "--device=cpu", "--group.timeout=20"),
]


@pytest.mark.parametrize(("workers", "tied"), [(2, False), (1, True), soak(1, False), soak(2, True)])
def test_the_first_loss_is_that_of_transformers(tmp_path: Path, workers: int, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    rope = {"rope_type": "default", "rope_theta": 500.0}
    own: dict[str, Any] = {
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-3,
        "rope_parameters": rope,
        "num_key_value_heads": 1,
    }
    make_model(tmp_path / "llama", "llama", False, initializer_range=0.2, **own)
    code, output = andon("train", "--model.from=llama", f"--workers={workers}", "--run.dir=run", *OPTIONS, cwd=tmp_path)
    assert code == 0, output
    corpus = Corpus(("stories",), str(tmp_path / "llama"), VOCAB, 200, 1)
    config = load(tmp_path / "run" / "config.yaml")
    batches = build_batches(config, prepare(corpus, tmp_path / "cache" / "andon"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    losses = []
    for slot in range(4):
        x, y = (torch.from_numpy(each) for each in batches(1, slot))
        with torch.no_grad():
            logits = model(input_ids=x).logits
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).item())
    assert events(tmp_path / "run", "step")[0]["loss"] == pytest.approx(sum(losses) / 4, abs=1e-4)
    saved = tmp_path / "run" / "checkpoints" / "checkpoint-3"
    again = json.loads((saved / "config.json").read_text())
    assert again["rope_theta"] == 500.0 and again["rms_norm_eps"] == 1e-3 and again["tie_word_embeddings"] is tied
    assert AutoModelForCausalLM.from_pretrained(saved).config.vocab_size == VOCAB
    if tied:
        return
    # What it wrote is where another run can go on from, and says so in its own configuration.
    following = ["--model.from=run/checkpoints/checkpoint-3", "--run.dir=next", "--train.steps=1"]
    code, output = andon("train", *OPTIONS, *following, cwd=tmp_path)
    assert code == 0 and summary(tmp_path / "next")["loss"] < events(tmp_path / "run", "step")[0]["loss"] + 0.5, output


def test_its_sizes_are_those_of_the_folder(tmp_path: Path) -> None:
    make_model(tmp_path / "llama")
    config = load(None, {"model.from": str(tmp_path / "llama"), "run.dir": str(tmp_path)})
    assert (config.model.hidden, config.model.vocab, config.train.context) == (32, VOCAB, 160)
    assert config.data.tokenizer == str(tmp_path / "llama") and config.optim.lr == 1e-4
    assert load(None, {"model.from": str(tmp_path / "llama"), "optim.lr": 3e-4}).optim.lr == 3e-4


def test_what_cannot_go_on_is_three_lines(tmp_path: Path) -> None:
    make_model(tmp_path / "gpt2", "gpt2")
    for folder, what in (("nowhere", "nowhere is not a checkpoint"), ("gpt2", "is not a plain Llama")):
        with pytest.raises(UserError, match=what) as caught:
            load(None, {"model.from": str(tmp_path / folder)})
        assert len(str(caught.value).splitlines()) == 3
    make_model(tmp_path / "llama")
    code, output = andon("train", "--model.from=llama", "--model.hidden=64", "--run.dir=run", *OPTIONS, cwd=tmp_path)
    assert code == 1 and "does not fit this model" in output, output
