"""Strangers at the door of a run while it trains: how much slower its steps are, and how much memory they take."""

from __future__ import annotations

import os
import random
import re
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.kit.runs import SMALL, events_so_far, listening, start, wait_for_step

SEED = int(os.environ.get("ANDON_SOAK_SEED", "1"))
TURNS = int(os.environ.get("ANDON_SOAK_COUNT") or "10")
TURN_SECONDS = 6.0
HELD = 1000
PAUSE = 0.02  # between two strangers: 50 come in a second


@contextmanager
def strangers(address: tuple[str, int]) -> Iterator[None]:
    """Idle connections, slow writers and noise."""
    ended = threading.Event()

    def come() -> None:
        dice, held = random.Random(SEED), list[socket.socket]()
        while not ended.wait(PAUSE):
            with suppress(OSError):
                held.append(socket.create_connection(address, 1.0))
                held[-1].sendall(dice.choice((b"", b"\0", dice.randbytes(200))))
            with suppress(OSError):
                dice.choice(held).sendall(b"\0")
            if len(held) > HELD:
                held.pop(0).close()
        for sock in held:
            sock.close()

    thread = threading.Thread(target=come)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def steps_per_second(run: Path) -> float:
    time.sleep(0.5)
    before, began = len(events_so_far(run)), time.monotonic()
    time.sleep(TURN_SECONDS)
    return (len(events_so_far(run)) - before) / (time.monotonic() - began)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", ["ring", "star"])
def test_strangers_slow_the_steps_by_less_than_a_tenth(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANDON_TOKEN", "the token of the tests")
    options = ["--train.steps=1000000", "--train.micro_batch=16", "--checkpoint.every=0", "--eval.every=0"]
    options += ["--workers=2", f"--group.transport={transport}", "--run.dir=run", "--bind=127.0.0.1:0"]
    coordinator = start("coordinator", *SMALL, *options, cwd=tmp_path)
    assert coordinator.stdout is not None
    while not (found := re.search(r"andon worker (\S+)", coordinator.stdout.readline())):
        assert coordinator.poll() is None
    workers = [start("worker", found[1], cwd=tmp_path) for _ in range(2)]
    wait_for_step(tmp_path / "run", 5, coordinator)
    door = ("127.0.0.1", int(found[1].rpartition(":")[2]))
    assert door in listening(psutil.Process(coordinator.pid))
    process = psutil.Process(coordinator.pid)
    before = process.memory_info().rss
    ratios = []
    for _ in range(TURNS):
        quiet = steps_per_second(tmp_path / "run")
        with strangers(door):
            ratios.append(steps_per_second(tmp_path / "run") / quiet)
    grown = (process.memory_info().rss - before) >> 20
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().count("Refused")
    print(f"{transport}: steps/s with strangers {statistics.median(ratios):.3f} of those without, median of {TURNS}")
    print(f"{transport}: the coordinator grew by {grown} MB and said {lines} lines")
    assert all(each.poll() is None for each in (coordinator, *workers))
    assert statistics.median(ratios) > 0.9, ratios
    assert grown < 30
    assert lines < 10 * TURNS
