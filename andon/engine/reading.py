"""Asynchronous copies of numbers from a GPU to the host: reading them does not wait for later work of the GPU."""

from typing import Any

import torch
from torch import Tensor


class Reading:
    """The values of a small tensor, copied to the host in the order of the device's work."""

    def __init__(self, values: Tensor) -> None:
        self._host, self._arrived = values, None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(values.device))

    def values(self) -> list[Any]:
        """The values, once the device has computed them."""
        if self._arrived:
            self._arrived.synchronize()
        return list(self._host.tolist())
