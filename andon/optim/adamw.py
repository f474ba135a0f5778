"""AdamW on parts of the arena, on a CPU in two fused calls: one for all matrices and one for the rest.

If the weights are bf16, the state also holds the *master*: the same weights in f32. AdamW updates the master, and the
weights are the master rounded.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from andon.engine.gradients.arena import Arena
from andon.optim.base import Range, UpdateRule


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


@dataclass(frozen=True)
class _Numbers:
    """The number of an update and, on the device, the divisor of the gradients and the gate, if there is one."""

    updates: int
    divisor: Tensor
    gate: Tensor | None


class AdamWRule(UpdateRule):
    """AdamW with weight decay on matrices only. Its options: `lr`, `betas`, `eps`, `weight_decay`."""

    gated = True

    def __init__(self, arena: Arena, parts: Sequence[Range], updated: Sequence[Range] | None = None) -> None:
        super().__init__(arena, parts, updated)
        self.state = {"first": arena.zeros(self.size), "second": arena.zeros(self.size)}
        if arena.weights.dtype != torch.float32:
            weights = [arena.weights[start:stop].float() for start, stop in parts]
            self.state["master"] = torch.cat([arena.zeros(0), *weights])
        self._matrices, self._vectors = self._split()

    def _split(self) -> tuple[list[_Run], list[_Run]]:
        """The updated ranges that hold matrices, and those that hold the rest."""
        matrices: list[_Run] = []
        vectors: list[_Run] = []
        offset = 0
        for start, stop in self.parts:
            ranges = [(max(lo, start), min(hi, stop)) for lo, hi in self.updated]
            for unit in self.arena.layout.units:
                for first, last, kind in ((unit.start, unit.vectors, matrices), (unit.vectors, unit.stop, vectors)):
                    for lo, hi in ((max(lo, first), min(hi, last)) for lo, hi in ranges):
                        if lo < hi:
                            kind.append(_Run(lo, hi, offset + lo - start))
            offset += stop - start
        return matrices, vectors

    @torch.no_grad()
    def weights_changed(self, parameters: Collection[str]) -> None:
        """Copy these weights into the master."""
        for name, lo, hi, offset in self.pieces() if "master" in self.state else ():
            if name in parameters:
                weights = self.arena.layout.view(self.arena.weights, name).view(-1)
                self.state["master"][offset : offset + hi - lo] = weights[lo:hi]

    def update(self, gradients: Tensor, scale: float, options: Mapping[str, Any]) -> None:
        """Update the weights from summed gradients, which are first divided by `scale` in place."""
        self._launch(gradients, _number(scale, gradients.device), None, options)

    def update_unless(self, gate: Tensor, gradients: Tensor, scale: Tensor, options: Mapping[str, Any]) -> None:
        """Like `update`, but the device changes nothing if `gate` is 1."""
        self._launch(gradients, scale.float(), gate.float(), options)

    @torch.no_grad()
    def _launch(self, gradients: Tensor, divisor: Tensor, gate: Tensor | None, options: Mapping[str, Any]) -> None:
        self.updates += 1
        numbers = _Numbers(self.updates, divisor, gate)
        update = self._update_on_gpu if gradients.device.type == "cuda" else self._update
        update(self._matrices, gradients, numbers, options)
        update(self._vectors, gradients, numbers, {**options, "weight_decay": 0.0})

    def _update(self, runs: list[_Run], gradients: Tensor, numbers: _Numbers, options: Mapping[str, Any]) -> None:
        if not runs:
            return
        weights = [run.of_arena(self.arena.weights) for run in runs]
        state = {name: [run.of_state(flat) for run in runs] for name, flat in self.state.items()}
        master = state.get("master", weights)
        torch._fused_adamw_(
            master,
            [run.of_arena(gradients) for run in runs],
            state["first"],
            state["second"],
            [],
            [_number(numbers.updates, gradients.device)] * len(runs),
            lr=options["lr"],
            beta1=options["betas"][0],
            beta2=options["betas"][1],
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=numbers.divisor,
            found_inf=numbers.gate,
        )
        if master is not weights:
            for rounded, exact in zip(weights, master, strict=True):
                rounded.copy_(exact)

    def _update_on_gpu(
        self, runs: list[_Run], gradients: Tensor, numbers: _Numbers, options: Mapping[str, Any]
    ) -> None:
        from andon.optim.adamw_kernel import update  # needs triton

        for run in runs:
            state = {name: run.of_state(flat) for name, flat in self.state.items()}
            weights, master = run.of_arena(self.arena.weights), state.get("master")
            update(
                weights if master is None else master,
                run.of_arena(gradients),
                (state["first"], state["second"]),
                None if master is None else weights,
                numbers.divisor,
                numbers.gate,
                numbers.updates,
                options,
                self.keeps_gradients,
            )


def _number(value: float, device: torch.device) -> Tensor:
    """A number on the device, made there so that the host does not wait for a copy."""
    return torch.full((), value, dtype=torch.float32, device=device)
