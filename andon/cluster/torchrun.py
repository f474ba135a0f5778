"""Under torchrun (or anything that sets RANK, WORLD_SIZE and MASTER_ADDR): this process is one rank.

There is no coordinator: the store of the process group is the rendezvous, rank 0 keeps the folder and speaks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from socket import gethostname
from types import FrameType

import torch
import torch.distributed as dist
from rich.console import Console

from andon.cluster.launch import recording, run_folder
from andon.cluster.session import make_torch_deterministic, open_configured, train
from andon.cluster.worker import EXIT_HALTED
from andon.config.load import build
from andon.config.schema import Config
from andon.integrity.halt import JidokaHalt
from andon.run.display import Display
from andon.run.events import Emit, Event, Recorder, event
from andon.run.loop import while_others_wait
from andon.run.prepare import prepare_tokens
from andon.transport.base import Group
from andon.transport.torch_dist import StoreRendezvous


def run(config: Config, resume: str, console: Console) -> int:
    """Train as the rank that the environment names; gives the exit code."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = build(config.model_dump(), {"workers": world_size}).with_transport("torch")
    make_torch_deterministic(config.threads)
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends this process
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    tokens = prepare_tokens(config, console if rank == 0 else Console(quiet=True))
    with contextlib.ExitStack() as stack:
        dist.init_process_group("nccl" if _choose_cuda(config) else "gloo")
        stack.callback(dist.destroy_process_group)
        group = _open(config)
        stack.callback(group.close)
        found, recorder = None, None
        emit: Emit = _nothing
        # Every byte of a checkpoint is verified here, which may take longer than the group would wait.
        held = while_others_wait(group, lambda: stack.enter_context(run_folder(config, resume, console)))
        if held:
            folder, found = held
            display = Display(console, config)
            stack.callback(display.close)
            recorder = stack.enter_context(
                contextlib.closing(Recorder(config.run.dir, display, hold=folder.hold))
            )
            emit = recording(config, folder, recorder)
            for note in folder.notes:
                emit(event("note", text=note))
        words = [
            word.decode()
            for word in group.all_gather_bytes(f"{os.getpid()} {gethostname()} {found or ''}".encode())
        ]
        for each, (pid, host, _) in enumerate(word.split(" ", 2) for word in words):
            emit(event("worker", rank=each, pid=int(pid), host=host))
        checkpoint = words[0].split(" ", 2)[2]
        try:
            train(config, tokens, group, Path(checkpoint) if checkpoint else None, emit, stop.is_set)
        except JidokaHalt:
            return EXIT_HALTED
    if recorder and recorder.failure:
        raise recorder.failure
    return 0


def _choose_cuda(config: Config) -> bool:
    """Whether this rank computes on a GPU, which is then chosen."""
    on_cuda = config.device != "cpu" and torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(
            int(os.environ.get("LOCAL_RANK", os.environ["RANK"])) % torch.cuda.device_count()
        )
    return on_cuda


def _open(config: Config) -> Group:
    store = dist.distributed_c10d._get_default_store()
    rendezvous = StoreRendezvous(store, dist.get_rank(), dist.get_world_size(), config.group.timeout)
    return open_configured(config, rendezvous)


def _nothing(said: Event) -> None:
    """Only rank 0 speaks."""
