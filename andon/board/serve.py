"""Serves the board: in `andon board`, and in the background process of a run on a terminal."""

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from andon.errors import UserError
from andon.transport.address import address_text

PORT = 29413
"""The default port; if it is taken, the board listens on a free one."""
LOOPBACK = "127.0.0.1"


def serve(folders: list[Path], listener: socket.socket, token: str | None, tls: tuple[str, str] | None = None) -> None:
    """Answer requests until the process is signalled to end."""
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
    """Listen at an address; without a port at the default port, or at a free one if that is taken."""
    wanted = PORT if port is None else port
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        # Connections queue here until the server is ready.
        open_at = partial(socket.create_server, family=family, backlog=64, dualstack_ipv6=both)
        try:
            return open_at((host, wanted))
        except OSError as error:
            if port is not None or error.errno != errno.EADDRINUSE:
                raise
            return open_at((host, 0))
    except OSError as error:
        cause = str(error.strerror or error).partition(" (")[0]
        remedy = "Choose another --bind: an address of this machine, and port 0 for a free one"
        raise UserError(f"The board cannot listen at {address_text(host, wanted)}", cause, remedy) from None


@contextlib.contextmanager
def background_board(folder: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Serve the board of one run in a background process of the lowest priority, until the context is left."""
    try:
        listener = listen(LOOPBACK, None)
    except UserError as error:  # the run continues without a board
        report(f"No board for this run: {error.cause}")
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
            start_new_session=True,  # so that Ctrl-C does not reach it
        )
        report(f"Board: http://{LOOPBACK}:{listener.getsockname()[1]}/")
    try:
        yield
    finally:
        assert child.stdin
        child.stdin.close()  # the child ends, as it would if this process ended
        try:
            child.wait(5.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def main() -> None:
    """The background process of a run. Its standard input closes when the run's process ends, and then it ends too."""

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    os.nice(19)
    threading.Thread(target=end_with_parent, daemon=True).start()
    descriptor, folder = sys.argv[1:]
    serve([Path(folder)], socket.socket(fileno=int(descriptor)), None)


if __name__ == "__main__":
    main()
