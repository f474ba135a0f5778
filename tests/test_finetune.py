"""Fine-tuning: what is learned, one answer, and a result that Hugging Face loads."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from andon.checkpoint.manifest import verify
from andon.data.batches import NO_TARGET
from andon.errors import UserError
from andon.finetune.base import Base
from andon.finetune.generate import generate, open_folder
from andon.finetune.result import merge
from andon.integrity.halt import JidokaHalt
from andon.transport.local import LocalGroup
from tests import prefork
from tests.runs import andon, environment, events, finish, start, summary
from tests.tuning import FAMILIES, chats, endings, make_model, open_run, plots, tune, tune_config, write_rows

QUICK = [
    *("--device=cpu", "--train.slots=6", "--train.micro_batch=2", "--train.context=48", "--train.steps=6"),
    *("--optim.lr=0.01", "--eval.samples=12", "--eval.shown=1", "--eval.length=4", "--eval.every=3"),
    *("--checkpoint.every=2", "--group.timeout=20"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and samples."""
    folder = tmp_path_factory.mktemp("tuning")
    for family in FAMILIES:
        make_model(folder / family, family)
    make_model(folder / "chat", chat=True)
    plots(folder / "plots.jsonl", 120)
    plots(folder / "few.jsonl", 16)
    endings(folder / "endings.jsonl", 80)
    chats(folder / "chats.jsonl", 60)
    return folder


@pytest.mark.parametrize("rank", [4, 0], ids=["lora", "all weights"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_learns(place: Path, tmp_path: Path, family: str, rank: int) -> None:
    data, held_out = ("few.jsonl", 0.0) if family == "bert" else ("endings.jsonl", 0.1)
    sizes = {"lora__rank": rank, "train__steps": 12, "data__validation": held_out}
    told = tune(tune_config(place / family, place / data, run__dir=str(tmp_path), **sizes))
    losses = [event["loss"] for event in told if event["event"] == "eval"]
    assert losses[-1] < losses[0] - 0.1
    (done,) = [event for event in told if event["event"] == "done"]
    assert Path(done["result"]).name == ("adapter" if rank else "model") and verify(Path(done["result"])).step == 12


def test_the_loss_is_that_of_transformers_over_the_answers_of_the_whole_step(place: Path, tmp_path: Path) -> None:
    config = tune_config(place / "llama", place / "endings.jsonl", train__steps=1, run__dir=str(tmp_path))
    run = open_run(config, LocalGroup())
    total, count, right = 0.0, 0, 0
    for slot in range(2):
        for number in run.batches.windows(1, slot):
            ids, labels = (torch.from_numpy(each(number))[None] for each in (run.samples.tokens, run.samples.answer))
            with torch.no_grad():
                out = run.trainer.model.module(input_ids=ids, labels=labels)
            answers = labels[:, 1:] != NO_TARGET
            total += out.loss.item() * int(answers.sum())
            count += int(answers.sum())
            right += int((out.logits[:, :-1].argmax(-1) == labels[:, 1:])[answers].sum())
    totals = run.trainer.train_step()
    run.trainer.close()
    assert totals.loss == pytest.approx(total / count, rel=1e-5) and totals.tokens == count
    assert run.step_facts() == {"correct": right, "total": count, "accuracy": right / count}


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_the_padding_of_a_batch_changes_nothing(place: Path, tmp_path: Path, family: str) -> None:
    data = place / "endings.jsonl"
    if family == "bert":
        data = write_rows(
            tmp_path / "short.jsonl", [{"text": "a b " * size, "label": size % 2} for size in range(1, 17)]
        )
    model = make_model(tmp_path / "model", family, initializer_range=0.3)
    run = open_run(tune_config(model, data, train__context=160, run__dir=str(tmp_path / "run")), LocalGroup())
    run.trainer.model.module.eval()
    numbers = run.batches.windows(1, 0)
    losses = []
    with torch.no_grad():
        for chosen in (numbers, *([number] for number in numbers)):
            x, y = (torch.from_numpy(each) for each in run.batches.stack(chosen))
            losses.append(run.learning.judge(x, y)[0].item())
    run.trainer.close()
    assert len({len(run.samples.tokens(number)) for number in numbers}) > 1
    assert losses[0] == pytest.approx(sum(losses[1:]), rel=1e-5)


@pytest.fixture(scope="module")
def answers(place: Path) -> list[dict[str, Any]]:
    """The summaries of one run on one worker, on two over shared memory, and on three over a star."""
    prefork.preload("transformers.models.auto.modeling_auto", "transformers.generation", "peft")
    found = []
    for name, options in (("one", []), ("two", ["--workers=2"]), ("three", ["--workers=3", "--group.transport=star"])):
        code, output = andon("finetune", "llama", "plots.jsonl", *QUICK, f"--run.dir={name}", *options, cwd=place)
        assert code == 0, output
        found.append(summary(place / name))
    return found


def test_one_answer_for_one_two_and_three_workers(answers: list[dict[str, Any]]) -> None:
    same = ("weights_blake3", "accuracy", "correct", "total", "loss", "validation_loss", "samples")
    assert all(each[key] == answers[0][key] for key in same for each in answers)
    assert [(each["transport"], each["workers"]) for each in answers] == [("local", 1), ("shm", 2), ("star", 3)]


def test_the_accuracy_of_every_step_is_counted_over_all_workers(place: Path, answers: list[dict[str, Any]]) -> None:
    counts = [[(step["correct"], step["total"]) for step in events(place / name, "step")] for name in ("one", "three")]
    assert counts[0] == counts[1] and [total for _, total in counts[0]] == [12] * 6


def test_a_killed_run_resumes_on_another_number_of_workers(place: Path, answers: list[dict[str, Any]]) -> None:
    command = ("finetune", "llama", "plots.jsonl", *QUICK, "--run.dir=killed")
    code, output = andon(*command, "--workers=2", "--fault=die:rank=1,step=5", cwd=place)
    assert code == 1, output
    code, output = andon(*command, "--workers=1", cwd=place)
    assert code == 0 and "Resuming from step" in output, output
    assert summary(place / "killed")["weights_blake3"] == answers[0]["weights_blake3"]
    code, output = andon(*command, "--lora.rank=2", cwd=place)
    assert code == 1 and "lora.rank 8 → 2" in output, output


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
        andon("generate", folder, "Once upon a time, Leo had a pony.", cwd=place) for folder in ("two/adapter", "whole")
    ]
    assert told[0] == told[1] and told[0][0] == 0 and told[0][1].strip().endswith("%)"), told
    weights = place / "two" / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    for command in (("generate", "two/adapter", "x"), ("merge", "two/adapter", "--out=never")):
        code, output = andon(*command, cwd=place)
        assert code == 1 and "two/adapter is damaged" in output and "tensor" in output, output


def test_a_checkpoint_of_adapters_is_no_adapter(place: Path, answers: list[dict[str, Any]]) -> None:
    code, output = andon("generate", "one/checkpoints/checkpoint-6", "x", cwd=place)
    assert code == 1 and "is a checkpoint of a fine-tuning run" in output, output


@pytest.mark.parametrize("name", ["transformers", "peft"])
def test_an_extra_that_is_not_installed_is_named(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = tune_config(place / "llama", place / "endings.jsonl", run__dir=str(tmp_path))
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError) as caught:
        open_run(config, LocalGroup())
    assert name in caught.value.cause and "andon[finetune]" in caught.value.remedy


def test_adapters_do_not_go_on_with_another_model(place: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shutil.copytree(place / "llama", tmp_path / "model")
    sizes = {"train__steps": 2, "run__dir": str(tmp_path / "run"), "data__cache": str(tmp_path / "cache")}
    tune(tune_config(tmp_path / "model", place / "endings.jsonl", **sizes))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.model.embed_tokens.weight.data[3, 3] += 0.5
    model.save_pretrained(tmp_path / "model")
    run = open_run(tune_config(tmp_path / "model", place / "endings.jsonl", **sizes), LocalGroup())
    with pytest.raises(UserError, match="was trained with another model"):
        run.trainer.resume(tmp_path / "run" / "checkpoints" / "checkpoint-2")
    run.trainer.close()


def test_a_bad_gradient_is_named_with_its_adapter_and_its_lines(place: Path) -> None:
    parameter = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.default.weight"
    fault = f"--fault=nan:rank=1,step=2,slot=4,parameter={parameter}"
    code, output = andon("finetune", "llama", "plots.jsonl", *QUICK, "--run.dir=bad", "--workers=2", fault, cwd=place)
    assert code == 3 and "plots.jsonl:" in output, output
    (found,) = json.loads((place / "bad" / "halt.json").read_text())["findings"]
    assert found["parameter"] == parameter and found["rank"] == 1 and len(found["samples"]) == 2


def test_the_line_whose_loss_is_not_finite_is_named(place: Path, tmp_path: Path) -> None:
    """One token of the model has bad weights, and one line of the data has that token."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(place / "llama", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    token = Base(tmp_path / "model").tokenizer("Ω")["input_ids"][0]
    model.model.embed_tokens.weight.data[token] = float("nan")
    model.save_pretrained(tmp_path / "model")
    rows = [json.loads(line) for line in (place / "endings.jsonl").read_text().splitlines()]
    rows[16]["prompt"] = "Ω"
    data = write_rows(tmp_path / "data.jsonl", rows)
    config = tune_config(tmp_path / "model", data, train__epochs=1, run__dir=str(tmp_path / "run"))
    run = open_run(config, LocalGroup())
    with pytest.raises(JidokaHalt) as halted:
        for _ in range(config.train.steps):
            run.trainer.train_step()
    run.trainer.close()
    assert all(finding.samples == ["data.jsonl:17"] for finding in halted.value.findings)
    assert any("lora_A" in finding.parameter for finding in halted.value.findings)


def test_a_conversation_is_learned_and_continued(place: Path, tmp_path: Path) -> None:
    config = tune_config(place / "chat", place / "chats.jsonl", train__steps=6, run__dir=str(tmp_path / "run"))
    tune(config)
    told = generate(tmp_path / "run" / "adapter", "Leo had a pony.", count=2, length=5, temperature=1.0, seed=3)
    again = generate(tmp_path / "run" / "adapter", "Leo had a pony.", count=2, length=5, temperature=1.0, seed=3)
    assert told == again and len(told) == 2


def test_all_weights_give_a_model_that_transformers_loads(place: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = open_run(
        tune_config(
            place / "gpt2", place / "endings.jsonl", lora__rank=0, train__steps=2, run__dir=str(tmp_path / "run")
        ),
        LocalGroup(),
    )
    run.train()
    run.trainer.close()
    ids = torch.arange(1, 17).view(1, 16)
    mine = run.trainer.model.module.eval()(input_ids=ids).logits
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()(input_ids=ids).logits
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "checkpoint-2")
    assert torch.equal(mine, other) and torch.equal(mine, saved.eval()(input_ids=ids).logits)


@pytest.mark.soak
def test_torchrun_gives_the_same_answer(place: Path, answers: list[dict[str, Any]]) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "andon", "finetune", "llama", "plots.jsonl"]
    root = str(Path(__file__).parent.parent)
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
    prefork.preload("transformers.models.auto.modeling_auto", "transformers.generation", "peft")
    seed = os.environ.get("ANDON_SOAK_SEED") or 1
    sizes = ["--train.slots=6", "--train.micro_batch=5", "--train.context=200", "--train.steps=150", f"--seed={seed}"]
    options = ["--device=cpu", "--optim.lr=0.01", "--eval.every=0", "--checkpoint.every=20", "--group.timeout=120"]

    def run(name: str, transport: str, workers: int, *more: str) -> int:
        place = [f"--run.dir={name}", f"--workers={workers}", f"--group.transport={transport}"]
        code, output = andon(
            "finetune", "llama", "plots.jsonl", *sizes, *options, *place, *more, cwd=tmp_path, timeout=1200
        )
        print(name, code, summary(tmp_path / name) if code == 0 else output[-300:], flush=True)
        return code

    for transport, workers in (
        ("local", 1),
        ("shm", 1),
        ("shm", 2),
        ("shm", 3),
        ("star", 1),
        ("star", 2),
        ("star", 3),
        ("ring", 2),
    ):
        assert run(f"{transport}-{workers}", transport, workers) == 0
    assert run("killed", "shm", 2, "--fault=die:rank=1,step=70") == 1
    assert run("killed", "star", 3) == 0
    ended = [summary(folder.parent) for folder in tmp_path.glob("*/summary.json")]
    assert len(ended) == 9 and len({(each["weights_blake3"], each["accuracy"]) for each in ended}) == 1
    assert ended[0]["accuracy"] >= 0.95
