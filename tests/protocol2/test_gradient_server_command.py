"""`andon gradient-server`, with workers written from the wire's specification alone (`tests/protocol2/plain_peers.py`).

`make soak` runs the long versions: five workers with the longest messages, and a worker that computes for 40 s. Their
figures are printed by

    pytest -s tests/protocol2/test_gradient_server_command.py -k "mean or death or computes"

(C-WIRE-002, C-SHARD-001)
"""

from __future__ import annotations

import json
import struct
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from andon.protocol2.client import WorkerClient
from andon.protocol2.wire.messages import JoinRequest
from tests.kit.group_harness import busy
from tests.kit.runs import andon, ctrl_c, end_started, events, start, summary
from tests.protocol2.gradient_servers import Server, everyone, serving, vectors
from tests.protocol2.plain_peers import SECONDS, PlainWorker, sequential_mean

LONGEST = 24_999_989
soak = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("count", "lengths"),
    [
        (2, (1, 2, 7, 65_536, 65_537, 1_000_003)),
        (3, (1, 300_001)),
        *(pytest.param(count, (1, 99_991, LONGEST), marks=soak) for count in (2, 3, 4, 5)),
    ],
)
def test_whole_vectors_with_assignments_are_the_sequential_mean(
    tmp_path: Path, count: int, lengths: tuple[int, ...]
) -> None:
    with serving(tmp_path, f"--workers={count}", f"--steps={len(lengths)}", "--samples=101") as server:
        workers = server.join(count)
        sent = [vectors(count, length) for length in lengths]
        expected = [sequential_mean(each).tobytes() for each in sent]

        def work(worker: PlainWorker) -> None:
            number, size = worker.worker_id, 101 // count
            for step in range(len(lengths)):
                end = 101 if number == count - 1 else (number + 1) * size
                assert worker.shard() == (step, number * size, end)
                worker.send_gradient(step, sent[step][number], 0.5 * number, number, end - number * size)
                got, mean, loss = worker.averaged()
                assert got == step and mean.tobytes() == expected[step]
                total = np.float32(0)
                for each in range(count):
                    samples = 101 - each * size if each == count - 1 else size
                    total += np.float32(0.5 * each) * np.float32(samples)
                assert loss == total / np.float32(101)
            assert worker.receive() == b"\x07"
            worker.sock.close()

        everyone(workers, work)
        code, output = server.finish()
    assert code == 0, output
    steps = events(tmp_path / "run", "step")
    took = [round(each["step_ms"]) for each in steps]
    print(f"{count} workers, whole vectors of {lengths} floats: the bits of the sequential mean; {took} ms a step")
    assert [(each["step"], each["workers"], each["total"]) for each in steps] == [
        (step, count, 101) for step in range(len(lengths))
    ]
    assert all(each["accuracy"] == sum(range(count)) / 101 for each in steps)
    assert all(each["bytes_received"] >= 4 * count * length for each, length in zip(steps, lengths, strict=True))
    assert all(each["bytes_sent"] >= 4 * count * length for each, length in zip(steps, lengths, strict=True))
    assert all(each[key] >= 0 for each in steps for key in ("wait_ms", "reduce_ms", "send_ms", "step_ms"))
    assert summary(tmp_path / "run")["step"] == len(lengths)
    assert {each["host"] for each in events(tmp_path / "run", "worker")} == {f"plain-{n}" for n in range(count)}
    assert f"step {len(lengths)}/{len(lengths)}  loss " in output and "accuracy" in output


@pytest.mark.parametrize(
    ("count", "longest"), [(2, 1), (3, 70_001), *(pytest.param(count, LONGEST, marks=soak) for count in (2, 4, 5))]
)
def test_blocks_and_components_are_the_sequential_mean_until_the_workers_leave(
    tmp_path: Path, count: int, longest: int
) -> None:
    blocks, steps = 3, 2
    with serving(tmp_path, f"--workers={count}") as server:
        workers = server.join(count)
        lengths = {(0, 0): longest, (0, 1): 5, (0, 2): 1001, (1, 0): longest, (1, 1): 1, (1, 2): 65_536}
        parts = {place: vectors(count, length) for place, length in lengths.items()}
        means = {place: sequential_mean(each).tobytes() for place, each in parts.items()}

        def work(worker: PlainWorker) -> None:
            for step in range(10, 10 + steps):
                for block in reversed(range(blocks)):
                    mine = parts[0, block][worker.worker_id]
                    worker.send_block(step, block, [1, len(mine) - 1], mine, blocks)
                    *place, mean = worker.averaged_block()
                    assert place == [step, block, [1, len(mine) - 1]]
                    assert mean.tobytes() == means[0, block]
                for component in range(3):
                    worker.send_non_block(step, component, parts[1, component][worker.worker_id])
                    *place, mean = worker.averaged_non_block()
                    assert place == [step, component]
                    assert mean.tobytes() == means[1, component]
            worker.sock.close()

        everyone(workers, work)
        code, output = server.finish()
    assert code == 0, output
    recorded = events(tmp_path / "run", "step")
    took = [round(each["step_ms"]) for each in recorded]
    print(f"{count} workers, blocks and components up to {longest} floats: the bits of the mean; {took} ms a step")
    assert [(each["step"], each["parts"], each["loss"]) for each in recorded] == [(10, 6, None), (11, 6, None)]
    assert all(each["left"] for each in events(tmp_path / "run", "lost"))
    assert summary(tmp_path / "run")["lost"] == []


@pytest.mark.alone
@pytest.mark.parametrize("sends_first", [False, True], ids=["while it computes", "in the middle of a long gradient"])
def test_a_death_is_named_at_once_and_the_survivors_next_step_works(tmp_path: Path, sends_first: bool) -> None:
    with serving(tmp_path, "--workers=3", "--steps=2", "--samples=9") as server:
        workers = server.join(3)
        for worker in workers:
            worker.shard()
        if sends_first:
            head = struct.pack(">I", 41 + 4 * LONGEST) + struct.pack("<BQIQ", 4, 0, 1, LONGEST)
            workers[1].sock.sendall(head + bytes(30_000_000))
        died = time.time()
        workers[1].sock.close()
        named = server.wait_for("lost") - died
        print(f"a death was named after {named:.3f} s")
        assert named < 0.5 * busy()
        survivors = [workers[0], workers[2]]
        for step in range(2):
            for worker in survivors:
                worker.send_gradient(step, [float(worker.worker_id)], 1.0, 1, 3)
            assert [worker.averaged()[1].tolist() for worker in survivors] == [[1.0], [1.0]]
            if step == 0:
                assert [worker.shard() for worker in survivors] == [(1, 0, 4), (1, 4, 9)]
        assert [worker.receive() for worker in survivors] == [b"\x07", b"\x07"]
        for worker in survivors:
            worker.sock.close()
        code, output = server.finish()
    (lost,) = events(tmp_path / "run", "lost")[:1]
    assert code == 0 and (lost["rank"], lost["host"], lost["left"]) == (1, "plain-1", False)
    assert "Step 0: worker 1 (plain-1 at 127.0.0.1) was lost" in output
    assert summary(tmp_path / "run")["lost"] == [1]


def test_who_leaves_before_the_others_is_told_to_be_missing(tmp_path: Path) -> None:
    """Workers of pretraining leave without a word. Whether it was the end shows when the others go on."""
    with serving(tmp_path, "--workers=3") as server:
        workers = server.join(3)
        for step in range(2):
            for component in range(3):
                for worker in workers:
                    worker.send_non_block(step, component, [1.0])
                for worker in workers:
                    worker.averaged_non_block()
            if step == 0:
                workers.pop(1).sock.close()
                server.wait_for("lost")
        for worker in workers:
            worker.sock.close()
        code, output = server.finish()
    assert code == 0 and "The others go on without worker 1: means are over 2 workers" in output, output
    assert summary(tmp_path / "run")["lost"] == [1]


@pytest.mark.parametrize("end", ["done", "failed", "killed"])
def test_a_worker_of_ours_that_ends_between_steps_has_left_only_if_it_says_so(tmp_path: Path, end: str) -> None:
    with serving(tmp_path, "--workers=2") as server, ThreadPoolExecutor(2) as pool:
        address = server.address
        ours = [WorkerClient(address, JoinRequest(f"ours-{number}", 0, "cpu")) for number in range(2)]
        ones = np.ones(3, np.float32)
        for averaged in [pool.submit(worker.average, 0, ones) for worker in ours]:
            assert averaged.result(SECONDS)[0].tolist() == [1.0] * 3
        if end == "killed":
            ours[1]._link.close()
        elif end == "failed":
            with pytest.raises(RuntimeError), ours[1]:
                raise RuntimeError
        for worker in reversed(ours):
            worker.close()
        code, output = server.finish()
    lost = end != "done"
    assert code == int(lost) and ("worker 1 (ours-1 at 127.0.0.1) was lost" in output) == lost, output
    assert {each["rank"]: each["left"] for each in events(tmp_path / "run", "lost")} == {0: True, 1: not lost}


def test_who_has_the_last_mean_may_leave_while_others_still_receive_it(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers=2", "--steps=1") as server:
        first, second = server.join(2)
        big = np.ones(4_000_000, np.float32)  # more than the kernel holds for a worker that does not read
        everyone([first, second], lambda worker: worker.send_gradient(0, big, 1.0, 1, 1))
        first.averaged()
        first.sock.close()
        server.wait_for("lost")
        second.averaged()
        second.receive()
        second.sock.close()
        assert server.finish()[0] == 0
    assert [each["left"] for each in events(tmp_path / "run", "lost")] == [True, True]
    assert summary(tmp_path / "run")["lost"] == []


@pytest.mark.parametrize("seconds", [0.5, pytest.param(40, marks=soak)])
def test_a_worker_that_computes_for_long_is_not_dropped(tmp_path: Path, seconds: float) -> None:
    with serving(tmp_path, "--workers=2", "--steps=1") as server:
        workers = server.join(2)
        big = np.ones(2_000_000, np.float32)
        with ThreadPoolExecutor(2) as pool:
            sending = pool.submit(workers[0].send_gradient, 0, big, 1.0, 1, 1)
            sending.result(SECONDS)
            time.sleep(seconds)
            workers[1].send_gradient(0, 3 * big, 1.0, 1, 1)
            time.sleep(seconds)  # and before it reads its mean
            for worker in workers:
                assert worker.averaged()[1].tobytes() == (2 * big).tobytes()
            for worker in workers:
                assert worker.receive() == b"\x07"
                worker.sock.close()
        assert server.finish()[0] == 0
    print(f"workers that computed for {seconds} s were not dropped")


@pytest.mark.parametrize("value", ["nan", "inf", "sum", "loss"])
def test_what_is_not_finite_halts_with_3_and_halt_json(tmp_path: Path, value: str) -> None:
    with serving(tmp_path, "--workers=2", "--samples=2") as server:
        workers = server.join(2)
        bad = {"nan": float("nan"), "inf": float("inf"), "sum": 3e38, "loss": 1.0}[value]
        for worker in workers:
            worker.shard()
            mine = [1.0, bad if worker.worker_id == 1 or value == "sum" else 1.0]
            worker.send_gradient(0, mine, float("nan") if value == "loss" and worker.worker_id else 1.0, 1, 1)
        for worker in workers:
            assert worker.receive() == b"\x07"
            worker.sock.close()
        code, output = server.finish()
    halt = json.loads((tmp_path / "run" / "halt.json").read_text())
    (finding,) = halt["findings"]
    assert code == 3 and "THE LINE STOPPED at step 0: worker 1 " in output
    assert (halt["step"], finding["rank"], finding["host"]) == (0, 1, "plain-1")
    assert finding["unit"] == ("loss" if value == "loss" else "whole vector")
    assert finding["kind"] == ("Inf" if value in ("inf", "sum") else "NaN")
    assert not events(tmp_path / "run", "step") and not (tmp_path / "run" / "summary.json").exists()


def test_a_halt_in_pretraining_names_the_block(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers=2") as server:
        workers = server.join(2)
        for worker in workers:
            worker.send_block(5, 1, [1], [1.0], blocks=2)
        for worker in workers:
            worker.averaged_block()
            worker.send_block(5, 0, [1], [float("nan") if worker.worker_id == 0 else 1.0], blocks=2)
        assert [worker.is_closed() for worker in workers] == [True, True]
        for worker in workers:
            worker.sock.close()
        code, output = server.finish()
    halt = json.loads((tmp_path / "run" / "halt.json").read_text())
    assert (code, halt["step"], halt["findings"][0]["unit"]) == (3, 5, "block 0"), output


def test_an_unequal_pair_ends_the_session_and_names_both(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers=2") as server:
        workers = server.join(2)
        for worker in workers:
            worker.send_gradient(0, [1.0] * (3 + worker.worker_id), 1.0, 1, 1)
        for worker in workers:
            assert worker.is_closed()
            worker.sock.close()
        code, output = server.finish()
    lines = output.strip().splitlines()
    assert code == 1 and "worker 0: whole vector of step 0 with 3 floats" in lines[-3] and "worker 1: " in lines[-3]
    assert "cannot tell which of them is right" in lines[-2]
    (ending,) = events(tmp_path / "run", "stopped")
    assert "with 3 floats" in ending["reason"] and state_of(tmp_path) == "stopped"


def test_workers_that_all_vanish_in_a_step_end_it_with_an_error(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers=2", "--steps=5") as server:
        for worker in server.join(2):
            worker.sock.close()
        code, output = server.finish()
    assert code == 1 and "Every worker is gone in step 0" in output
    (ending,) = events(tmp_path / "run", "stopped")
    assert "Every worker is gone in step 0: Worker " in ending["reason"] and state_of(tmp_path) == "stopped"


def state_of(cwd: Path) -> str:
    """What `andon status` says of the session."""
    code, output = andon("status", "run", "--json", cwd=cwd)
    assert code == 0, output
    state: str = json.loads(output)["state"]
    return state


def test_counts_that_make_no_share_give_no_accuracy(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers=1", "--steps=2") as server:
        (worker,) = server.join(1)
        for step in range(2):
            worker.send_gradient(step, [1.0], 0.5, 2, 1)
            worker.averaged()
        worker.receive()
        worker.sock.close()
        code, output = server.finish()
    assert code == 0 and "loss 0.5000  workers 1" in output, output
    assert output.count("no accuracy, because workers count 2 of 1 as correct") == 1
    assert [(each["accuracy"], each["correct"]) for each in events(tmp_path / "run", "step")] == [(None, 2)] * 2
    assert summary(tmp_path / "run")["accuracy"] is None


def test_ctrl_c_ends_the_session_with_4(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers=2", "--samples=2") as server:
        workers = server.join(2)
        for worker in workers:
            worker.shard()
        ctrl_c(server.process)
        assert [worker.receive() for worker in workers] == [b"\x07", b"\x07"]
        for worker in workers:
            worker.sock.close()
        code, output = server.finish()
    assert code == 4 and "Stopped in step 0" in output, output
    assert events(tmp_path / "run", "stopped")


def test_a_second_session_moves_the_first_aside(tmp_path: Path) -> None:
    for _ in range(2):
        with serving_session(tmp_path) as (server, worker):
            worker.send_gradient(0, [1.0], 1.0, 1, 1)
            worker.averaged()
            worker.receive()
            worker.sock.close()
            assert server.finish()[0] == 0
    assert summary(tmp_path / "run.1")["step"] == summary(tmp_path / "run")["step"] == 1


@contextmanager
def serving_session(cwd: Path) -> Iterator[tuple[Server, PlainWorker]]:
    if (cwd / "run").exists():
        process = start("gradient-server", "--bind=127.0.0.1:0", "--run.dir=run", "--workers=1", "--steps=1", cwd=cwd)
        assert process.stdout and "is now in" in process.stdout.readline()
        try:
            server = Server(process, cwd / "run")
            yield server, PlainWorker(server.address)
        finally:
            end_started()
    else:
        with serving(cwd, "--workers=1", "--steps=1") as server:
            yield server, PlainWorker(server.address)


def test_a_gradient_server_loads_no_torch() -> None:
    import sys

    script = "import sys, andon.commands.gradient_server; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
