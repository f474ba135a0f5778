"""AdamW on parts of the flat arena, in two fused calls: one for all matrices and one for the rest.

Where the weights are bf16, the *master*, the same weights in f32, is kept beside the two moments: it is what
AdamW updates, and the weights are what it rounds to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from andon.engine.arena import Arena


@dataclass(frozen=True)
class Settings:
    """What AdamW needs besides the learning rate."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


class AdamW:
    """AdamW with weight decay on matrices only; its moments hold the given parts, one after another."""

    def __init__(self, arena: Arena, settings: Settings, parts: Sequence[tuple[int, int]]) -> None:
        self.arena, self.settings, self.parts = arena, settings, list(parts)
        size = sum(stop - start for start, stop in parts)
        self.moments = {"first": arena.zeros(size), "second": arena.zeros(size)}
        if arena.weights.dtype != torch.float32:
            self.moments["master"] = self._own(arena.weights, arena.zeros(size))
        self.steps_done = 0
        self._matrices, self._vectors = self._split()

    def _own(self, flat: Tensor, into: Tensor) -> Tensor:
        """The parts of a flat buffer, one after another."""
        at = 0
        for start, stop in self.parts:
            into[at : at + stop - start].copy_(flat[start:stop])
            at += stop - start
        return into

    def _split(self) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """(start, stop, offset in the moments) of the parts' matrices and of the rest."""
        matrices: list[tuple[int, int, int]] = []
        vectors: list[tuple[int, int, int]] = []
        offset = 0
        for start, stop in self.parts:
            for unit in self.arena.layout.units:
                for lo, hi, kind in (
                    (unit.start, unit.vectors, matrices),
                    (unit.vectors, unit.stop, vectors),
                ):
                    lo, hi = max(lo, start), min(hi, stop)
                    if lo < hi:
                        kind.append((lo, hi, offset + lo - start))
            offset += stop - start
        return matrices, vectors

    @torch.no_grad()
    def step(self, gradients: Tensor, scale: float, lr: float) -> None:
        """Update the weights from summed gradients, which are first divided by `scale`, in place."""
        divisor = torch.tensor(scale, dtype=torch.float32, device=gradients.device)
        self._update(self._matrices, gradients, divisor, lr, self.settings.weight_decay)
        self._update(self._vectors, gradients, divisor, lr, 0.0)
        self.steps_done += 1

    def _update(
        self, ranges: list[tuple[int, int, int]], gradients: Tensor, divisor: Tensor, lr: float, decay: float
    ) -> None:
        if not ranges:
            return
        weights, grads = ([flat[lo:hi] for lo, hi, _ in ranges] for flat in (self.arena.weights, gradients))
        held = {
            kind: [flat[at : at + hi - lo] for lo, hi, at in ranges] for kind, flat in self.moments.items()
        }
        master = held.get("master", weights)
        done = torch.tensor(float(self.steps_done), device=gradients.device)
        adamw(
            master,
            grads,
            held["first"],
            held["second"],
            [],
            [done.clone() for _ in ranges],
            fused=True,
            grad_scale=divisor,
            amsgrad=False,
            beta1=self.settings.beta1,
            beta2=self.settings.beta2,
            lr=lr,
            weight_decay=decay,
            eps=self.settings.eps,
            maximize=False,
        )
        if master is not weights:
            for rounded, exact in zip(weights, master, strict=True):
                rounded.copy_(exact)

    def pieces(self, within: Sequence[tuple[int, int]] | None = None) -> Iterator[tuple[str, int, int, int]]:
        """(name, lo, hi, offset): elements [lo, hi) of a parameter have their moments at `offset`.

        Only those in the ranges `within` of the arena, if given."""
        offset = 0
        for start, stop in self.parts:
            for first, last in within if within is not None else [(start, stop)]:
                for piece in self.arena.layout.slices.values():
                    lo, hi = max(start, first, piece.start), min(stop, last, piece.stop)
                    if lo < hi:
                        yield piece.name, lo - piece.start, hi - piece.start, offset + lo - start
            offset += stop - start
