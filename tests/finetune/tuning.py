"""Small random models, samples of the built-in stories, and fine-tuning in this process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from andon.config.finetune import FinetuneConfig
from andon.config.load import merge, validate
from andon.data import stories
from andon.data.tokenizer import Tokenizer
from andon.finetune.base import Base
from andon.finetune.build import FineTuningBuilder
from andon.finetune.loop import FineTuning
from andon.finetune.plan import resolve_steps
from andon.finetune.samples.tokenize import prepare_samples
from andon.run.records.events import Event, no_event
from andon.transport.base import Group
from andon.transport.local import LocalGroup

VOCAB, WIDTH = 320, 32
LIBRARIES = ("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "peft")
"""What `andon finetune` imports, for `tests.kit.prefork.preload`."""
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FAMILIES = ("llama", "qwen2", "gpt2", "gpt_neox", "bert")


@cache
def tokenizer(vocabulary: int) -> Tokenizer:
    """A tokenizer of the built-in stories."""
    return Tokenizer.train(stories.stories(1, 300), vocabulary)


def make_model(folder: Path, family: str = "llama", chat: bool = False, **sizes: Any) -> Path:
    """The folder of a small model with random weights and a tokenizer of the built-in stories."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    heads: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
    }
    if family == "gpt2":
        heads = {"n_head": 2, "n_layer": 2, "n_embd": WIDTH}
    if family == "qwen2":
        heads["num_key_value_heads"] = 1
    positions = "n_positions" if family == "gpt2" else "max_position_embeddings"
    tokens = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    own = {"vocab_size": VOCAB, positions: 160, **heads, **tokens, **sizes}
    config = AutoConfig.for_model(family, **own)
    torch.manual_seed(1)
    kind = AutoModelForSequenceClassification if family == "bert" else AutoModelForCausalLM
    kind.from_config(config).save_pretrained(folder)
    tokenizer(own["vocab_size"]).save(folder)
    if chat:
        (folder / "chat_template.jinja").write_text(CHAT)
    return folder


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """A .jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def plot_of(story: str) -> str:
    """Which plot a story has."""
    sentences = re.split(r"(?<=\.) ", story)
    names = zip(stories.SENTENCES, stories.PLOTS, strict=True)
    return next(name for name, plot in names if stories.follows(plot, sentences))


def plots(path: Path, count: int) -> Path:
    """Stories, and which plot each has."""
    texts = stories.stories(7, count)
    return write_rows(path, ({"text": text, "label": plot_of(text)} for text in texts))


def endings(path: Path, count: int) -> Path:
    """The first sentence of a story, and the second."""
    texts = (re.split(r"(?<=\.) ", text) for text in stories.stories(7, count))
    return write_rows(path, ({"prompt": first, "completion": f" {second}"} for first, second, *_ in texts))


def chats(path: Path, count: int) -> Path:
    """Conversations of two questions and two answers about stories."""
    rows = []
    for text in stories.stories(7, count):
        first, second, third, fourth, *_ = re.split(r"(?<=\.) ", text)
        said = (("user", first), ("assistant", second), ("user", third), ("assistant", fourth))
        rows.append({"messages": [{"role": role, "content": content} for role, content in said]})
    return write_rows(path, rows)


def tune_config(model: Path, data: Path, **overrides: Any) -> FinetuneConfig:
    """A settled configuration; overrides with double underscores for dots."""
    given = {
        "model": str(model),
        "data.files": [str(data)],
        "data.cache": str(data.parent / "cache"),
        "run.dir": str(data.parent / "run"),
        "device": "cpu",
        "train.slots": 2,
        "train.micro_batch": 4,
        "train.context": 64,
        "optim.lr": 1e-2,
        "optim.warmup": 2,
        "eval.samples": 16,
        "eval.shown": 1,
        "eval.length": 4,
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }
    return resolve_steps(validate(merge({}, given, FinetuneConfig), FinetuneConfig), Console(quiet=True))


def open_run(config: FinetuneConfig, group: Group, events: list[Event] | None = None) -> FineTuning:
    """A fine-tuning on a group."""
    torch.set_num_threads(1)
    samples = prepare_samples(config, Base(config.model))
    emit = no_event if events is None or group.rank else events.append
    builder = FineTuningBuilder(config, samples)
    return builder.loop(builder.first(group, torch.device("cpu"), emit), emit)


def tune(config: FinetuneConfig) -> list[Event]:
    """A fine-tuning of one worker in this process: its events."""
    events: list[Event] = []
    run = open_run(config, LocalGroup(), events)
    try:
        run.train()
    finally:
        run.trainer.close()
    return events
