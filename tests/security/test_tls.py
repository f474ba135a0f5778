"""TLS on every connection of a run: control links, ring and star; nobody without a certificate takes part."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from andon.control.worker.join import join
from andon.errors import UserError
from andon.transport.base import GroupTimeout, Settings
from andon.transport.keys import SERVER
from andon.transport.tcp.entrance import handshake
from andon.transport.tcp.entrance.tls import Tls
from andon.transport.tcp.ring import RingGroup
from andon.transport.tcp.star import StarGroup
from andon.transport.tcp.star_server import StarServer
from tests.cluster.coordinators import TOKEN, coordinator_of
from tests.cluster.test_coordinator import STEPS, coordinating, end
from tests.kit.group_harness import link_keys
from tests.kit.runs import start, summary, train
from tests.transport.test_ring import Seat, Table

SECONDS = 20.0
pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="needs the openssl command")


def certify(folder: Path, authority: str, name: str) -> Tls:
    """A certificate of an authority, which is made if it is new."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    ca = [f"{folder}/{authority}.pem", f"{folder}/{authority}.key"]
    days = ["-days", "2"]

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)

    if not Path(ca[0]).exists():
        openssl("req", "-x509", *curve, "-keyout", ca[1], "-out", ca[0], "-subj", f"/CN={authority}", *days)
    openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    signed = ["-CA", ca[0], "-CAkey", ca[1], "-CAcreateserial"]
    openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem", *days)
    return Tls(f"{folder}/{name}.pem", f"{folder}/{name}.key", ca[0])


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return certify(tmp_path_factory.mktemp("ours"), "authority", "machine")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return certify(tmp_path_factory.mktemp("theirs"), "impostor", "machine")


def everyone(groups: list[RingGroup] | list[StarGroup], act: Callable[[RingGroup | StarGroup], object]) -> list[object]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(act, groups))


def exchange_much(groups: list[RingGroup] | list[StarGroup]) -> None:
    """Long vectors in both directions at once, and short messages, several times."""
    size = len(groups)
    for length in (1, 3_000_001, 17):
        vectors = [torch.arange(float(length)) % 1000 + rank for rank in range(size)]
        everyone(groups, lambda group, v=vectors: group.all_reduce(v[group.rank]))  # type: ignore[misc]
        expected = (torch.arange(float(length)) % 1000) * size + size * (size - 1) / 2
        assert all(torch.equal(vector, expected) for vector in vectors)
        assert everyone(groups, lambda group: group.all_gather_bytes(b"%d" % group.rank))[0] == [
            b"%d" % rank for rank in range(size)
        ]


def test_a_ring_exchanges_over_tls(ours: Tls) -> None:
    table = Table(3)
    seats = [Seat(table, rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        opening = [
            pool.submit(RingGroup.open, seat, Settings(SECONDS, keys=link_keys(seat.rank, 3), tls=ours))
            for seat in seats
        ]
        groups = [each.result(SECONDS) for each in opening]
    try:
        assert all(isinstance(group._left, ssl.SSLSocket) for group in groups)
        exchange_much(groups)
    finally:
        for group in groups:
            group.close()


def test_a_star_exchanges_over_tls_and_knows_when_its_ranks_leave(ours: Tls) -> None:
    server = StarServer(("127.0.0.1", 0), 2, SECONDS, link_keys(SERVER, 2), ours)
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(server.serve)
        settings = [Settings(SECONDS, server=server.address, keys=link_keys(rank, 2), tls=ours) for rank in range(2)]
        groups = [StarGroup.open(Seat(Table(2), rank), settings[rank]) for rank in range(2)]
        exchange_much(groups)
        for group in groups:
            group.close()
        serving.result(SECONDS)


def test_strangers_without_tls_or_with_anothers_certificate_are_refused(
    ours: Tls, theirs: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 1.0)
    lines: list[str] = []

    def note(event: dict[str, object]) -> None:
        lines.append(str(event.get("text")))

    with coordinator_of(1, note, tls=ours) as coordinator:
        with socket.create_connection(coordinator.address, SECONDS) as plain, suppress(ConnectionResetError):
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while plain.recv(100):
                pass
        with pytest.raises(UserError, match="TLS with the coordinator failed"):
            join(coordinator.address, TOKEN, None, theirs, patience=SECONDS)
        with pytest.raises(GroupTimeout):
            join(coordinator.address, TOKEN, None, None)
        _, client = join(coordinator.address, TOKEN, None, ours)
        client.enter({"data": "digest", "folder": "mark"})
        assert client.wait_for_generation()
        client.leave(0)
        assert coordinator.wait() == 0
    assert any("TLS failed" in line for line in lines)


@pytest.mark.parametrize("transport", ["star", "ring"])
def test_a_run_over_tls_gives_the_answer(
    tmp_path: Path, ours: Tls, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANDON_TOKEN", TOKEN)
    files = [f"--tls-cert={ours.cert}", f"--tls-key={ours.key}", f"--tls-ca={ours.ca}"]
    with coordinating(tmp_path, "--workers=2", f"--group.transport={transport}", *files) as (coordinator, address):
        workers = [start("worker", address, *files, cwd=tmp_path) for _ in range(2)]
        outputs = [end(worker) for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], outputs
        end(coordinator, 30)
    alone = train(*STEPS, cwd=tmp_path, name="alone")
    assert summary(tmp_path / "run")["weights_blake3"] == alone["weights_blake3"]


def test_files_that_cannot_be_used_are_named(tmp_path: Path, ours: Tls) -> None:
    for tls in (Tls(ours.cert), Tls(ours.cert, ours.ca, ours.ca), Tls(ca=str(tmp_path / "none"))):
        with pytest.raises(UserError):
            tls.check()


def test_a_silent_tls_connection_holds_up_nobody(ours: Tls) -> None:
    joined = threading.Event()

    def come() -> None:
        join(coordinator.address, TOKEN, None, ours)[1].close()
        joined.set()

    with coordinator_of(1, tls=ours) as coordinator, socket.create_connection(coordinator.address, SECONDS):
        threading.Thread(target=come, daemon=True).start()
        assert joined.wait(SECONDS)
