"""`andon bench finetune`: LoRA with Andon's step against Hugging Face's Trainer with peft and DDP, in one run.

Both train the same adapters on the same model, with the same initial weights and the same samples in the same order, in
the same processes. They take turns, so that times can be compared turn by turn and losses step by step.
"""

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from andon.bench.kit.processes import run_ranks
from andon.bench.kit.report import ratio, show, slowest
from andon.config.finetune import FinetuneConfig
from andon.config.load import merge, validate
from andon.data import stories
from andon.data.tokenizer import Tokenizer
from andon.finetune.plan import resolve_steps
from andon.model.hub_config import to_hub
from andon.model.shape import SHAPES

STEPS = 5  # in a turn
WARM_UP = 2  # turns
STORIES = 400
LARGEST_VOCABULARY = 2_048


def main(presets: Sequence[str], ranks: int, samples: int, repetitions: int, transport: str, as_json: bool) -> None:
    """Measure, and print one row for each model."""
    rows = []
    for preset in presets:
        with tempfile.TemporaryDirectory(prefix="andon-bench-") as folder:
            by_rank = _measure(Path(folder), preset, ranks, samples, repetitions, transport)
        rows.append(_row(preset, ranks, samples, by_rank))
    show(f"LoRA, {ranks} workers, one thread each, {transport}, against Trainer + peft over Gloo", rows, as_json)


def _measure(folder: Path, preset: str, ranks: int, samples: int, repetitions: int, transport: str) -> list[Any]:
    model, data = _make_model(folder / "model", preset), _make_data(folder / "samples.jsonl")
    keys = {
        "model": str(model),
        "data.files": [str(data)],
        "data.cache": str(folder / "cache"),
        "data.validation": 0.0,
        "run.dir": str(folder / "run"),
        "train.slots": ranks,
        "train.micro_batch": samples,
        "train.steps": (WARM_UP + repetitions) * STEPS + 1,
        "optim.schedule": "constant",
        "optim.warmup": 0,
        "optim.lr": 1e-3,
        "checkpoint.every": 0,
        "workers": ranks,
        "device": "cpu",
    }
    config = resolve_steps(validate(merge({}, keys, FinetuneConfig), FinetuneConfig), Console(quiet=True))
    task = {"config": config.model_dump(mode="json"), "turns": WARM_UP + repetitions, "steps": STEPS}
    return run_ranks("andon.bench.ranks.finetune", ranks, {**task, "transport": transport})


def _row(preset: str, ranks: int, samples: int, by_rank: Sequence[Any]) -> dict[str, Any]:
    seconds = {name: turns[WARM_UP:] for name, turns in slowest([each["seconds"] for each in by_rank]).items()}
    # A rank of the Trainer reports the loss of its own samples, weighted so that the mean over ranks is the step's.
    theirs = [statistics.fmean(step) for step in zip(*(each["trainer"] for each in by_rank), strict=True)]
    ours = by_rank[0]["andon"]
    return {
        "model": preset,
        "ranks": ranks,
        "samples": samples,
        "andon_ms": 1e3 * statistics.median(seconds["andon"]),
        "trainer_ms": 1e3 * statistics.median(seconds["trainer"]),
        "ratio": ratio(seconds["trainer"], seconds["andon"]),
        "loss": ours[-1],
        "loss_gap": max(abs(one - other) for one, other in zip(ours, theirs, strict=True)),
    }


def _make_model(folder: Path, preset: str) -> Path:
    """Write a Hugging Face Llama model with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**to_hub(SHAPES[preset], end_token=0))).save_pretrained(folder)
    Tokenizer.train(stories.stories(1, STORIES), min(LARGEST_VOCABULARY, SHAPES[preset].vocab)).save(folder)
    return folder


def _make_data(path: Path) -> Path:
    """Write stories as samples: the first half of the words is the prompt, the rest the completion."""
    rows = []
    for text in stories.stories(2, STORIES):
        words = text.split(" ")
        half = len(words) // 2
        rows.append({"prompt": " ".join(words[:half]), "completion": " " + " ".join(words[half:])})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
