"""Running the ranks of a benchmark: one process each, whose results come back as JSON."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import TCPStore

from andon.errors import UserError

POLL_SECONDS = 0.2  # rarely enough not to disturb what is measured


def run_ranks(module: str, ranks: int, task: dict[str, Any], token: str = "") -> list[Any]:
    """Run `main` of a module once per rank, with a store to meet at; returns what each returned, by rank."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tasks = [{**task, "rank": rank, "ranks": ranks, "port": store.port} for rank in range(ranks)]
    command = [sys.executable, "-m", "andon.bench.ranks", module]
    return run_processes([[*command, json.dumps(each)] for each in tasks], token)


def run_processes(commands: Sequence[Sequence[str]], token: str) -> list[Any]:
    """Run one command per rank; returns what each printed. The first rank that fails ends all: the others would only
    wait for it."""
    # As for real workers: after torch.set_num_threads(1) alone a second thread keeps spinning.
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, "OMP_NUM_THREADS": "1", "ANDON_TOKEN": token}
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        processes = []
        for command, output in zip(commands, outputs, strict=True):
            process = subprocess.Popen(command, stdout=output, env=environment, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(POLL_SECONDS)
        for rank, code in enumerate(codes):
            if code:
                what = f"Rank {rank} of the benchmark failed"
                raise UserError(what, f"It ended with exit code {code}", "Look at its error above")
        for output in outputs:
            output.seek(0)
        return [json.load(output) for output in outputs]
