"""A snapshot: a copy of what one rank will write, taken while training goes on.

Rank 0 writes the weights and the module's buffers; the optimizer's state is shared out among the ranks
(`checkpoint.moments`). Weights and state do not change before the next optimizer step, so a background thread can copy
them during the next forward and backward; the module's buffers are few and copied at once. The memory of the copies is
kept for the next save. The same pass takes the digests of the weights: of the copy where there is one, and elsewhere of
the weights themselves.

From a GPU everything is copied to pinned memory, on a stream of its own, in less time than a step takes. Training waits
for these copies only: digests are taken of them afterwards.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from blake3 import blake3
from torch import Tensor, nn

from andon.checkpoint.background import background
from andon.checkpoint.disk.format import At, tensor_blake3
from andon.engine.gradients.arena import Arena, Layout


class Snapshot:
    """What one rank writes: its piece of the moments, which lie in `shards` files, and on rank 0 the weights."""

    def __init__(self, arena: Arena, moments: Mapping[str, Tensor], shards: int, weights: bool) -> None:
        self.arena, self.sources, self.shards = arena, moments, shards
        self.weights: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.moments: Mapping[str, Tensor] = {}
        self.digests: dict[str, str] = {}
        """BLAKE3 of each weight."""
        self.copied = threading.Event()
        """Set when nothing more is copied: from then on weights and state may change."""
        self._with_weights = weights
        self._gpu = _Gpu(arena.device) if arena.device.type == "cuda" else None
        self._memory = background("andon-snapshot", _nothing, self._allocate) if self._gpu else None
        """Pinning gigabytes takes seconds: that begins at once."""

    @property
    def on_gpu(self) -> bool:
        """Whether it copies from a GPU."""
        return self._gpu is not None

    @property
    def size(self) -> int:
        """Bytes of all copies."""
        return sum(tensor.nbytes for each in (self.weights, self.buffers, self.moments) for tensor in each.values())

    def keep_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Copy buffers now: the next forward may change them."""
        self.buffers = {name: buffer.detach().cpu().clone() for name, buffer in buffers.items()}

    def begin(self) -> None:
        """The state to copy is what all work leaves that was launched so far."""
        self.copied.clear()
        if self._gpu:
            self._gpu.mark()

    def take(self, at: At) -> tuple[str, ...]:
        """Copy everything; the digest of each unit's weights."""
        try:
            self._copy(at)
        finally:
            self.copied.set()
        if self._gpu:
            for name, copy in self.arena.layout.views(self._flat).items():
                at("snapshot")
                self.digests[name] = tensor_blake3(copy)
        return unit_digests(self.arena.layout, self.digests)

    @torch.no_grad()
    def _copy(self, at: At) -> None:
        if self._gpu is None:
            self._allocate()
            self._copy_on_cpu(at)
            return
        assert self._memory
        self._memory.result()
        with self._gpu.copying():
            at("snapshot")
            self._flat.copy_(self.arena.weights, non_blocking=True)
            for name, source in self.sources.items():
                self.moments[name].copy_(source, non_blocking=True)

    def _copy_on_cpu(self, at: At) -> None:
        for name, source in self.arena.layout.views(self.arena.weights).items():
            at("snapshot")
            if self._with_weights:
                source = self.weights[name].copy_(source)
            self.digests[name] = tensor_blake3(source)
        for name, source in self.sources.items():
            at("snapshot")
            self.moments[name].copy_(source)

    def _allocate(self) -> None:
        """Memory for the copies, once; on a GPU for the weights on every rank, whose digests are taken of the copy."""
        pinned = self._gpu is not None
        if not self.weights and (self._with_weights or pinned):
            self._flat = _memory(self.arena.layout.size, self.arena.buffer.dtype, pinned)
            self.weights = self.arena.layout.views(self._flat) if self._with_weights else {}
        if not self.moments and self.sources:
            self.moments = _like(self.sources, pinned)


class _Gpu:
    """Copies from a GPU on a stream of their own, of the state at a point of the training's stream."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._point = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        self._point.record(torch.cuda.current_stream(self.device))

    @contextmanager
    def copying(self) -> Iterator[None]:
        """What is copied inside has arrived at the end."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._point)
            yield
            self._stream.synchronize()


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


def _like(sources: Mapping[str, Tensor], pinned: bool) -> dict[str, Tensor]:
    """Tensors of the same sizes, in one buffer."""
    flat = _memory(sum(source.numel() for source in sources.values()), torch.float32, pinned)
    found, start = {}, 0
    for name, source in sources.items():
        found[name] = flat[start : start + source.numel()]
        start += source.numel()
    return found


def _memory(size: int, dtype: torch.dtype, pinned: bool) -> Tensor:
    """Memory of the host; where so much cannot be pinned, ordinary memory, to which copies are slower."""
    try:
        return torch.empty(size, dtype=dtype, pin_memory=pinned)
    except RuntimeError:
        if not pinned:
            raise
        return torch.empty(size, dtype=dtype)


def _nothing() -> None:
    pass
