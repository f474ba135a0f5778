"""`--group.transport protocol2`: ranks that are workers of a gradient server, Andon's or another's."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from andon.config.load import load
from andon.errors import UserError
from andon.protocol2.client import ServerHalted
from andon.protocol2.group import Protocol2Group
from andon.transport.base import Group, Settings
from andon.transport.registry import open_group
from andon.transport.torch_backend import StoreRendezvous
from tests import ROOT
from tests.kit.group_harness import link_keys, start_gradient_server
from tests.kit.runs import SMALL, andon, end_started, events, start, summary, train, wait_for_step
from tests.protocol2.gradient_servers import Server, gradient_server, over
from tests.protocol2.plain_peers import SECONDS, PlainGradientServer, PlainWorker

BLOCKS = 2  # of the small model


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the small run comes to over shared memory."""
    found: str = train("--workers=2", cwd=tmp_path_factory.mktemp("shm"))["weights_blake3"]
    return found


@pytest.mark.soak
def test_one_worker_gives_the_answer(tmp_path: Path, answer: str) -> None:
    with gradient_server(tmp_path, 1) as server:
        assert train(*over(server.address), cwd=tmp_path)["weights_blake3"] == answer
        assert server.finish()[0] == 0


def test_a_run_over_another_implementations_server_gives_the_answer(tmp_path: Path, answer: str) -> None:
    with PlainGradientServer(2, BLOCKS) as server:
        done = train("--workers=2", "--zero.policy=even", *over(server.address), cwd=tmp_path)
    assert done["weights_blake3"] == answer and server.steps == 6


@pytest.mark.soak
def test_tied_weights_have_an_empty_lm_head(tmp_path: Path) -> None:
    options = ["--workers=2", "--model.tied=true"]
    expected = train(*options, cwd=tmp_path, name="shm")["weights_blake3"]
    with PlainGradientServer(2, BLOCKS) as server:
        done = train(*options, *over(server.address), cwd=tmp_path)
    assert done["weights_blake3"] == expected


def test_three_ranks_hold_the_same_bits_and_resume_with_another_transport(tmp_path: Path) -> None:
    with gradient_server(tmp_path, 3) as server:
        train("--workers=3", "--train.steps=4", *over(server.address), cwd=tmp_path)
        assert server.finish()[0] == 0
    train("--workers=2", cwd=tmp_path)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_nan_halts_the_run_and_the_server_and_both_name_it(tmp_path: Path, workers: int) -> None:
    with gradient_server(tmp_path, workers) as server:
        rank = workers - 1
        fault = f"--fault=nan:rank={rank},step=3,parameter=model.layers.1.mlp.up_proj.weight"
        code, output = andon(
            "train", *SMALL, f"--workers={workers}", fault, "--run.dir=run", *over(server.address), cwd=tmp_path
        )
        assert code == 3 and "go on from there" in output and "on_nonfinite" not in output, output
        assert server.finish()[0] == 3
    ours, theirs = (json.loads((tmp_path / name / "halt.json").read_text()) for name in ("run", "server"))
    (found,) = ours["findings"]
    assert (ours["step"], found["rank"]) == (3, rank)
    assert found["parameter"] == "model.layers.1.mlp.up_proj.weight"
    assert (theirs["step"], theirs["findings"][0]["rank"], theirs["findings"][0]["unit"]) == (2, rank, "block 1")


@pytest.mark.alone
def test_a_killed_rank_is_named_by_the_run_and_by_the_server(tmp_path: Path) -> None:
    with gradient_server(tmp_path, 2) as server:
        process = start(
            "train", *SMALL, "--workers=2", "--train.steps=100000", "--run.dir=run", *over(server.address), cwd=tmp_path
        )
        wait_for_step(tmp_path / "run", 3, process)
        code, said = andon("resize", "run", "3", cwd=tmp_path)
        assert code == 1 and "The members of a group over protocol2 cannot change" in said, said
        (victim,) = [each["pid"] for each in events(tmp_path / "run", "worker") if each["rank"] == 1]
        os.kill(victim, signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1 and "Rank 1" in output, output
        assert "The members of a group over protocol2 cannot change" in output.splitlines()[-2], output
        code, said = server.finish()
    assert code == 1 and "worker 1 (" in said, said
    assert events(tmp_path / "server", "lost")[0]["rank"] == 1


def test_a_server_that_is_not_there_or_serves_others_is_refused_in_three_lines(tmp_path: Path) -> None:
    def refused(*options: str) -> str:
        code, output = andon("train", *SMALL, "--workers=2", "--run.dir=run", *options, cwd=tmp_path)
        assert code == 1 and "Traceback" not in output, output
        return output

    assert "The gradient server at 127.0.0.1:9 cannot be joined" in refused(*over(("127.0.0.1", 9)))
    with gradient_server(tmp_path, 3) as server:
        output = refused(*over(server.address))
    assert f"The gradient server at 127.0.0.1:{server.address[1]} serves 3 workers, not 2" in output
    with gradient_server(tmp_path, 2, name="other") as server:
        stranger = PlainWorker(server.address)
        output = refused(*over(server.address))
        stranger.sock.close()
    assert "Rank 0 is worker 1 of the gradient server" in output and "does not belong to this run" in output


def test_a_server_that_shares_out_samples_is_named_with_the_remedy(tmp_path: Path) -> None:
    with gradient_server(tmp_path, 2, "--samples=10") as server:
        code, output = andon("train", *SMALL, "--workers=2", "--run.dir=run", *over(server.address), cwd=tmp_path)
    assert code == 1, output
    cause, remedy = output.strip().splitlines()[-2:]
    assert f"The gradient server at 127.0.0.1:{server.address[1]} assigns samples" in cause, output
    assert "Start it without --samples" in remedy


@pytest.mark.alone
def test_a_server_that_dies_is_named_with_the_remedy(tmp_path: Path) -> None:
    with gradient_server(tmp_path, 2) as server:
        options = ["--workers=2", "--train.steps=100000", "--run.dir=run"]
        process = start("train", *SMALL, *options, *over(server.address), cwd=tmp_path)
        wait_for_step(tmp_path / "run", 3, process)
        server.process.kill()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "the gradient server was lost" in output, output
    cause, remedy = output.strip().splitlines()[-2:]
    assert f"The gradient server at 127.0.0.1:{server.address[1]} has ended or cannot be reached" in cause, output
    assert "Start `andon gradient-server` again, then this command: it resumes" in remedy


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"group.transport": "protocol2"}, "group.transport protocol2 needs group.server"),
        ({"group.transport": "protocol2", "group.server": "somewhere"}, "group.server = 'somewhere' is not HOST:PORT"),
        ({"group.transport": "protocol2", "group.server": "a b:1"}, "group.server = 'a b:1' is not HOST:PORT"),
        ({"group.transport": "ring", "group.server": "host:1"}, "group.server is for group.transport protocol2"),
        (
            {"group.transport": "protocol2", "group.server": "host:1", "on_nonfinite": "skip"},
            "on_nonfinite = 'skip' needs another transport: the server of protocol2 halts",
        ),
    ],
)
def test_the_server_is_named_exactly_where_it_is_needed(keys: dict[str, str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        load(None, {"workers": 2, **keys})
    assert load(None, {"group.transport": "protocol2", "group.server": "[::1]:5"}).group.server_address == ("::1", 5)


PAGE = (ROOT / "docs" / "protocol2.md").read_text()


def test_the_commands_of_the_page_give_the_answer(tmp_path: Path, answer: str) -> None:
    (block,) = re.findall(r"^```\n(.*?)^```", PAGE, re.M | re.S)
    first, second = (shlex.split(line)[1:] for line in block.splitlines())
    assert (first[0], second[0]) == ("gradient-server", "train")
    with closing(socket.create_server(("127.0.0.1", 0))) as found:
        port = str(found.getsockname()[1])
    first, second = ([word.replace("29412", port) for word in words] for words in (first, second))
    try:
        server = Server(start(*first, cwd=tmp_path), tmp_path / "runs" / "gradient-server")
        code, output = andon(*second, *SMALL, "--run.dir=run", cwd=tmp_path)
        assert code == 0, output
        assert server.finish()[0] == 0
    finally:
        end_started()
    done, steps = summary(tmp_path / "run"), events(server.folder, "step")
    assert (done["weights_blake3"], done["transport"]) == (answer, "protocol2")
    assert [(each["step"], each["workers"], each["parts"]) for each in steps] == [
        (step, 2, BLOCKS + 3) for step in range(6)
    ]


def test_the_python_example_of_the_page_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    means: list[float] = []
    with gradient_server(tmp_path, 2, "--steps=2", "--samples=7") as server:

        def backward(samples: range) -> tuple[Any, float, int]:
            return np.full(3, len(samples), np.float32), 1.0, 1

        names = {"backward": backward, "update": lambda mean: means.append(float(mean[0]))}
        script = example.replace('("127.0.0.1", 29412)', repr(server.address))
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(exec, script, dict(names)) for _ in range(2)]:
                done.result(20)
        assert server.finish()[0] == 0
    assert means == [3.5] * 4


UNITS = [("lm_head", (6,)), ("model.norm", (2,)), ("model.layers.1", (3, 1)), ("model.layers.0", (3, 1))]


def exchange_in_order(rank: int, store: int, server: int) -> tuple[list[int], list[float]]:
    rendezvous = StoreRendezvous(TCPStore("127.0.0.1", store, wait_for_workers=False), rank, 2, SECONDS)
    settings = Settings(SECONDS, server=("127.0.0.1", server), keys=link_keys(rank, 2))
    with open_group("protocol2", rendezvous, settings) as group:
        return in_order(group)


def in_order(group: Group) -> tuple[list[int], list[float]]:
    order = list(group.exchange_order(UNITS))
    sums = []
    for _ in range(2):
        for unit in order:
            row = torch.full((1, sum(UNITS[unit][1])), float(unit + group.rank))
            group.all_reduce(row)
            sums.append(float(row[0, -1]))
    return order, sums


def test_blocks_come_first_and_missing_components_are_empty() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server = start_gradient_server(2)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(exchange_in_order, rank, store.port, server) for rank in range(2)]:
            order, sums = done.result(SECONDS)
            assert order == [2, 3, 0, 1]
            assert sums == [5.0, 7.0, 1.0, 3.0] * 2


def test_who_goes_on_after_the_server_has_halted_is_told_where_to_look(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with gradient_server(tmp_path, 1) as server:
        settings = Settings(SECONDS, server=server.address, keys=link_keys(0, 1))
        with open_group("protocol2", StoreRendezvous(store, 0, 1, SECONDS), settings) as group:
            row = torch.full((1, 3), float("nan"))
            group.all_reduce(row)
            with pytest.raises(ServerHalted) as caught:
                group.all_reduce(torch.ones(1, 3))
        assert server.finish()[0] == 3
    assert f"The gradient server at 127.0.0.1:{server.address[1]} found" in caught.value.cause
    assert "halt.json" in caught.value.remedy


def test_a_model_that_is_too_large_for_another_server_is_refused_before_the_first_step() -> None:
    class Client:
        piece_floats = 0

    group = object.__new__(Protocol2Group)
    group._client = Client()  # type: ignore[assignment]
    group.exchange_order([("lm_head", (24_999_000,))])
    with pytest.raises(UserError, match="33,554,432 floats is too long"):
        group.exchange_order([("lm_head", (32_768 * 1024,))])


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_demo_over_protocol_2_reaches_the_demos_quality(tmp_path: Path) -> None:
    options = ["--workers=2", "--run.dir=run", "--device=cpu"]
    with gradient_server(tmp_path, 2) as server:
        code, output = andon("train", *options, *over(server.address), cwd=tmp_path, timeout=1700, executed=True)
        assert code == 0, output
        assert server.finish()[0] == 0
    done = summary(tmp_path / "run")
    print(done)
    assert done["valid_share"] >= 0.8
    assert done["weights_blake3"] == "6d56a8e8a73bc110f7209ce56a1fe5798906ea7ddd055dc1eb2a0c1e320a1a9c"
