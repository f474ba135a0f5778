"""A snapshot: a copy of what one rank will write, taken while training goes on.

Rank 0 writes the weights and the module's buffers; the optimizer's state is shared out among the ranks
(`checkpoint.moments`). Weights and state do not change before the next optimizer step, so a background thread can copy
them during the next forward and backward; the module's buffers are few and copied at once. The memory of the copies is
kept for the next save. The same pass takes the digests of the weights: of the copy where there is one, and elsewhere of
the weights themselves.
"""

from collections.abc import Mapping

import torch
from blake3 import blake3
from torch import Tensor, nn

from andon.checkpoint.format import At, tensor_blake3
from andon.engine.arena import Arena, Layout


class Snapshot:
    """What one rank writes: its piece of the moments, which lie in `shards` files, and on rank 0 the weights."""

    def __init__(self, arena: Arena, moments: Mapping[str, Tensor], shards: int, weights: bool) -> None:
        self.arena, self.sources, self.shards = arena, moments, shards
        self.weights: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.moments: Mapping[str, Tensor] = {}
        self.digests: dict[str, str] = {}
        """BLAKE3 of each weight."""
        self._with_weights = weights

    @property
    def size(self) -> int:
        """Bytes of all copies."""
        return sum(tensor.nbytes for each in (self.weights, self.buffers, self.moments) for tensor in each.values())

    def keep_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Copy buffers now: the next forward may change them."""
        self.buffers = {name: buffer.detach().cpu().clone() for name, buffer in buffers.items()}

    @torch.no_grad()
    def take(self, at: At) -> tuple[str, ...]:
        """Copy everything; the digest of each unit's weights."""
        if not self.weights and self._with_weights:
            copy = torch.empty(self.arena.layout.size, dtype=self.arena.weights.dtype)
            self.weights = self.arena.layout.views(copy)
        if not self.moments and self.sources:
            self.moments = _like(self.sources)
        for name, source in self.arena.layout.views(self.arena.weights).items():
            at("snapshot")
            if self._with_weights:
                source = self.weights[name].copy_(source)
            self.digests[name] = tensor_blake3(source)
        for name, source in self.sources.items():
            at("snapshot")
            self.moments[name].copy_(source)
        return unit_digests(self.arena.layout, self.digests)


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to a module's state, by name."""
    buffers, state = dict(module.named_buffers()), module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in buffers.items() if name in state}


def unit_digests(layout: Layout, digests: Mapping[str, str]) -> tuple[str, ...]:
    """The digest of each unit: BLAKE3 over its parameters' names and digests."""
    texts = ("".join(f"{piece.name} {digests[piece.name]}\n" for piece in unit.slices) for unit in layout.units)
    return tuple(blake3(text.encode()).hexdigest() for text in texts)


def weights_digests(arena: Arena) -> dict[str, str]:
    """The digest of each unit of the weights as they are, by its name."""
    views = arena.layout.views(arena.weights)
    found = unit_digests(arena.layout, {name: tensor_blake3(view) for name, view in views.items()})
    return {unit.name: digest for unit, digest in zip(arena.layout.units, found, strict=True)}


def _like(sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same sizes, in one buffer."""
    flat = torch.empty(sum(source.numel() for source in sources.values()))
    found, start = {}, 0
    for name, source in sources.items():
        found[name] = flat[start : start + source.numel()]
        start += source.numel()
    return found
