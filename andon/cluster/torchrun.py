"""Training under torchrun, or anything that sets RANK, WORLD_SIZE and MASTER_ADDR: this process is one rank.

There is no coordinator: the store of the process group is the rendezvous, and rank 0 locks the run's folder and records
the events.
"""

import contextlib
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path
from socket import gethostname

import torch.distributed as dist
from rich.console import Console

from andon.cluster.bf16 import check_bf16
from andon.cluster.kinds import prepare, resolve_steps
from andon.cluster.launch import absolute, recording, run_folder
from andon.cluster.session import Hooks, Session, choose_device, make_torch_deterministic, open_configured
from andon.cluster.signals import save_on_signal
from andon.cluster.star_process import star_process
from andon.config.load import validate
from andon.config.schema import RunSettings
from andon.control.token import VARIABLE, Credentials, checked, new_token
from andon.errors import EXIT_HALTED, EXIT_STOPPED, UserError
from andon.integrity.halt import JidokaHalt
from andon.run.loop import while_others_wait
from andon.run.records.events import Emit, event, no_event
from andon.transport.base import Settings
from andon.transport.registry import TRANSPORTS
from andon.transport.tcp.connect import check_loopback, is_loopback
from andon.transport.torch_backend import StoreRendezvous, gloo_at, init_ranks


def run(config: RunSettings, resume: str, console: Console) -> int:
    """Train as the rank that the environment names; returns the exit code."""
    rank, world_size, local_rank = (_number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    _number("MASTER_PORT")
    quiet = console if rank == 0 else Console(quiet=True)
    config = validate({**absolute(config).model_dump(), "workers": world_size}, type(config))
    config = resolve_steps(config.with_transport("torch"), quiet)
    check_bf16(config)
    make_torch_deterministic(config.threads)
    stop = threading.Event()
    save_on_signal(stop.set)
    data = prepare(config, quiet)
    with contextlib.ExitStack() as stack:
        device = choose_device(config.device, local_rank, no_event)
        host = own_address()
        init_ranks(gloo_at(host), config.group.timeout, device)
        stack.callback(dist.destroy_process_group)
        store = dist.distributed_c10d._get_default_store()
        rendezvous = StoreRendezvous(store, rank, world_size, config.group.timeout)
        settings = _settings(config, rendezvous, host, stack)
        group = stack.enter_context(open_configured(config, rendezvous, settings))
        found, recorder = None, None
        emit: Emit = no_event
        # This verifies every byte of the checkpoint, which may take longer than the group's timeout.
        held = while_others_wait(group, lambda: stack.enter_context(run_folder(config, resume, console)))
        if held:
            folder, found = held
            recorder, emit = stack.enter_context(recording(config, folder, console))
        gathered = group.all_gather_bytes(f"{os.getpid()} {gethostname()} {found or ''}".encode())
        workers = [fields.decode().split(" ", 2) for fields in gathered]
        for each, (pid, name, _) in enumerate(workers):
            emit(event("worker", rank=each, pid=int(pid), host=name))
        checkpoint = workers[0][2]
        try:
            hooks = Hooks(emit, stop.is_set, local_rank)
            with contextlib.closing(Session(config, data, hooks)) as session:
                stopped = session.train(group, Path(checkpoint) if checkpoint else None)
        except JidokaHalt:
            return EXIT_HALTED
    if recorder and recorder.failure:
        raise recorder.failure
    return EXIT_STOPPED if stopped else 0


def _number(name: str) -> int:
    """Read a number that the launcher has put into the environment."""
    value = os.environ.get(name, "0" if name == "LOCAL_RANK" else "")
    if not value.isdecimal():
        cause = f"{name} is {value!r}" if value else f"{name} is not set"
        remedy = "Start it with torchrun, or unset RANK and WORLD_SIZE to train without it"
        raise UserError("The environment of torchrun is not complete", cause, remedy)
    return int(value)


def own_address() -> str:
    """This machine's address on the route to rank 0, at which the other ranks reach it."""
    master = os.environ["MASTER_ADDR"]
    try:
        family, _, _, _, place = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing: it only chooses the route
            address = str(probe.getsockname()[0])
    except OSError as error:
        remedy = "Give torchrun --master-addr with an address of rank 0's machine that all machines reach"
        raise UserError(f"MASTER_ADDR {master} cannot be reached", error.strerror or str(error), remedy) from None
    several = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < int(os.environ["WORLD_SIZE"])
    if several and "LOCAL_WORLD_SIZE" in os.environ and is_loopback(address):
        cause = f"MASTER_ADDR {master} leads to {address}, which other machines cannot reach"
        remedy = "Give torchrun --master-addr with an address of rank 0's machine on the network"
        raise UserError("The ranks on other machines cannot reach this one", cause, remedy)
    return address


def _settings(config: RunSettings, rendezvous: StoreRendezvous, host: str, stack: contextlib.ExitStack) -> Settings:
    """The settings of the transport: keys from ANDON_TOKEN, and for a star a server at rank 0."""
    token = os.environ.pop(VARIABLE, "")
    settings = Settings(config.group.timeout, config.group.wire, host, config.group.server_address)
    transport = TRANSPORTS[config.group.transport]
    if not token:
        if not transport.needs_server:
            return settings
        check_loopback(host)
        token = rendezvous.exchange("token", new_token())[0]
    else:
        token = checked(token, VARIABLE)
    credentials = Credentials(token, secret=token.encode())
    generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    rank, size = rendezvous.rank, rendezvous.world_size
    keys = credentials.issue(rank, size, generation).sealed(token)
    server = settings.server
    if transport.needs_server:
        mine = ("", 0)
        if rank == 0:
            mine = stack.enter_context(star_process(host, size, config.group.timeout, credentials, generation))
        address, port = rendezvous.exchange("star server", f"{mine[0]} {mine[1]}")[0].split()
        server = (address, int(port))
    return replace(settings, keys=keys, server=server)
