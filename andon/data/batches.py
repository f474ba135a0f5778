"""Batches as a pure function of (seed, step, slot): the position in the data is the step number.

The tokens are cut into *windows* of `context` tokens (plus the one that follows). Every k-th window is held out for
validation. Each epoch visits every training window exactly once (F-DP-002), in the order of a keyed permutation that
is computed, not stored: a Feistel network over the next power of four, applied until the result is in range. The
windows of a step are dealt to its slots in turn (C-SHARD-001).
"""

from typing import Protocol
from zlib import crc32

import numpy as np
import numpy.typing as npt

from andon.errors import UserError

MASK = (1 << 64) - 1
NO_TARGET = -100
"""The target that the loss ignores, in torch and in transformers."""
Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Inputs and targets, each windows x context."""


class Tokens(Protocol):
    """A long sequence of tokens."""

    @property
    def token_count(self) -> int: ...

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]: ...


class Windows:
    """Which of `count` windows each slot of a step takes, and which are held out."""

    def __init__(self, count: int, seed: int, slots: int, micro_batch: int, validation: float) -> None:
        self.seed, self.slots, self.micro_batch = seed, slots, micro_batch
        self.every = max(2, round(1 / validation)) if validation and count > 1 else 0
        self.held_out = count // self.every if self.every else 0
        self.training = count - self.held_out

    def windows(self, step: int, slot: int) -> list[int]:
        """The window numbers of a slot; steps count from 1."""
        first = (step - 1) * self.slots * self.micro_batch
        return [self._window(first + sample) for sample in interleave(self.slots * self.micro_batch, slot, self.slots)]

    def name(self, window: int) -> int | str:
        """The name of a window in a halt."""
        return window

    def validation_windows(self, count: int) -> list[list[int]]:
        """The first held-out windows (training windows if none are held out), by micro-batch."""
        numbers = [self.every * (index + 1) - 1 for index in range(self.held_out)] or list(range(self.training))
        numbers = numbers[:count]
        return [numbers[at : at + self.micro_batch] for at in range(0, len(numbers), self.micro_batch)]

    def _window(self, sample: int) -> int:
        epoch, position = divmod(sample, self.training)
        chosen = permute(position, self.training, self.seed << 32 ^ epoch)
        return chosen + chosen // (self.every - 1) if self.every else chosen


class Batches(Windows):
    """The windows of a corpus as micro-batches."""

    def __init__(
        self, source: Tokens, seed: int, slots: int, micro_batch: int, context: int, validation: float
    ) -> None:
        self.source, self.context = source, context
        windows = max(0, (source.token_count - 1) // context)
        super().__init__(windows, seed, slots, micro_batch, validation)
        if not windows:
            what = f"The corpus has {source.token_count:,} tokens, fewer than one window of {context + 1:,}"
            remedy = f"Give more text, or --train.context {max(1, source.token_count // 4)}"
            raise UserError(what, "train.context is longer than the text", remedy)

    def __call__(self, step: int, slot: int) -> Batch:
        """The micro-batch of a slot."""
        return self._stack(self.windows(step, slot))

    def validation(self, count: int) -> list[Batch]:
        """The first held-out windows (training windows if none are held out), in micro-batches."""
        return [self._stack(windows) for windows in self.validation_windows(count)]

    def _stack(self, windows: list[int]) -> Batch:
        rows = np.stack([self.source.read(window * self.context, self.context + 1) for window in windows])
        return rows[:, :-1], rows[:, 1:]


def checksum(samples: list[int]) -> int:
    """CRC-32 of the sample numbers of a slot, for the ledger."""
    return crc32(",".join(map(str, samples)).encode())


def interleave(count: int, part: int, parts: int) -> range:
    """Every `parts`-th number below `count`, from `part` on: the parts are disjoint and complete."""
    return range(part, count, parts)


def permute(index: int, count: int, key: int) -> int:
    """Apply the permutation of range(count) that `key` selects to an index."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    while True:
        index = _feistel(index, half, key)
        if index < count:
            return index


def _feistel(value: int, half: int, key: int) -> int:
    left, right = value >> half, value & ((1 << half) - 1)
    for turn in range(4):
        left, right = right, left ^ (_mix(right ^ _mix(key * 4 + turn)) & ((1 << half) - 1))
    return left << half | right


def _mix(value: int) -> int:
    """SplitMix64's finaliser."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31
