"""`andon coordinator` and `andon worker` as separate processes: one answer, and refusals with the reason."""

from __future__ import annotations

import json
import re
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.runs import SMALL, andon, start, summary, train, wait_for_step

STEPS = ["--train.steps=8"]


@contextmanager
def coordinating(cwd: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A coordinator that listens, and its address."""
    command = ["coordinator", *SMALL, *STEPS, "--run.dir=run", "--bind=127.0.0.1:0", *arguments]
    process = start(*command, cwd=cwd)
    assert process.stdout is not None
    try:
        while not (found := re.search(r"andon worker (\S+)", line := process.stdout.readline())):
            assert line, "the coordinator ended"
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> str:
    digest: str = train(*STEPS, cwd=tmp_path_factory.mktemp("alone"))["weights_blake3"]
    return digest


@pytest.mark.parametrize(("transport", "workers"), [("star", 3), ("ring", 2)])
def test_workers_started_by_hand_give_the_answer(tmp_path: Path, answer: str, transport: str, workers: int) -> None:
    options = [f"--workers={workers}", f"--group.transport={transport}"]
    with coordinating(tmp_path, *options) as (coordinator, address):
        started = [start("worker", address, cwd=tmp_path) for _ in range(workers)]
        outputs = [worker.communicate(timeout=90)[0] for worker in started]
        assert [worker.returncode for worker in started] == [0] * workers, outputs
        output, _ = coordinator.communicate(timeout=30)
        assert coordinator.returncode == 0, output
    assert summary(tmp_path / "run")["weights_blake3"] == answer
    assert summary(tmp_path / "run")["transport"] == transport


def test_a_worker_with_other_data_is_refused_with_the_reason_and_another_takes_its_place(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("One two three four five. " * 400)
    other = tmp_path / "other"
    other.mkdir()
    (other / "text.txt").write_text("Six seven eight nine ten. " * 400)
    with coordinating(tmp_path, "text.txt", "--workers=1", "--group.transport=ring") as (coordinator, address):
        code, output = andon("worker", address, cwd=other)
        assert code == 1 and "its tokens are not the coordinator's" in output, output
        code, output = andon("worker", address, cwd=tmp_path)
        assert code == 0, output
        said, _ = coordinator.communicate(timeout=30)
        assert coordinator.returncode == 0 and "was refused: its tokens are not" in said


def test_a_worker_of_another_version_is_refused_with_the_reason(tmp_path: Path) -> None:
    with coordinating(tmp_path, "--workers=1") as (_, address):
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            hello = b"\x10" + json.dumps({"kind": "hello", "version": "9.9.9", "host": "elsewhere"}).encode()
            connection.sendall(struct.pack(">I", len(hello)) + hello)
            (length,) = struct.unpack(">I", connection.recv(4))
            answer = json.loads(connection.recv(length)[1:])
    assert answer["kind"] == "refused" and "it runs 9.9.9" in answer["reason"]


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x05\x10null", b"\xff" * 64, b""])
def test_noise_at_the_door_does_no_harm(tmp_path: Path, answer: str, noise: bytes) -> None:
    with coordinating(tmp_path, "--workers=1", "--group.transport=ring") as (coordinator, address):
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(noise)
        code, output = andon("worker", address, cwd=tmp_path)
        assert code == 0, output
        coordinator.communicate(timeout=30)
    assert summary(tmp_path / "run")["weights_blake3"] == answer


def test_workers_join_over_ipv6(tmp_path: Path, answer: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    with coordinating(tmp_path, "--workers=2", "--group.transport=star", "--bind=[::1]:0") as (coordinator, address):
        assert address.startswith("[::1]:")
        started = [start("worker", address, cwd=tmp_path) for _ in range(2)]
        outputs = [worker.communicate(timeout=90)[0] for worker in started]
        assert [worker.returncode for worker in started] == [0, 0], outputs
        coordinator.communicate(timeout=30)
    assert summary(tmp_path / "run")["weights_blake3"] == answer


@pytest.mark.parametrize("transport", ["star", "ring"])
def test_an_address_that_cannot_be_bound_is_named(tmp_path: Path, transport: str) -> None:
    options = [*SMALL, "--run.dir=run", "--workers=2", f"--group.transport={transport}"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        code, output = andon("coordinator", *options, f"--bind={taken}", cwd=tmp_path)
    *_, what, cause, remedy = output.splitlines()
    assert (code, what, cause) == (1, f"The coordinator cannot listen at {taken}", "Address already in use"), output
    assert "--bind" in remedy
    code, output = andon("coordinator", *options, "--bind=192.0.2.1:0", "--insecure", cwd=tmp_path)
    assert code == 1 and "cannot listen at 192.0.2.1" in output and "Traceback" not in output, output


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:70000", "127.0.0.1:²", f"127.0.0.1:{'1' * 5000}"])
def test_what_is_no_address_is_refused(tmp_path: Path, address: str) -> None:
    code, output = andon("worker", address, cwd=tmp_path)
    assert code == 1 and "is not an address" in output and "Traceback" not in output, output


def test_binding_off_loopback_needs_a_word(tmp_path: Path) -> None:
    code, output = andon("coordinator", *SMALL, "--bind=0.0.0.0:0", cwd=tmp_path)
    assert code == 1 and "Workers are not authenticated" in output and "--insecure" in output, output


def test_a_coordinator_that_is_not_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code, output = andon("worker", f"127.0.0.1:{port}", cwd=tmp_path)
    assert code == 1 and "cannot be reached" in output, output


def test_a_worker_that_is_lost_is_not_a_success(tmp_path: Path) -> None:
    options = ["--workers=2", "--group.transport=ring", "--train.steps=100000"]
    with coordinating(tmp_path, *options) as (coordinator, address):
        workers = [start("worker", address, cwd=tmp_path) for _ in range(2)]
        wait_for_step(tmp_path / "run", 2, coordinator)
        for worker in workers:
            worker.kill()
        output, _ = coordinator.communicate(timeout=60)
    assert coordinator.returncode == 1 and "was lost" in output, output


JOB = {"config": {"run": {"dir": "here"}}, "data": "digest", "folder_mark": "mark"}


class PlainWorker:
    """A worker of which only the control link is there, spoken by hand."""

    def __init__(self, address: tuple[str, int]) -> None:
        from andon import __version__

        self.socket = socket.create_connection(address, timeout=30)
        self.send("hello", version=__version__, host="here", pid=1, rank=None)
        assert self.receive() == "job"
        self.send("ready", data="digest", folder="mark")
        assert self.receive() == "welcome"

    def send(self, kind: str, **fields: object) -> None:
        payload = b"\x10" + json.dumps({"kind": kind, **fields}).encode()
        self.socket.sendall(struct.pack(">I", len(payload)) + payload)

    def receive(self) -> object:
        (length,) = struct.unpack(">I", self._read(4))
        return json.loads(self._read(length)[1:])["kind"]

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            data += self.socket.recv(count - len(data))
        return data


@pytest.mark.parametrize(
    ("ends", "code", "failures"),
    [
        ([0, 0], 0, []),
        ([0, 3], 3, []),
        ([3, 0], 3, []),
        ([4, 4], 4, []),
        ([4, 0], 4, []),
        ([4, 3], 3, []),
        ([4, None], 1, ["Rank 1 was lost"]),
        ([0, None], 1, ["Rank 1 was lost"]),
        ([None, 0], 1, ["Rank 0 was lost"]),
    ],
)
def test_the_worst_end_of_a_worker_is_the_end_of_the_run(
    ends: list[int | None], code: int, failures: list[str]
) -> None:
    """None: its connection ends without a goodbye."""
    from andon.cluster.coordinator import Coordinator

    with closing(Coordinator(JOB, 2, lambda event: None)) as coordinator:
        workers = [PlainWorker(coordinator.address) for _ in ends]
        for worker in workers:
            worker.send("value", topic="addresses", value="here")
        assert [worker.receive() for worker in workers] == ["values", "values"]
        for worker, end in zip(workers, ends, strict=True):
            if end is not None:
                worker.send("bye", code=end)
            worker.socket.close()
        assert coordinator.wait() == code
        assert [failure.what for failure in coordinator.failures] == failures
