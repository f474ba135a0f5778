"""A worker: joins a coordinator, receives the configuration and its rank, and trains."""

import faulthandler
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from andon.cluster.client import CoordinatorClient, enter, log
from andon.cluster.control import Message
from andon.cluster.signals import save_on_signal
from andon.config.schema import Config
from andon.data.token_set import TokenSet
from andon.errors import EXIT_HALTED, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from andon.numerics import choose_kernels
from andon.run.events import event
from andon.run.folder import read_mark
from andon.transport.base import GroupError

START_AGAIN = "Run the same command again: it resumes from the newest checkpoint"


def join(host: str, port: int, rank: int | None, tokens_of: Callable[[Config, Message], TokenSet]) -> int:
    """Join the coordinator at host:port and train as one rank of its run; gives the exit code."""
    prepared: list[tuple[Config, TokenSet]] = []

    def prepare(job: Message) -> Mapping[str, str]:
        config = Config.model_validate(job["config"])
        tokens = tokens_of(config, job)
        prepared.append((config, tokens))
        return {"data": tokens.digest, "folder": read_mark(config.run.dir)}

    job, client = enter((host, port), rank, prepare)
    ((config, tokens),) = prepared
    # A batch system, or a machine that shuts down, signals every process and not only the launcher.
    save_on_signal(client.stop.set)
    code, stopped = EXIT_USER_ERROR, f"Rank {client.rank} on {socket.gethostname()} stopped"
    try:
        code = _train(config, tokens, job, client)
    except UserError as error:
        client.fail(error.what, error.cause, error.remedy)
        log(str(error))
    except GroupError as error:
        client.fail(f"{stopped}: {error}", "A worker died or cannot be reached", START_AGAIN)
        log(traceback.format_exc())
    except Exception as error:
        what = f"{stopped}: {type(error).__name__}: {error}"
        client.fail(what, "An unexpected error", f"Its traceback is in {job['log']}")
        log(traceback.format_exc())
    client.leave(code)
    return code


def _train(config: Config, tokens: TokenSet, job: Message, client: CoordinatorClient) -> int:
    """Train as one rank; torch is loaded here and not before."""
    if warning := choose_kernels(config.numerics):
        client.emit(event("note", text=f"rank {client.rank}: {warning}"))
    from andon.cluster.session import open_configured, train
    from andon.integrity.halt import JidokaHalt

    server = job["server"]
    if server and server[0] in ("0.0.0.0", "::"):  # it listens everywhere, so also where the coordinator is
        server = [client.control.link.socket.getpeername()[0], *server[1:]]
    resume = Path(job["resume"]) if job["resume"] else None
    try:
        with open_configured(config, client, client.host, server) as group:
            stopped = train(config, tokens, group, resume, client.emit, client.stop.is_set)
    except JidokaHalt as halt:
        log(str(halt))
        return EXIT_HALTED
    return EXIT_STOPPED if stopped else 0


def main(arguments: Sequence[str]) -> int:
    """One worker of `andon train`; its arguments are the coordinator's host and port, and the rank."""
    faulthandler.enable()
    host, port, rank = arguments
    return join(host, int(port), int(rank), lambda config, job: TokenSet.open(Path(job["tokens"])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
