"""Strangers at the ports of a run: refused with a line, whatever they send, and nobody else waits for them."""

from __future__ import annotations

import json
import os
import resource
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from andon.control.token import read_token, token_of_run, token_of_worker
from andon.control.worker.client import CoordinatorClient
from andon.control.worker.join import join
from andon.errors import UserError
from andon.run.records.events import check_event
from andon.transport.base import ProtocolError
from andon.transport.keys import SERVER, LinkKeys
from andon.transport.tcp.connect import Acceptor, connect, is_loopback
from andon.transport.tcp.entrance import handshake, reception
from andon.transport.tcp.entrance.handshake import NotAuthenticated
from andon.transport.tcp.frames import Accepted, Challenge, Hello, Operation, decode, frame
from andon.transport.tcp.star_server import checked_operation
from tests import ROOT
from tests.cluster.coordinators import TOKEN, coordinator_of
from tests.kit.runs import SMALL, events_so_far, listening, soak, start, wait_for_step, workers_of
from tests.protocol2.plain_peers import PlainSocket

SECONDS = 20.0


class Door:
    """A coordinator for one worker, and the lines that it says."""

    def __init__(self, world_size: int = 1) -> None:
        self.lines: list[str] = []
        self._stack = ExitStack()
        opened = coordinator_of(world_size, lambda event: self.lines.append(json.dumps(event)))
        self.coordinator = self._stack.enter_context(opened)
        self.address = self.coordinator.address

    def said(self, text: str) -> int:
        """How many lines hold a text; waits for the first one."""
        until = time.monotonic() + SECONDS
        while not any(text in line for line in self.lines) and time.monotonic() < until:
            time.sleep(0.01)
        return sum(text in line for line in self.lines)

    def admits_a_worker(self) -> bool:
        """Whether someone who knows the token can still join, do its work and leave."""
        _, client = join(self.address, TOKEN, None)
        client.enter({"data": "digest", "folder": "mark"})
        assert client.wait_for_generation()
        client.leave(0)
        return self.coordinator.wait() == 0

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def door() -> Iterator[Door]:
    with closing(Door()) as found:
        yield found


def knock(address: tuple[str, int]) -> tuple[PlainSocket, Challenge]:
    """A connection, and the challenge with which every one is greeted."""
    plain = PlainSocket(socket.create_connection(address, SECONDS))
    challenge = decode(plain.receive())
    assert isinstance(challenge, Challenge)
    return plain, challenge


def answer(key: bytes, challenge: Challenge, hello: Hello) -> bytes:
    return frame(replace(hello, proof=handshake.prove(key, "connector", challenge.nonce, hello)))


def test_a_wrong_token_is_refused_on_both_sides_and_told_nothing(door: Door) -> None:
    with pytest.raises(UserError, match="their tokens differ"):
        join(door.address, "another token, just as long", None)
    plain, challenge = knock(door.address)
    plain.sock.sendall(answer(b"another token", challenge, Hello(0, 0, 0, "control", "nonce")))
    assert plain.is_closed()  # not a byte of an answer
    assert door.said("it does not know the run's token") == 1  # twice, in one line
    assert door.admits_a_worker()


def test_a_recorded_handshake_is_worth_nothing(door: Door) -> None:
    plain, challenge = knock(door.address)
    said = answer(TOKEN.encode(), challenge, Hello(0, 0, 0, "control", "nonce"))
    plain.sock.sendall(said)
    assert isinstance(decode(plain.receive()), Accepted)
    plain.sock.close()
    replayed, _ = knock(door.address)
    replayed.sock.sendall(said)
    assert replayed.is_closed()
    assert door.said("it does not know the run's token") == 1


def test_a_coordinator_that_does_not_know_the_token_learns_nothing() -> None:
    heard: list[bytes] = []

    def pretend(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            plain = PlainSocket(sock)
            plain.sock.sendall(frame(Challenge(secrets.token_hex(32))))
            heard.append(plain.receive())
            plain.sock.sendall(frame(Accepted("0" * 64)))
            with suppress(OSError):
                heard.append(plain.sock.recv(100))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=pretend, args=[listener])
        thread.start()
        with pytest.raises(UserError, match="does not know the run's token"):
            join(listener.getsockname()[:2], TOKEN, None)
        thread.join(SECONDS)
    assert len(heard) == 2 and heard[1] == b"" and TOKEN.encode() not in heard[0]


def test_a_proof_cannot_be_sent_back_to_the_one_who_made_it() -> None:
    hello = Hello(0, 1, 0, "data", "nonce")
    proofs = {handshake.prove(b"key", role, "challenge", hello) for role in ("connector", "acceptor")}
    assert len(proofs) == 2


def test_no_rank_has_the_key_of_two_others_and_a_new_generation_has_new_ones() -> None:
    keys = {rank: LinkKeys.derive(b"secret", rank, 3) for rank in range(SERVER, 3)}
    assert keys[0].of(1) == keys[1].of(0)
    pairs = {(min(a, b), max(a, b)): keys[a].of(b) for a in keys for b in keys if a != b}
    assert len(set(pairs.values())) == len(pairs) == 6
    assert keys[0].of(1) != LinkKeys.derive(b"secret", 0, 3, generation=1).of(1)
    assert keys[0].of(1) not in keys[2].keys.values()
    assert keys[0].sealed("token").of(1) == keys[1].sealed("token").of(0) != keys[0].of(1)


@pytest.mark.parametrize(
    ("rank", "size", "generation", "key_of"), [(1, 2, 0, 0), (5, 2, 0, 1), (1, 3, 0, 1), (1, 2, 1, 1)]
)
def test_a_rank_with_anothers_key_generation_or_size_is_refused(
    rank: int, size: int, generation: int, key_of: int
) -> None:
    """Rank 0 of two expects rank 1; whoever comes has the wrong key, rank, size or generation."""
    mine, theirs = LinkKeys.derive(b"secret", 0, 2), LinkKeys.derive(b"secret", 1, 2)
    key = theirs.of(0) if key_of else LinkKeys.derive(b"secret", 0, 2).of(SERVER)
    acceptor = Acceptor("127.0.0.1", 0, 2, mine)
    with ExitStack() as stack:
        stack.callback(acceptor.close)
        accepted: list[Any] = []
        thread = threading.Thread(target=lambda: accepted.append(acceptor.accept({("data", 1)}, SECONDS)))
        thread.start()
        with pytest.raises(NotAuthenticated):
            connect(acceptor.address, 0, Hello(rank, size, generation, "data"), key, SECONDS)
        connect(acceptor.address, 0, Hello(1, 2, 0, "data"), theirs.of(0), SECONDS).close()
        thread.join(SECONDS)
        accepted[0]["data", 1].close()


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x05\x10null",
        b"\xff" * 64,
        b"",
        b"\x00\x00\x03\xe8\x20" + bytes(999),
        frame(Hello(0, 0, 0, "control", "x" * 300, "y" * 300)),
        frame(Accepted("0" * 64)),
    ],
)
def test_noise_at_the_door_does_no_harm(door: Door, noise: bytes) -> None:
    plain, _ = knock(door.address)
    plain.sock.sendall(noise)
    if noise:
        assert plain.is_closed()
    else:
        plain.sock.close()
    assert door.admits_a_worker()


def test_four_bytes_from_a_stranger_allocate_no_16_megabytes(door: Door) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    strangers = []
    for _ in range(100):
        plain, _ = knock(door.address)
        plain.sock.sendall(struct.pack(">I", 16_000_000))
        strangers.append(plain)
    assert all(plain.is_closed() for plain in strangers)
    assert process.memory_info().rss - before < 30 << 20
    assert door.said("a frame of 16,000,000 bytes") == 1


def test_refusals_are_few_lines_whatever_strangers_make_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    refusals = reception.Refusals(lines.append)
    for number in range(10_000):
        refusals.add("10.0.0.1", f"a frame of {number:,} bytes; 1 to 1,024 are allowed")
        refusals.add("10.0.0.1", f"unknown message tag 0x{number % 256:02x}")
    assert len(lines) == 2
    for number in range(10_000):
        refusals.add("10.0.0.1", f"a reason that {'x' * (number % 997)} made up")
    assert len(lines) <= 2 + reception.MAX_REASONS
    monkeypatch.setattr(reception, "QUIET_SECONDS", 0.0)
    refusals.add("10.0.0.1", "a frame of 5 bytes; 1 to 1,024 are allowed")
    assert "9,999 more were refused for that reason" in lines[-1]


def test_a_slow_writer_has_one_deadline_for_all_of_its_handshake(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "HANDSHAKE_SECONDS", 1.0)
    plain, challenge = knock(door.address)
    began = time.monotonic()
    for byte in answer(TOKEN.encode(), challenge, Hello(0, 0, 0, "control", "nonce")):
        try:
            plain.sock.sendall(bytes([byte]))
        except OSError:
            break
        time.sleep(0.1)
    assert time.monotonic() - began < 5.0
    assert door.said("it proved nothing within 1 s") == 1
    assert door.admits_a_worker()


def test_a_connection_that_is_dropped_while_it_sends_ends_nothing(door: Door) -> None:
    """The oldest of too many connections send a byte just as newer ones push them out."""
    held: list[socket.socket] = []
    for _ in range(1500):
        held.append(socket.create_connection(door.address, SECONDS))
        for sock in held[:8] if len(held) >= 126 else ():
            with suppress(OSError):
                sock.send(b"\0\0")
        if len(held) > 140:
            for sock in held[:8]:
                sock.close()
            del held[:8]
    assert door.admits_a_worker()
    for sock in held:
        sock.close()


def test_an_idle_connection_does_not_spoil_the_end_of_a_run(door: Door) -> None:
    with socket.create_connection(door.address, SECONDS):
        assert door.admits_a_worker()
        door.close()


def test_a_flood_from_one_address_pushes_out_nobody_from_another(door: Door) -> None:
    elsewhere = PlainSocket(socket.create_connection(door.address, SECONDS, source_address=("127.0.0.2", 0)))
    challenge = decode(elsewhere.receive())
    assert isinstance(challenge, Challenge)
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(door.address, SECONDS))
        assert door.said("more than 128 connections") == 1
        elsewhere.sock.sendall(answer(TOKEN.encode(), challenge, Hello(0, 0, 0, "control", "nonce")))
        assert isinstance(decode(elsewhere.receive()), Accepted)
        elsewhere.sock.close()


def test_a_thousand_idle_connections_keep_no_worker_out(door: Door) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    threads = threading.active_count()
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1000):
            stack.enter_context(socket.create_connection(door.address, SECONDS))
        assert door.admits_a_worker()
        assert threading.active_count() <= threads + 2
    assert 1 <= door.said("more than 128 connections have proved nothing") <= 3


FULL = """
import json, os, resource, sys
from tests.cluster.coordinators import coordinator_of
lines = []
tell = lambda event: lines.append(event["text"]) if "text" in event else None
with coordinator_of(1, tell) as coordinator:
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 5, used + 5))
    print(coordinator.address[1], flush=True)
    sys.stdin.readline()
    print(json.dumps(lines), coordinator.wait(), flush=True)
"""


def test_a_full_table_of_file_descriptors_passes_and_the_door_opens_again() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FULL], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin and process.stdout
        address = ("127.0.0.1", int(process.stdout.readline()))
        with ExitStack() as stack:
            for _ in range(40):
                stack.enter_context(socket.create_connection(address, SECONDS))
            _, client = join(address, TOKEN, None, patience=SECONDS)
            client.enter({"data": "digest", "folder": "mark"})
            assert client.wait_for_generation()
            client.leave(0)
        print(file=process.stdin, flush=True)
        text, _, code = process.stdout.readline().rpartition(" ")
        assert int(code) == 0 and sum("cannot open another connection" in line for line in json.loads(text)) == 1
    finally:
        process.kill()
        process.communicate()


@contextmanager
def joined(door: Door) -> Iterator[tuple[CoordinatorClient, list[str]]]:
    """A rank of the run, and what the coordinator says when it drops it."""
    _, client = join(door.address, TOKEN, None)
    client._leaving = True  # being dropped must not end the tests
    client.enter({"data": "digest", "folder": "mark"})
    assert client.wait_for_generation()
    yield client, door.lines
    client.close()


def step(**changes: Any) -> dict[str, Any]:
    fields = {"event": "step", "time": 1.0, "step": 1, "loss": 1.0, "tokens": 1, "tokens_per_s": 1.0}
    return {**fields, "lr": 1.0, "grad_norm": 1.0, **changes}


def halt(**changes: Any) -> dict[str, Any]:
    finding = {"rank": 0, "host": "h", "slot": 1, "unit": "u", "parameter": "p", "kind": "NaN", "count": 1, "first": 0}
    findings = [{**finding, "samples": [], **changes}]
    fields = {"event": "halt", "time": 1.0, "step": 2, "committed": 1, "cause": "c", "sound": True}
    return {**fields, "findings": findings}


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("send", "reason"),
    [
        (lambda client: client.send("event", event={"event": "nonsense", "time": 1.0}), "an event of unknown kind"),
        (lambda client: client.send("event", event=step(loss="low")), "a 'step' event whose 'loss' is 'low'"),
        (lambda client: client.send("event", event=step(step=True)), "whose 'step' is True"),
        (lambda client: client.send("bye", code="0"), "it sent 'bye' with code = '0'"),
        (lambda client: client.send("welcome"), "a message of unknown kind 'welcome'"),
        (lambda client: client.send("hello", version="1", host="x", machine="y", pid=1, rank=None), "out of turn"),
        (lambda client: [client.send("value", topic=f"{n}", value="x") for n in range(50)], ""),
        (lambda client: client.send("value", topic="t" * 1000, value="x"), "too long"),
        (lambda client: client.send("store", id=1, operation="burn", key="k", value=""), "cannot do"),
        (lambda client: client.send("store", id=1, operation="add", key="k", value="x"), "holds no number"),
        (lambda client: client.send("store", id=1, operation="add", key="k", value="9" * 4000), "than a number holds"),
        (lambda client: client.send("alive", compute_ms=10**400), ""),
        (lambda client: client.send("event", event=step(step=10**400)), "whose 'step' is"),
        (lambda client: client.send("event", event=step(more=json.loads("[" * 9 + "]" * 9))), "nested too deeply"),
        (lambda client: client.send("event", event=halt(slot="x")), "whose 'slot' is 'x'"),
        (lambda client: client.link.queue_frame(b"\x10" + DEEP.encode()), "not JSON"),
        (lambda client: client.link.queue_frame(b"\x11bytes"), "tag 0x11"),
        (lambda client: client.link.queue_frame(b"\x10" + bytes(2 << 20)), "a frame of"),
    ],
)
def test_a_worker_that_breaks_the_protocol_is_lost_with_the_reason(
    door: Door, send: Callable[[CoordinatorClient], Any], reason: str
) -> None:
    with joined(door) as (client, _):
        send(client)
        client._loop.wake()
        if reason:
            assert door.said(reason) == 1
            assert door.coordinator.wait() == 1
        else:
            client.leave(0)  # a world of one answers every topic at once
            assert door.coordinator.wait() == 0


def test_topics_and_stored_bytes_are_limited() -> None:
    from andon.control.store import KeyValues, Topics

    topics = Topics(2)
    with pytest.raises(ProtocolError, match="more than 16 topics"):
        for number in range(100):
            topics.add(0, str(number), "x")
    store = KeyValues()
    with pytest.raises(ProtocolError, match="would hold more"):
        for number in range(10_000):
            store.request("set", str(number), "x" * 60_000, lambda value: None)


def test_a_key_of_the_store_may_be_set_any_number_of_times() -> None:
    from andon.control.store import KeyValues

    store, found = KeyValues(), list[str]()
    for number in range(10_000):
        store.request("set", "key", str(number).zfill(60_000), lambda value: None)
    store.request("get", "key", "", found.append)
    assert found[0].endswith("9999")


def test_only_rank_0_reports_results() -> None:
    done = {"event": "done", "time": 1.0, "step": 1, "tokens": 1, "loss": 1.0, "validation_loss": 1.0}
    done |= {"weights_blake3": "0", "transport": "star", "workers": 2, "samples": []}
    assert check_event(done, 0) == done
    for rank, event in ((1, done), (0, {**done, "samples": [1]}), (0, {**done, "step": None}), (0, "done")):
        with pytest.raises(ValueError):
            check_event(event, rank)


def test_a_peer_that_never_reads_delays_nobody_and_is_dropped() -> None:
    with closing(Door(2)) as door:
        plain, challenge = knock(door.address)
        hello = Hello(0, 0, 0, "control", "nonce")
        plain.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.sock.sendall(answer(TOKEN.encode(), challenge, hello))
        _, client = join(door.address, TOKEN, None)
        client._leaving = True
        client.enter({"data": "digest", "folder": "mark"})

        def say(kind: str, **fields: Any) -> None:
            plain.send(b"\x10" + json.dumps({"kind": kind, **fields}).encode())

        from andon.version import VERSION

        say("hello", version=VERSION, host="deaf", machine="m", pid=1, rank=None)
        say("ready", data="digest", folder="mark")
        assert client.wait_for_generation()
        took = []
        for _ in range(300):  # 18 MB of answers that nobody reads
            say("store", id=1, operation="set", key="k", value="x" * 60_000)
            say("store", id=1, operation="get", key="k", value="")
            began = time.monotonic()
            client.ask_store("check", "k", seconds=SECONDS)
            took.append(time.monotonic() - began)
            if any("it does not read" in line for line in door.lines):
                break
        assert max(took) < 2.0
        assert door.said("it does not read") >= 1
        client.close()


def test_a_star_counts_no_pieces_of_absurd_vectors() -> None:
    huge = Operation("all-reduce", 1 << 50, "float32", (0, 1 << 50), 2, (0, 1, 2))
    with pytest.raises(ProtocolError, match="elements are more than"):
        checked_operation(frame(huge)[4:], 2)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("127.evil.example", False),
        ("0.0.0.0", False),
        ("::", False),
    ],
)
def test_loopback_is_an_address_and_not_a_name(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_the_token_is_in_a_file_that_only_its_owner_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANDON_TOKEN", raising=False)
    token = token_of_run(tmp_path)
    path = tmp_path / "token"
    assert path.stat().st_mode & 0o777 == 0o600 and len(token) == 64 and token_of_run(tmp_path) == token
    assert token_of_worker(path) == token
    path.chmod(0o644)
    with pytest.raises(UserError, match="can be read by other users"):
        read_token(path)
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="cannot be read"):
        read_token(path)
    monkeypatch.setenv("ANDON_TOKEN", "short")
    with pytest.raises(UserError, match="too weak"):
        token_of_worker(None)
    monkeypatch.setenv("ANDON_TOKEN", token)
    assert token_of_worker(None) == token and "ANDON_TOKEN" not in os.environ  # no child inherits it
    with pytest.raises(UserError, match="needs the run's token"):
        token_of_worker(None)


@pytest.mark.parametrize("transport", ["torch", soak("star"), soak("shm"), soak("ring")])
def test_a_stranger_on_the_same_machine_finds_no_open_port_and_no_secret(tmp_path: Path, transport: str) -> None:
    """While `andon train` runs: loopback only, no secret on a command line, a challenge or nothing at each port."""
    options = ["--workers=2", "--train.steps=100000", f"--group.transport={transport}", "--run.dir=run"]
    process = start("train", *SMALL, *options, cwd=tmp_path, executed=True)
    wait_for_step(tmp_path / "run", 3, process)
    family = [psutil.Process(process.pid), *workers_of(process)]
    secret = next(each.environ()["ANDON_TOKEN"] for each in family if "ANDON_TOKEN" in each.environ())
    assert not any(secret in word for each in family for word in each.cmdline())
    ports = set(listening(psutil.Process(process.pid)))
    assert ports and all(is_loopback(host) for host, _ in ports), ports
    for address in ports:
        with suppress(OSError), socket.create_connection(address, SECONDS) as stranger:
            stranger.sendall(b"\x00" * 600)
            stranger.settimeout(0.3)
            stranger.recv(1000)
    before = events_so_far(tmp_path / "run")[-1]["step"]
    wait_for_step(tmp_path / "run", before + 5, process)
    assert process.poll() is None
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert secret not in text and not any(secret in log.read_text() for log in (tmp_path / "run/logs").iterdir())
