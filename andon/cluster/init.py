"""`andon.init`: the group of a process that runs a script of the user's own."""

import os

import torch
import torch.distributed as dist

from andon.transport.base import Group, Settings
from andon.transport.local import LocalGroup
from andon.transport.torch_dist import TorchGroup


def init(timeout: float = 60.0) -> Group:
    """The group of this process: torchrun's ranks, or a group of one. Close it at the end."""
    if "WORLD_SIZE" not in os.environ:
        return LocalGroup()
    opened_here = not dist.is_initialized()
    if opened_here:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return TorchGroup(None, Settings(timeout), owned=opened_here)
