"""Under torchrun (or anything that sets RANK, WORLD_SIZE and MASTER_ADDR): this process is one rank.

There is no coordinator: the store of the process group is the rendezvous, rank 0 keeps the folder and speaks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from andon.cluster.prepare import prepare_tokens
from andon.cluster.run_folder import RunFolder
from andon.cluster.session import open_configured, settle, train
from andon.cluster.worker import EXIT_HALTED
from andon.config import Config
from andon.display import Display, show_plan
from andon.group.base import Group
from andon.group.torch_dist import StoreRendezvous, TorchGroup
from andon.integrity.halt import JidokaHalt
from andon.metrics import Emit, Event, Recorder


def run(config: Config, resume: str, console: Console) -> int:
    """Train as the rank that the environment names; gives the exit code."""
    settle(config.threads)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = Config.model_validate({**config.model_dump(), "workers": world_size}).with_transport("torch")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with contextlib.ExitStack() as stack:
        group = _open(config)
        stack.callback(group.close)
        emit: Emit = _nothing
        found: Path | None = None
        if rank == 0:
            show_plan(console, config)
            folder = RunFolder(config.run.dir)
            folder.take()
            stack.callback(folder.release)
            found = folder.resume_from(resume)
            folder.write_config(config)
            display = Display(console, config)
            stack.callback(display.close)
            recorder = Recorder(config.run.dir, display)
            stack.callback(recorder.close)
            emit = recorder.emit
        tokens = prepare_tokens(config, console if rank == 0 else Console(quiet=True))
        word = group.all_gather_bytes(str(found or "").encode())[0].decode()
        try:
            train(config, tokens, group, Path(word) if word else None, emit, stop.is_set)
        except JidokaHalt:
            return EXIT_HALTED
    return 0


def _open(config: Config) -> Group:
    backend = "nccl" if config.device != "cpu" and torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)
    if config.group.transport == "torch":
        return TorchGroup(None, config.group.timeout, config.group.wire, owned=True)
    store = dist.distributed_c10d._get_default_store()
    rendezvous = StoreRendezvous(store, dist.get_rank(), dist.get_world_size(), config.group.timeout)
    return open_configured(config, rendezvous)


def _nothing(said: Event) -> None:
    """Only rank 0 speaks."""
