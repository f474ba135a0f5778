"""A run as its launcher sees it: the folder, the data, a coordinator, the workers, and a clean end."""

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rich.console import Console

from andon.board.serve import beside
from andon.checkpoint.disk.listing import step_of
from andon.cluster.bf16 import check_bf16
from andon.cluster.kinds import inputs, libraries, prepare, settle, show_data, show_plan
from andon.cluster.nursery import Nursery
from andon.cluster.processes import Command, Process, Workers, execute, log_of
from andon.cluster.signals import save_on_signal
from andon.cluster.star_process import StarProcess
from andon.cluster.worker import START_AGAIN, Access, work
from andon.config.load import load
from andon.config.schema import RunSettings
from andon.control.coordinator import Coordinator
from andon.control.generations.succession import GoesOn
from andon.control.link import Message
from andon.control.token import FILE, VARIABLE, Credentials, environment, new_token, token_of_run
from andon.errors import EXIT_HALTED, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from andon.files import expand
from andon.numerics import kernels
from andon.run.records.events import Emit, Event, Recorder, event, last_step
from andon.run.records.folder import RunFolder, read_mark
from andon.run.records.ledger import Ledger
from andon.run.records.resize import RequestedWorkers
from andon.run.screen.display import Display, show_error
from andon.run.screen.outlook import machine_notes
from andon.transport.address import address_text
from andon.transport.base import TRANSPORTS, GroupError, PeerLost
from andon.transport.tcp.entrance.tls import Tls

LOOPBACK = "127.0.0.1"
C = TypeVar("C", bound=RunSettings)
WORKER = ("-m", "andon.cluster.worker")
PORT = 29411
"""Where a coordinator listens, unless told otherwise."""


def train(config: RunSettings, resume: str, console: Console) -> int:
    """`andon train`: start the workers of a run here and wait for them; gives the exit code."""
    config = settle(absolute(config).on_this_machine(), console)
    check_bf16(config)
    for note in machine_notes(config):
        console.print(note, style="yellow", soft_wrap=True)
    with run_folder(config, resume, console) as (folder, checkpoint):
        return _coordinate(config, folder, checkpoint, console)


def train_demo(overrides: Mapping[str, Any], resume: str, console: Console) -> int:
    """`andon demo`: the tiny preset on the built-in stories; a finished demo is moved aside, not repeated."""
    demo = {"run.dir": "runs/demo", "workers": min(2, os.cpu_count() or 1)}
    config = absolute(load(None, {**demo, **overrides}))
    finished = (config.run.dir / "summary.json").exists()
    return train(config, "none" if finished and resume == "auto" else resume, console)


@dataclass(frozen=True)
class Door:
    """Where a coordinator listens for workers that are started elsewhere."""

    host: str
    """Empty: every address of this machine."""
    port: int | None
    """None: the usual one, or a free one if that is taken."""
    tls: Tls | None = None


def serve(config: RunSettings, resume: str, door: Door, console: Console) -> int:
    """`andon coordinator`: wait for workers that are started elsewhere; gives the exit code."""
    config = settle(absolute(config).with_transport("star"), console)
    with run_folder(config, resume, console) as (folder, checkpoint):
        return _coordinate(config, folder, checkpoint, console, door)


def join_run(address: tuple[str, int], access: Access) -> int:
    """`andon worker`: join a coordinator, perhaps on another machine; gives the exit code."""
    place = address_text(*address)
    try:
        code = work(address, access)
    except PeerLost as error:
        remedy = "Check the address and that `andon coordinator` is running there"
        raise UserError(f"The coordinator at {place} cannot be reached", str(error), remedy) from None
    except GroupError as error:
        remedy = "Check that the same Andon is installed on both machines, and that both use TLS or neither does"
        raise UserError(f"The coordinator at {place} cannot be joined", str(error), remedy) from None
    if code == 0:
        access.say("Done")
    return code


@contextlib.contextmanager
def run_folder(config: RunSettings, resume: str, console: Console) -> Iterator[tuple[RunFolder, Path | None]]:
    """Show the plan and lock the run's folder; gives the folder and the checkpoint to resume from."""
    show_plan(console, config)
    with contextlib.closing(RunFolder(config.run.dir)) as folder:
        folder.take()
        try:
            if resume == "none" and (aside := folder.move_aside(inputs(config))):
                with contextlib.suppress(FileNotFoundError):  # workers have copies of the token
                    (aside / FILE).rename(folder.folder / FILE)
                console.print(f"The earlier run is now in {aside}", style="dim")
            yield folder, folder.resume_from(resume)
        except OSError as error:
            what = f"The run's folder {folder.folder} cannot be used"
            cause = f"{error.strerror} at {error.filename}" if error.filename else str(error.strerror)
            raise UserError(what, cause, "Choose another --run.dir") from error


@contextlib.contextmanager
def recording(config: RunSettings, folder: RunFolder, console: Console) -> Iterator[tuple[Recorder, Emit]]:
    """Record and show the events of a run; its first `start` removes how an earlier part of it ended."""
    display = Display(console, config)
    recorder = Recorder(folder.folder, display, hold=folder.hold)
    with contextlib.closing(display), contextlib.closing(recorder):

        def emit(event: Event) -> None:
            if event["event"] == "start":
                folder.begin(config.model_copy(update={"probe": event["probe"]}))
            recorder.emit(event)

        for damage in folder.damaged:
            emit(event("damaged", step=step_of(damage.path), reason=damage.reason))
        for note in folder.notes:
            emit(event("note", text=note))
        yield recorder, emit


def _coordinate(
    config: RunSettings, folder: RunFolder, checkpoint: Path | None, console: Console, door: Door | None = None
) -> int:
    """Coordinate a run: start its workers here, or wait at a door for those that are started elsewhere."""
    logs = config.run.dir / "logs"
    workers: Workers | None = None
    kinds: set[str] = set()

    def save() -> None:
        console.print("Saving after this step, then leaving. Once more quits at once.", style="yellow")
        coordinator.stop()

    def quit_now(number: int, frame: FrameType | None) -> None:
        if workers is None:
            raise KeyboardInterrupt
        workers.quit()

    def on_event(event: Event) -> None:
        kinds.add(event["event"])
        emit(event)

    token = token_of_run(folder.folder) if door else new_token()
    credentials = Credentials(token, door.tls if door else None)
    with contextlib.ExitStack() as stack:
        begin = None if door else _starter(config, token, logs, stack)  # loads torch meanwhile
        data = prepare(config, console)
        show_data(console, config, data)
        if config.run.board and console.is_terminal:
            stack.enter_context(beside(config.run.dir, partial(console.print, style="dim", soft_wrap=True)))
        recorder, emit = stack.enter_context(recording(config, folder, console))
        goes_on = _goes_on(config, folder, checkpoint, stack)
        transport = TRANSPORTS[config.group.transport]
        if transport.needs_server:
            host = door.host if door else LOOPBACK
            star = stack.enter_context(contextlib.closing(StarProcess(host, config.group.timeout, credentials)))
            goes_on = replace(goes_on, server=star.serve)
        job = {
            "config": config.model_dump(mode="json"),
            "data": data.digest,
            "folder_mark": read_mark(folder.folder),
            "tokens": str(data.folder),
            "resume": str(checkpoint) if checkpoint else None,
            "log": str(logs),
        }
        listening = _listening(job, Members(config.workers, goes_on), on_event, credentials, door or Door(LOOPBACK, 0))
        coordinator = stack.enter_context(listening)
        save_on_signal(save, quit_now)
        if not begin:
            assert door
            _invite(config, coordinator, door.tls, console)
            code = coordinator.wait()
        else:

            def start(place: int, log: Path) -> Process:
                return begin([coordinator.address[0], str(coordinator.address[1]), str(place)], log)

            workers = stack.enter_context(Workers(start, logs, config.restarts))
            requested = RequestedWorkers(folder.folder)
            if transport.goes_on:
                workers.wishes = lambda: requested.changed(config.workers, config.train.slots)
            workers.start(config.workers)
            code = workers.wait(coordinator)
    if workers and workers.was_quit:
        raise UserError("The run was ended at once", "A second Ctrl-C", START_AGAIN)
    if failures := coordinator.failures + ([recorder.failure] if recorder.failure else []):
        first = failures[0]
        cause = workers.first_signal if workers and workers.first_signal else first.cause
        cause += f". {transport.fixed}" if transport.fixed and "lost" in kinds else ""
        show_error(console, UserError(first.what, cause, first.remedy))
        return code if code == EXIT_HALTED else EXIT_USER_ERROR
    if code == EXIT_STOPPED and not coordinator.begun:
        console.print("Stopped before the first step: there was nothing to save.")
    if code not in (0, EXIT_HALTED, EXIT_STOPPED):
        who = workers.first_failure if workers else "A worker"
        where = logs if workers else "the terminals of the workers"
        raise UserError(f"{who} ended the run", "It gave no reason", f"Look at {where}")
    if code == 0 and "done" not in kinds:
        cause = "Every rank said goodbye, and none reported a result"
        raise UserError("The run ended before its last step", cause, "Start it again: it resumes")
    return code


def _starter(
    config: RunSettings, token: str, logs: Path, stack: contextlib.ExitStack
) -> Callable[[Sequence[str], Path], Process]:
    """What starts the workers of this machine, with their arguments and their log."""
    own = environment(token)
    if sys.platform != "linux":  # elsewhere a process that has loaded torch cannot be forked safely
        return lambda arguments, log: execute(Command([*WORKER, *arguments], own), config.threads, log)
    settings = {"OMP_NUM_THREADS": str(config.threads), "PYTHONUNBUFFERED": "1", **kernels(config.numerics)}
    nursery = Nursery({**own, **settings}, libraries(config), log_of(logs, 0))
    return stack.enter_context(contextlib.closing(nursery)).start


def _invite(config: RunSettings, coordinator: Coordinator, tls: Tls | None, console: Console) -> None:
    """Say how workers join."""
    host, port = coordinator.address
    where = address_text(socket.gethostname() if ip_address(host).is_unspecified else host, port)
    if VARIABLE in os.environ:
        command, token = f"andon worker {where}", f"with the same {VARIABLE} as here"
    else:
        file = config.run.dir / FILE
        command, token = f"andon worker {where} --token-file {file}", "with a copy of that file on other machines"
    if tls:
        command, token = f"{command} --tls-ca CA", f"{token}, and TLS as here"
    console.print(f"Waiting for {config.workers} workers: {command}   ({token})", soft_wrap=True, highlight=False)


@dataclass(frozen=True)
class Members:
    """How many workers a run wants, and how it goes on without some of them."""

    wanted: int
    goes_on: GoesOn


def _goes_on(config: RunSettings, folder: RunFolder, checkpoint: Path | None, stack: contextlib.ExitStack) -> GoesOn:
    """What the run needs to go on when its members change; the ledger is closed at the end."""
    ledger = Ledger(folder.folder, step_of(checkpoint) if checkpoint else 0)
    stack.callback(ledger.close)
    possible = TRANSPORTS[config.group.transport].goes_on
    told = partial(last_step, folder.folder)
    return GoesOn(config.min_workers, config.group.timeout, ledger, told_step=told, possible=possible)


@contextlib.contextmanager
def _listening(
    job: Message, members: Members, emit: Emit, credentials: Credentials, door: Door
) -> Iterator[Coordinator]:
    """A coordinator at a door, until the context is left."""

    def open_at(port: int) -> Coordinator:
        return Coordinator(job, members.wanted, emit, credentials, (door.host, port), members.goes_on)

    try:
        try:
            coordinator = open_at(PORT if door.port is None else door.port)
        except OSError as error:
            if door.port is not None or error.errno != errno.EADDRINUSE:
                raise
            emit(event("note", text=f"Port {PORT} is taken: give the workers the port below"))
            coordinator = open_at(0)
    except OSError as error:
        what = f"The coordinator cannot listen at {address_text(door.host, door.port or PORT)}"
        remedy = "Choose another --bind: an address of this machine, and port 0 for a free one"
        reason = str(error.strerror or error).partition(" (")[0]  # Python names the address once more
        raise UserError(what, reason, remedy) from None
    with contextlib.closing(coordinator):
        yield coordinator


def absolute(config: C) -> C:
    """The configuration with an absolute path of the run's folder."""
    run = config.run.model_copy(update={"dir": expand(config.run.dir).resolve()})
    return config.model_copy(update={"run": run})
