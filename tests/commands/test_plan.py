"""`andon plan`: its arithmetic is what a run takes."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from andon import machine
from andon.checkpoint.moments import Moments
from andon.config.load import build
from andon.engine.optimizer import AdamW
from andon.engine.parallel import DataParallel
from andon.model.llama import Llama
from andon.model.shape import SHAPES, Shape
from andon.optim.shard_map import Policy
from andon.optim.sharding import Zero
from andon.run.plan import cost_of_a_loss, live_activations, make_plan
from andon.transport.base import Group
from tests.kit.memory import peak_memory
from tests.kit.runs import andon
from tests.kit.thread_group import thread_groups

SMALL = Shape(vocab=97, hidden=32, layers=3, heads=4, kv_heads=2, intermediate=48, context=24)
SETTING = ["--model.preset=30m", "--train.micro_batch=1", "--train.slots=4"]


def planned(*options: str) -> float:
    """The memory of all workers at the peak of a step, by the plan."""
    config = build({}, dict(option[2:].split("=") for option in options)).on_this_machine()
    return config.workers * make_plan(config).memory.step


def kept_for_backward(shape: Shape, windows: int) -> int:
    """Bytes of all float tensors that autograd keeps, each memory counted once, without the parameters."""
    model = Llama(shape)
    own = {each.data_ptr() for each in (*model.parameters(), model.cos, model.sin)}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage().data_ptr()
        if tensor.is_floating_point() and tensor.dim() > 1 and memory not in own:
            kept[memory] = tensor
        return tensor

    tokens = torch.zeros(windows, shape.context, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, tokens)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("shape", [SMALL, replace(SHAPES["tiny"], layers=2)])
@pytest.mark.parametrize("windows", [1, 3])
def test_the_activations_are_what_autograd_keeps(shape: Shape, windows: int) -> None:
    two_gradients = 2 * 4 * windows * shape.context * shape.vocab
    assert live_activations(shape, windows) - two_gradients == kept_for_backward(shape, windows)


@pytest.mark.parametrize(
    ("preset", "windows", "kept", "measured"),
    [
        *(("350m", 32, 0.75, 28.1), ("350m", 32, 1, 37.3), ("124m", 256, 0.75, 50.8), ("124m", 256, 1, 70.7)),
        *(("1b", 8, 0.75, 32.7), ("1b", 8, 1, 39.8)),
    ],
)
def test_the_memory_on_a_gpu_is_what_an_h200_measured(preset: str, windows: int, kept: float, measured: float) -> None:
    """In GiB; of one worker with one slot, as `andon bench train --device cuda` prints it."""
    settings = {"device": "cuda", "workers": 1, "train.slots": 1, "train.context": SHAPES[preset].context}
    train = {"train.micro_batch": windows, "train.activation_memory": kept}
    memory = make_plan(build({}, {"model.preset": preset, **settings, **train}).on_this_machine()).memory
    assert memory.total / 2**30 == pytest.approx(measured, rel=0.05)


def test_on_a_machine_with_a_gpu_the_plan_is_that_of_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def total(device: str) -> tuple[int, int]:
        settings = {"device": device, "train.slots": 1, "train.micro_batch": 32, "train.context": 1024}
        memory = make_plan(build({}, {"model.preset": "350m", **settings}).on_this_machine()).memory
        return memory.total, memory.on_host

    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    assert total("auto") == total("cpu"), "a CPU build of torch"
    monkeypatch.setattr(machine, "version", lambda name: "2.13.0")
    assert total("auto") == total("cuda") and total("cuda")[1] > 12 * 432e6 > total("cpu")[1] == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert total("auto") == total("cpu")


def test_plan_needs_no_torch_and_shows_what_settings_would_change(tmp_path: Path) -> None:
    script = (
        "import sys; sys.argv = ['andon', 'plan', '--model.preset=30m', '--workers=2', '--numerics=native']\n"
        "from andon.cli import app; app(standalone_mode=False); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "optimizer 128 MB" in done.stdout and "--zero.policy off" in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero.policy": "off"}, "no committed step: every worker has all of the state"),
        ({"zero.replicas": 2}, "unless two neighbours are lost at once"),
        ({"checkpoint.every": 30}, "up to 30 steps; --zero.replicas 2 would lose none, for 64.0 MB more"),
        ({"group.transport": "torch"}, "ends the run over torch"),
        ({"group.transport": "protocol2", "group.server": "host:1"}, "ends the run over protocol2"),
        ({"workers": 1}, "the worker is started again"),
    ],
)
def test_the_plan_says_what_a_loss_costs(options: dict[str, Any], said: str) -> None:
    config = build({}, {"model.preset": "30m", "workers": 4, "train.slots": 8, **options}).on_this_machine()
    assert said in cost_of_a_loss(config, make_plan)


def test_plan_as_json_counts_what_zero_saves(tmp_path: Path) -> None:
    code, output = andon("plan", "--model.preset=30m", "--workers=4", "--min_workers=2", "--json", cwd=tmp_path)
    assert code == 0, output
    plan = json.loads(output)
    off = next(row for row in plan["changes"] if row["keys"] == {
        "workers": 4, "zero.policy": "off", "zero.replicas": 1
    })  # fmt: skip
    assert off["memory"]["optimizer"] - plan["memory"]["optimizer"] == 6 * plan["parameters"]
    assert plan["sent"] == off["sent"] == 6 * plan["parameters"]


@pytest.mark.parametrize(
    ("workers", "slots", "rows", "moments"), [(1, 4, 2, 8), (2, 4, 1, 4), (1, 8, 3, 8), (4, 8, 1, 2)]
)
def test_weights_gradients_and_moments_are_counted(workers: int, slots: int, rows: int, moments: int) -> None:
    """A worker folds its slots in as many rows as the tree is deep, and ZeRO shares out the moments."""
    config = build({}, {"model.preset": "tiny", "workers": workers, "train.slots": slots}).on_this_machine()
    plan = make_plan(config)
    assert plan.memory.weights == 4 * plan.parameters
    assert plan.memory.gradients == rows * 4 * plan.parameters
    assert plan.memory.optimizer == moments * plan.parameters


@pytest.mark.parametrize("policy", ["off", "even", "contiguous"])
def test_the_copies_for_a_save_are_the_moments_shared_out_and_on_rank_0_the_weights(policy: Policy) -> None:
    model, zero = Llama(SHAPES["tiny"]), Zero(policy)

    def kept_by(group: Group) -> int:
        parallel = DataParallel(copy.deepcopy(model), group, slots=2)
        moments = Moments(AdamW(parallel, lr=0.1, zero=zero), rank_0_writes_all=False)
        parallel.close()
        return sum(4 * each.numel() for each in moments.to_save().values())

    with ThreadPoolExecutor(2) as pool:
        kept = list(pool.map(kept_by, thread_groups(2)))
    config = build({}, {"model.preset": "tiny", "workers": 2, "zero.policy": policy}).on_this_machine()
    memory = make_plan(config).memory
    assert memory.snapshot == pytest.approx(max(kept), rel=0.02)
    assert memory.total - memory.step == memory.snapshot + 4 * SHAPES["tiny"].parameters


@pytest.mark.skipif(sys.platform != "linux", reason="PSS is a figure of Linux")
def test_the_memory_of_a_small_run_is_as_planned(tmp_path: Path) -> None:
    options = ["--model.preset=tiny", "--workers=2"]
    plan = planned(*options)
    assert peak_memory(*options, cwd=tmp_path, steps=10, least=0.9 * plan) == pytest.approx(plan, rel=0.1)


@cache
def measured(folder: Path, workers: int, policy: str) -> float:
    here = folder / f"{workers}-{policy}"
    here.mkdir()
    return peak_memory(*SETTING, f"--workers={workers}", f"--zero.policy={policy}", cwd=here)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="PSS is a figure of Linux")
@pytest.mark.parametrize(("workers", "policy"), [(1, "off"), (2, "off"), (4, "off"), (2, "even"), (4, "even")])
def test_the_memory_of_30m_is_as_planned(folder: Path, workers: int, policy: str) -> None:
    plan = planned(*SETTING, f"--workers={workers}", f"--zero.policy={policy}")
    found = measured(folder, workers, policy)
    print(f"30m, {workers} workers, ZeRO {policy}: {found / workers:,.0f} a worker, plan {plan / workers:,.0f}")
    assert found == pytest.approx(plan, rel=0.1)


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="PSS is a figure of Linux")
@pytest.mark.parametrize("workers", [1, 2])
def test_the_memory_of_30m_with_saves_is_as_planned(folder: Path, workers: int) -> None:
    options = [*SETTING, f"--workers={workers}", "--checkpoint.every=2", "--checkpoint.keep=1"]
    config = build({}, dict(option[2:].split("=") for option in options)).on_this_machine()
    plan = make_plan(config).memory.of_all(workers)
    here = folder / f"{workers}-saves"
    here.mkdir()
    found = peak_memory(*options, cwd=here)
    print(f"30m, {workers} workers, with saves: {found / workers:,.0f} a worker, plan {plan / workers:,.0f}")
    assert found == pytest.approx(plan, rel=0.1)


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="PSS is a figure of Linux")
def test_zero_saves_what_it_should_at_four_workers(folder: Path) -> None:
    arithmetic = 3 / 4 * 8 * SHAPES["30m"].parameters * 4
    saved = measured(folder, 4, "off") - measured(folder, 4, "even")
    print(f"ZeRO saves {saved:,.0f} of {arithmetic:,.0f} bytes: {saved / arithmetic:.0%}")
    assert saved >= 0.8 * arithmetic
