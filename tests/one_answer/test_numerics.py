"""Portable numerics and the probe: machines that compute other bits are named, and train together when allowed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from andon.engine.gradients.exchange import sum_in_halves
from andon.integrity.probe import OPERATIONS, differing, take_probe
from andon.numerics import AVX2, Numerics, has_avx2, kernels
from andon.transport.base import Group
from tests.kit.group_harness import World
from tests.kit.runs import SMALL, andon, environment, events, summary, train
from tests.kit.training import digest, make_trainer, small_config, small_tokens

needs_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT" or "avx512f" not in Path("/proc/cpuinfo").read_text(),
    reason="another machine is simulated with native kernels, which must not be those of AVX2",
)


def native(cwd: Path) -> dict[str, str]:
    return {name: value for name, value in environment(cwd).items() if name not in AVX2}


@cache
def portable_probe(number: int) -> dict[str, str]:
    """The probe that a fresh process with portable kernels takes; another number, another process."""
    return probe_in(native(Path()) | dict(kernels("portable")))


COMPATIBLE = {
    "the matrix product": "efffa9c171637f31",
    "the matrix product of small sizes": "13e8ad6f785435c7",
    "attention": "54441afab8b17ec6",
    "the exponential": "a5a03869da2bc0dc",
}
"""What compatible kernels computed on an AMD EPYC and on an emulated Intel Skylake, torch 2.13."""


def probe_in(environ: dict[str, str]) -> dict[str, str]:
    """The probe that a fresh process takes."""
    code = "import json, torch; from andon.integrity.probe import take_probe; torch.set_num_threads(1); "
    code += "print(json.dumps(take_probe(torch.device('cpu'))))"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_the_probe_is_the_same_every_time_and_names_each_operation() -> None:
    assert list(portable_probe(1)) == list(OPERATIONS)
    assert portable_probe(1) == portable_probe(2)


@pytest.mark.skipif(not has_avx2(), reason="needs AVX2")
def test_compatible_kernels_give_the_digests_of_amd_and_intel(tmp_path: Path) -> None:
    found = probe_in(native(tmp_path) | dict(kernels("compatible")))
    assert {name: found[name] for name in COMPATIBLE} == COMPATIBLE
    assert "the matrix product" in differing(found, portable_probe(1))


CHOOSE = "import torch; from andon.numerics import choose_kernels; {before}; print(choose_kernels('{numerics}'))"


@pytest.mark.skipif(not has_avx2(), reason="needs AVX2")
@pytest.mark.parametrize(
    ("first", "before", "numerics", "warns"),
    [
        ("portable", "torch.ones(9, 9) @ torch.ones(9, 9)", "portable", False),
        ("portable", "pass", "compatible", False),
        ("portable", "torch.ones(9, 9) @ torch.ones(9, 9)", "compatible", True),
        ("compatible", "torch.ones(9, 9) @ torch.ones(9, 9)", "portable", True),
    ],
)
def test_kernels_that_were_chosen_too_late_are_noticed(
    first: Numerics, before: str, numerics: Numerics, warns: bool, tmp_path: Path
) -> None:
    code = CHOOSE.format(before=before, numerics=numerics)
    environ = native(tmp_path) | dict(kernels(first))
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and ("already uses other kernels" in done.stdout) == warns, done.stdout + done.stderr


@needs_avx512
def test_native_kernels_of_this_processor_are_noticed_by_the_probe(tmp_path: Path) -> None:
    assert differing(probe_in(native(tmp_path)), portable_probe(1))


def test_the_sum_of_the_norm_depends_on_the_length_alone() -> None:
    values = np.random.default_rng(1).random(1001)
    tree = list(values)
    while len(tree) > 1:
        half = (len(tree) + 1) // 2
        tree = [tree[i] + tree[half + i] if half + i < len(tree) else tree[i] for i in range(half)]
    assert sum_in_halves(torch.from_numpy(values.copy())) == tree[0]
    assert sum_in_halves(torch.zeros(0)) == 0.0


def test_a_run_writes_its_probe_and_a_resume_elsewhere_names_what_differs(tmp_path: Path) -> None:
    train(cwd=tmp_path)
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["numerics"] == "portable" and list(config["probe"]) == list(OPERATIONS)
    state = json.loads((tmp_path / "run" / "checkpoints" / "checkpoint-6" / "state.json").read_text())
    assert state["config"]["probe"] == config["probe"]
    config["probe"]["attention"] = "0" * 16  # as if it came from another machine
    (tmp_path / "foreign.yaml").write_text(yaml.safe_dump(config))
    code, output = andon("train", "foreign.yaml", "--run.dir=again", cwd=tmp_path)
    assert code == 0 and "This machine computes attention differently" in output, output


def start_mixed(cwd: Path, *options: str) -> tuple[list[int], str]:
    """Two workers on unequal machines, one of which has only AVX2: exit codes, and what the coordinator says."""
    command = [sys.executable, "-m", "andon"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(
        [
            *command,
            "coordinator",
            *SMALL,
            "--workers=2",
            "--run.dir=run",
            "--numerics=native",
            "--bind=127.0.0.1:0",
            *options,
        ],
        cwd=cwd,
        env=environment(cwd),
        **pipes,
    ) as coordinator:
        assert coordinator.stdout
        output = ""
        while "andon worker" not in output:
            line = coordinator.stdout.readline()
            assert line, output
            output += line
        address = output.split("andon worker ")[1].split()[0]
        workers = [
            subprocess.Popen([*command, "worker", address, "--token-file=run/token"], cwd=cwd, env=environ, **pipes)
            for environ in (native(cwd), native(cwd) | dict(kernels("portable")))
        ]
        try:
            codes = [worker.wait(timeout=100) for worker in workers]
            output += coordinator.communicate(timeout=20)[0]
        finally:
            for process in (*workers, coordinator):
                process.kill()
                process.wait()
    return codes, output


@needs_avx512
def test_workers_that_compute_other_bits_are_refused_with_the_operation_named(tmp_path: Path) -> None:
    codes, output = start_mixed(tmp_path, "--group.transport=torch")
    assert codes == [1, 1]
    assert "The workers do not compute the same bits: " in output and "differs between ranks 0, 1" in output, output


@needs_avx512
@pytest.mark.parametrize("policy", ["off", pytest.param("even", marks=pytest.mark.soak)])
def test_mixed_workers_hold_equal_weights_after_every_step(tmp_path: Path, policy: str) -> None:
    steps = int(os.environ.get("ANDON_SOAK_COUNT") or 6)
    options = [f"--zero.policy={policy}", "--group.mixed=true", f"--train.steps={steps}", "--group.transport=star"]
    codes, output = start_mixed(tmp_path, *options)
    assert codes == [0, 0], output  # a halt would be 3: fingerprints are compared in every step
    assert summary(tmp_path / "run")["step"] == steps
    assert any("Unequal machines" in note["text"] for note in events(tmp_path / "run", "note"))


def test_replicas_and_mixed_machines_exclude_each_other(tmp_path: Path) -> None:
    code, output = andon("config", "validate", "--group.mixed=true", "--zero.replicas=2", cwd=tmp_path)
    assert code == 1 and "group.mixed" in output


def test_processors_without_avx2_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert not has_avx2() and kernels("portable") == {}


def test_take_probe_in_this_process() -> None:
    assert list(take_probe(torch.device("cpu"))) == list(OPERATIONS)


def train_where_rank_1_updates_otherwise(group: Group, tokens: Path) -> str:
    group.mixed = True
    trainer = make_trainer(group, tokens, small_config(zero__policy="off"))
    update = trainer.optimizer.rule.update
    if group.rank == 1:
        trainer.optimizer.rule.update = (  # type: ignore[method-assign]
            lambda gradients, scale, options: update(gradients, scale, {**options, "lr": options["lr"] * 1.00001})
        )
    for _ in range(3):
        trainer.train_step()
    found = digest(trainer)
    trainer.close()
    return found


def test_a_machine_whose_optimizer_computes_other_bits_may_take_part(tmp_path: Path) -> None:
    with World("shm", 3) as world:
        assert len(set(world.run(train_where_rank_1_updates_otherwise, small_tokens(tmp_path)))) == 1
