"""`andon worker`: a worker that was started by hand, perhaps on another machine."""

from __future__ import annotations

from rich.console import Console

from andon.cluster.control import Message
from andon.cluster.worker import join
from andon.config.schema import Config, DataConfig
from andon.data.token_set import TokenSet
from andon.errors import UserError
from andon.run.prepare import prepare_tokens
from andon.transport.base import GroupError


def join_run(host: str, port: int, console: Console) -> int:
    """Join the coordinator at host:port; gives the exit code."""

    def tokens_of(config: Config, plan: Message) -> TokenSet:
        console.print(
            f"Joined {host}:{port}: {config.model.preset}, {config.train.steps:,} steps", style="dim"
        )
        data = config.data.model_copy(update={"cache": DataConfig().cache})  # each machine has its own
        return prepare_tokens(config.model_copy(update={"data": data}), console)

    try:
        return join(host, port, None, tokens_of)
    except GroupError as error:
        raise UserError(
            f"The coordinator at {host}:{port} cannot be reached",
            str(error),
            "Check the address; is it running?",
        ) from None
