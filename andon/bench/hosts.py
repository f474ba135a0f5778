"""`andon bench hosts`: Andon's step over ring and star against DDP over Gloo, on hosts with a network of a given rate.

A host is a network namespace, connected to one switch; a token bucket (`tc tbf`) limits what it sends and receives. One
rank runs on each host. All contestants take turns in one run, a step each. It needs root.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from andon.bench.kit.processes import run_processes
from andon.bench.kit.report import ratio, show, slowest
from andon.control.token import new_token
from andon.errors import UserError

NAMES = ("ring", "ring:bf16", "star", "star:bf16")


def main(rates: list[str], ranks: int, preset: str, tokens: int, repetitions: int, as_json: bool) -> None:
    """Measure, and print one row per rate and transport."""
    rows = []
    for rate in rates:
        with _hosts(ranks, rate) as namespaces:
            task = {"preset": preset, "tokens": tokens, "repetitions": repetitions, "names": NAMES}
            seconds = slowest(_run_ranks(namespaces, task))
        for name in NAMES:
            rows.append(
                {
                    "rate": rate,
                    "transport": name,
                    "ranks": ranks,
                    "step_ms": 1e3 * statistics.median(seconds[name]),
                    "ddp_step_ms": 1e3 * statistics.median(seconds["ddp"]),
                    "ratio": ratio(seconds["ddp"], seconds[name]),
                }
            )
    show(f"{preset}, {ranks} hosts, {tokens} tokens per worker, against DDP over Gloo", rows, as_json)


def _run_ranks(namespaces: list[str], task: dict[str, Any]) -> list[Any]:
    commands = []
    for rank, namespace in enumerate(namespaces):
        place = {"rank": rank, "ranks": len(namespaces), "host": _address(rank), "master": _address(0)}
        command = [sys.executable, "-m", "andon.bench.ranks", "andon.bench.ranks.hosts", json.dumps({**task, **place})]
        commands.append(["ip", "netns", "exec", namespace, *command])
    return run_processes(commands, new_token())


@contextmanager
def _hosts(count: int, rate: str) -> Iterator[list[str]]:
    """Create the namespaces; yields their names, and removes them at the end."""
    switch = f"andonbench{os.getpid()}"
    namespaces = [f"{switch}-{number}" for number in range(count)]
    with ExitStack() as undo:
        try:
            _run("ip", "netns", "add", switch)
            undo.callback(_run, "ip", "netns", "del", switch)
            _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "br0", "up")
            for number, namespace in enumerate(namespaces):
                port = f"p{number}"
                _run("ip", "netns", "add", namespace)
                undo.callback(_run, "ip", "netns", "del", namespace)
                pair = ["eth0", "netns", namespace, "type", "veth", "peer", port, "netns", switch]
                _run("ip", "link", "add", *pair)
                _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
                _run("ip", "-n", namespace, "addr", "add", f"{_address(number)}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _run("ip", "-n", namespace, "link", "set", device, "up")
                for place, device in ((namespace, "eth0"), (switch, port)):
                    limit = ["rate", rate, "burst", "256kb", "latency", "50ms"]
                    _run("tc", "-n", place, "qdisc", "add", "dev", device, "root", "tbf", *limit)
        except (OSError, subprocess.CalledProcessError) as error:
            cause = str(getattr(error, "stderr", "") or error).strip()
            raise UserError("Hosts cannot be made here", cause, "Run it as root on Linux, with iproute2") from None
        yield namespaces


def _address(rank: int) -> str:
    return f"10.76.0.{rank + 1}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
