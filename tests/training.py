"""Training inside the ranks of a test world: a small model on a small corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from andon.checkpoint.store import weights_blake3
from andon.config.load import load
from andon.config.schema import Config
from andon.data.build import Corpus, prepare
from andon.data.token_set import TokenSet
from andon.engine.trainer import Trainer
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


def make_trainer(group: Group, tokens: Path, config: Config) -> Trainer:
    """A trainer on a group that outlives it."""
    torch.set_num_threads(1)
    return Trainer(config, TokenSet.open(tokens), group, torch.device("cpu"))


def digest(trainer: Trainer) -> str:
    """The digest of weights and moments together, whoever holds the moments."""
    parallel, layout = trainer.parallel, trainer.arena.layout
    state: dict[str, torch.Tensor] = dict(trainer.arena.parameters)
    for kind, flat in parallel.optimizer.moments.items():
        whole, at = torch.zeros(layout.size), 0
        for start, stop in parallel.own:
            whole[start:stop] = flat[at : at + stop - start]
            at += stop - start
        for unit, bounds in zip(layout.units, parallel.ownership.bounds or (), strict=False):
            trainer.group.all_gather(whole[unit.start : unit.stop], bounds)
        state |= {f"{kind}.{name}": view for name, view in layout.views(whole).items()}
    return weights_blake3(state)


def train_digest(group: Group, tokens: Path, config: Config) -> str:
    """Train all steps; the digest of the weights."""
    trainer = make_trainer(group, tokens, config)
    try:
        for _ in range(config.train.steps):
            trainer.train_step()
        return weights_blake3(trainer.arena.parameters)
    finally:
        trainer.gradients.close()
