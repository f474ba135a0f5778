"""AdamW on the flat arena: two fused calls, one for the matrices of all units and one for the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from andon.arena import Arena


@dataclass(frozen=True)
class Settings:
    """What AdamW needs besides the learning rate."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


class AdamW:
    """AdamW with decoupled weight decay on matrices only; its moments have the arena's layout."""

    def __init__(self, arena: Arena, settings: Settings) -> None:
        self.arena, self.settings = arena, settings
        self.first = arena.zeros(arena.layout.size)
        self.second = arena.zeros(arena.layout.size)
        self.steps_done = 0
        units = arena.layout.units
        self._matrices = [(unit.start, unit.vectors) for unit in units if unit.start < unit.vectors]
        self._vectors = [(unit.vectors, unit.stop) for unit in units if unit.vectors < unit.stop]

    @torch.no_grad()
    def step(self, gradients: Tensor, scale: float, lr: float) -> None:
        """Update the weights from summed gradients, which are first divided by `scale`, in place."""
        divisor = torch.tensor(scale, dtype=torch.float32, device=gradients.device)
        for ranges, decay in ((self._matrices, self.settings.weight_decay), (self._vectors, 0.0)):
            self._update(ranges, gradients, divisor, lr, decay)
        self.steps_done += 1

    def _update(
        self, ranges: list[tuple[int, int]], gradients: Tensor, divisor: Tensor, lr: float, decay: float
    ) -> None:
        if not ranges:
            return
        weights, grads, first, second = (
            [flat[start:stop] for start, stop in ranges]
            for flat in (self.arena.weights, gradients, self.first, self.second)
        )
        done = torch.tensor(float(self.steps_done), device=gradients.device)
        adamw(
            weights,
            grads,
            first,
            second,
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
