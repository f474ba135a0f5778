"""Fine-tuning: what is learned, what stops it, and a result that Hugging Face loads."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from andon.checkpoint.disk.manifest import verify
from andon.checkpoint.disk.store import weights_blake3
from andon.data.batches import NO_TARGET
from andon.errors import UserError
from andon.finetune.base import Base
from andon.finetune.generate import generate, open_folder
from andon.finetune.plan import sizes_of
from andon.finetune.result import merge
from andon.integrity.halt import JidokaHalt
from andon.transport.local import LocalGroup
from tests.finetune.tuning import FAMILIES, chats, endings, make_model, open_run, plots, tune, tune_config, write_rows


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
    assert run.step_facts(0.0) == {"correct": right, "total": count, "accuracy": right / count}


def test_ahead_of_the_verdict_or_after_it_bits_and_answers_are_the_same(place: Path, tmp_path: Path) -> None:
    """As on a GPU, where one worker updates before it reads the verdict."""
    found = []
    for ahead in (False, True):
        config = tune_config(place / "llama", place / "endings.jsonl", run__dir=str(tmp_path / str(ahead)))
        run = open_run(config, LocalGroup())
        run.trainer.optimizer._updates_ahead = ahead
        answers = [(run.trainer.train_step(), run.step_facts(0.0)) for _ in range(3)]
        found.append((weights_blake3(run.trainer.model.arena.parameters), answers))
        run.trainer.close()
    assert found[0] == found[1] and all(facts["total"] for _, facts in found[0][1])


@pytest.mark.parametrize("precision", ["bf16", "auto"])
def test_everything_is_computed_in_the_precision_that_was_asked_for(
    place: Path, tmp_path: Path, precision: str
) -> None:
    class Computing(Exception):
        pass

    def tell(*_: object) -> None:  # and compute nothing: not every CPU can
        raise Computing(torch.is_autocast_enabled("cpu"))

    options = {"train__precision": precision, "run__dir": str(tmp_path)}
    run = open_run(tune_config(place / "llama", place / "endings.jsonl", **options), LocalGroup())
    for module in run.trainer.model.module.modules():
        module.register_forward_pre_hook(tell)
    for work in (run.trainer.train_step, run.evaluate, run.answers):
        with pytest.raises(Computing, match=str(precision == "bf16")):
            work()
    run.trainer.close()


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
            losses.append(run.scorer.score(x, y)[0].item())
    run.trainer.close()
    assert len({len(run.samples.tokens(number)) for number in numbers}) > 1
    assert losses[0] == pytest.approx(sum(losses[1:]), rel=1e-5)


def test_the_padding_of_a_classifier_is_what_its_model_knows_as_such(place: Path, tmp_path: Path) -> None:
    """The model's configuration names another token than the tokenizer, or none."""
    data = write_rows(tmp_path / "data.jsonl", [{"text": "a b " * size, "label": size % 2} for size in range(1, 17)])
    for name, token in (("other", 7), ("none", None)):
        model = make_model(tmp_path / name, "llama", initializer_range=0.3, pad_token_id=token)
        run = open_run(tune_config(model, data, run__dir=str(tmp_path / f"{name}-run")), LocalGroup())
        run.trainer.model.module.eval()
        numbers = run.batches.windows(1, 0)
        losses = []
        for chosen in (numbers, *([number] for number in numbers)):
            x, y = (torch.from_numpy(each) for each in run.batches.stack(chosen))
            losses.append(run.scorer.score(x, y)[0].item())
        run.trainer.close()
        assert losses[0] == pytest.approx(sum(losses[1:]), rel=1e-5)


def test_weights_that_are_missing_are_not_made_up(place: Path, tmp_path: Path) -> None:
    for family, data, name in (("llama", "endings.jsonl", "model.norm.weight"), ("bert", "few.jsonl", "bert.")):
        shutil.copytree(place / family, tmp_path / family)
        file = tmp_path / family / "model.safetensors"
        weights = load_file(file)
        lost = next(key for key in weights if key.startswith(name))
        del weights[lost]
        save_file(weights, file)
        config = tune_config(tmp_path / family, place / data, run__dir=str(tmp_path / "run"))
        with pytest.raises(UserError, match="does not hold all weights") as caught:
            open_run(config, LocalGroup())
        assert lost in caught.value.cause


@pytest.mark.parametrize(
    ("kind", "found"), [("AutoConfig", "own"), ("AutoTokenizer", "vit"), ("AutoModelForCausalLM", "t5")]
)
def test_code_that_comes_with_a_model_never_runs(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, found: str
) -> None:
    """Not even if the library asks for it and the user agrees."""
    shutil.copytree(place / "llama", model := tmp_path / "model")
    own = {"auto_map": {kind: [None, "own.Own"] if kind == "AutoTokenizer" else "own.Own"}}
    (model / "config.json").write_text(json.dumps({"model_type": found, "architectures": ["OwnForCausalLM"], **own}))
    if kind == "AutoTokenizer":
        (model / "tokenizer_config.json").write_text(json.dumps(own))
    (model / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n\n\nclass Own:\n    pass\n")
    monkeypatch.setattr("builtins.input", lambda question: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    for use in (sizes_of, lambda config: open_run(config, LocalGroup())):
        with pytest.raises(UserError) as caught:
            use(tune_config(model, place / "endings.jsonl"))
        assert "custom code" in caught.value.cause
        assert "is not run" in caught.value.remedy or kind == "AutoTokenizer"
    assert not (tmp_path / "ran").exists()


def test_a_classifier_without_its_head_gives_no_answers(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "llama", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    named = {"architectures": ["LlamaForSequenceClassification"], "id2label": {0: "cat", 1: "dog"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    with pytest.raises(UserError, match=r"cannot answer yet\n1 of its tensors are missing, such as score.weight"):
        open_folder(tmp_path / "model")


def test_a_weight_that_is_shared_has_no_adapter(place: Path, tmp_path: Path) -> None:
    """Merged, it would change the embedding as well as the head."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    tied = make_model(tmp_path / "tied", tie_word_embeddings=True)
    config = tune_config(tied, place / "endings.jsonl", lora__targets=["lm_head"], train__steps=1)
    with pytest.raises(UserError, match=r"An adapter cannot be added to lm_head\nIt shares its weight with"):
        open_run(config, LocalGroup())
    settings = LoraConfig(target_modules=["embed_tokens"], task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tied), settings)
    adapted.save_pretrained(tmp_path / "made")
    with pytest.raises(UserError, match=r"An adapter cannot be added to model\.embed_tokens"):
        merge(tmp_path / "made", None)


def test_a_template_that_wants_more_than_a_prompt_says_so(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "chat", tmp_path / "chat")
    template = "{{ raise_exception('a system message comes first\\nalways') }}"
    (tmp_path / "chat" / "chat_template.jinja").write_text(template)
    (tmp_path / "chat" / "state.json").write_text('{"columns": "messages"}')
    with pytest.raises(UserError, match=r"a single message of the user\na system message comes first\nUse it"):
        generate(tmp_path / "chat", "hello", count=1, length=2, temperature=0.0, seed=1)


def test_a_new_pooler_is_trained_and_saved_with_the_head(place: Path, tmp_path: Path) -> None:
    """A model that was no classifier has no pooler: made anew, it belongs to the adapter."""
    from transformers import AutoModelForMaskedLM

    shutil.copytree(place / "bert", tmp_path / "model")
    torch.manual_seed(2)
    AutoModelForMaskedLM.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "model")
    run = open_run(
        tune_config(tmp_path / "model", place / "few.jsonl", train__steps=1, run__dir=str(tmp_path / "run")),
        LocalGroup(),
    )
    run.train()
    run.trainer.close()
    ids = torch.arange(1, 17).view(1, 16)
    torch.manual_seed(3)
    again = open_folder(tmp_path / "run" / "adapter").model
    assert torch.equal(run.trainer.model.module.eval()(input_ids=ids).logits, again(input_ids=ids).logits)


def test_an_answer_has_no_more_tokens_than_the_model_has_positions(place: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "Once upon a time, " * 30, "completion": " there was a pony."}] * 4
    data = write_rows(tmp_path / "long.jsonl", rows)
    sizes = {"train__context": 160, "train__steps": 1, "eval__length": 64, "run__dir": str(tmp_path / "run")}
    told = tune(tune_config(place / "gpt2", data, **sizes))
    assert [event for event in told if event["event"] == "done"]


def test_a_kill_between_the_renames_of_a_result_leaves_the_earlier_one(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(tune_config(place / "llama", place / "endings.jsonl", train__steps=1, run__dir=str(tmp_path)))
    adapter, merged, rename = tmp_path / "adapter", tmp_path / "merged", os.rename
    before = verify(merge(adapter, None)).digest

    def killed(source: Path, target: Path) -> None:
        if Path(target) == merged:
            raise KeyboardInterrupt
        rename(source, target)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", killed)
        merge(adapter, None)
    assert not merged.exists()
    with monkeypatch.context() as patch, pytest.raises(UserError, match="merged could not be written\nNo space left"):
        patch.setattr("transformers.PreTrainedModel.save_pretrained", full)
        merge(adapter, None)
    assert verify(merged).digest == before
    merge(adapter, None)
    assert verify(merged).digest == before and not list(tmp_path.glob(".merged*"))


@pytest.mark.parametrize("name", ["transformers", "peft"])
def test_an_extra_that_is_not_installed_is_named(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = tune_config(place / "llama", place / "endings.jsonl", run__dir=str(tmp_path))
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError) as caught:
        open_run(config, LocalGroup())
    assert name in caught.value.cause and "andon[finetune]" in caught.value.remedy


@pytest.mark.parametrize("named", [None, "", 7])
def test_an_adapter_that_names_no_model_is_refused(place: Path, tmp_path: Path, named: object) -> None:
    tune(tune_config(place / "llama", place / "endings.jsonl", train__steps=1, run__dir=str(tmp_path)))
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": named}))
    with pytest.raises(UserError, match=f"adapter does not name its model\nbase_model.* is {named!r}\n"):
        open_folder(tmp_path / "adapter")


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

    shutil.copytree(place / "gpt2", tmp_path / "gpt2")
    # As of many models: the library loads this, and would refuse to save it.
    (tmp_path / "gpt2" / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.5}')
    run = open_run(
        tune_config(
            tmp_path / "gpt2", place / "endings.jsonl", lora__rank=0, train__steps=2, run__dir=str(tmp_path / "run")
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
