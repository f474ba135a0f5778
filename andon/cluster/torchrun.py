"""Under torchrun (or anything that sets RANK, WORLD_SIZE and MASTER_ADDR): this process is one rank.

There is no coordinator: the store of the process group is the rendezvous, and rank 0 locks the run's folder
and records the events.
"""

import contextlib
import os
import threading
from pathlib import Path
from socket import gethostname

import torch.distributed as dist
from rich.console import Console

from andon.cluster.bf16 import check_bf16
from andon.cluster.launch import absolute, recording, run_folder
from andon.cluster.session import choose_device, make_torch_deterministic, open_configured, train
from andon.cluster.signals import save_on_signal
from andon.config.load import build
from andon.config.schema import Config
from andon.errors import EXIT_HALTED, EXIT_STOPPED
from andon.integrity.halt import JidokaHalt
from andon.run.events import Emit, event, no_event
from andon.run.loop import while_others_wait
from andon.run.prepare import prepare_tokens
from andon.transport.torch_dist import StoreRendezvous


def run(config: Config, resume: str, console: Console) -> int:
    """Train as the rank that the environment names; gives the exit code."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = absolute(build(config.model_dump(), {"workers": world_size})).with_transport("torch")
    check_bf16(config)
    make_torch_deterministic(config.threads)
    stop = threading.Event()
    save_on_signal(stop.set)
    tokens = prepare_tokens(config, console if rank == 0 else Console(quiet=True))
    with contextlib.ExitStack() as stack:
        device = choose_device(config.device, rank, no_event)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        stack.callback(dist.destroy_process_group)
        store = dist.distributed_c10d._get_default_store()
        rendezvous = StoreRendezvous(store, rank, world_size, config.group.timeout)
        group = stack.enter_context(open_configured(config, rendezvous))
        found, recorder = None, None
        emit: Emit = no_event
        # Every byte of the checkpoint is verified here, which may take longer than the group's timeout.
        held = while_others_wait(group, lambda: stack.enter_context(run_folder(config, resume, console)))
        if held:
            folder, found = held
            recorder, emit = stack.enter_context(recording(config, folder, console))
        gathered = group.all_gather_bytes(f"{os.getpid()} {gethostname()} {found or ''}".encode())
        workers = [fields.decode().split(" ", 2) for fields in gathered]
        for each, (pid, host, _) in enumerate(workers):
            emit(event("worker", rank=each, pid=int(pid), host=host))
        checkpoint = workers[0][2]
        try:
            stopped = train(config, tokens, group, Path(checkpoint) if checkpoint else None, emit, stop.is_set)
        except JidokaHalt:
            return EXIT_HALTED
    if recorder and recorder.failure:
        raise recorder.failure
    return EXIT_STOPPED if stopped else 0
