"""Running the ranks of a benchmark: one process each, their results as JSON."""

import json
import os
import subprocess
import sys
from typing import Any

from torch._C._distributed_c10d import TCPStore


def run_ranks(module: str, ranks: int, task: dict[str, Any], token: str = "") -> list[Any]:
    """Run `python -m module TASK` once per rank, with a store to meet at; what each prints, by rank."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, json.dumps({**task, "rank": rank, "ranks": ranks, "port": store.port})],
            stdout=subprocess.PIPE,
            # As for real workers: after torch.set_num_threads(1) alone a second thread spins on.
            env={**os.environ, "OMP_NUM_THREADS": "1", "ANDON_TOKEN": token},
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed := [rank for rank, process in enumerate(processes) if process.returncode]:
        raise RuntimeError(f"rank {failed[0]} of the benchmark failed; its error is above")
    return [json.loads(output) for output in outputs]
