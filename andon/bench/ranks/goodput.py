"""One rank of the peer in `andon bench goodput`: a plain PyTorch training script for torchrun.

It uses DistributedDataParallel over gloo and fused AdamW. Rank 0 writes a checkpoint every `save_every` steps. When a
rank has died, torchrun restarts all ranks, and they resume from the newest checkpoint. Each step is a JSON line.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from andon.bench.ranks.train import LR, RandomBatches, initialised
from andon.model.shape import SHAPES

CHECKPOINT = Path("checkpoint.safetensors")


def write(event: dict[str, Any]) -> None:
    """Append an event to metrics.jsonl."""
    with open("metrics.jsonl", "a") as file:
        file.write(json.dumps({**event, "time": time.time()}) + "\n")


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write weights and optimizer state; the file appears whole or not at all."""
    tensors: dict[str, Tensor] = {f"model.{name}": value for name, value in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": value for name, value in state.items()}
    fresh = CHECKPOINT.with_suffix(".new")
    save_file(tensors, fresh, {"step": str(step)})
    fresh.rename(CHECKPOINT)


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Resume from the newest checkpoint."""
    tensors = load_file(CHECKPOINT)
    model.load_state_dict({name[6:]: value for name, value in tensors.items() if name.startswith("model.")})
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, number, name = key.split(".")
            state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def main(task: dict[str, Any]) -> None:
    """Train until the process is killed."""
    torch.set_num_threads(1)
    write({"event": "worker", "pid": os.getpid()})
    dist.init_process_group("gloo")
    shape = SHAPES[task["preset"]]
    model = initialised(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), fused=True)
    step = 0
    if CHECKPOINT.exists():
        load(model, optimizer)
        step = int(next(iter(optimizer.state.values()))["step"])
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    batches = RandomBatches(shape, task["windows"] * shape.context, seed=dist.get_rank())
    x, y = (torch.from_numpy(each) for each in batches(1, 0))
    while True:
        optimizer.zero_grad(set_to_none=True)
        (parallel(x, y) / y.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if dist.get_rank() == 0:
            write({"event": "step", "step": step})
            if step % task["save_every"] == 0:
                save(model, optimizer, step)
