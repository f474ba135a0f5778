"""`andon board`: show runs on a page, until Ctrl-C."""

import contextlib
from pathlib import Path

from rich.console import Console

from andon.board.app import is_run
from andon.board.serve import is_loopback, listen, serve
from andon.control.token import VARIABLE, token_of_run
from andon.errors import UserError


def board(folders: list[Path], address: tuple[str, int | None], tls: tuple[str, str] | None, console: Console) -> None:
    """Serve the board of some runs; off loopback only to those who know the token of the first."""
    for folder in folders:
        if not folder.is_dir():
            remedy = "Name the folder of a run, or one that holds runs"
            raise UserError(f"There is no folder {folder}", "A run's folder holds metrics.jsonl", remedy)
    host, port = address
    token, where = None, ""
    if not is_loopback(host):
        of_run = next((run for folder in folders for run in (folder, *sorted(folder.glob("*"))) if is_run(run)), None)
        if of_run is None:
            raise UserError("There is no run yet", "Off loopback the board asks for a run's token", "Start a run first")
        token = token_of_run(of_run)
        where = f"   (asks for the token: {VARIABLE} or {of_run / 'token'})"
        if not tls:
            note = "Without --tls-cert and --tls-key the token travels in the clear: use this in a network you trust"
            console.print(note, style="yellow", soft_wrap=True)
    listener = listen(host, port)
    name = f"[{host}]" if ":" in host else host
    url = f"http{'s' if tls else ''}://{name}:{listener.getsockname()[1]}/"
    console.print(f"Board: {url}{where}", soft_wrap=True, markup=False)
    with contextlib.suppress(KeyboardInterrupt):
        serve(folders, listener, token, tls)
