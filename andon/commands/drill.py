"""`andon drill`: inject every kind of fault and check that the run stops, or goes on without the lost worker.

Each drill is a real training run of a very small model in a temporary folder, with real workers and one injected fault
(`andon.integrity.faults`).
"""

import json
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Column, Table

from andon.errors import UserError
from andon.transport.registry import TRANSPORTS

WORKERS = 3
RUN_SECONDS = 300.0
START_SECONDS = 60.0
SMALL = (
    "--model.vocab=300 --model.hidden=32 --model.layers=2 --model.heads=2 --model.kv_heads=1 --model.intermediate=48 "
    "--train.context=32 --train.micro_batch=2 --train.slots=6 --train.steps=8 --data.stories=300 --eval.stories=0 "
    f"--eval.sample_every=0 --workers={WORKERS} --group.timeout=5 --device=cpu"
).split()
Verdict = Callable[[int, dict[str, Any], str], bool]


class Drill(NamedTuple):
    """A fault, and the reaction that it must cause."""

    fault: str
    expected: str
    passed: Verdict
    end: str = "stopped"


def _halted(step: int, *names: str) -> Verdict:
    def stopped(code: int, halt: dict[str, Any], output: str) -> bool:
        text = json.dumps(halt)
        return code == 3 and halt.get("step") == step and all(name in text for name in names)

    return stopped


def _went_on(rank: int) -> Verdict:
    return lambda code, halt, output: code == 0 and f"Rank {rank} on " in output and "Going on with" in output


def _ended(rank: int) -> Verdict:
    return lambda code, halt, output: code == 1 and f"rank {rank} " in output.lower()


def _lost(rank: int, fault: str, goes_on: bool) -> Drill:
    if goes_on:
        return Drill(fault, f"the others go on without rank {rank}", _went_on(rank), "went on")
    return Drill(fault, f"the others name rank {rank}", _ended(rank))


PARAMETER = "model.layers.1.mlp.up_proj.weight"
HALTS = (
    Drill(f"nan:rank=1,step=3,parameter={PARAMETER}", "halt at 3, rank and parameter", _halted(3, PARAMETER)),
    Drill("inf:rank=2,step=2", "halt at 2, every parameter", _halted(2, "lm_head.weight", "Inf")),
    Drill("bitflip:rank=2,step=4,unit=lm_head", "halt at 4, unit and rank", _halted(4, "lm_head", "on rank 2")),
    Drill(
        "bitflip:rank=0,step=5,unit=model.layers.0,buffer=second",
        "halt at 5, optimizer state",
        _halted(5, "second of model.layers.0", "on rank 0"),
    ),
)
LOSSES = ((1, "die:rank=1,step=3,at=exchange"), (2, "stall:rank=2,step=3,at=backward,seconds=30"))
"""The rank that is lost, and the fault."""


def drills(transport: str) -> list[Drill]:
    """All drills. Over a transport whose members cannot change, the loss of a rank ends the run."""
    goes_on = transport not in TRANSPORTS or TRANSPORTS[transport].goes_on
    return [*HALTS, *(_lost(rank, fault, goes_on) for rank, fault in LOSSES)]


def drill(transport: str, console: Console) -> int:
    """Do all drills; returns 0 if every run reacted as it must."""
    columns = [Column(heading, overflow="fold") for heading in ("fault", "must show", "seconds", "the run")]
    table = Table(*columns, title=f"{WORKERS} workers over {transport}")
    passed = True
    for each in drills(transport):
        with console.status(f"{each.fault} …"):
            started = time.monotonic()
            good = _inject(each, transport)
        verdict = f"[green]{each.end}[/]" if good else "[bold red]DID NOT[/]"
        table.add_row(each.fault, each.expected, f"{time.monotonic() - started:.1f}", verdict)
        passed = passed and good
    console.print(table)
    return 0 if passed else 1


def _inject(each: Drill, transport: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="andon-drill-") as folder, _gradient_server(transport, folder) as server:
        run = Path(folder) / "run"
        options = [f"--run.dir={run}", f"--group.transport={transport}", f"--fault={each.fault}", *server]
        if "buffer=" in each.fault:
            options.append("--zero.policy=off")  # every rank has the whole optimizer state, and can compare it
        command = [sys.executable, "-m", "andon", "train", *SMALL, *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        file = run / "halt.json"
        halt = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return each.passed(done.returncode, halt, done.stdout + done.stderr)


@contextmanager
def _gradient_server(transport: str, folder: str) -> Iterator[list[str]]:
    """Run a gradient server if the transport needs one; yields the option with its address."""
    if transport not in TRANSPORTS or not TRANSPORTS[transport].joins_server:
        yield []
        return
    options = ["--bind=127.0.0.1:0", f"--workers={WORKERS}", f"--run.dir={folder}/server"]
    command = [sys.executable, "-m", "andon", "gradient-server", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        try:
            ready, _, _ = select.select([process.stdout], [], [], START_SECONDS)
            found = re.search(r"\S+:\d+", process.stdout.readline() if ready else "")
            if not found:
                cause = "It has ended, or does not answer"
                raise UserError("The gradient server cannot be started", cause, "Try `andon gradient-server` by itself")
            yield [f"--group.server={found[0]}"]
        finally:
            process.kill()
