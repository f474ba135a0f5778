"""Running the ranks of a benchmark: one process each, their results as JSON."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from torch._C._distributed_c10d import TCPStore

from andon.errors import UserError

LOOK_S = 0.2  # between two looks at the ranks: seldom enough not to disturb what is measured


def run_ranks(module: str, ranks: int, task: dict[str, Any], token: str = "") -> list[Any]:
    """Run `python -m module TASK` once per rank, with a store to meet at; what each prints, by rank.

    The first rank that fails ends all: the others would only wait for it.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = []
        for rank, output in enumerate(outputs):
            given = json.dumps({**task, "rank": rank, "ranks": ranks, "port": store.port})
            # As for real workers: after torch.set_num_threads(1) alone a second thread spins on.
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "ANDON_TOKEN": token}
            process = subprocess.Popen([sys.executable, "-m", module, given], stdout=output, env=environment, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(LOOK_S)
        for rank, code in enumerate(codes):
            if code:
                what = f"Rank {rank} of the benchmark failed"
                raise UserError(what, f"It ended with exit code {code}", "Look at its error above")
        for output in outputs:
            output.seek(0)
        return [json.load(output) for output in outputs]
