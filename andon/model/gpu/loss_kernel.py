"""The cross entropy of many rows of logits on a GPU; its gradient replaces the logits (`loss.loss_of_chunk`).

A target outside the vocabulary gives a loss of NaN, which stops the line."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS: Final = 8_192
"""Columns at a time. The second pass over a row finds it in the GPU's cache."""


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(logits, targets, losses, WIDTH: tl.constexpr, IGNORED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * WIDTH
    target = tl.load(targets + row)
    counts = target != IGNORED
    chosen = tl.load(logits + target, (target >= 0) & (target < WIDTH), float("nan")).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    top, total = float("-inf"), 0.0
    for start in range(0, WIDTH, BLOCK):
        at = start + columns
        values = tl.load(logits + at, at < WIDTH, float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(values, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(values - higher), 0)
        top = higher
    scale = top + tl.log(total)
    tl.store(losses + row, tl.where(counts, scale - chosen, 0.0))
    for start in range(0, WIDTH, BLOCK):
        at = start + columns
        values = tl.load(logits + at, at < WIDTH, float("-inf")).to(tl.float32)
        gradient = tl.exp(values - scale) - tl.where(at == target, 1.0, 0.0)
        tl.store(logits + at, tl.where(counts, gradient, 0.0), at < WIDTH)


def turn_into_gradient(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """The loss of each row; its gradient replaces the logits."""
    rows, width = logits.shape
    losses = torch.empty(rows, device=logits.device)
    block = min(COLUMNS, triton.next_power_of_2(width))
    with torch.cuda.device(logits.device):
        _cross_entropy[(rows,)](logits, targets, losses, WIDTH=width, IGNORED=ignored, BLOCK=block, num_warps=8)
    return losses
