"""Batches on the device. For a GPU the next batch is made in the background and copied on a separate stream.

A batch goes through pinned memory, so that its copy does not wait for the device's work, nor the device for the copy.
Batches are requested by step and slot; a prepared batch that is not requested next is dropped, as when a step is
repeated or a slot has moved to another worker.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from andon.data.batches import NO_TARGET

IntArray = npt.NDArray[np.int64]
Place = tuple[int, int]
"""A step and a slot."""


class BatchSource(Protocol):
    """Batches as a pure function of step and slot."""

    def __call__(self, step: int, slot: int) -> tuple[IntArray, IntArray]:
        """Inputs and targets."""
        ...

    def windows(self, step: int, slot: int) -> list[int]:
        """The numbers of the samples."""
        ...

    def name(self, window: int) -> int | str:
        """How a halt names a sample: the number of a window, or the line of a file."""
        ...


class Loaded(NamedTuple):
    """A batch on the device."""

    inputs: Tensor
    targets: Tensor
    counted: int
    """The number of targets that count."""


class Loader:
    """Loads the batches of a source as tensors on a device."""

    def __init__(self, source: BatchSource, device: torch.device) -> None:
        self._source, self._device = source, device
        self._on_gpu = device.type == "cuda"
        self._ahead: tuple[Place, Future[Loaded]] | None = None
        if self._on_gpu:
            self._thread = ThreadPoolExecutor(1, "andon-batches")
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, step: int, slot: int) -> Loaded:
        """The batch of a slot."""
        if not self._on_gpu:
            x, y = self._source(step, slot)
            device = self._device
            return Loaded(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device), count_targets(y))
        if not (self._ahead and self._ahead[0] == (step, slot)):
            self.prepare(step, slot)
        assert self._ahead
        batch, self._ahead = self._ahead[1].result(), None
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for each in (batch.inputs, batch.targets):
            each.record_stream(current)
        return batch

    def prepare(self, step: int, slot: int) -> None:
        """Prepare the next batch in the background."""
        if self._on_gpu:
            self._ahead = (step, slot), self._thread.submit(self._copy, step, slot)

    def _copy(self, step: int, slot: int) -> Loaded:
        arrays = self._source(step, slot)
        x, y = (torch.from_numpy(np.ascontiguousarray(each)).pin_memory() for each in arrays)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            x, y = x.to(self._device, non_blocking=True), y.to(self._device, non_blocking=True)
        return Loaded(x, y, count_targets(arrays[1]))

    def close(self) -> None:
        """Stop the thread."""
        if self._on_gpu:
            self._thread.shutdown(wait=True, cancel_futures=True)


def count_targets(targets: IntArray) -> int:
    """The number of targets that count; computed on the host, so that nothing waits for the GPU."""
    return int(np.count_nonzero(targets != NO_TARGET))
