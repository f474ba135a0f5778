"""Serving the board: `andon board`, and the process that `andon train` starts beside a run on a terminal."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path

from andon.errors import UserError

PORT = 29412
"""Where the board listens, unless told otherwise; a free port if it is taken."""
LOOPBACK = "127.0.0.1"


def serve(folders: list[Path], listener: socket.socket, token: str | None, tls: tuple[str, str] | None = None) -> None:
    """Answer until the process is told to end."""
    import uvicorn

    from andon.board.app import make_app

    certificate, key = tls or (None, None)
    config = uvicorn.Config(
        make_app(folders, token),
        log_level="error",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        limit_concurrency=256,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        server_header=False,
    )
    uvicorn.Server(config).run(sockets=[listener])


def listen(host: str, port: int | None) -> socket.socket:
    """A socket at an address; without a port the usual one, or a free one if that is taken."""
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        for choice in (PORT, 0) if port is None else (port,):
            listener = socket.socket(family)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, choice))
                listener.listen(64)  # who connects before the server is ready waits for it
                return listener
            except OSError:
                listener.close()
                if choice != PORT or port is not None:
                    raise
    except OSError as error:
        remedy = "Choose another --bind: an address of this machine, and port 0 for a free one"
        raise UserError(f"The board cannot listen at {host}:{port or PORT}", f"{error.strerror}", remedy) from None
    raise AssertionError("a port was tried")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def beside(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """A board of one run in a process of its own, of the lowest priority, until the context is left."""
    try:
        listener = listen(LOOPBACK, None)
    except UserError as error:  # a run needs no board
        say(f"No board beside this run: {error.cause}")
        yield
        return
    command = [sys.executable, "-m", "andon.board.serve", str(listener.fileno()), str(folder)]
    with listener:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C is for the run
        )
        say(f"Board: http://{LOOPBACK}:{listener.getsockname()[1]}/")
    try:
        yield
    finally:
        assert child.stdin
        child.stdin.close()  # which ends it, as the end of this process would
        try:
            child.wait(5.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def main() -> None:
    """The process beside a run: ends with the one that started it, whose end closes its standard input."""

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    os.nice(19)
    threading.Thread(target=end_with_parent, daemon=True).start()
    descriptor, folder = sys.argv[1:]
    serve([Path(folder)], socket.socket(fileno=int(descriptor)), None)


if __name__ == "__main__":
    main()
