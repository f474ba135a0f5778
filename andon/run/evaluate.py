"""Evaluating a model: loss on held-out windows, bits per byte, and the share of valid stories."""

import math
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from andon.data import stories
from andon.data.batches import Batch
from andon.data.tokenizer import Tokenizer
from andon.engine.loader import count_targets
from andon.model.generate import sample
from andon.model.llama import Llama
from andon.transport.base import Group

PART = struct.Struct("<dQQ")  # of a micro-batch: summed loss, right answers, targets
Score = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | int]]
"""Inputs and targets of a micro-batch → summed loss, right answers."""


@torch.no_grad()
def score_held_out(
    batches: Iterable[Batch], group: Group, device: torch.device, score: Score
) -> tuple[float, int, int]:
    """The mean loss per target, right answers and targets of all micro-batches. Ranks share the micro-batches; the sums
    are exact, so that they are the same for any number of ranks."""
    mine = b""
    for number, (x, y) in enumerate(batches):
        if number % group.world_size == group.rank:
            loss, right = score(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device))
            mine += PART.pack(loss.item(), int(right), count_targets(y))
    parts = [part for packed in group.all_gather_bytes(mine) for part in PART.iter_unpack(packed)]
    losses, rights, counts = zip(*parts, strict=True)
    return math.fsum(losses) / sum(counts), sum(rights), sum(counts)


def validation_loss(model: Llama, batches: Iterable[Batch], group: Group) -> float:
    """Mean loss per token."""
    return score_held_out(batches, group, model.cos.device, lambda x, y: (model(x, y), 0))[0]


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
