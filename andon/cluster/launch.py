"""A run from the launcher's side: the folder, the data, a coordinator, the workers, and a clean end."""

import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from andon.board.serve import background_board
from andon.checkpoint.disk.listing import step_of
from andon.cluster.bf16 import check_bf16
from andon.cluster.fork_server import ForkServer
from andon.cluster.kinds import inputs, libraries, prepare, resolve_steps, show_data, show_plan
from andon.cluster.processes import Process, Workers, execute, log_of
from andon.cluster.signals import save_on_signal
from andon.cluster.star_process import StarProcess
from andon.cluster.worker import START_AGAIN, Access, work
from andon.config.load import load
from andon.config.schema import RunSettings
from andon.control.coordinator import Coordinator
from andon.control.generations.succession import GoesOn
from andon.control.token import FILE, VARIABLE, Credentials, new_token, token_of_run
from andon.errors import EXIT_HALTED, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from andon.files import expand
from andon.numerics import kernels
from andon.run.records.aside import moved_aside
from andon.run.records.events import Emit, Event, Recorder, event, last_step
from andon.run.records.folder import RunFolder, read_mark
from andon.run.records.ledger import Ledger
from andon.run.records.resize import RequestedWorkers
from andon.run.screen.display import Display, show_error
from andon.run.screen.outlook import machine_notes
from andon.transport.address import address_text
from andon.transport.base import GroupError, PeerLost
from andon.transport.registry import TRANSPORTS
from andon.transport.tcp.entrance.tls import Tls

LOOPBACK = "127.0.0.1"
C = TypeVar("C", bound=RunSettings)
WORKER = ("-m", "andon.cluster.worker")
PORT = 29411
"""The default port of a coordinator."""


def train(config: RunSettings, resume: str, console: Console) -> int:
    """`andon train`: start the workers of a run here and wait for them; returns the exit code."""
    config = resolve_steps(absolute(config).on_this_machine(), console)
    check_bf16(config)
    for note in machine_notes(config):
        console.print(note, style="yellow", soft_wrap=True)
    with run_folder(config, resume, console) as (folder, checkpoint):
        return _coordinate(config, folder, checkpoint, console)


def train_demo(overrides: Mapping[str, Any], resume: str, console: Console) -> int:
    """`andon demo`: the tiny preset on the built-in stories; a finished demo is moved aside, and a new one starts."""
    demo = {"run.dir": "runs/demo", "workers": min(2, os.cpu_count() or 1)}
    config = absolute(load(None, {**demo, **overrides}))
    finished = (config.run.dir / "summary.json").exists()
    return train(config, "none" if finished and resume == "auto" else resume, console)


@dataclass(frozen=True)
class Listener:
    """Where a coordinator listens for workers that are started separately."""

    host: str
    """Empty: every address of this machine."""
    port: int | None
    """None: the default port, or a free one if that is taken."""
    tls: Tls | None = None


def serve(config: RunSettings, resume: str, listener: Listener, console: Console) -> int:
    """`andon coordinator`: wait for workers that are started separately; returns the exit code."""
    config = resolve_steps(absolute(config).with_transport("star"), console)
    with run_folder(config, resume, console) as (folder, checkpoint):
        return _coordinate(config, folder, checkpoint, console, listener)


def join_run(address: tuple[str, int], access: Access) -> int:
    """`andon worker`: join a coordinator, perhaps on another machine; returns the exit code."""
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
        access.notify("Done")
    return code


@contextlib.contextmanager
def run_folder(config: RunSettings, resume: str, console: Console) -> Iterator[tuple[RunFolder, Path | None]]:
    """Show the plan and lock the run's folder; yields the folder and the checkpoint to resume from."""
    show_plan(console, config)
    with contextlib.closing(RunFolder(config.run.dir)) as folder:
        folder.take()
        report = partial(console.print, style="dim", soft_wrap=True, markup=False)
        fresh = moved_aside(folder, inputs(config), report) if resume == "none" else contextlib.nullcontext()
        try:
            with fresh:
                yield folder, folder.resume_from(resume)
        except OSError as error:
            what = f"The run's folder {folder.folder} cannot be used"
            cause = f"{error.strerror} at {error.filename}" if error.filename else str(error.strerror)
            raise UserError(what, cause, "Choose another --run.dir") from error


@contextlib.contextmanager
def recording(config: RunSettings, folder: RunFolder, console: Console) -> Iterator[tuple[Recorder, Emit]]:
    """Record and show the events of a run; the first `start` removes the result of an earlier part of the run."""
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
    config: RunSettings, folder: RunFolder, checkpoint: Path | None, console: Console, listener: Listener | None = None
) -> int:
    """Coordinate a run: start its workers here, or wait for those that are started separately."""
    logs = config.run.dir / "logs"
    workers: Workers | None = None
    seen: set[str] = set()  # kinds of events

    def save() -> None:
        console.print("Saving after this step, then leaving. Ctrl-C again quits at once.", style="yellow")
        coordinator.stop()

    def on_event(event: Event) -> None:
        seen.add(event["event"])
        emit(event)

    token = token_of_run(folder.folder) if listener else new_token()
    credentials = Credentials(token, listener.tls if listener else None)
    with contextlib.ExitStack() as stack:
        begin = None if listener else _starter(config, token, logs, stack)  # imports torch in the background
        data = prepare(config, console)
        show_data(console, config, data)
        if config.run.board and console.is_terminal:
            stack.enter_context(background_board(config.run.dir, partial(console.print, style="dim", soft_wrap=True)))
        recorder, emit = stack.enter_context(recording(config, folder, console))
        goes_on = _goes_on(config, folder, checkpoint, stack)
        transport = TRANSPORTS[config.group.transport]
        if transport.needs_server:
            host = listener.host if listener else LOOPBACK
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
        bind = partial(Coordinator, job, config.workers, on_event, credentials, goes_on)
        coordinator = stack.enter_context(contextlib.closing(_listen(bind, listener or Listener(LOOPBACK, 0), emit)))
        requested = RequestedWorkers(folder.folder)

        def new_size() -> int | None:
            return requested.changed(config.workers, config.train.slots) if transport.goes_on else None

        if begin is None:
            assert listener
            save_on_signal(save, signal.default_int_handler)
            _invite(config, coordinator, listener.tls, console)
            code = coordinator.wait(new_size)
        else:

            def start(number: int, log: Path) -> Process:
                return begin([coordinator.address[0], str(coordinator.address[1]), str(number)], log)

            workers = stack.enter_context(Workers(start, logs, config.restarts))
            save_on_signal(save, workers.quit)
            workers.new_size = new_size
            workers.start(config.workers)
            code = workers.wait(coordinator)
    if workers and workers.was_quit:
        raise UserError("The run was ended at once", "A second Ctrl-C", START_AGAIN)
    if failures := [*coordinator.failures, *filter(None, (recorder.failure, goes_on.ledger.failure))]:
        first = failures[0]
        cause = workers.first_signal if workers and workers.first_signal else first.cause
        cause += f". {transport.fixed}" if transport.fixed and "lost" in seen else ""
        show_error(console, UserError(first.what, cause, first.remedy))
        return code if code == EXIT_HALTED else EXIT_USER_ERROR
    if code == EXIT_STOPPED and not coordinator.begun:
        console.print("Stopped before the first step: there was nothing to save.")
    if code not in (0, EXIT_HALTED, EXIT_STOPPED):
        who = workers.first_failure if workers else "A worker"
        where = logs if workers else "the terminals of the workers"
        raise UserError(f"{who} ended the run", "It gave no reason", f"Look at {where}")
    if code == 0 and "done" not in seen:
        cause = "Every rank has left, and none reported a result"
        raise UserError("The run ended before its last step", cause, "Start it again: it resumes")
    return code


def _starter(
    config: RunSettings, token: str, logs: Path, stack: contextlib.ExitStack
) -> Callable[[Sequence[str], Path], Process]:
    """A function that starts a worker on this machine, with its arguments and its log."""
    environment = {VARIABLE: token, "OMP_NUM_THREADS": str(config.threads), **kernels(config.numerics)}
    if sys.platform != "linux":  # elsewhere a process that has imported torch cannot be forked safely
        return lambda arguments, log: execute([*WORKER, *arguments], environment, log)
    fork_server = ForkServer(environment, libraries(config), log_of(logs, 0))
    return stack.enter_context(contextlib.closing(fork_server)).start


def _invite(config: RunSettings, coordinator: Coordinator, tls: Tls | None, console: Console) -> None:
    """Print the command with which workers join."""
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


def _goes_on(config: RunSettings, folder: RunFolder, checkpoint: Path | None, stack: contextlib.ExitStack) -> GoesOn:
    """What the run needs to go on when its members change; the stack closes the ledger."""
    ledger = Ledger(folder.folder, step_of(checkpoint) if checkpoint else 0)
    stack.callback(ledger.close)
    possible = TRANSPORTS[config.group.transport].goes_on
    reported = partial(last_step, folder.folder)
    return GoesOn(config.min_workers, config.group.timeout, ledger, reported_step=reported, possible=possible)


def _listen(bind: Callable[[tuple[str, int]], Coordinator], listener: Listener, emit: Emit) -> Coordinator:
    """Open a coordinator at an address; without a port at the usual one, or at a free one."""
    try:
        try:
            return bind((listener.host, PORT if listener.port is None else listener.port))
        except OSError as error:
            if listener.port is not None or error.errno != errno.EADDRINUSE:
                raise
            emit(event("note", text=f"Port {PORT} is taken: give the workers the port below"))
            return bind((listener.host, 0))
    except OSError as error:
        what = f"The coordinator cannot listen at {address_text(listener.host, listener.port or PORT)}"
        remedy = "Choose another --bind: an address of this machine, and port 0 for a free one"
        reason = str(error.strerror or error).partition(" (")[0]  # Python appends the address
        raise UserError(what, reason, remedy) from None


def absolute(config: C) -> C:
    """The configuration with an absolute path of the run's folder."""
    run = config.run.model_copy(update={"dir": expand(config.run.dir).resolve()})
    return config.model_copy(update={"run": run})
