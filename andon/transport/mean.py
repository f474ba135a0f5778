"""The mean over the ranks of a group, for scripts that average something themselves (C-RING-001)."""

import torch

from andon.transport.base import Group


def mean(group: Group, tensor: torch.Tensor) -> None:
    """Replace the tensor on every rank by the mean over ranks, with the same bits everywhere.

    All ranks call it, with f32 tensors of the same size. Over a ring each rank sends 2(N − 1)/N of its bytes."""
    if not tensor.is_contiguous():
        raise ValueError("only a contiguous tensor can be averaged in place")
    flat = tensor.detach().view(-1)
    group.all_reduce(flat)
    flat.div_(group.world_size)
