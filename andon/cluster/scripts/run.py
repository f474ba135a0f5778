"""`andon run`: a user's script on several workers of this machine.

The launcher starts one process per worker and is their coordinator. A worker runs the script. When the script calls
`andon.init`, the worker joins the coordinator, whose address is in the environment, and opens a group over shared
memory. The output of rank 0 is shown, the other ranks write logs. Ctrl-C asks all workers to save and leave after the
step.
"""

import contextlib
import errno
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3
from rich.console import Console

from andon.cluster.processes import Process, Workers, execute, log_of
from andon.cluster.signals import save_on_signal
from andon.control.coordinator import Coordinator
from andon.control.generations.succession import GoesOn
from andon.control.token import VARIABLE, Credentials, new_token, token_of_worker
from andon.control.worker.client import CoordinatorClient
from andon.control.worker.join import join
from andon.errors import EXIT_HALTED, EXIT_PEER_LOST, EXIT_STOPPED, EXIT_USER_ERROR, UserError, harmless
from andon.machine import name_process
from andon.numerics import Numerics, kernels
from andon.run.records.events import Event
from andon.run.records.folder import NoLocks, RunFolder
from andon.run.records.ledger import Ledger
from andon.run.screen.display import show_error
from andon.run.screen.terminal import Terminal
from andon.transport.base import GroupError, GroupTimeout, PeerLost
from andon.transport.registry import TRANSPORTS, fastest_here

ADDRESS = "ANDON_COORDINATOR"
RANK = "ANDON_RANK"
NUMERICS = "ANDON_NUMERICS"
SCRIPT = "ANDON_SCRIPT"  # the digest of the script that a worker runs
PATIENCE_SECONDS = 60.0  # time for a worker to leave its group when another one is lost
RESTARTS = 100  # of lost workers, in all


def run_script(script: Path, arguments: Sequence[str], count: int, numerics: Numerics, console: Console) -> int:
    """Run a script on `count` workers and wait for them; returns the exit code."""
    if not script.is_file():
        raise UserError(f"{script} is not a file", "`andon run` runs a Python script", "Check its path")

    def stop() -> None:
        console.print("Stopping after this step. Ctrl-C again quits at once.", style="yellow")
        coordinator.stop()

    with contextlib.ExitStack() as stack:
        credentials = Credentials(new_token())
        logs = stack.enter_context(contextlib.closing(_lock_logs(script.stem, console))).folder
        ledger = stack.enter_context(contextlib.closing(Ledger(logs.parent, 0)))
        goes_on = GoesOn(1, PATIENCE_SECONDS, ledger, possible=TRANSPORTS[fastest_here(count)].goes_on)
        job = {"data": "", "folder_mark": "", "script": _digest(script)}
        coordinator = Coordinator(job, count, lambda event: show(event, console), credentials, goes_on)
        stack.enter_context(contextlib.closing(coordinator))
        host, port = coordinator.address
        environment = {VARIABLE: credentials.token, NUMERICS: numerics, ADDRESS: f"{host}:{port}"}
        environment |= {"OMP_NUM_THREADS": "1", **kernels(numerics)}

        def start(rank: int, log: Path) -> Process:
            command = ["-m", "andon.cluster.scripts.run", str(script), *arguments]
            return execute(command, {**environment, RANK: str(rank)}, log if rank else None)

        for rank in range(count):
            log_of(logs, rank).unlink(missing_ok=True)
        workers = stack.enter_context(Workers(start, logs, RESTARTS))
        save_on_signal(stop, workers.quit)
        workers.start(count)
        code = workers.wait(coordinator)
        members = coordinator.succession.processes  # of the last generation; none without andon.init
        ended = {process.pid for process in workers.processes.values() if process.returncode == 0}
    if ledger.failure:
        show_error(console, ledger.failure)
    if workers.was_quit:
        raise UserError(f"{script.name} was ended at once", "A second Ctrl-C", "What it saved before is intact")
    if code not in (EXIT_HALTED, EXIT_STOPPED) and coordinator.failures and goes_on.possible:
        raise coordinator.failures[0]  # where a loss ends the run, the end of the lost worker's log says more
    if code not in (0, EXIT_HALTED, EXIT_STOPPED):
        what = f"{workers.first_failure} ended {script.name} with exit code {code}"
        show_error(console, UserError(what, _last_lines(workers, logs), f"Look at {logs}"))
    elif code == 0 and members and ended - members:
        what = f"A lost worker of {script.name} was started again, and computed apart from the others"
        cause = "The script has not reached a loop over model.steps, in which a worker can join the others"
        raise UserError(what, cause, "Run the same command again")
    elif code == 0 and members - ended:
        what = f"A worker of {script.name} was lost before its script had ended"
        cause = "What it does after the last step may be missing"
        raise UserError(what, cause, "Run the same command again")
    return code


def _lock_logs(name: str, console: Console) -> RunFolder:
    """Lock the folder of a script's logs: `runs/NAME/logs`, or `runs/NAME-2/logs` while another run of it uses that.
    The script itself may lock `runs/NAME`."""
    folder = first = Path("runs") / name
    number = 1
    while True:
        logs = RunFolder(folder / "logs")
        try:
            with contextlib.suppress(NoLocks):  # then two runs write to one folder
                logs.hold()
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            number += 1
            folder = first.with_name(f"{name}-{number}")
            continue
        if folder != first:
            text = f"Another run of {name}.py uses {first}: the logs and the ledger of this one are in {folder}"
            console.print(text, style="yellow", markup=False, soft_wrap=True)
        return logs


def show(event: Event, console: Console) -> None:
    """Print losses and notes."""
    if event["event"] in ("lost", "note"):
        console.print(event["text"], style="dim", markup=False, soft_wrap=True)


def _last_lines(workers: Workers, logs: Path) -> str:
    """The error at the end of the first failed worker's log; the output of rank 0 was on the terminal."""
    rank = workers.first_failed
    if rank:
        with contextlib.suppress(OSError):
            lines = log_of(logs, rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            traceback = [number for number, line in enumerate(lines, 1) if line.startswith(" ")]
            return ". ".join(lines[max(traceback, default=0) :] or lines[-1:]) or "It wrote nothing"
    return "Its output is above"


def join_launcher() -> tuple[CoordinatorClient, bool, bool] | None:
    """Join the launcher of `andon run`; returns the client, whether the run has begun, and whether the script has
    changed since the launcher read it. None without a launcher."""
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
    return client, bool(job.get("joins")), job.get("script") != os.environ[SCRIPT]


def main(arguments: Sequence[str]) -> int:
    """Run one worker of `andon run`: the script with its arguments; returns its exit code."""
    script, *rest = arguments
    name_process(f"andon-rank-{os.environ[RANK]}")
    os.environ[SCRIPT] = _digest(Path(script))  # now: later it may have been edited, or the folder may be another
    sys.argv = [script, *rest]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
        return 0
    except Exception as error:
        if (code := show_without_traceback(error)) is None:
            raise
        if isinstance(error, (PeerLost, GroupTimeout)):
            sys.last_value = error  # as if nobody had caught it: nothing waits for the peer at exit
            return EXIT_PEER_LOST
        return code


def _digest(script: Path) -> str:
    return blake3(script.read_bytes()).hexdigest()


def show_without_traceback(error: BaseException) -> int | None:
    """Show a halt, or an error of the user, a file or a peer; returns the exit code, or None for any other error."""
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
