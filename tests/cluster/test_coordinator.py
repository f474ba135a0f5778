"""`andon coordinator` and `andon worker` as separate processes: one answer, deaths that are named, clean ends."""

from __future__ import annotations

import json
import queue
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from rich.console import Console

from andon.checkpoint.disk.manifest import read as manifest
from andon.cluster.launch import run_folder
from andon.cluster.session import refuse_mixed_devices
from andon.cluster.worker import in_own_folder
from andon.config.load import build
from andon.control import coordinator as coordinator_module
from andon.control import stragglers as stragglers_module
from andon.control.files import Receiver
from andon.control.link import ControlLink
from andon.control.members import Worker, addresses
from andon.control.stragglers import Stragglers
from andon.control.token import token_of_run
from andon.control.worker import client as client_module
from andon.control.worker.join import join
from andon.data.build import Corpus, prepare
from andon.data.cache import find, receive
from andon.data.token_set import TokenSet
from andon.errors import UserError
from andon.finetune.base import Base
from andon.finetune.samples.sample_set import SampleSet
from andon.finetune.samples.tokenize import prepare_samples
from andon.transport.base import PeerLost, ProtocolError
from tests.cluster.coordinators import JOB, TOKEN, coordinator_of, members_of
from tests.finetune.tuning import endings, make_model, tune_config
from tests.kit.group_harness import busy
from tests.kit.runs import SMALL, andon, events, soak, start, summary, train, wait_for_step
from tests.kit.thread_group import thread_groups

STEPS = ["--train.steps=8"]


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANDON_TOKEN", TOKEN)


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


def end(process: subprocess.Popen[str], timeout: float = 90) -> str:
    """What a process still prints until it ends."""
    return process.communicate(timeout=timeout)[0]


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> str:
    digest: str = train(*STEPS, cwd=tmp_path_factory.mktemp("alone"))["weights_blake3"]
    return digest


@pytest.mark.parametrize(("transport", "workers"), [("star", 3), ("ring", 2), ("torch", 2)])
def test_workers_started_by_hand_give_the_answer(tmp_path: Path, answer: str, transport: str, workers: int) -> None:
    options = [f"--workers={workers}", f"--group.transport={transport}"]
    with coordinating(tmp_path, *options) as (coordinator, address):
        started = [start("worker", address, cwd=tmp_path) for _ in range(workers)]
        outputs = [end(worker) for worker in started]
        assert [worker.returncode for worker in started] == [0] * workers, outputs
        output = end(coordinator, 30)
        assert coordinator.returncode == 0, output
    assert summary(tmp_path / "run")["weights_blake3"] == answer
    assert summary(tmp_path / "run")["transport"] == transport
    assert not any(TOKEN in text for text in (output, *outputs))


@pytest.mark.parametrize("transport", ["star", soak("ring"), soak("torch")])
@pytest.mark.parametrize(("timeout", "late"), [(2, 2.5), soak(60, 90.0)])
def test_workers_may_come_later_than_any_timeout(
    tmp_path: Path, answer: str, transport: str, timeout: int, late: float
) -> None:
    options = ["--workers=2", f"--group.transport={transport}", f"--group.timeout={timeout}"]
    with coordinating(tmp_path, *options) as (coordinator, address):
        time.sleep(late)
        first = start("worker", address, cwd=tmp_path)
        time.sleep(late)
        second = start("worker", address, cwd=tmp_path)
        assert end(first) and first.returncode == 0 and end(second) and second.returncode == 0
        end(coordinator, 30)
    assert summary(tmp_path / "run")["weights_blake3"] == answer


def test_a_worker_that_starts_first_waits_and_says_so(tmp_path: Path, answer: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
    worker = start("worker", place, cwd=tmp_path)
    assert worker.stdout is not None
    assert f"Waiting up to 600 s for the coordinator at {place}" in worker.stdout.readline()
    with coordinating(tmp_path, "--workers=1", f"--bind={place}") as (coordinator, _):
        assert end(worker) and worker.returncode == 0
        end(coordinator, 30)
    assert summary(tmp_path / "run")["weights_blake3"] == answer


def test_a_worker_gives_up_on_a_coordinator_that_does_not_come(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code, output = andon("worker", f"127.0.0.1:{port}", "--wait=0.5", cwd=tmp_path)
    assert code == 1 and "cannot be reached" in output and "Traceback" not in output, output


def test_a_worker_in_another_folder_takes_part_and_writes_nothing(tmp_path: Path, answer: str) -> None:
    away = tmp_path / "away"
    away.mkdir()
    options = ["--workers=2", "--group.transport=ring", "--checkpoint.every=2"]
    with coordinating(tmp_path, *options) as (coordinator, address):
        far = start("worker", address, cwd=away)
        assert far.stdout is not None
        while "Rank 1 of 2" not in far.stdout.readline():
            assert far.poll() is None
        near = start("worker", address, cwd=tmp_path)
        assert end(near) and near.returncode == 0 and end(far) and far.returncode == 0
        end(coordinator, 30)
    assert summary(tmp_path / "run")["weights_blake3"] == answer
    assert {path.name for path in away.iterdir()} <= {"cache"}


def test_nobody_who_sees_no_folder_becomes_rank_0(tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.mkdir()
    with coordinating(tmp_path, "--workers=1") as (_, address):
        code, output = andon("worker", address, cwd=away)
        assert code == 1 and "rank 0 is left" in output and "--folder" in output, output
        code, output = andon("worker", address, f"--folder={tmp_path}", cwd=away)
        assert code == 0, output


@pytest.mark.parametrize("transport", ["star", "ring"])
def test_workers_join_over_ipv6_and_by_name(tmp_path: Path, answer: str, transport: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    options = ["--workers=2", f"--group.transport={transport}", "--bind=[::1]:0"]
    with coordinating(tmp_path, *options) as (coordinator, address):
        assert address.startswith("[::1]:")
        workers = [start("worker", address, cwd=tmp_path) for _ in range(2)]
        outputs = [end(worker) for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], outputs
        end(coordinator, 30)
    assert summary(tmp_path / "run")["weights_blake3"] == answer
    with coordinating(tmp_path, "--workers=1", "--bind=localhost", "--resume=none") as (coordinator, address):
        code, output = andon("worker", "localhost:" + address.rpartition(":")[2], cwd=tmp_path)
        assert code == 0, output
        end(coordinator, 30)


@pytest.mark.parametrize("address", ["127.0.0.1:70000", "127.0.0.1:²", f"127.0.0.1:{'1' * 5000}", "a b", "[::1", ""])
def test_what_is_no_address_is_refused(tmp_path: Path, address: str) -> None:
    code, output = andon("worker", address, cwd=tmp_path)
    assert code == 1 and "is not an address" in output and "Traceback" not in output, output


@pytest.mark.parametrize("transport", ["star", "ring"])
def test_an_address_that_cannot_be_bound_is_named(tmp_path: Path, transport: str) -> None:
    options = [*SMALL, "--run.dir=run", "--workers=2", f"--group.transport={transport}"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        code, output = andon("coordinator", *options, f"--bind={taken}", cwd=tmp_path)
    *_, what, cause, remedy = output.splitlines()
    assert (code, what, cause) == (1, f"The coordinator cannot listen at {taken}", "Address already in use"), output
    assert "--bind" in remedy
    code, output = andon("coordinator", *options, "--bind=192.0.2.1:0", cwd=tmp_path)
    assert code == 1 and "cannot listen at 192.0.2.1" in output and "Traceback" not in output, output


@pytest.mark.parametrize("joined", [0, 1])
def test_sigterm_ends_a_coordinator_that_still_waits_and_its_workers(tmp_path: Path, joined: int) -> None:
    with coordinating(tmp_path, "--workers=2") as (coordinator, address):
        workers = [start("worker", address, cwd=tmp_path) for _ in range(joined)]
        for worker in workers:
            assert worker.stdout is not None
            while "waiting until all have joined" not in worker.stdout.readline():
                assert worker.poll() is None
        coordinator.send_signal(signal.SIGTERM)
        output = end(coordinator, 10 * busy())
        assert coordinator.returncode == 4, output
        for worker in workers:
            assert "before the run began" in end(worker, 10 * busy()) and worker.returncode == 4


LONG = ["--train.steps=100000", "--group.timeout=60"]


@pytest.mark.parametrize(
    ("transport", "sign"), [("star", signal.SIGKILL), ("ring", signal.SIGKILL), ("ring", signal.SIGSTOP)]
)
def test_survivors_go_on_and_another_worker_joins(tmp_path: Path, transport: str, sign: signal.Signals) -> None:
    folder, options = tmp_path / "run", ["--workers=3", f"--group.transport={transport}", "--zero.policy=off"]

    def wait_for_generation(workers: int) -> float:
        until = time.monotonic() + 30 * busy()
        while not (found := [each for each in events(folder, "generation") if each["workers"] == workers]):
            assert time.monotonic() < until and coordinator.poll() is None
            time.sleep(0.02)
        wait_for_step(folder, found[-1]["step"] + 2, coordinator)
        return float(found[-1]["time"])

    with coordinating(tmp_path, *options, *LONG) as (coordinator, address):
        victim, *others = [start("worker", address, cwd=tmp_path) for _ in range(3)]
        wait_for_step(folder, 2, coordinator)
        victim.send_signal(sign)
        began = time.time()
        limit = 1.0 if sign == signal.SIGKILL else 6.0
        assert wait_for_generation(2) - began < limit * busy()
        others.append(start("worker", address, cwd=tmp_path))
        wait_for_generation(3)
        coordinator.send_signal(signal.SIGINT)
        outputs = [end(worker, 30) for worker in others]
        assert [worker.returncode for worker in others] == [4, 4, 4], outputs
        assert end(coordinator, 20) and coordinator.returncode == 4
        victim.kill()


@pytest.mark.parametrize("sign", [soak(signal.SIGKILL), signal.SIGSTOP])
def test_over_torch_every_survivor_names_who_died_and_the_coordinator_ends(
    tmp_path: Path, sign: signal.Signals
) -> None:
    with coordinating(tmp_path, "--workers=3", "--group.transport=torch", *LONG) as (coordinator, address):
        workers = [start("worker", address, cwd=tmp_path) for _ in range(3)]
        wait_for_step(tmp_path / "run", 2, coordinator)
        ranks = {event["pid"]: event["rank"] for event in events(tmp_path / "run", "worker")}
        victim, *others = workers
        victim.send_signal(sign)
        began = time.monotonic()
        limit = 1.0 if sign == signal.SIGKILL else 6.0
        outputs = [end(other, 30) for other in others]
        assert time.monotonic() - began < (limit + 0.5) * busy()  # they also end
        died = f"rank {ranks[victim.pid]} on {socket.gethostname()} was lost during"
        assert all(died in output and "Traceback" not in output for output in outputs), outputs
        output = end(coordinator, 20)
        assert coordinator.returncode == 1 and f"ank {ranks[victim.pid]} on" in output and "was lost" in output, output
        victim.kill()


@pytest.mark.parametrize("transport", ["ring", "star"])
def test_a_coordinator_that_comes_back_finds_its_workers(tmp_path: Path, transport: str) -> None:
    folder, options = tmp_path / "run", ["--workers=2", f"--group.transport={transport}", "--checkpoint.every=10"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    bind = [f"--bind={address}", "--zero.policy=off", "--optim.schedule=constant", "--eval.every=0"]
    with coordinating(tmp_path, *options, *LONG, *bind) as (coordinator, _):
        workers = [start("worker", address, cwd=tmp_path) for _ in range(2)]
        wait_for_step(folder, 4, coordinator)
        coordinator.kill()
    steps = len(events(folder, "step"))
    with coordinating(tmp_path, *options, *LONG, *bind) as (coordinator, _):
        wait_for_step(folder, steps + 10, coordinator)
        coordinator.send_signal(signal.SIGINT)
        outputs = [end(worker, 30) for worker in workers]
        assert [worker.returncode for worker in workers] == [4, 4], outputs
        end(coordinator, 20)
        assert coordinator.returncode == 4
    assert "Workers of generation 0 come back" in [event["text"] for event in events(folder, "note")]
    step = events(folder, "stopped")[-1]["step"]
    assert [event["step"] for event in events(folder, "step")] == list(range(1, step + 1))
    code, said = andon("audit", "run", cwd=tmp_path)
    assert code == 0 and f"{step} steps are committed, none missing" in said, said
    train(f"--train.steps={step}", "--optim.schedule=constant", "--zero.policy=off", cwd=tmp_path, name="whole")
    whole, found = (manifest(tmp_path / name / "checkpoints" / f"checkpoint-{step}") for name in ("whole", "run"))
    assert whole.units == found.units


def test_over_torch_a_coordinator_that_dies_ends_its_workers_with_a_sentence(tmp_path: Path) -> None:
    with coordinating(tmp_path, "--workers=2", "--group.transport=torch", *LONG) as (coordinator, address):
        workers = [start("worker", address, cwd=tmp_path) for _ in range(2)]
        wait_for_step(tmp_path / "run", 2, coordinator)
        coordinator.kill()
        for worker in workers:
            output = end(worker, 20)
            assert worker.returncode == 1 and "the coordinator at 127.0.0.1 was lost" in output, output


def test_a_coordinator_resumes_where_its_run_was_stopped(tmp_path: Path, answer: str) -> None:
    options = ["--workers=2", "--group.transport=star", "--checkpoint.every=2"]
    for resume in ("auto", "none"):
        with coordinating(tmp_path, *options, f"--resume={resume}") as (coordinator, address):
            workers = [start("worker", address, cwd=tmp_path) for _ in range(2)]
            assert all(end(worker) and worker.returncode == 0 for worker in workers)
            end(coordinator, 30)
        assert summary(tmp_path / "run")["weights_blake3"] == answer
    assert (tmp_path / "run.1").exists()  # --resume none moves the earlier run aside


@pytest.mark.parametrize(
    ("ends", "code", "failures"),
    [
        ([0, 0], 0, []),
        ([0, 3], 3, []),
        ([3, 0], 3, []),
        ([4, 4], 4, []),
        ([4, 0], 4, []),
        ([4, 3], 3, []),
        ([4, None], 1, ["Rank 1 on"]),
        ([0, None], 1, ["Rank 1 on"]),
        ([None, 0], 1, ["Rank 0 on"]),
    ],
)
def test_the_worst_end_of_a_worker_is_the_end_of_the_run(
    ends: list[int | None], code: int, failures: list[str]
) -> None:
    """None: its connection ends without a goodbye."""
    with coordinator_of(2) as coordinator:
        for client, how in zip(members_of(coordinator, 2), ends, strict=True):
            if how is None:
                client.close()
            else:
                client.leave(how)
        assert coordinator.wait() == code
        assert [
            failure.what[: len(name)] for failure, name in zip(coordinator.failures, failures, strict=True)
        ] == failures


@pytest.mark.parametrize("says_goodbye", [False, True])
def test_a_rank_that_is_lost_before_the_run_begins_is_free_again(says_goodbye: bool) -> None:
    said: list[str] = []
    with coordinator_of(2, lambda event: said.append(json.dumps(event))) as coordinator:
        first, second, third = (join(coordinator.address, TOKEN, None)[1] for _ in range(3))
        first.enter({"data": "digest", "folder": "mark"})
        until = time.monotonic() + 10
        if says_goodbye:
            first.leave(0)
        else:
            first.close()
            while not any("was lost before the run began" in line for line in said) and time.monotonic() < until:
                time.sleep(0.01)
        second.enter({"data": "digest", "folder": "mark"})
        assert not coordinator.begun
        third.enter({"data": "digest", "folder": "mark"})
        assert second.wait_for_generation() and {second.rank, third.rank} == {0, 1}
        for client in (second, third):
            client.leave(0)
        assert coordinator.wait() == 0


def test_a_rank_that_fails_before_the_group_is_open_is_named_to_those_who_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinator_module, "OTHERS_SECONDS", 0.5)
    with coordinator_of(2) as coordinator:
        waits, fails = members_of(coordinator, 2)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(waits.exchange, "ring", "here")
            fails.fail("Rank 1 stopped: ImportError", "An unexpected error", "Look there")
            fails.leave(1)
            with pytest.raises(PeerLost, match="rank 1 was lost during forming the group"):
                waiting.result(10)
        waits.leave(1)
        assert coordinator.wait() == 1
        assert coordinator.failures[0].what == "Rank 1 stopped: ImportError"


def test_a_new_run_in_the_same_folder_keeps_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANDON_TOKEN")
    config = build({}, {"run.dir": str(tmp_path / "run")}).on_this_machine()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    token = token_of_run(tmp_path / "run")
    with run_folder(config, "none", Console(quiet=True)):
        assert (tmp_path / "run.1").exists() and token_of_run(tmp_path / "run") == token


@pytest.mark.parametrize(
    ("variables", "cause"),
    [
        ({"RANK": "x"}, "RANK is 'x'"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({"ANDON_TOKEN": "short"}, "ANDON_TOKEN has 5 characters"),
    ],
)
def test_an_environment_that_torchrun_would_not_give_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], cause: str
) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", **variables}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    code, output = andon("train", *SMALL, "--run.dir=run", "--group.transport=ring", cwd=tmp_path)
    assert code == 1 and cause in output and "Traceback" not in output, output


def test_under_torchrun_ranks_with_other_tokens_do_not_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    processes = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("ANDON_TOKEN", f"the token of rank number {rank}")
        processes.append(start("train", *SMALL, f"--run.dir=run{rank}", "--group.transport=torch", cwd=tmp_path))
    outputs = [end(process) for process in processes]
    assert all(process.returncode == 1 for process in processes), outputs
    assert any("does not know the run's token" in output for output in outputs), outputs


def test_a_worker_without_the_data_receives_it_from_the_coordinator_and_keeps_it(tmp_path: Path) -> None:
    tokens = prepare(Corpus(stories_count=300, vocab_size=300), tmp_path / "theirs")
    job = {**JOB, "data": tokens.digest, "tokens": str(tokens.folder)}
    with coordinator_of(1, job=job) as coordinator:
        _, client = join(coordinator.address, TOKEN, None)
        received = receive(tmp_path / "mine", tokens.digest, client.fetch, TokenSet.open)
        client.enter({"data": received.digest, "folder": "mark"})
        assert client.wait_for_generation()
        client.leave(0)
        assert coordinator.wait() == 0
    assert (received.read(0, 100) == tokens.read(0, 100)).all()
    found = find(tmp_path / "mine", tokens.digest, TokenSet.open)
    assert found is not None and found.folder == received.folder
    assert find(tmp_path / "mine", "another digest", TokenSet.open) is None


def test_a_worker_receives_the_samples_of_a_fine_tuning(tmp_path: Path) -> None:
    config = tune_config(make_model(tmp_path / "model"), endings(tmp_path / "ends.jsonl", 12))
    samples = prepare_samples(config, Base(config.model))
    job = {**JOB, "data": samples.digest, "tokens": str(samples.folder)}
    with coordinator_of(1, job=job) as coordinator:
        _, client = join(coordinator.address, TOKEN, None)
        received = receive(tmp_path / "mine", samples.digest, client.fetch, SampleSet.open)
        client.enter({"data": received.digest, "folder": "mark"})
        assert client.wait_for_generation()
        client.leave(0)
        assert coordinator.wait() == 0
    assert received.folder != samples.folder and (received.tokens(5) == samples.tokens(5)).all()


def test_data_that_arrives_faster_than_the_disk_takes_it_waits_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs" / "tokens-00000.bin").write_bytes(bytes(30 << 20))
    monkeypatch.setattr(client_module, "MAX_PIECES", 4)
    waiting: list[int] = []
    write = Receiver.write

    def write_slowly(receiver: Receiver, piece: bytes) -> None:
        waiting.append(client._inbox.qsize())
        time.sleep(0.01)
        write(receiver, piece)

    monkeypatch.setattr(Receiver, "write", write_slowly)
    with coordinator_of(1, job={**JOB, "tokens": str(tmp_path / "theirs")}) as one:
        _, client = join(one.address, TOKEN, None)
        assert client.fetch(tmp_path / "mine") == 30 << 20
        client.close()
    assert max(waiting) < 20, waiting


def test_what_arrives_with_another_digest_is_not_kept(tmp_path: Path) -> None:
    tokens = prepare(Corpus(stories_count=300, vocab_size=300), tmp_path / "theirs")
    job = {**JOB, "data": "0" * 64, "tokens": str(tokens.folder)}
    with coordinator_of(1, job=job) as coordinator:
        _, client = join(coordinator.address, TOKEN, None)
        with pytest.raises(UserError, match="did not arrive intact"):
            receive(tmp_path / "mine", "0" * 64, client.fetch, TokenSet.open)
        client.close()
    assert not any((tmp_path / "mine").iterdir())


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "run.py", "tokens-1.bin"])
def test_no_coordinator_chooses_where_a_worker_writes(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProtocolError):
        Receiver(tmp_path).begin({"kind": "file", "name": name, "size": 1})
    config = build({}, {"run.dir": "/somewhere/else"})
    assert in_own_folder(config, tmp_path).run.dir == tmp_path / "runs" / "else"
    inside = build({}, {"run.dir": str(tmp_path / "runs" / "x")})
    assert in_own_folder(inside, tmp_path).run.dir == tmp_path / "runs" / "x"
    (tmp_path / "link").symlink_to("/somewhere")
    outside = build({}, {"run.dir": str(tmp_path / "link" / "x")})
    assert in_own_folder(outside, tmp_path).run.dir == tmp_path / "runs" / "x"


def test_ranks_on_different_devices_are_refused() -> None:
    groups = thread_groups(2, 10.0)
    with ThreadPoolExecutor(2) as pool:
        kinds = [torch.device("cpu"), torch.device("cuda", 0)]
        tries = [pool.submit(refuse_mixed_devices, group, kind) for group, kind in zip(groups, kinds, strict=True)]
        for each in tries:
            with pytest.raises(UserError, match="rank 0 on cpu, rank 1 on cuda"):
                each.result(10)


def member(rank: int, machine: str, remote: str, local: str) -> Worker:
    link = SimpleNamespace(remote=remote, local=local)
    return Worker(cast(ControlLink, link), rank=rank, machine=machine)


def test_a_worker_keeps_its_gpu_and_one_that_replaces_it_gets_the_same() -> None:
    with coordinator_of(3, goes_on=True) as coordinator:
        clients = [join(coordinator.address, TOKEN, number)[1] for number in (2, 0, None)]
        assert [client.local_rank for client in clients] == [2, 0, 1]
        for client in clients:
            client.enter({"data": "digest", "folder": "mark"})
        assert all(client.wait_for_generation() for client in clients)
        clients[0].close()
        while coordinator.begun and len(coordinator.succession.generations.members) == 3:
            time.sleep(0.01)
        again, outside = (join(coordinator.address, TOKEN, number)[1] for number in (2, None))
        assert (again.local_rank, outside.local_rank) == (2, 3)
        for client in (*clients[1:], again, outside):
            client.close()


def test_everyone_gets_an_address_that_others_reach() -> None:
    members = [
        member(0, "a", "127.0.0.1", "127.0.0.1"),
        member(1, "b", "10.0.0.2", "10.0.0.1"),
        member(2, "a", "127.0.0.1", "127.0.0.1"),
        member(3, "b", "10.0.0.2", "10.0.0.1"),
    ]
    assert addresses(members) == ["10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.2"]
    alone = [member(0, "a", "127.0.0.1", "127.0.0.1"), member(1, "a", "127.0.0.1", "127.0.0.1")]
    assert addresses(alone) == ["127.0.0.1", "127.0.0.1"]


def test_a_straggler_is_named_once_with_how_much_it_is_slower() -> None:
    said: list[str] = []
    stragglers = Stragglers(said.append)
    members = [member(rank, "a", "127.0.0.1", "127.0.0.1") for rank in range(3)]
    members[2].host = "slow"
    for _ in range(20):
        for worker, took in zip(members, (100.0, 110.0, 320.0), strict=True):
            stragglers.on_heartbeat(worker, {"compute_ms": took}, members)
    assert len(said) == 1 and "rank 2 on slow is slow" in said[0] and "3.0 × the others" in said[0], said


def test_ranks_that_have_not_joined_are_named_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers_module, "LATE_SECONDS", 0.5)
    notes: queue.SimpleQueue[str] = queue.SimpleQueue()
    with coordinator_of(3, lambda event: notes.put(event.get("text", ""))) as coordinator:
        time.sleep(1.2)  # nobody waits for anyone yet
        _, client = join(coordinator.address, TOKEN, 1)
        client.enter({"data": "digest", "folder": "mark"})
        joined, *said = [notes.get(timeout=30) for _ in range(3)]
        client.close()
    assert joined == "", joined
    assert all(re.fullmatch(r"1 of 3 workers have waited \d+ s for ranks 0, 2 to join", text) for text in said), said
