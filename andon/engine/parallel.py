"""The Python door: data-parallel training of any module, with the same checks as `andon train`.

    group = andon.join()                                  # torchrun's ranks; alone, a group of one
    parallel = andon.DataParallel(model, group, slots=8)
    for step in range(1, steps + 1):
        for slot in parallel.slots:                       # my share of the step's 8 micro-batches
            x, y = batch(step, slot)
            loss = cross_entropy(model(x), y, reduction="sum")
            parallel.backward(loss, slot, tokens=y.numel())
        totals = parallel.step(lr=3e-4)                   # exchange, verdict, update, proof; or JidokaHalt

Units are found by a rule (`andon.engine.arena.backward_order`): each child of the longest module list is a
block. Only parameters that require gradients take part, so a LoRA model exchanges its adapters alone.
`zero=True`, short for `Zero("even")`, gives each rank an even share of the optimizer state. A model whose
parameters are bf16 is trained on an f32 master, taken from them when it is handed over.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from andon.engine.accumulate import Gradients, OnGradient, Totals
from andon.engine.arena import Arena
from andon.engine.gather import Gather
from andon.integrity.fingerprint import Fingerprints, compare_replicas
from andon.integrity.halt import JidokaHalt
from andon.optim.adamw import AdamW, Settings
from andon.optim.sharding import Ownership, Zero
from andon.transport.base import Group


class DataParallel:
    """A module whose parameters live in an arena and are trained alike on every rank of a group."""

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        slots: int,
        settings: Settings | None = None,
        zero: Zero | bool = False,
        on_gradient: OnGradient | None = None,
    ) -> None:
        self.model, self.group = model, group
        if not isinstance(zero, Zero):
            zero = Zero("even" if zero else "off")
        on_cpu = next(model.parameters()).device.type == "cpu"
        self.arena = Arena(
            model, (lambda size: group.allocate(1, size)[0]) if zero.policy != "off" and on_cpu else None
        )
        group.broadcast(self.arena.weights, src=0)
        self.ownership = Ownership.of(self.arena.layout, group.world_size, zero.policy, zero.replicas)
        self.gradients = Gradients(self.arena, group, slots, self.ownership, on_gradient)
        self.gather = Gather(self.arena, group, self.ownership, self.gradients.thread)
        self.own = self.ownership.parts(group.rank)
        parts = self.own + self.ownership.replica_parts(group.rank)
        self.optimizer = AdamW(self.arena, settings or Settings(), parts)
        self.state = {"weights": self.arena.weights}
        if not self.ownership.shared:
            self.state |= self.optimizer.moments
        self.fingerprints = Fingerprints(self.arena, self.state, group)
        self.slots = self.gradients.slots
        self.steps_done = 0
        self._gathered: dict[str, Tensor] = {}

    def backward(self, loss: Tensor, slot: int, tokens: int) -> None:
        """Backward of one slot's loss, summed over its tokens (or samples)."""
        self.gradients.backward(loss, slot, tokens)

    def step(self, lr: float, clip: float = 1.0) -> Totals:
        """End a step: agree with all ranks, halt if something is wrong, and only then update."""
        step = self.steps_done + 1
        prints = self.fingerprints.take(f"{step} {lr} {clip}")
        totals = self.gradients.finish()
        self.compare(step, prints)
        if not totals.sound:
            raise JidokaHalt(step, totals.complaint)
        self.update(totals, lr, clip)
        self.steps_done = step
        return totals

    def update(self, totals: Totals, lr: float, clip: float) -> None:
        """AdamW on the mean gradient, clipped to a global norm (0: not clipped)."""
        scale = totals.tokens * max(1.0, totals.norm / clip if clip else 1.0)
        self.optimizer.step(self.gradients.total, scale, lr)
        self.gather.begin()

    def compare(self, step: int, prints: bytes) -> None:
        """Halt on every rank if any rank holds other bits than it should (C-DDP-001)."""
        self.fingerprints.compare(step, prints)
        if self.ownership.replicas > 1:
            owned = sum(stop - start for start, stop in self.own)
            moments = self.optimizer.moments.values()
            compare_replicas(
                self.group, step, [flat[:owned] for flat in moments], [flat[owned:] for flat in moments]
            )

    def _gather_moments(self) -> dict[str, Tensor]:
        """AdamW's moments of every parameter on the CPU of rank 0, nothing elsewhere; every rank calls it.

        The others hold one unit at a time; rank 0 keeps the room for the next time."""
        layout, leads = self.arena.layout, self.group.rank == 0
        most = max(unit.stop - unit.start for unit in layout.units)
        found: dict[str, Tensor] = {}
        for kind, flat in self.optimizer.moments.items():
            if leads and kind not in self._gathered:
                self._gathered[kind] = torch.zeros(layout.size)
            room, at = self._gathered[kind] if leads else torch.zeros(most), 0
            for unit, bounds in zip(layout.units, self.ownership.bounds or (), strict=True):
                whole = room[unit.start : unit.stop] if leads else room[: unit.stop - unit.start]
                lo, hi = bounds[self.group.rank : self.group.rank + 2]
                whole[lo:hi].copy_(flat[at : at + hi - lo])
                at += hi - lo
                self.group.all_gather(whole, bounds)
            if leads:
                found |= {f"{kind}.{name}": view for name, view in layout.views(room).items()}
        return found

    def moments_to_save(self, alone: bool) -> dict[str, Tensor]:
        """What this rank saves of AdamW's moments: `first.NAME[lo:hi]` and the elements, where they are.

        `alone`: rank 0 saves everything; with ZeRO it is gathered for that, by all ranks together."""
        moments, ranges = self.optimizer.moments, self.own
        if alone and self.ownership.shared:
            whole = self._gather_moments()
            return {f"{name}[0:{tensor.numel()}]": tensor.view(-1) for name, tensor in whole.items()}
        if alone and self.group.rank:
            return {}
        if not alone and not self.ownership.shared:  # everyone has all of it: an even share each
            ranges = Ownership.of(self.arena.layout, self.group.world_size, "even").parts(self.group.rank)
        pieces = list(self.optimizer.pieces(ranges))
        return {
            f"{kind}.{name}[{lo}:{hi}]": flat[at : at + hi - lo]
            for kind, flat in moments.items()
            for name, lo, hi, at in pieces
        }

    def load_moments(self, read: Callable[[str, str, int, int], Tensor]) -> None:
        """Take this rank's part of the moments; `read` gives elements [lo, hi) of a parameter's."""
        for kind, flat in self.optimizer.moments.items():
            for name, lo, hi, at in self.optimizer.pieces():
                flat[at : at + hi - lo].copy_(read(kind, name, lo, hi))

    def receive_moments(self, read: Callable[[str, str, int, int], Tensor] | None) -> None:
        """Take this rank's part of the moments from rank 0, which alone can read them."""
        for kind, flat in self.optimizer.moments.items():
            for unit in self.arena.layout.units:
                whole = self.arena.zeros(unit.stop - unit.start)
                if read:
                    for piece in unit.slices:
                        lo, size = piece.start - unit.start, piece.shape.numel()
                        whole[lo : lo + size].copy_(read(kind, piece.name, 0, size))
                self.group.broadcast(whole, src=0)
                for name, lo, hi, at in self.optimizer.pieces([(unit.start, unit.stop)]):
                    start = self.arena.layout.slices[name].start - unit.start
                    flat[at : at + hi - lo].copy_(whole[start + lo : start + hi])

    def close(self) -> None:
        """Let go of the model and the group."""
        self.gradients.close()
        self.group.close()


def join(timeout: float = 60.0) -> Group:
    """The group of this process: torchrun's ranks, or a group of one."""
    if "WORLD_SIZE" not in os.environ:
        from andon.transport.local import LocalGroup

        return LocalGroup()
    import torch.distributed as dist

    from andon.transport.torch_dist import TorchGroup

    mine = not dist.is_initialized()
    if mine:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return TorchGroup(None, timeout, owned=mine)
