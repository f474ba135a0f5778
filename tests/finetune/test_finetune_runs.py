"""`andon finetune` with real processes: one answer, resumes, errors, and the commands around it.

The long version prints accuracy and digest of every transport and number of workers:

    pytest -s -m soak tests/finetune/test_finetune_runs.py -k plot_of_a_story
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from andon.checkpoint.disk.manifest import read as manifest
from andon.checkpoint.disk.manifest import verify
from andon.cli import app
from andon.errors import UserError
from andon.finetune.generate import open_folder
from andon.finetune.result import merge
from tests import ROOT
from tests.finetune.tuning import LIBRARIES, VOCAB, WIDTH, make_model, plots
from tests.kit import prefork
from tests.kit.runs import andon, environment, events, finish, start, summary, wait_for_step
from tests.membership.test_goes_on import steps_after, stop, wait_for, wait_for_newest
from tests.protocol2.gradient_servers import gradient_server, over

QUICK = [
    *("--device=cpu", "--train.slots=4", "--train.micro_batch=3", "--train.context=48", "--train.steps=6"),
    *("--optim.lr=0.01", "--eval.samples=12", "--eval.shown=1", "--eval.length=4", "--eval.every=3"),
    *("--checkpoint.every=2", "--group.timeout=20"),
]

SAME = ("weights_blake3", "accuracy", "correct", "total", "loss", "validation_loss", "samples")
"""What the summaries of runs with one answer have in common."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and samples."""
    prefork.preload(*LIBRARIES)
    folder = tmp_path_factory.mktemp("runs")
    make_model(folder / "llama")
    plots(folder / "plots.jsonl", 120)
    return folder


@pytest.fixture(scope="module")
def answers(place: Path) -> list[dict[str, Any]]:
    """The summaries of one run on one worker, on two over shared memory, and on three over a star."""
    found = []
    for name, options in (("one", []), ("two", ["--workers=2"]), ("three", ["--workers=3", "--group.transport=star"])):
        code, output = andon("finetune", "llama", "plots.jsonl", *QUICK, f"--run.dir={name}", *options, cwd=place)
        assert code == 0, output
        found.append(summary(place / name))
    return found


def test_one_answer_for_one_two_and_three_workers(answers: list[dict[str, Any]]) -> None:
    assert all(each[key] == answers[0][key] for key in SAME for each in answers)
    assert [(each["transport"], each["workers"]) for each in answers] == [("local", 1), ("shm", 2), ("star", 3)]


def test_the_accuracy_of_every_step_is_counted_over_all_workers(place: Path, answers: list[dict[str, Any]]) -> None:
    counts = [[(step["correct"], step["total"]) for step in events(place / name, "step")] for name in ("one", "three")]
    assert counts[0] == counts[1] and [total for _, total in counts[0]] == [12] * 6


def test_a_killed_run_resumes_on_another_number_of_workers(place: Path, answers: list[dict[str, Any]]) -> None:
    command = ("finetune", "llama", "plots.jsonl", *QUICK, "--run.dir=killed")
    alone = ["--workers=2", "--min_workers=2", "--restarts=0", "--fault=die:rank=1,step=5"]
    code, output = andon(*command, *alone, cwd=place)
    assert code == 1 and "The run cannot go on" in output, output
    code, output = andon(*command, "--workers=1", cwd=place)
    assert code == 0 and "Resuming from step" in output, output
    assert summary(place / "killed")["weights_blake3"] == answers[0]["weights_blake3"]
    code, output = andon(*command, "--lora.rank=2", cwd=place)
    assert code == 1 and "lora.rank 8 → 2" in output, output
    code, output = andon("status", "killed", cwd=place)
    assert code == 0 and " done " in output, output


@pytest.mark.parametrize(
    ("zero", "every"),
    [(["--zero.replicas=2"], 2), ([], 0), pytest.param([], 2, marks=pytest.mark.soak)],
    ids=["replicas", "back to the first weights", "back to a checkpoint"],
)
def test_a_worker_is_killed_and_the_answer_stays(
    place: Path, answers: list[dict[str, Any]], tmp_path: Path, zero: list[str], every: int
) -> None:
    options = [*QUICK, f"--run.dir={tmp_path}", "--workers=3", f"--checkpoint.every={every}"]
    options += ["--zero.policy=even", *zero, "--fault=die:rank=1,step=4"]
    code, output = andon("finetune", "llama", "plots.jsonl", *options, cwd=place)
    assert code == 0 and "was lost" in output and "Going on with" in output, output
    assert all(summary(tmp_path)[key] == answers[0][key] for key in SAME)
    here, there = (
        {step["step"]: (step["correct"], step["total"]) for step in events(run, "step")}
        for run in (tmp_path, place / "one")
    )
    assert here == there
    code, output = andon("audit", str(tmp_path), cwd=place)
    assert code == 0 and "6 steps are committed, none missing and none twice" in output, output


def test_a_run_grows_and_shrinks_while_it_goes_on(place: Path) -> None:
    options = [*QUICK, "--eval.every=0", "--checkpoint.every=0", "--optim.schedule=constant"]
    command, folder = ("finetune", "llama", "plots.jsonl", *options), place / "resized"
    process = start(*command, "--run.dir=resized", "--train.steps=100000", cwd=place)
    wait_for_step(folder, 2, process)
    for workers in (3, 2):
        code, output = andon("resize", "resized", str(workers), cwd=place)
        assert code == 0, output
        wait_for_newest(folder, process, workers)
        at = time.time()
        wait_for(process, lambda at=at: steps_after(folder, at)[2:])
    step, output = stop(process, folder)
    assert [event["step"] for event in events(folder, "step")] == list(range(1, step + 1)), output
    assert andon(*command, "--run.dir=undisturbed", f"--train.steps={step}", cwd=place)[0] == 0
    one, other = (manifest(place / name / "checkpoints" / f"checkpoint-{step}") for name in ("resized", "undisturbed"))
    assert one.units == other.units
    code, output = andon("audit", "resized", cwd=place)
    assert code == 0 and f"{step} steps are committed, none missing and none twice" in output, output


def test_a_worker_with_another_model_is_not_let_in(place: Path) -> None:
    shutil.copytree(place / "llama", place / "other")
    command, folder = ("finetune", "other", "plots.jsonl", *QUICK, "--eval.every=0"), place / "mixed"
    process = start(*command, "--run.dir=mixed", "--train.steps=100000", cwd=place)
    wait_for_step(folder, 2, process)
    weights = load_file(place / "other" / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"][0, 0] += 1.0
    save_file(weights, place / "new.safetensors", {"format": "pt"})
    (place / "new.safetensors").rename(place / "other" / "model.safetensors")
    assert andon("resize", "mixed", "2", cwd=place)[0] == 0
    wait_for(process, lambda: "was refused" in str(events(folder, "note")))
    assert "other is another model here" in str(events(folder, "note")) and not events(folder, "generation")
    stop(process, folder)


def test_workers_started_by_hand_give_the_answer(
    place: Path, answers: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANDON_TOKEN", "the token of the tests")
    code, text = andon("config", "show", "--finetune", str(place / "llama"), "plots.jsonl", *QUICK, cwd=place)
    assert code == 0, text
    (place / "tune.yaml").write_text(text)
    command = ["coordinator", "tune.yaml", "--workers=2", "--run.dir=far", "--bind=127.0.0.1:0"]
    coordinator = start(*command, cwd=place)
    assert coordinator.stdout is not None
    while not (found := re.search(r"andon worker (\S+)", line := coordinator.stdout.readline())):
        assert line, "the coordinator ended"
    workers = [start("worker", found[1], cwd=place) for _ in range(2)]
    outputs = [finish(worker) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert finish(coordinator) is not None and coordinator.returncode == 0
    assert summary(place / "far")["weights_blake3"] == answers[0]["weights_blake3"]


def test_peft_loads_the_adapter_and_agrees(place: Path, answers: list[dict[str, Any]]) -> None:
    from peft import AutoPeftModelForSequenceClassification, PeftModel
    from transformers import AutoModelForSequenceClassification

    adapter = place / "one" / "adapter"
    base = AutoModelForSequenceClassification.from_pretrained(place / "llama", num_labels=8)
    models = [
        PeftModel.from_pretrained(base, adapter),
        AutoPeftModelForSequenceClassification.from_pretrained(adapter, num_labels=8),
        open_folder(adapter).model,
        open_folder(merge(adapter, None)).model,
    ]
    ids = torch.arange(1, 33).view(2, 16)
    logits: list[Tensor] = [model.eval()(input_ids=ids).logits.detach() for model in models]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    assert torch.allclose(logits[0], logits[3], atol=1e-5)
    assert verify(place / "one" / "merged").step == 6


def test_the_command_line_merges_and_answers(place: Path, answers: list[dict[str, Any]]) -> None:
    code, output = andon("merge", "two/adapter", "--out=whole", cwd=place)
    assert code == 0 and "whole" in output, output
    told = [
        andon("generate", folder, "Once upon a time, Leo had a pony.", cwd=place)
        for folder in ("two/adapter", "two", "whole")
    ]
    assert told[0] == told[1] == told[2] and told[0][0] == 0 and told[0][1].strip().endswith("%)"), told
    weights = place / "two" / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    for command in (("generate", "two/adapter", "x"), ("merge", "two/adapter", "--out=never")):
        code, output = andon(*command, cwd=place)
        assert code == 1 and "two/adapter is damaged" in output and "tensor" in output, output


def test_what_is_still_needed_is_not_replaced(place: Path, answers: list[dict[str, Any]], tmp_path: Path) -> None:
    adapter, base = place / "one" / "adapter", tmp_path / "base"
    for other in (adapter, place / "one" / "checkpoints" / "checkpoint-6"):
        with pytest.raises(UserError, match="is in the way"):
            merge(adapter, other)
    merge(adapter, base)
    (tmp_path / "later").mkdir()
    shutil.copyfile(adapter / "adapter_model.safetensors", tmp_path / "later" / "adapter_model.safetensors")
    settings = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(base)}
    (tmp_path / "later" / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"base cannot be replaced\nIt holds .*base, which is merged"):
        merge(tmp_path / "later", base)
    merge(adapter, place / "one" / "merged")
    again = ("finetune", "one/merged", "plots.jsonl", *QUICK, "--run.dir=one", "--resume=none")
    code, output = andon(*again, cwd=place)
    assert code == 1 and "one/merged is in the run's own folder" in output, output
    assert summary(place / "one") == answers[0]
    code, output = andon("finetune", "one", "plots.jsonl", *QUICK, "--run.dir=new", cwd=place)
    assert code == 1 and "one/adapter is an adapter" in output and "andon merge" in output, output


def test_a_checkpoint_of_adapters_is_no_adapter(place: Path, answers: list[dict[str, Any]]) -> None:
    code, output = andon("generate", "one/checkpoints/checkpoint-6", "x", cwd=place)
    assert code == 1 and "is a checkpoint of a fine-tuning run" in output, output
    code, output = andon("evaluate", "one/checkpoints/checkpoint-6", cwd=place)
    assert code == 1 and "It is a checkpoint of `andon finetune`" in output, output


def test_the_samples_of_a_run_are_shown(place: Path, answers: list[dict[str, Any]]) -> None:
    row = json.loads((place / "plots.jsonl").read_text().splitlines()[16])
    code, output = andon("data", "show", "one", "--samples=plots.jsonl:17", cwd=place)
    assert code == 0 and row["text"][:40] in output and f"→ {row['label']}" in output, output
    for wrong, complaint in (
        ("--samples=plots.jsonl:999", "There is no sample plots.jsonl:999"),
        ("--windows=3", "It is a run of fine-tuning"),
    ):
        code, output = andon("data", "show", "one", wrong, cwd=place)
        assert code == 1 and complaint in output and len(output.strip().splitlines()) == 3, output


def test_the_plan_counts_what_is_trained_and_what_autograd_keeps(place: Path, answers: list[dict[str, Any]]) -> None:
    options = [*QUICK, "--workers=2", "--train.micro_batch=2", "--json"]
    code, output = andon("plan", "--finetune", "llama", "plots.jsonl", *options, cwd=place)
    assert code == 0, output
    plan = json.loads(output)
    weights = load_file(place / "one" / "adapter" / "adapter_model.safetensors")
    trained = sum(value.numel() for value in weights.values())
    assert plan["memory"]["optimizer"] == 8 * trained // 2
    base = sum(value.numel() for value in load_file(place / "llama" / "model.safetensors").values())
    heads = 8 * WIDTH - VOCAB * WIDTH  # PEFT keeps a classifier's first head; there is none for tokens
    assert plan["parameters"] == base + heads + trained and plan["memory"]["weights"] == 4 * plan["parameters"]
    (half,) = [each for each in plan["changes"] if each["keys"].get("train.micro_batch") == 1]
    assert half["memory"]["activations"] == pytest.approx(plan["memory"]["activations"] / 2, rel=0.1)


def test_a_configuration_of_fine_tuning_is_one_for_every_command(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app(["config", "show", "--finetune", str(place / "llama"), str(place / "plots.jsonl")], standalone_mode=False)
    file = tmp_path / "tune.yaml"
    file.write_text(capsys.readouterr().out)
    for command in ("config validate", "config show", "launch slurm", "launch k8s", "plan --json"):
        app([*command.split(), str(file), "--workers=2", f"--data.cache={tmp_path}"], standalone_mode=False)
        assert capsys.readouterr().out


def test_a_gradient_server_averages_a_fine_tuning(place: Path, answers: list[dict[str, Any]]) -> None:
    with gradient_server(place, 2) as server:
        options = [*QUICK, "--workers=2", "--run.dir=served", *over(server.address)]
        code, output = andon("finetune", "llama", "plots.jsonl", *options, cwd=place)
        assert code == 0 and server.finish()[0] == 0, output
    assert summary(place / "served")["weights_blake3"] == answers[0]["weights_blake3"]


def test_a_bad_gradient_is_named_with_its_adapter_and_its_lines(place: Path) -> None:
    parameter = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.default.weight"
    fault = f"--fault=nan:rank=1,step=2,slot=3,parameter={parameter}"
    code, output = andon("finetune", "llama", "plots.jsonl", *QUICK, "--run.dir=bad", "--workers=2", fault, cwd=place)
    assert code == 3 and "plots.jsonl:" in output, output
    (found,) = json.loads((place / "bad" / "halt.json").read_text())["findings"]
    assert found["parameter"] == parameter and found["rank"] == 1 and len(found["samples"]) == 3


@pytest.mark.soak
def test_torchrun_gives_the_same_answer(place: Path, answers: list[dict[str, Any]]) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "andon", "finetune", "llama", "plots.jsonl"]
    root = str(ROOT)
    done = subprocess.run(
        [sys.executable, *command, *QUICK, "--run.dir=torchrun"],
        cwd=place,
        env={**environment(place), "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found = summary(place / "torchrun")
    assert found["weights_blake3"] == answers[0]["weights_blake3"] and found["transport"] == "torch"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_plot_of_a_story_is_told_by_every_number_of_workers(tmp_path: Path) -> None:
    wide = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    make_model(tmp_path / "llama", "llama", False, vocab_size=512, max_position_embeddings=256, **wide)
    plots(tmp_path / "plots.jsonl", 1200)
    prefork.preload(*LIBRARIES)
    seed = os.environ.get("ANDON_SOAK_SEED") or 1
    sizes = ["--train.slots=6", "--train.micro_batch=5", "--train.context=200", "--train.steps=150", f"--seed={seed}"]
    options = ["--device=cpu", "--optim.lr=0.01", "--eval.every=0", "--checkpoint.every=20", "--group.timeout=120"]

    def run(name: str, transport: str, workers: int, *more: str) -> int:
        place = [f"--run.dir={name}", f"--workers={workers}", f"--group.transport={transport}"]
        code, output = andon(
            "finetune", "llama", "plots.jsonl", *sizes, *options, *place, *more, cwd=tmp_path, timeout=1200
        )
        if code == 0:
            done = summary(tmp_path / name)
            print(f"{name}: accuracy {done['accuracy']:.1%}, weights {done['weights_blake3'][:16]}…", flush=True)
        else:
            print(f"{name}: exit code {code}: {output.strip().splitlines()[-3]}", flush=True)
        return code

    for transport, workers in (("local", 1), *((name, count) for name in ("shm", "star") for count in (1, 2, 3))):
        assert run(f"{transport}-{workers}", transport, workers) == 0
    lonely = ("--min_workers=2", "--restarts=0", "--fault=die:rank=1,step=70")
    assert run("killed", "shm", 2, *lonely) == 1
    assert run("killed", "star", 3) == 0
    ended = [summary(folder.parent) for folder in tmp_path.glob("*/summary.json")]
    assert len(ended) == 8 and len({(each["weights_blake3"], each["accuracy"]) for each in ended}) == 1
    assert ended[0]["accuracy"] >= 0.95
