"""Using a checkpoint: writing text and measuring it."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from rich.console import Console

from andon.checkpoint.manifest import verify_named
from andon.checkpoint.store import load_state
from andon.config.load import build
from andon.data import stories
from andon.data.batches import Batches
from andon.data.tokenizer import Tokenizer
from andon.errors import UserError
from andon.model.generate import sample
from andon.model.hub import load_model
from andon.run import evaluate as evaluation
from andon.run.prepare import other_data, prepare_tokens
from andon.transport.local import LocalGroup


def generate(folder: Path, prompt: str, *, count: int, length: int, temperature: float, seed: int) -> None:
    """Print texts that go on from a prompt."""
    verify_named(folder)
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    start = [tokenizer.end, *tokenizer.encode(prompt)]
    room = model.shape.context
    if len(start) >= room:
        raise UserError(
            f"The prompt has {len(start):,} tokens",
            f"The model's context is {room:,}",
            "Give a shorter prompt",
        )
    rows = sample(model, [start] * count, tokenizer.end, length or room - len(start), temperature, seed)
    for row in rows:
        print(prompt + tokenizer.decode(row))


def evaluate(folder: Path, windows: int, console: Console) -> None:
    """Print what a checkpoint is worth on the held-out part of its corpus."""
    verify_named(folder)
    state = load_state(folder)
    config = build(state["config"], {})
    model, tokens = load_model(folder), prepare_tokens(config, console)
    if tokens.digest != state["data"]:
        raise other_data(folder)
    train = config.train
    batches = Batches(
        tokens, config.seed, train.slots, train.micro_batch, train.context, config.data.validation
    )
    loss = evaluation.validation_loss(model, batches.validation(windows), LocalGroup())
    bits = evaluation.bits_per_byte(loss, tokens.bytes_per_token)
    console.print(f"validation loss {loss:.4f} nats per token, {bits:.4f} bits per byte")
    if config.data.corpus == ("stories",):
        with torch.no_grad():
            count = config.eval.stories or 64
            texts = evaluation.write(model, tokens.tokenizer(), count, config.eval.temperature, config.seed)
        training = set(stories.stories(config.seed, config.data.stories))
        score = evaluation.story_score(texts, training.__contains__)
        console.print(
            f"{score.valid_share:.1%} of {len(texts)} stories valid, {score.known} in the training text"
        )
        floor = stories.entropy() * config.data.stories / tokens.tokens
        bits = stories.entropy() / math.log(2)
        console.print(
            f"floor of the loss: {floor:.4f}, from the grammar's entropy of {bits:.0f} bits a story"
        )
