"""Whether this CPU computes in bf16: on some, oneDNN kills the process with an illegal instruction.

`check_bf16` tries one small step in a separate process, with the kernels of the configuration; `main` is that step.
"""

import os
import signal
import subprocess
import sys

from andon.config.schema import RunSettings
from andon.errors import UserError
from andon.numerics import kernels

ATTEMPT = [sys.executable, "-m", "andon.cluster.bf16"]
SECONDS = 120.0  # loading torch from a slow disk may take this long


def check_bf16(config: RunSettings) -> None:
    """Refuse bf16 on a CPU that cannot compute in it."""
    if config.train.precision != "bf16" or config.device == "cuda":
        return
    none, environment = subprocess.DEVNULL, os.environ | kernels(config.numerics)
    attempt = [*ATTEMPT, config.device]
    try:
        code = subprocess.run(
            attempt, env=environment, stdin=none, stdout=none, stderr=none, timeout=SECONDS
        ).returncode
        cause = f"A small step in bf16 was killed by {signal.Signals(-code).name}" if code < 0 else ""
    except subprocess.TimeoutExpired:
        cause = f"A small step in bf16 has not ended within {SECONDS:.0f} s"
    if cause:
        what = f"train.precision = bf16 does not work on this CPU with {config.numerics} kernels"
        other = " or --numerics portable" if config.numerics == "native" else ""
        raise UserError(what, cause, f"Use --train.precision f32{other}")


def main(device: str) -> None:
    """Do one step in bf16 on the CPU, with a model that has all kinds of layers."""
    import torch

    from andon.model.llama import Llama
    from andon.model.shape import Shape

    if device == "auto" and torch.cuda.is_available():
        return
    torch.set_num_threads(1)
    model = Llama(Shape(vocab=256, hidden=128, layers=1, heads=4, kv_heads=2, intermediate=384, context=64))
    model.initialise(0)
    tokens = torch.arange(2 * 64).view(2, 64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, tokens)
    loss.backward()


if __name__ == "__main__":
    main(sys.argv[1])
