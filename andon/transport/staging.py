"""Tensors for transports that work in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_host(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself, or for one on a GPU a pinned copy whose first row is copied back at the end."""
    if tensor.device.type == "cpu":
        if tensor.numel() and tensor.stride(-1) != 1:
            raise ValueError("the elements of a row must lie side by side to be exchanged")
        yield tensor
        return
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    yield host
    (tensor if tensor.dim() == 1 else tensor[0]).copy_(host if host.dim() == 1 else host[0])
