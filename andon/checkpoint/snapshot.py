"""A snapshot: a copy of what one rank will write, taken during training.

Rank 0 writes the weights and the module's buffers; the optimizer's state is divided among the ranks
(`checkpoint.moments`). Weights and state do not change before the next optimizer step, so a background thread can copy
them during the next forward and backward; the module's buffers are small and copied at once. The memory of the copies
is kept for the next save. The same pass computes the digests of the weights: of the copy on ranks that make one, of the
weights themselves on the others.

From a GPU everything is copied to pinned memory, on a separate stream, in less time than a step takes. Training waits
for these copies only: their digests are computed afterwards.
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
    """What one rank writes: its part of the moments, as one of `shards` files, and on rank 0 the weights."""

    def __init__(self, arena: Arena, moments: Mapping[str, Tensor], shards: int, weights: bool) -> None:
        self.arena, self.sources, self.shards = arena, moments, shards
        self.weights: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.moments: Mapping[str, Tensor] = {}
        self.digests: dict[str, str] = {}
        """BLAKE3 of each weight."""
        self.copied = threading.Event()
        """Set when everything is copied, or copying has failed: from then on weights and state may change."""
        self._with_weights = weights
        self._gpu = _Gpu(arena.device) if arena.device.type == "cuda" else None
        self._allocation = background(self._allocate) if self._gpu else None
        """Pinning gigabytes takes seconds, so it starts right away."""

    @property
    def on_gpu(self) -> bool:
        """Whether the state is copied from a GPU."""
        return self._gpu is not None

    @property
    def size(self) -> int:
        """Bytes of all copies."""
        return sum(tensor.nbytes for each in (self.weights, self.buffers, self.moments) for tensor in each.values())

    def keep_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Copy buffers now: the next forward may change them."""
        self.buffers = {name: buffer.detach().cpu().clone() for name, buffer in buffers.items()}

    def begin(self) -> None:
        """Mark the moment: the copies hold the state after all work that has been launched so far."""
        self.copied.clear()
        if self._gpu:
            self._gpu.mark()

    def take(self, at: At) -> dict[str, str]:
        """Copy everything; returns the digest of each unit's weights."""
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
        assert self._allocation
        self._allocation.result()
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
        """Allocate the copies, once; with a GPU every rank copies the weights, because digests need them on the CPU."""
        pinned = self._gpu is not None
        if not self.weights and (self._with_weights or pinned):
            self._flat = _host_memory(self.arena.layout.size, self.arena.buffer.dtype, pinned)
            self.weights = self.arena.layout.views(self._flat) if self._with_weights else {}
        if not self.moments and self.sources:
            self.moments = _like(self.sources, pinned)


class _Gpu:
    """Copies from a GPU on a separate stream: the state at a marked point of the training's stream."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._point = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        self._point.record(torch.cuda.current_stream(self.device))

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Run copies on the stream, and wait at the end until they have arrived."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._point)
            yield
            self._stream.synchronize()


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to a module's state, by name."""
    buffers, state = dict(module.named_buffers()), module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in buffers.items() if name in state}


def unit_digests(layout: Layout, digests: Mapping[str, str]) -> dict[str, str]:
    """The digest of each unit: BLAKE3 over its parameters' names and digests."""
    found = {}
    for unit in layout.units:
        text = "".join(f"{piece.name} {digests[piece.name]}\n" for piece in unit.slices)
        found[unit.name] = blake3(text.encode()).hexdigest()
    return found


def weights_digests(arena: Arena) -> dict[str, str]:
    """The digest of each unit of the current weights."""
    views = arena.layout.views(arena.weights)
    return unit_digests(arena.layout, {name: tensor_blake3(view) for name, view in views.items()})


def _like(sources: Mapping[str, Tensor], pinned: bool) -> dict[str, Tensor]:
    """Allocate tensors of the same sizes, in one buffer."""
    sizes = [source.numel() for source in sources.values()]
    parts = torch.split(_host_memory(sum(sizes), torch.float32, pinned), sizes)
    return dict(zip(sources, parts, strict=True))


def _host_memory(size: int, dtype: torch.dtype, pinned: bool) -> Tensor:
    """Allocate host memory; if pinning fails, it is pageable, and copies take longer."""
    try:
        return torch.empty(size, dtype=dtype, pin_memory=pinned)
    except RuntimeError:
        if not pinned:
            raise
        return torch.empty(size, dtype=dtype)
