"""The mean over the ranks of a group, for scripts that average something themselves (C-RING-001)."""

import torch

from andon.transport.base import Group


def mean(group: Group, tensor: torch.Tensor) -> None:
    """Replace everyone's tensor by the mean of all of them, with the same bits on every rank.

    All ranks call it, with f32 tensors of the same size. Over a ring each rank sends 2(N − 1)/N of it."""
    if not tensor.is_contiguous():
        raise ValueError("only a contiguous tensor can be averaged in place")
    flat = tensor.detach().view(-1)
    group.all_reduce(flat)
    flat.div_(group.world_size)
