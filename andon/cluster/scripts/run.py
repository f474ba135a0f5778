"""`andon run`: a script of the user's own on several workers of this machine.

The launcher starts one process per worker and is their coordinator. A worker runs the script; where the script calls
`andon.init`, it joins the coordinator, whose address is in the environment, and opens a group over shared memory. Rank
0's output is the command's own, the other ranks write logs. Ctrl-C asks all workers to save and leave after the step.
"""

import atexit
import contextlib
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from andon.cluster.processes import Command, Process, Workers, execute, log_of
from andon.cluster.signals import save_on_signal
from andon.control.coordinator import Coordinator
from andon.control.generations.succession import GoesOn
from andon.control.token import Credentials, environment, new_token, token_of_worker
from andon.control.worker.client import CoordinatorClient
from andon.control.worker.join import join
from andon.errors import EXIT_HALTED, EXIT_PEER_LOST, EXIT_STOPPED, EXIT_USER_ERROR, UserError, harmless
from andon.machine import name_process
from andon.numerics import Numerics, kernels
from andon.run.records.events import Event
from andon.run.records.ledger import Ledger
from andon.run.screen.display import show_error
from andon.run.screen.terminal import Terminal
from andon.transport.base import TRANSPORTS, GroupError, PeerLost, fastest_here

ADDRESS = "ANDON_COORDINATOR"
RANK = "ANDON_RANK"
NUMERICS = "ANDON_NUMERICS"
PATIENCE = 60.0  # seconds that a worker gets to leave its group when another one is lost
RESTARTS = 100  # how many lost workers are started again, in all


def run_script(script: Path, arguments: Sequence[str], count: int, numerics: Numerics, console: Console) -> int:
    """Run a script on `count` workers and wait for them; gives the exit code."""
    if not script.is_file():
        raise UserError(f"{script} is not a file", "`andon run` runs a Python script", "Check its path")
    logs = Path("runs") / script.stem / "logs"
    workers: Workers | None = None

    def stop() -> None:
        console.print("Stopping after this step. Once more quits at once.", style="yellow")
        coordinator.stop()

    def quit_now(number: int, frame: FrameType | None) -> None:
        if workers is None:
            raise KeyboardInterrupt
        workers.quit()

    with contextlib.ExitStack() as stack:
        credentials = Credentials(new_token())
        logs.mkdir(parents=True, exist_ok=True)
        ledger = stack.enter_context(contextlib.closing(Ledger(logs.parent, 0)))
        goes_on = GoesOn(1, PATIENCE, ledger, possible=TRANSPORTS[fastest_here(count)].goes_on)
        job = {"data": "", "folder_mark": ""}
        coordinator = Coordinator(job, count, lambda event: show(event, console), credentials, goes_on=goes_on)
        stack.enter_context(contextlib.closing(coordinator))
        save_on_signal(stop, quit_now)
        host, port = coordinator.address
        own = {**environment(credentials.token), **kernels(numerics), NUMERICS: numerics, ADDRESS: f"{host}:{port}"}

        def start(rank: int, log: Path) -> Process:
            command = ["-m", "andon.cluster.scripts.run", str(script), *arguments]
            return execute(Command(command, {**own, RANK: str(rank)}, shown=rank == 0), 1, log)

        for rank in range(count):
            log_of(logs, rank).unlink(missing_ok=True)
        workers = stack.enter_context(Workers(start, logs, RESTARTS))
        workers.start(count)
        code = workers.wait(coordinator)
    if workers.was_quit:
        raise UserError(f"{script.name} was ended at once", "A second Ctrl-C", "What it saved before is intact")
    if code not in (0, EXIT_HALTED, EXIT_STOPPED):
        what = f"{workers.first_failure} ended {script.name} with exit code {code}"
        show_error(console, UserError(what, _last_words(workers, logs), f"Look at {logs}"))
    return code


def show(event: Event, console: Console) -> None:
    """Say who was lost, and what becomes of the run."""
    if event["event"] in ("lost", "note"):
        console.print(event["text"], style="dim", markup=False, soft_wrap=True)


def _last_words(workers: Workers, logs: Path) -> str:
    """The last line of the first failed worker's log; rank 0's words were on the terminal."""
    rank = workers.first_failed
    if rank:
        with contextlib.suppress(OSError):
            lines = log_of(logs, rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return lines[-1] if lines else "It wrote nothing"
    return "Its output is above"


def join_launcher() -> tuple[CoordinatorClient, bool] | None:
    """This process as a worker of `andon run`, and whether it joins a run that has begun; None if it is none."""
    if ADDRESS not in os.environ:
        return None
    host, _, port = os.environ[ADDRESS].rpartition(":")
    job, client = join((host, int(port)), token_of_worker(None), int(os.environ[RANK]))
    save_on_signal(client.stop.set)
    if not job.get("joins"):
        client.enter({"data": "", "folder": ""})
        if not client.wait_for_generation():
            client.leave(EXIT_STOPPED)
            sys.exit(EXIT_STOPPED)
    atexit.register(client.leave, 0)  # the launcher takes the exit code from the process itself
    return client, bool(job.get("joins"))


def main(arguments: Sequence[str]) -> int:
    """One worker of `andon run`: the script with its arguments, and the exit code of what ended it."""
    script, *rest = arguments
    name_process(f"andon-rank-{os.environ[RANK]}")
    sys.argv = [script, *rest]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
        return 0
    except Exception as error:
        if (code := show_without_traceback(error)) is None:
            raise
        return EXIT_PEER_LOST if isinstance(error, PeerLost) else code


def show_without_traceback(error: BaseException) -> int | None:
    """Show what a user, a file or a peer got wrong, or a halt; the exit code. None: it is some other error."""
    from andon.integrity.halt import JidokaHalt

    if isinstance(error, JidokaHalt):
        print(harmless(str(error)), file=sys.stderr)
        return EXIT_HALTED
    if isinstance(error, GroupError):
        error = UserError(str(error), error.cause, error.remedy or "Run the same command again")
    if isinstance(error, UserError):
        show_error(Terminal(stderr=True), error)
        return EXIT_USER_ERROR
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
