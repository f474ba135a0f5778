"""`andon board`: serve a page that shows runs, until Ctrl-C."""

import contextlib
from pathlib import Path

from rich.console import Console

from andon.board.access import LOOPBACK
from andon.board.serve import listen, serve
from andon.commands.runs.status import named_runs
from andon.control.token import VARIABLE, token_of_run
from andon.errors import UserError
from andon.transport.address import address_text


def board(folders: list[Path], address: tuple[str, int | None], tls: tuple[str, str] | None, console: Console) -> None:
    """Serve the board of some runs. At an address other than loopback, viewers need the token of the first run."""
    runs = named_runs(folders)
    host, port = address
    token, where = None, ""
    if host not in LOOPBACK:
        if not runs:
            raise UserError("There is no run yet", f"Viewers at {host} need the token of a run", "Start a run first")
        token = token_of_run(runs[0])
        where = f"   (asks for the token: {VARIABLE} or {runs[0] / 'token'})"
        if not tls:
            note = "Without --tls-cert and --tls-key the token is sent unencrypted: use this in a network you trust"
            console.print(note, style="yellow", soft_wrap=True)
    listener = listen(host, port)
    url = f"{'https' if tls else 'http'}://{address_text(host, listener.getsockname()[1])}/"
    console.print(f"Board: {url}{where}", soft_wrap=True, markup=False)
    with contextlib.suppress(KeyboardInterrupt):
        serve(folders, listener, token, tls)
