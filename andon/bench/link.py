"""A network that is slower than memory: the loopback of a namespace, held to a rate (Linux, as root)."""

from __future__ import annotations

import shutil
import subprocess
import sys

from andon.errors import UserError

SETUP = """
ip link set lo up && tc qdisc add dev lo root tbf rate "$1" burst 4mb latency 100ms && shift && exec "$@"
"""


def run_at(rate: str, arguments: list[str]) -> int:
    """Run `andon ARGUMENTS` in a network of its own that carries `rate` (4gbit); its exit code."""
    if missing := [tool for tool in ("unshare", "ip", "tc") if not shutil.which(tool)]:
        raise UserError(
            f"--rate needs {', '.join(missing)}",
            "They make a network of its own for the benchmark, on Linux",
            "Install util-linux and iproute2, or leave out --rate",
        )
    command = [sys.executable, "-m", "andon", *arguments]
    return subprocess.run(["unshare", "--net", "sh", "-c", SETUP, "sh", rate, *command]).returncode
