"""Samples for fine-tuning: which tokens count, what is cut, and errors that name the line."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from andon.config.finetune import FinetuneConfig
from andon.config.load import build, merge, validate
from andon.data.batches import NO_TARGET
from andon.errors import UserError
from andon.finetune.base import Base
from andon.finetune.samples.sample_set import PADDING, SampleBatches, SampleSet
from andon.finetune.samples.tokenize import prepare_samples
from tests.finetune.tuning import chats, endings, make_model, plots, tune_config, write_rows

Rows = list[Mapping[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "llama")
    make_model(folder / "chat", chat=True)
    make_model(folder / "bert", "bert")
    return folder


def samples_of(model: Path, data: Path, **overrides: Any) -> SampleSet:
    config = tune_config(model, data, **overrides)
    return prepare_samples(config, Base(config.model))


def test_only_the_answer_and_its_end_are_targets(models: Path, tmp_path: Path) -> None:
    rows: Rows = [{"prompt": "Leo had a pony.", "completion": " One day it was lost."}]
    found = samples_of(models / "llama", write_rows(tmp_path / "one.jsonl", rows))
    tokenizer = Base(models / "llama").tokenizer
    ids, targets = found.tokens(0).tolist(), found.answer(0)
    answer = targets[targets != NO_TARGET].tolist()
    assert tokenizer.decode(answer) == " One day it was lost.<|endoftext|>"
    assert tokenizer.decode(ids) == "Leo had a pony. One day it was lost.<|endoftext|>"
    assert ids[-len(answer) :] == answer


def test_every_answer_of_a_conversation_is_a_target(models: Path, tmp_path: Path) -> None:
    said = (("user", "Who?"), ("assistant", "Leo."), ("user", "Where?"), ("assistant", "Here."), ("user", "Oh."))
    messages = [{"role": role, "content": content} for role, content in said]
    found = samples_of(models / "chat", write_rows(tmp_path / "one.jsonl", [{"messages": messages}]))
    tokenizer, ids, targets = Base(models / "chat").tokenizer, found.tokens(0), found.answer(0)
    assert tokenizer.decode(targets[targets != NO_TARGET].tolist()) == "Leo.<|endoftext|>Here.<|endoftext|>"
    assert tokenizer.decode(ids.tolist()).endswith("<|assistant|>Here.<|endoftext|>")


def test_what_is_too_long_is_cut_so_that_the_answer_stays_and_counted(models: Path, tmp_path: Path) -> None:
    whole = samples_of(models / "llama", endings(tmp_path / "ends.jsonl", 6), train__context=160)
    cut = samples_of(models / "llama", tmp_path / "ends.jsonl", train__context=20)
    assert whole.meta["cut"] == 0 and cut.meta["cut"] == 6
    lengths = sorted(len(whole.tokens(number)) for number in range(6))
    some = samples_of(models / "llama", tmp_path / "ends.jsonl", train__context=lengths[3])
    assert some.meta["cut"] == sum(length > lengths[3] for length in lengths) > 0
    for number in range(6):
        assert len(cut.tokens(number)) == 20
        targets, before = cut.answer(number), whole.answer(number)
        kept, answer = targets[targets != NO_TARGET], before[before != NO_TARGET]
        assert (kept == answer[: len(kept)]).all() and len(kept) == min(19, len(answer))
        prompt = whole.tokens(number)[before == NO_TARGET]
        assert (cut.tokens(number)[targets == NO_TARGET] == prompt[len(kept) - 20 :]).all()
    texts = samples_of(models / "llama", plots(tmp_path / "plots.jsonl", 20), train__context=20)
    assert texts.meta["cut"] == 20 and len(texts.tokens(0)) == 20
    talk = samples_of(models / "chat", chats(tmp_path / "chats.jsonl", 4), train__context=20)
    assert talk.meta["cut"] == 4 and (talk.answer(0) == talk.tokens(0))[-4:].all()


def test_the_context_is_at_most_what_the_model_reads(models: Path, tmp_path: Path) -> None:
    config = tune_config(models / "llama", plots(tmp_path / "plots.jsonl", 20), train__context=4096)
    assert config.train.context == 160


def test_a_batch_is_padded_and_its_targets_are_the_next_tokens(models: Path, tmp_path: Path) -> None:
    config = tune_config(models / "llama", endings(tmp_path / "ends.jsonl", 12))
    found = prepare_samples(config, Base(config.model))
    batches = SampleBatches(found, config)
    x, y = batches(1, 1)
    for row, number in enumerate(batches.windows(1, 1)):
        ids, targets = found.tokens(number), found.answer(number)
        size = len(ids) - 1
        assert (x[row, :size] == ids[:-1]).all() and (x[row, size:] == PADDING).all()
        assert (y[row, :size] == targets[1:]).all() and (y[row, size:] == NO_TARGET).all()
    assert batches.name(7) == "ends.jsonl:8"


def test_each_epoch_sees_every_training_sample_once_and_no_held_out_one(models: Path, tmp_path: Path) -> None:
    config = tune_config(models / "llama", plots(tmp_path / "plots.jsonl", 80), train__epochs=2)
    batches = SampleBatches(prepare_samples(config, Base(config.model)), config)
    assert batches.training == 72 and config.train.steps == 18
    seen = [number for step in range(1, 10) for slot in range(2) for number in batches.windows(step, slot)]
    held_out = {number for batch in batches.validation_windows(99) for number in batch}
    assert len(set(seen)) == 72 and len(held_out) == 8 and not held_out & set(seen)


def test_parquet_gives_the_same_samples(models: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in plots(tmp_path / "plots.jsonl", 20).read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "plots.parquet")
    one, other = (samples_of(models / "llama", tmp_path / f"plots.{kind}") for kind in ("jsonl", "parquet"))
    assert np.array_equal(one.ids, other.ids) and np.array_equal(one.targets, other.targets)
    assert one.labels == other.labels and other.place(3) == "plots.parquet:4"


def test_samples_come_from_the_cache_until_the_data_or_the_tokenizer_changes(models: Path, tmp_path: Path) -> None:
    data = plots(tmp_path / "plots.jsonl", 20)
    one, again = samples_of(models / "llama", data), samples_of(models / "llama", data)
    assert one.folder == again.folder
    shutil.copytree(models / "llama", tmp_path / "other")
    (tmp_path / "other" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "added": 1}')
    assert samples_of(tmp_path / "other", data).folder != one.folder
    array = one.folder / "samples-ids.npy"
    array.write_bytes(array.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match="is damaged"):
        samples_of(models / "llama", data)
    array.write_bytes(b"")
    with pytest.raises(UserError, match="is damaged"):
        samples_of(models / "llama", data)
    shutil.rmtree(one.folder)
    meta = samples_of(models / "llama", data).folder / "meta.json"
    meta.write_text(meta.read_text().replace(one.labels[0], "changed"))
    with pytest.raises(UserError, match="is damaged"):
        samples_of(models / "llama", data)


GOOD: Rows = [{"text": "a b", "label": 0}, {"text": "c d", "label": 1}] * 10
PROMPT: Mapping[str, Any] = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("model", "rows", "line", "what"),
    [
        ("llama", [*GOOD[:4], {"text": "x"}, *GOOD], 5, "`label` is missing"),
        ("llama", [*GOOD[:9], {"text": "x", "label": 7}, *GOOD], 10, "no training sample has the label '7'"),
        ("llama", [*GOOD[:2], {"text": "x", "label": 0.5}, *GOOD], 3, "`label` is not a class"),
        ("llama", [*GOOD[:9], {"text": "x", "label": "--7"}, *GOOD], 10, "no training sample has the label '--7'"),
        ("llama", [*GOOD[:2], {"text": 7, "label": 1}, *GOOD], 3, "`text` is not text"),
        ("llama", [*GOOD[:2], {"text": "", "label": 1}, *GOOD], 3, "the text is empty"),
        ("llama", [{"words": "x"}], 1, "these are not the columns of a sample"),
        ("llama", [{**PROMPT, "messages": []}], 1, "these are columns of several kinds of samples"),
        ("llama", [PROMPT, {"prompt": "a", "completion": " "}], 2, "the answer is empty"),
        ("llama", [PROMPT, {"prompt": "a", "completion": None}], 2, "`completion` is missing"),
        ("llama", [{"messages": [{"role": "user", "content": "x"}]}], 1, "messages need a chat template"),
        ("chat", [{"messages": [{"role": "user", "content": "x"}]}], 1, "the answer is empty"),
        ("chat", [{"messages": [{"role": "assistant", "content": ""}]}], 1, "the answer is empty"),
        ("chat", [{"messages": "hello"}], 1, "`messages` is not a list of messages"),
        ("chat", [{"messages": [{"role": "user"}]}], 1, "message 1 has no role and content"),
    ],
)
def test_what_is_wrong_with_a_row_names_its_line(
    models: Path, tmp_path: Path, model: str, rows: Rows, line: int, what: str
) -> None:
    with pytest.raises(UserError) as caught:
        samples_of(models / model, write_rows(tmp_path / "data.jsonl", rows))
    assert f"data.jsonl, line {line}: {what}" in caught.value.what
    assert len(str(caught.value).splitlines()) == 3


def _text(folder: Path) -> None:
    (folder / "data.jsonl").write_text('{"text": "a", "label": 1}\nnot JSON\n')


def _txt(folder: Path) -> None:
    (folder / "data.jsonl").rename(folder / "data.txt")


def _no_model(folder: Path) -> None:
    shutil.rmtree(folder / "model")


def _unknown(folder: Path) -> None:
    (folder / "model" / "config.json").write_text('{"model_type": "gpt17", "architectures": ["GPT17"]}')


def _no_tokenizer(folder: Path) -> None:
    (folder / "model" / "tokenizer.json").unlink()
    (folder / "model" / "tokenizer_config.json").unlink()


def _small_vocabulary(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 50}))


def _empty(folder: Path) -> None:
    (folder / "data.jsonl").write_text("\n\n")


def _one_class(folder: Path) -> None:
    write_rows(folder / "data.jsonl", [{"text": "a", "label": "x"}] * 4)


def _sorter(folder: Path) -> None:
    write_rows(folder / "data.jsonl", [PROMPT] * 4)


def _classes_of_the_model(folder: Path) -> None:
    name_classes(folder / "model", "good", "bad")
    write_rows(folder / "data.jsonl", [{"text": "a", "label": "good"}, {"text": "b", "label": 2}] * 4)


def name_classes(model: Path, *names: str) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id2label": dict(enumerate(names))}))


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (_text, "data.jsonl, line 2: this is not JSON"),
        (_txt, "data.txt is not a kind of sample file that can be read"),
        (_no_model, "model is not a model"),
        (_unknown, "names no model that transformers"),
        (_no_tokenizer, "has no tokenizer that can be read"),
        (_small_vocabulary, "The tokenizer of"),
        (_empty, "There are no samples in"),
        (_one_class, "All samples have the label 'x'"),
        (_sorter, "cannot write answers"),
        (_classes_of_the_model, "line 2: the model has no class '2'"),
    ],
)
def test_bad_input_is_three_lines(models: Path, tmp_path: Path, spoil: Callable[[Path], None], what: str) -> None:
    shutil.copytree(models / "bert", tmp_path / "model")
    write_rows(tmp_path / "data.jsonl", GOOD)
    spoil(tmp_path)
    (data,) = (path for path in tmp_path.iterdir() if path.name.startswith("data."))
    with pytest.raises(UserError) as caught:
        tune_config(tmp_path / "model", data)
    assert what in caught.value.what, caught.value
    assert len(str(caught.value).splitlines()) == 3


def test_the_classes_of_a_model_may_be_given_by_name_or_number(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "bert", tmp_path / "model")
    name_classes(tmp_path / "model", "good", "bad")
    rows: Rows = [{"text": "a", "label": "bad"}, {"text": "b", "label": 1}, {"text": "c", "label": 0}] * 4
    found = samples_of(tmp_path / "model", write_rows(tmp_path / "data.jsonl", rows))
    assert found.labels == ["good", "bad"] and found.targets[:3].tolist() == [1, 1, 0]


def test_files_of_the_same_name_are_told_apart_by_their_folders(models: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        plots(tmp_path / name / "plots.jsonl", 20)
    found = samples_of(models / "llama", tmp_path)
    assert (found.place(0), found.place(20)) == ("one/plots.jsonl:1", "two/plots.jsonl:1")
    assert (found.find("two/plots.jsonl:1"), found.find("two/plots.jsonl:21"), found.find("x")) == (20, None, None)


def test_a_folder_of_samples_may_hold_other_files_and_compressed_ones(models: Path, tmp_path: Path) -> None:
    (tmp_path / "set" / "data").mkdir(parents=True)
    (tmp_path / "set" / "README.md").write_text("About these samples")
    plain = plots(tmp_path / "plots.jsonl", 20)
    (tmp_path / "set" / "data" / "plots.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    found, same = samples_of(models / "llama", tmp_path / "set"), samples_of(models / "llama", plain)
    assert found.ids.tolist() == same.ids.tolist() and found.place(0) == "plots.jsonl.gz:1"


def test_the_context_is_at_most_what_the_tokenizer_allows(models: Path, tmp_path: Path) -> None:
    """Some models have rows for positions that they do not use; their tokenizers know it."""
    shutil.copytree(models / "bert", tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 30}))
    assert tune_config(tmp_path / "model", plots(tmp_path / "plots.jsonl", 20)).train.context == 30


def test_keys_of_pretraining_are_not_keys_of_fine_tuning() -> None:
    with pytest.raises(UserError, match="no configuration key 'model\\.hidden'"):
        validate(merge({}, {"model.hidden": 3}, FinetuneConfig), FinetuneConfig)
    with pytest.raises(UserError, match="no configuration key 'lora\\.rank'"):
        build({}, {"lora.rank": 3})
    given = {"model": "m", "data.files": ["d"]}
    adapters, whole = (
        validate(merge({}, {**given, "lora.rank": rank}, FinetuneConfig), FinetuneConfig) for rank in ("8", "0")
    )
    assert adapters.optim.lr == 2e-4 and whole.optim.lr == 2e-5
