"""A run as its launcher sees it: the folder, the data, a coordinator, the workers, and a clean end."""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from andon.cluster.bf16 import check_bf16
from andon.cluster.control import Message
from andon.cluster.coordinator import Coordinator
from andon.cluster.processes import Command, Workers
from andon.cluster.signals import save_on_signal
from andon.cluster.star_process import star_process
from andon.cluster.worker import START_AGAIN, join
from andon.config.load import load
from andon.config.schema import Config
from andon.data.token_set import TokenSet
from andon.errors import EXIT_HALTED, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from andon.files import expand
from andon.run.display import Display, show_error, show_plan
from andon.run.events import Emit, Event, Recorder, event
from andon.run.folder import RunFolder, read_mark
from andon.run.prepare import prepare_tokens
from andon.transport.base import TRANSPORTS, GroupError

LOOPBACK = "127.0.0.1"


def train(config: Config, resume: str, console: Console) -> int:
    """`andon train`: start the workers of a run here and wait for them; gives the exit code."""
    config = absolute(config).on_this_machine()
    check_bf16(config)
    with run_folder(config, resume, console) as (folder, checkpoint):
        return _coordinate(config, folder, checkpoint, console)


def train_demo(overrides: Mapping[str, Any], resume: str, console: Console) -> int:
    """`andon demo`: the tiny preset on the built-in stories; a finished demo is moved aside, not repeated."""
    demo = {"run.dir": "runs/demo", "workers": min(2, os.cpu_count() or 1)}
    config = absolute(load(None, {**demo, **overrides}))
    finished = (config.run.dir / "summary.json").exists()
    return train(config, "none" if finished and resume == "auto" else resume, console)


def serve(config: Config, bind: tuple[str, int], console: Console) -> int:
    """`andon coordinator`: wait for workers that are started elsewhere; gives the exit code."""
    config = absolute(config).with_transport("star")
    with run_folder(config, "auto", console) as (folder, checkpoint):
        return _coordinate(config, folder, checkpoint, console, bind)


def join_run(host: str, port: int, console: Console) -> int:
    """`andon worker`: join a coordinator, perhaps on another machine; gives the exit code."""

    def tokens_of(config: Config, job: Message) -> TokenSet:
        console.print(f"Joined {place}: {config.model.preset}, {config.train.steps:,} steps", style="dim")
        check_bf16(config)
        return prepare_tokens(config.with_own_cache(), console)  # each machine has its own

    place = address_text(host, port)
    try:
        return join(host, port, None, tokens_of)
    except GroupError as error:
        remedy = "Check the address and that `andon coordinator` is running there"
        raise UserError(f"The coordinator at {place} cannot be reached", str(error), remedy) from None


@contextlib.contextmanager
def run_folder(config: Config, resume: str, console: Console) -> Iterator[tuple[RunFolder, Path | None]]:
    """Show the plan and lock the run's folder; gives the folder and the checkpoint to resume from."""
    show_plan(console, config)
    with contextlib.closing(RunFolder(config.run.dir)) as folder:
        folder.take()
        try:
            if resume == "none" and (aside := folder.move_aside()):
                console.print(f"The earlier run is now in {aside}", style="dim")
            yield folder, folder.resume_from(resume)
        except OSError as error:
            what = f"The run's folder {folder.folder} cannot be used"
            cause = f"{error.strerror} at {error.filename}" if error.filename else str(error.strerror)
            raise UserError(what, cause, "Choose another --run.dir") from error


@contextlib.contextmanager
def recording(config: Config, folder: RunFolder, console: Console) -> Iterator[tuple[Recorder, Emit]]:
    """Record and show the events of a run; its first `start` removes how an earlier part of it ended."""
    display = Display(console, config)
    recorder = Recorder(folder.folder, display, hold=folder.hold)
    with contextlib.closing(display), contextlib.closing(recorder):

        def emit(event: Event) -> None:
            if event["event"] == "start":
                folder.begin(config.model_copy(update={"probe": event["probe"]}))
            recorder.emit(event)

        for note in folder.notes:
            emit(event("note", text=note))
        yield recorder, emit


def _coordinate(
    config: Config, folder: RunFolder, checkpoint: Path | None, console: Console, bind: tuple[str, int] | None = None
) -> int:
    """Coordinate a run: start its workers here, or with `bind` wait for those that are started elsewhere."""
    tokens = prepare_tokens(config, console)
    logs = config.run.dir / "logs"
    workers: Workers | None = None

    def save() -> None:
        console.print("Saving after this step, then leaving. Once more quits at once.", style="yellow")
        coordinator.stop()

    def quit_now(number: int, frame: FrameType | None) -> None:
        if workers is None:
            raise KeyboardInterrupt
        workers.quit()

    with contextlib.ExitStack() as stack:
        recorder, emit = stack.enter_context(recording(config, folder, console))
        server = None
        if TRANSPORTS[config.group.transport].needs_server:
            host = bind[0] if bind else LOOPBACK
            server = stack.enter_context(star_process(host, config.workers, config.group.timeout))
        job = {
            "config": config.model_dump(mode="json"),
            "data": tokens.digest,
            "folder_mark": read_mark(folder.folder),
            "tokens": str(tokens.folder),
            "resume": str(checkpoint) if checkpoint else None,
            "log": str(logs),
            "server": server,
        }
        coordinator = stack.enter_context(_listening(job, config.workers, emit, bind or (LOOPBACK, 0)))
        save_on_signal(save, quit_now)
        if bind:
            host, port = coordinator.address
            host = socket.gethostname() if host in ("0.0.0.0", "::") else host
            where = address_text(host, port)
            console.print(f"Waiting for {config.workers} workers: andon worker {where}", soft_wrap=True)
            code = coordinator.wait()
        else:
            place = [coordinator.address[0], str(coordinator.address[1])]
            commands = [Command(["-m", "andon.cluster.worker", *place, str(rank)]) for rank in range(config.workers)]
            workers = stack.enter_context(Workers(commands, config.threads, logs))
            code = workers.wait(coordinator)
    if workers and workers.was_quit:
        raise UserError("The run was ended at once", "A second Ctrl-C", START_AGAIN)
    if failures := coordinator.failures + ([recorder.failure] if recorder.failure else []):
        show_error(console, failures[0])
        return code if code == EXIT_HALTED else EXIT_USER_ERROR
    if code not in (0, EXIT_HALTED, EXIT_STOPPED):
        who = workers.first_failure if workers else "A worker"
        raise UserError(f"{who} ended the run", "It gave no reason", f"Look at {logs}")
    return code


@contextlib.contextmanager
def _listening(job: Message, workers: int, emit: Emit, bind: tuple[str, int]) -> Iterator[Coordinator]:
    """A coordinator at an address, until the context is left."""
    try:
        coordinator = Coordinator(job, workers, emit, bind)
    except OSError as error:
        what = f"The coordinator cannot listen at {address_text(*bind)}"
        remedy = "Choose another --bind: an address of this machine, and port 0 for a free one"
        reason = str(error.strerror or error).partition(" (")[0]  # Python names the address once more
        raise UserError(what, reason, remedy) from None
    with contextlib.closing(coordinator):
        yield coordinator


def address_text(host: str, port: int) -> str:
    """HOST:PORT, as a person types it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def absolute(config: Config) -> Config:
    """The configuration with an absolute path of the run's folder."""
    run = config.run.model_copy(update={"dir": expand(config.run.dir).resolve()})
    return config.model_copy(update={"run": run})
