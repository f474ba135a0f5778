"""Evaluating a model: loss on held-out windows, bits per byte, and the share of valid stories."""

import math
import struct
from collections.abc import Iterable
from typing import NamedTuple

import torch

from andon.data import stories
from andon.data.batches import Batch
from andon.data.tokenizer import Tokenizer
from andon.model.generate import sample
from andon.model.llama import Llama
from andon.transport.base import Group

PART = struct.Struct("<IdQ")  # micro-batch, summed loss, tokens


@torch.no_grad()
def validation_loss(model: Llama, batches: Iterable[Batch], group: Group) -> float:
    """Mean loss per token. Ranks share the micro-batches; the sum is exact, so that it is the same for any number."""
    mine, device = b"", model.cos.device
    for number, (x, y) in enumerate(batches):
        if number % group.world_size == group.rank:
            loss = model(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device))
            mine += PART.pack(number, loss.item(), y.size)
    parts = [part for packed in group.all_gather_bytes(mine) for part in PART.iter_unpack(packed)]
    tokens: int = sum(count for _, _, count in parts)
    return math.fsum(loss for _, loss, _ in parts) / tokens


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """A loss in nats per token, as bits per byte of text."""
    return loss / math.log(2) / bytes_per_token


def sample_texts(model: Llama, tokenizer: Tokenizer, count: int, temperature: float, seed: int) -> list[str]:
    """Sample texts without a prompt, each up to the end token or one context long."""
    rows = sample(model, [[tokenizer.end]] * count, tokenizer.end, model.shape.context - 1, temperature, seed)
    return [tokenizer.decode(row) for row in rows]


class StoryScore(NamedTuple):
    """The share of sampled stories that are valid, and how many of them are in the training text."""

    valid_share: float
    known: int


def story_score(samples: list[str], seed: int, count: int) -> StoryScore:
    """Check sampled stories against the grammar and against the `count` training stories of a seed."""
    training = set(stories.stories(seed, count))
    return StoryScore(sum(map(stories.is_valid, samples)) / len(samples), sum(text in training for text in samples))


def loss_floor(story_count: int, token_count: int) -> float:
    """The lowest loss that the built-in stories allow: the grammar's entropy per token, in nats."""
    return stories.entropy() * story_count / token_count
