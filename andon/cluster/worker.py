"""A worker: joins a coordinator, receives the configuration, the data and its rank, and trains."""

from __future__ import annotations

import contextlib
import faulthandler
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from andon.cluster.kinds import libraries, open_data, read_config
from andon.cluster.signals import save_on_signal
from andon.config.schema import RunSettings
from andon.control.link import Message
from andon.control.token import token_of_worker
from andon.control.worker.client import CoordinatorClient
from andon.control.worker.exit import log
from andon.control.worker.join import join
from andon.data.cache import Prepared, find, open_sound, receive
from andon.errors import EXIT_HALTED, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from andon.numerics import choose_kernels
from andon.run.records.events import event
from andon.run.records.folder import read_mark
from andon.transport.base import SOMEONE, Group, GroupError, ProtocolError
from andon.transport.tcp.entrance.tls import Tls

if TYPE_CHECKING:  # torch is imported only when the worker trains
    from andon.cluster.session import Session
    from andon.engine.trainer import Trainer

IMPORT_SECONDS = 120.0  # importing torch from a slow disk may take this long
START_AGAIN = "Run the same command again: it resumes from the newest checkpoint"


@dataclass(frozen=True)
class Access:
    """How a worker reaches a run, and what the run may do with it."""

    token: str
    rank: int | None = None
    """The rank that it asks for."""
    tls: Tls | None = None
    folder: Path | None = None
    """The only folder in which the run may write; None: a launcher's own worker, which may write anywhere."""
    patience: float = 0.0
    """Seconds to wait for the coordinator."""
    notify: Callable[[str], None] = lambda text: None
    """Shows a line to the user; the launcher does that for its own workers."""


def work(address: tuple[str, int], access: Access) -> int:
    """Join the coordinator at an address and train as one rank of its run; returns the exit code."""
    job, client = join(address, access.token, access.rank, access.tls, access.patience, access.notify)
    try:
        config, data = _prepare(job, client, access)
        # A worker that joins a running run builds everything before the others wait for it.
        session = _load(config, data, client, job) if job.get("joins") else None
        client.folder_mark = partial(read_mark, config.run.dir)
        client.enter({"data": data.digest, "folder": client.folder_mark()})
        status = f"Rank {client.rank} of {client.world_size}" if client.rank >= 0 else "Ready"
        access.notify(f"{status}; waiting until all have joined")
        if not client.wait_for_generation():
            access.notify("The coordinator stopped before the run began")
            client.leave(EXIT_STOPPED)
            return EXIT_STOPPED
    except UserError as error:
        client.fail(error.what, error.cause, error.remedy)
        client.close()
        raise
    except GroupError:
        client.close()
        raise
    access.notify(f"Training with {', '.join(f'rank {rank} on {host}' for rank, host in enumerate(client.hosts))}")
    code = _train_and_report(config, data, job, client, access, session)
    client.leave(code)
    return code


def _train_and_report(
    config: RunSettings,
    data: Prepared,
    job: Message,
    client: CoordinatorClient,
    access: Access,
    session: Session | None,
) -> int:
    """Train as one rank; an error is reported to the coordinator and written to the log."""
    # A batch system, or a machine that shuts down, signals every process and not only the launcher.
    save_on_signal(client.stop.set)
    stopped = f"Rank {client.rank} on {socket.gethostname()} stopped"
    try:
        session = session or _load(config, data, client, job)
        return _train(session, job, client, access)
    except UserError as error:
        client.fail(error.what, error.cause, error.remedy)
        log(str(error))
    except GroupError as error:
        text = _with_host(str(error), client)
        client.fail(f"{stopped}: {text}", error.cause, error.remedy or START_AGAIN)
        log(f"{stopped}: {text}")
    except Exception as error:
        what = f"{stopped}: {type(error).__name__}: {error}"
        where = job["log"] if access.folder is None else f"that worker's terminal, on {socket.gethostname()}"
        client.fail(what, "An unexpected error", f"Its traceback is in {where}")
        log(traceback.format_exc())
    return EXIT_USER_ERROR


def _with_host(text: str, client: CoordinatorClient) -> str:
    """Add the host to the rank that an error of the group names."""
    for rank in range(client.world_size):
        if text.startswith(f"rank {rank} "):
            return client.name(rank) + text.removeprefix(f"rank {rank}")
    return text


def _prepare(job: Message, client: CoordinatorClient, access: Access) -> tuple[RunSettings, Prepared]:
    """The configuration for this machine, and the data with the digest in the job."""
    try:
        config = read_config(job["config"])
        names = {name: job[name] for name in ("tokens", "resume", "log")}
    except (KeyError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ProtocolError(f"the coordinator sent a job that this version of Andon cannot read: {reason}") from None
    if not isinstance(names["tokens"], str) or not isinstance(names["resume"], str | None):
        raise ProtocolError("the coordinator sent a job without paths")
    if access.folder is None:
        return config, open_data(config, Path(job["tokens"]))
    access.notify(f"Joined: {config.model_name}, {config.train.steps:,} steps")
    from andon.cluster.bf16 import check_bf16

    config = in_own_folder(config, access.folder)
    check_bf16(config)
    cache, digest = config.data.cache, job["data"]
    open_folder = partial(open_data, config)
    if data := find(cache, digest, open_folder):
        access.notify(f"Data {digest[:16]}…: from the cache")
    elif data := open_sound(Path(job["tokens"]), digest, open_folder):
        access.notify(f"Data {digest[:16]}…: from the coordinator's folder, which this machine can read")
    else:
        access.notify(f"Data {digest[:16]}…: receiving it from the coordinator")
        data = receive(cache, digest, client.fetch, open_folder)
    return config, data


def in_own_folder(config: RunSettings, folder: Path) -> RunSettings:
    """The configuration with this user's cache, and with the coordinator's run folder only if it is inside the folder
    that this worker's user chose."""
    folder = folder.resolve()
    wanted = config.run.dir.resolve()
    place = wanted if wanted.is_relative_to(folder) else folder / "runs" / wanted.name
    return config.with_own_cache().model_copy(update={"run": config.run.model_copy(update={"dir": place})})


def _load(config: RunSettings, data: Prepared, client: CoordinatorClient, job: Message) -> Session:
    """Import torch and make a session."""
    if warning := choose_kernels(config.numerics):
        log(f"rank {client.rank}: {warning}")
        if client.rank >= 0:
            client.emit(event("note", text=f"rank {client.rank}: {warning}"))
    with client.may_be_silent(IMPORT_SECONDS):
        from andon.cluster.session import Hooks, Session, make_torch_deterministic

        with contextlib.suppress(ImportError):  # their first use reports which one is missing
            for module in libraries(config):
                import_module(module)

    def built(trainer: Trainer) -> None:
        times = trainer.model.phases
        client.compute_ms = lambda: times.last.get("forward", 0.0) + times.last.get("backward", 0.0)

    requests = (client.change.is_set, client.shrink.is_set)
    hooks = Hooks(client.emit, client.stop.is_set, client.local_rank, built, *requests, client)
    make_torch_deterministic(config.threads)
    session = Session(config, data, hooks)
    if job.get("joins"):
        session.prepare(job.get("probe", {}), job.get("frozen", ""))
    return session


def _train(session: Session, job: Message, client: CoordinatorClient, access: Access) -> int:
    """Train as one rank of one generation after another."""
    from andon.cluster.session import open_configured
    from andon.control.worker.torch_store import ControlStore
    from andon.engine.membership import MembersChange
    from andon.integrity.halt import JidokaHalt
    from andon.transport.base import Settings

    config, since = session.config, time.monotonic()
    resume = Path(job["resume"]) if job["resume"] else None
    while True:
        settings = Settings(
            config.group.timeout,
            config.group.wire,
            client.host,
            config.group.server_address or _server(client),
            client.keys,
            access.tls,
            ControlStore(client, config.group.timeout),
            client.watch,
        )
        try:
            with open_configured(config, client, settings) as group, _leaving(session, group):
                client.watch(group)
                known = client.recorded, since
                stopped = session.go_on(group, *known) if client.later else session.train(group, resume)
            session.close()
            return EXIT_STOPPED if stopped else 0
        except JidokaHalt as halt:
            log(str(halt))
            return EXIT_HALTED
        except MembersChange:
            why, error = "a worker joins or leaves", None
        except GroupError as failure:
            if not client.goes_on or isinstance(failure, ProtocolError):
                raise
            why, error = _with_host(str(failure), client), failure
            log(why)
        since = time.monotonic()
        if not client.part(why, getattr(error, "rank", SOMEONE) if error else None):
            if session.is_over or client.released:
                return 0
            raise error or GroupError("the run has ended")


@contextlib.contextmanager
def _leaving(session: Session, group: Group) -> Iterator[None]:
    """When a generation ends with an error, stop the threads that use its group before the group is left."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, GroupError):
            group.abort(getattr(error, "rank", SOMEONE), "the generation has ended")
        session.part()
        raise


def _server(client: CoordinatorClient) -> tuple[str, int] | None:
    """The address of a star's server; if it listens at every address, that of the coordinator."""
    if not client.server:
        return None
    host, port = client.server
    return (client.link.remote if ip_address(host).is_unspecified else host), port


def main(arguments: Sequence[str]) -> int:
    """Run one worker of `andon train`; the arguments are the coordinator's host and port, and the rank."""
    faulthandler.enable()
    host, port, rank = arguments
    return work((host, int(port)), Access(token_of_worker(None), int(rank)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
