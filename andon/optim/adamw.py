"""AdamW on parts of the arena, in two fused calls: one for all matrices and one for the rest.

Where the weights are bf16, the state also holds the *master*: the same weights in f32. AdamW updates the
master, and the weights are the master rounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from andon.engine.arena import Arena
from andon.optim.base import Range, UpdateRule


@dataclass(frozen=True)
class AdamWSettings:
    """What AdamW needs besides the learning rate."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclass(frozen=True)
class _Run:
    """Elements [start, stop) of the arena, whose state begins at `offset`."""

    start: int
    stop: int
    offset: int

    def of_arena(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop]

    def of_state(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.stop - self.start]


class AdamWRule(UpdateRule):
    """AdamW with weight decay on matrices only."""

    def __init__(self, arena: Arena, parts: Sequence[Range], settings: AdamWSettings) -> None:
        super().__init__(arena, parts)
        self.settings = settings
        self.state = {"first": arena.zeros(self.size), "second": arena.zeros(self.size)}
        if arena.weights.dtype != torch.float32:
            weights = [arena.weights[start:stop].float() for start, stop in parts]
            self.state["master"] = torch.cat([arena.zeros(0), *weights])
        self._matrices, self._vectors = self._split()

    def _split(self) -> tuple[list[_Run], list[_Run]]:
        """The runs of matrices in the parts, and those of the rest."""
        matrices: list[_Run] = []
        vectors: list[_Run] = []
        offset = 0
        for start, stop in self.parts:
            for unit in self.arena.layout.units:
                for lo, hi, kind in ((unit.start, unit.vectors, matrices), (unit.vectors, unit.stop, vectors)):
                    lo, hi = max(lo, start), min(hi, stop)
                    if lo < hi:
                        kind.append(_Run(lo, hi, offset + lo - start))
            offset += stop - start
        return matrices, vectors

    @torch.no_grad()
    def update(self, gradients: Tensor, scale: float, lr: float) -> None:
        """Update the weights from summed gradients, which are first divided by `scale`, in place."""
        divisor = torch.tensor(scale, dtype=torch.float32, device=gradients.device)
        self._update(self._matrices, gradients, divisor, lr, self.settings.weight_decay)
        self._update(self._vectors, gradients, divisor, lr, 0.0)
        self.updates += 1

    def _update(self, runs: list[_Run], gradients: Tensor, divisor: Tensor, lr: float, weight_decay: float) -> None:
        if not runs:
            return
        weights = [run.of_arena(self.arena.weights) for run in runs]
        state = {name: [run.of_state(flat) for run in runs] for name, flat in self.state.items()}
        master = state.get("master", weights)
        updates = torch.tensor(float(self.updates), device=gradients.device)
        adamw(
            master,
            [run.of_arena(gradients) for run in runs],
            state["first"],
            state["second"],
            [],
            [updates.clone() for _ in runs],
            fused=True,
            grad_scale=divisor,
            amsgrad=False,
            beta1=self.settings.beta1,
            beta2=self.settings.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self.settings.eps,
            maximize=False,
        )
        if master is not weights:
            for rounded, exact in zip(weights, master, strict=True):
                rounded.copy_(exact)
