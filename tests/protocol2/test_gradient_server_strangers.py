"""Who may connect to `andon gradient-server`, and what strangers cannot do to it. The long version, 100,000 malformed
frames beside idle connections and slow writers, prints its figures:

    pytest -s tests/protocol2/test_gradient_server_strangers.py -k malformed
"""

from __future__ import annotations

import os
import random
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import ip_network
from pathlib import Path
from threading import Event

import psutil
import pytest

from andon.protocol2.connections import is_allowed
from tests.kit.runs import andon, end_started, start
from tests.protocol2.gradient_servers import everyone, serving, vectors
from tests.protocol2.plain_peers import SECONDS, PlainWorker, sequential_mean

SEED = int(os.environ.get("ANDON_SOAK_SEED", "1"))
COUNT = int(os.environ.get("ANDON_SOAK_COUNT") or "100000")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--workers=2", "--bind=0.0.0.0:0"], "A gradient server would accept gradients from anyone"),
        (["--workers=2", "--bind=0.0.0.0:0", "--allow=example"], "--allow is not a network"),
        (["--workers=2", "--bind=192.0.2.1:1", "--allow=10.0.0.0/8"], "cannot listen at 192.0.2.1:1"),
        (["--workers=2", "--bind=nowhere:port"], "'nowhere:port' is not an address"),
    ],
)
def test_what_cannot_be_served_is_refused_in_three_lines(tmp_path: Path, options: list[str], what: str) -> None:
    code, output = andon("gradient-server", *options, cwd=tmp_path)
    assert code == 1 and what in output and len(output.strip().splitlines()) == 3, output


def test_whoever_is_allowed_is_warned_of(tmp_path: Path) -> None:
    process = start("gradient-server", "--bind=0.0.0.0:0", "--workers=1", "--allow=10.1.0.0/16", cwd=tmp_path)
    try:
        assert process.stdout
        lines = [process.stdout.readline() for _ in range(2)]
        assert lines[1].startswith("WARNING: There is no authentication: any host in 10.1.0.0/16 can take part")
    finally:
        end_started()


def test_only_this_machine_and_allowed_networks_may_connect() -> None:
    networks = [ip_network("10.1.0.0/16"), ip_network("fd00::/8")]
    allowed = ("127.0.0.1", "::1", "::ffff:127.0.0.1", "10.1.2.3", "::ffff:10.1.2.3", "fd00::1%eth0")
    assert all(is_allowed(host, networks) for host in allowed)
    assert not any(is_allowed(host, networks) for host in ("10.2.0.1", "192.0.2.1", "::ffff:10.2.0.1", "2001:db8::1"))
    assert not is_allowed("10.1.2.3", [])


def malformed(dice: random.Random) -> bytes:
    """A frame with a fault: a wrong length, tag, count or text, or nothing but noise."""
    join = struct.pack("<BI", 1, 5) + b"plain" + struct.pack("<II", 1, 3) + b"cpu"
    gradient = struct.pack("<BQIQ3ffQQ", 4, 0, 2, 3, 1.0, 2.0, 3.0, 1.0, 1, 1)
    payload = bytearray(dice.choice((join, gradient)))
    match dice.randrange(5):
        case 0:
            return struct.pack(">I", dice.choice((0, 100_000_001, 2**32 - 1))) + payload
        case 1:
            del payload[dice.randrange(1, len(payload)) :]
        case 2:
            payload[0] = dice.choice((0, 0x0C, 0x46, 0xFF))
        case 3:
            payload[1:5] = struct.pack("<I", dice.choice((2**31, 2**32 - 1, 1 << 20)))
        case _:
            payload = bytearray([dice.choice((2, 3, 5, 7, 9, 11))]) + dice.randbytes(dice.randrange(60))
    return struct.pack(">I", len(payload)) + bytes(payload)


@pytest.mark.parametrize("count", [300, pytest.param(COUNT, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_malformed_frames_idle_connections_and_slow_writers_do_no_harm(tmp_path: Path, count: int) -> None:
    """Strangers attack while ten of twelve workers are still missing: half of them join first, and take the place of
    one for a moment. Then the ten join, and all do their steps."""
    with serving(tmp_path, "--workers=12", "--steps=3") as server:
        honest = server.join(2)
        process = psutil.Process(server.process.pid)
        idle = [socket.create_connection(server.address, SECONDS) for _ in range(300)]
        stop = Event()
        sizes: list[float] = []

        def trickle() -> None:
            """A worker that joins a byte at a time, too slowly."""
            frame = struct.pack(">IBI", 17, 1, 1) + b"w" + struct.pack("<II", 1, 3) + b"cpu"
            with suppress(OSError), socket.create_connection(server.address, SECONDS) as sock:
                for byte in frame:
                    sock.sendall(bytes([byte]))
                    if stop.wait(1.0):
                        return

        def attack(turn: int) -> None:
            dice = random.Random(f"{SEED} {turn}")
            with suppress(OSError, AssertionError, struct.error):
                worker = PlainWorker(server.address, "stranger", join=dice.random() < 0.5)
                with worker.sock:
                    worker.sock.settimeout(5.0)
                    worker.sock.sendall(malformed(dice))
                    worker.sock.shutdown(socket.SHUT_WR)
                    while worker.sock.recv(1 << 16):
                        pass

        with ThreadPoolExecutor(8) as pool:
            slow = [pool.submit(trickle) for _ in range(4)]
            for part in range(10):
                list(pool.map(attack, range(part * count // 10, (part + 1) * count // 10)))
                sizes.append(process.memory_info().rss / (1 << 20))
            stop.set()
            for each in slow:
                each.result(SECONDS)
        print(f"{count} malformed frames: memory {[round(size) for size in sizes]} MB")
        assert sizes[-1] - sizes[1] < 20, sizes
        honest += server.join(10)
        sent = vectors(12, 10_003)

        def work(worker: PlainWorker) -> None:
            for step in range(3):
                worker.send_gradient(step, sent[worker.worker_id], 1.0, 1, 1)
                assert worker.averaged()[1].tobytes() == sequential_mean(sent).tobytes()
            worker.receive()
            worker.sock.close()

        everyone(honest, work)
        for sock in idle:
            sock.close()
        code, output = server.finish()
    assert code == 0 and "Traceback" not in output, output[-3000:]
    assert len(output) < 100_000
