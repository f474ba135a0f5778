"""Training inside the ranks of a test world: a small model on a small corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from andon.checkpoint.disk.store import weights_blake3
from andon.config.load import load
from andon.config.schema import Config
from andon.config.sections import RunConfig
from andon.data.build import Corpus, prepare
from andon.data.token_set import TokenSet
from andon.engine.trainer import Trainer
from andon.run.pretraining import PretrainingBuilder
from andon.run.records.events import Emit, no_event
from andon.transport.base import Group

SMALL: dict[str, Any] = {
    "model.vocab": 300,
    "model.hidden": 32,
    "model.layers": 2,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.intermediate": 48,
    "train.context": 16,
    "train.micro_batch": 2,
    "train.slots": 8,
    "train.steps": 50,
    "optim.warmup": 5,
    "device": "cpu",
}


def small_config(**overrides: Any) -> Config:
    """The small model; overrides with double underscores for dots."""
    return load(None, {**SMALL, **{key.replace("__", "."): value for key, value in overrides.items()}})


def small_tokens(folder: Path) -> Path:
    """A small corpus of stories, prepared once."""
    return prepare(Corpus(vocab_size=300, stories_count=300), folder).folder


def make_trainer(group: Group, tokens: Path, config: Config, emit: Emit = no_event) -> Trainer:
    """A trainer on a group that outlives it; it saves nothing unless a test has chosen a folder."""
    torch.set_num_threads(1)
    if config.group.transport == "auto":
        zero = config.zero.model_copy(update={"policy": config.zero.resolve("auto")})
        exchange = config.group.model_copy(update={"transport": group.transport})
        config = config.model_copy(update={"zero": zero, "group": exchange})
    trainer = PretrainingBuilder(config, TokenSet.open(tokens)).first(group, torch.device("cpu"), emit)
    if config.run.dir == RunConfig().dir:
        trainer.checkpointer = None
    return trainer


def digest(trainer: Trainer) -> str:
    """The digest of weights and moments together, whoever holds the moments."""
    model, optimizer = trainer.model, trainer.optimizer
    layout = model.arena.layout
    state: dict[str, torch.Tensor] = dict(model.arena.parameters)
    for kind, flat in optimizer.rule.state.items():
        whole, at = torch.zeros(layout.size), 0
        for start, stop in optimizer.owned_parts:
            whole[start:stop] = flat[at : at + stop - start]
            at += stop - start
        for unit, bounds in zip(layout.units, optimizer.ownership.bounds or (), strict=False):
            model.group.all_gather(whole[unit.start : unit.stop], bounds)
        state |= {f"{kind}.{name}": view for name, view in layout.views(whole).items()}
    return weights_blake3(state)


def train_digest(group: Group, tokens: Path, config: Config) -> str:
    """Train all steps; the digest of the weights."""
    trainer = make_trainer(group, tokens, config)
    try:
        for _ in range(config.train.steps):
            trainer.train_step()
        return weights_blake3(trainer.model.arena.parameters)
    finally:
        trainer.close()
