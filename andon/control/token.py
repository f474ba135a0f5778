"""The run's token: a secret that a worker must know to join. It is in a file that only its owner can read, or in the
environment as ANDON_TOKEN; never on a command line, in a log or on the network."""

import contextlib
import getpass
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from andon.errors import UserError
from andon.files import no_follow
from andon.transport.keys import LinkKeys
from andon.transport.tcp.entrance.tls import Tls

VARIABLE: Final = "ANDON_TOKEN"
FILE: Final = "token"
SHORTEST: Final = 16


@dataclass(frozen=True)
class Credentials:
    """The run's token, the certificates, and a secret that only the coordinator and its servers know."""

    token: str
    tls: Tls | None = None
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def issue(self, rank: int, world_size: int, generation: int) -> LinkKeys:
        """The keys that a rank receives; it seals them with the token."""
        return LinkKeys.derive(self.secret, rank, world_size, generation)


def new_token() -> str:
    """Make a random token."""
    return secrets.token_hex(32)


def token_of_run(folder: Path) -> str:
    """The token with which a coordinator admits workers: ANDON_TOKEN, or the run's file, which is made if missing."""
    if VARIABLE in os.environ:
        return checked(os.environ[VARIABLE], VARIABLE)
    path = folder / FILE
    if not path.exists():
        # A worker may be waiting for the file, so it must appear with its whole text.
        temporary = folder / f".{FILE}.{os.getpid()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(new_token() + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
    return read_token(path)


def token_of_worker(file: Path | None, patience: float = 0.0, notify: Callable[[str], None] = print) -> str:
    """The token with which a worker joins: from a file, from ANDON_TOKEN, or typed in. Waits up to `patience` seconds
    for the file, which the coordinator makes when it starts."""
    if file:
        until = time.monotonic() + patience
        if not file.exists() and patience:
            notify(f"Waiting up to {patience:.0f} s for the run's token {file}")
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.2)
        return read_token(file)
    if VARIABLE in os.environ:
        # Removed, so that no child process inherits it.
        return checked(os.environ.pop(VARIABLE), VARIABLE)
    if sys.stdin and sys.stdin.isatty():
        return checked(getpass.getpass("The run's token: "), "The typed token")
    cause = "It is in the file `token` of the run's folder, on the coordinator's machine"
    remedy = f"Copy that file here and give --token-file FILE, or set {VARIABLE}"
    raise UserError("A worker needs the run's token", cause, remedy)


def read_token(path: Path) -> str:
    """Read a token from a file that only its owner may read."""
    try:
        with open(path, encoding="utf-8", opener=no_follow) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                cause = f"Its mode is {mode:04o}, so other users can join the run"
                raise UserError(f"The token {path} can be read by other users", cause, f"chmod 600 {path}")
            return checked(file.read(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        remedy = "Copy it from the run's folder on the coordinator's machine"
        raise UserError(f"The token {path} cannot be read", reason, remedy) from None


def checked(text: str, where: str) -> str:
    """Return a token without surrounding blanks; `UserError` if it is too easy to guess."""
    token = text.strip()
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable():
        cause = f"{where} has {len(token)} characters, or some that are not printable ASCII"
        remedy = f"Use {SHORTEST} or more random characters: python -c 'import secrets; print(secrets.token_hex(32))'"
        raise UserError("That token is too weak", cause, remedy)
    return token
