"""Sampling text from a model."""

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from andon.model.llama import Cache, Llama

COLDEST: Final = 1e-30
"""Logits divided by a lower temperature overflow in f32; it counts as 0, which takes the likeliest token."""


@torch.no_grad()
def sample(
    model: Llama, prompts: Sequence[Sequence[int]], end: int, length: int, temperature: float = 1.0, seed: int = 0
) -> list[list[int]]:
    """Continue several prompts of the same length at once, each up to `length` tokens or the end token."""
    rows = torch.tensor(prompts, dtype=torch.long, device=model.cos.device)
    done = [False] * len(prompts)
    out: list[list[int]] = [[] for _ in prompts]
    for drawn in _draw(model, rows, length, temperature, seed):
        for row, token in enumerate(drawn):
            done[row] = done[row] or token == end
            if not done[row]:
                out[row].append(token)
        if all(done):
            break
    return out


def _draw(model: Llama, rows: Tensor, length: int, temperature: float, seed: int) -> Iterator[list[int]]:
    generator = torch.Generator(rows.device).manual_seed(seed)
    cache, unseen = Cache(model, len(rows)), rows
    for _ in range(length):
        if cache.length + unseen.shape[1] > model.shape.context:
            # The context is full: continue from its later half.
            cache, unseen = Cache(model, len(rows)), rows[:, -(model.shape.context // 2) :]
        logits = model.logits(unseen, cache)[:, -1].float()
        if temperature < COLDEST:
            unseen = logits.argmax(-1, keepdim=True)
        else:
            unseen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        rows = torch.cat((rows, unseen), 1)
        yield unseen[:, 0].tolist()
