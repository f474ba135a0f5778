"""The model: Hugging Face's logits, its names, sampling with and without a cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from andon.errors import UserError
from andon.model.generate import sample
from andon.model.hub import load_model
from andon.model.hub_config import to_hub
from andon.model.llama import Cache, Llama
from andon.model.shape import SHAPES, Shape

SMALL = Shape(vocab=97, hidden=32, layers=3, heads=4, kv_heads=2, intermediate=48, context=24)


def make(shape: Shape, seed: int = 3) -> Llama:
    model = Llama(shape)
    model.initialise(seed)
    return model


def save(model: Llama, folder: Path) -> Path:
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(to_hub(model.shape, end_token=0)))
    return folder


def tokens(shape: Shape, rows: int = 2, length: int = 20) -> Tensor:
    return torch.randint(0, shape.vocab, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tied", [False, True])
def test_hugging_face_loads_a_checkpoint_with_the_same_logits(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    shape = replace(SMALL, tied=tied, rope_theta=5000.0)
    model = make(shape)
    for parameter in model.parameters():
        parameter.data.mul_(8)  # with its first weights a model hardly looks at positions
    theirs = AutoModelForCausalLM.from_pretrained(save(model, tmp_path))
    x = tokens(shape)
    with torch.no_grad():
        torch.testing.assert_close(theirs(x).logits, model.logits(x), atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_a_hugging_face_checkpoint_loads_back(tmp_path: Path, tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**to_hub(replace(SMALL, tied=tied), end_token=0))
    theirs = LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path)
    x = tokens(SMALL)
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path).logits(x), theirs(x).logits, atol=1e-4, rtol=0)


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    save(make(SMALL), tmp_path)
    config = to_hub(replace(SMALL, hidden=64), end_token=0)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="does not fit this model"):
        load_model(tmp_path)


def test_a_model_that_is_no_plain_llama_is_refused(tmp_path: Path) -> None:
    config = to_hub(SMALL, end_token=0) | {"model_type": "gpt2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="not a plain Llama"):
        load_model(tmp_path)


@pytest.mark.parametrize("preset", ["tiny", "30m"])
def test_the_parameter_count_is_the_arithmetic_one(preset: str) -> None:
    for tied in (False, True):
        shape = replace(SHAPES[preset], tied=tied)
        with torch.device("meta"):
            model = Llama(shape)
        assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters


def test_the_350m_preset_is_the_shape_of_the_seeds() -> None:
    shape = SHAPES["350m"]
    assert (shape.hidden, shape.layers, shape.heads, shape.kv_heads) == (1024, 24, 16, 4)
    assert (shape.intermediate, shape.vocab, shape.context) == (4096, 32768, 1024)


def test_weights_depend_on_the_seed_alone() -> None:
    assert torch.equal(make(SMALL, 5).lm_head.weight, make(SMALL, 5).lm_head.weight)
    assert not torch.equal(make(SMALL, 5).lm_head.weight, make(SMALL, 6).lm_head.weight)


def test_a_cache_gives_the_logits_of_the_whole_row() -> None:
    model, x = make(SMALL), tokens(SMALL, length=10)
    cache = Cache(model, 2)
    with torch.no_grad():
        pieces = [model.logits(x[:, :4], cache)] + [model.logits(x[:, at : at + 1], cache) for at in range(4, 10)]
        torch.testing.assert_close(torch.cat(pieces, 1), model.logits(x), atol=1e-5, rtol=1e-5)


def test_sampling_without_temperature_follows_the_likeliest_token_past_the_context() -> None:
    model = make(SMALL)
    (row,) = sample(model, [[1, 2, 3]], end=-1, length=40, temperature=0)
    assert len(row) == 40
    with torch.no_grad():
        first = model.logits(torch.tensor([[1, 2, 3]]))[0, -1].argmax().item()
    assert row[0] == first


def test_sampling_is_repeatable_and_stops_at_the_end_token() -> None:
    model = make(SMALL)
    rows = sample(model, [[1], [1]], end=7, length=200, seed=4)
    assert rows == sample(model, [[1], [1]], end=7, length=200, seed=4)
    assert rows != sample(model, [[1], [1]], end=7, length=200, seed=5)
    assert all(7 not in row for row in rows) and any(len(row) < 200 for row in rows)


def test_targets_of_minus_100_do_not_count() -> None:
    model, x = make(SMALL), tokens(SMALL)
    y = x.clone()
    y[:, 5:] = -100
    with torch.no_grad():
        torch.testing.assert_close(model(x, y), model(x[:, :5], y[:, :5]))


def test_a_low_temperature_takes_the_likeliest_token() -> None:
    model = make(SMALL)
    (likeliest,) = sample(model, [[1, 2, 3]], end=-1, length=20, temperature=0)
    assert sample(model, [[1, 2, 3]], end=-1, length=20, temperature=1e-6, seed=9) == [likeliest]
    assert sample(model, [[1, 2, 3]], end=-1, length=20, temperature=1.0, seed=9) != [likeliest]


def test_a_row_that_has_ended_stays_ended_while_another_goes_on() -> None:
    model = make(SMALL)
    rows = sample(model, [[token] for token in range(20)], end=7, length=60, seed=4)
    long = sample(model, [[token] for token in range(20)], end=-1, length=60, seed=4)
    assert rows == [row[: row.index(7)] if 7 in row else row for row in long]
    assert len({len(row) for row in rows}) > 2


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    model = make(SMALL)
    save(model, tmp_path)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"1 tensors are missing, first model\.norm\.weight"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "yarn"}},
        {"rope_scaling": {"type": "linear"}},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"head_dim": 64},
    ],
)
def test_what_this_decoder_does_not_do_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    save(make(SMALL), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(to_hub(SMALL, end_token=0) | change))
    with pytest.raises(UserError, match="not a plain Llama"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        *({"num_attention_heads": count} for count in (0, -4, 3, "4", 2.5, True)),
        *({"num_key_value_heads": 0}, {"hidden_size": 0}, {"vocab_size": 10**15}, {"max_position_embeddings": 10**15}),
        *({"num_hidden_layers": 10**15}, {"rms_norm_eps": "small"}, {"rope_theta": -1.0}, {"intermediate_size": []}),
    ],
    ids=str,
)
def test_sizes_that_make_no_sense_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    save(make(SMALL), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(to_hub(SMALL, end_token=0) | change))
    with pytest.raises(UserError, match="describes an impossible model"):
        load_model(tmp_path)


def test_sizes_that_the_weights_do_not_have_cost_no_memory(tmp_path: Path) -> None:
    save(make(SMALL), tmp_path)
    huge = to_hub(replace(SMALL, hidden=1 << 17, intermediate=1 << 20), end_token=0)
    (tmp_path / "config.json").write_text(json.dumps(huge))
    with pytest.raises(UserError, match="does not fit this model"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", "null", "7", "{", "[" * 100_000, '{"rope_parameters": []}'], ids=lambda t: t[:9]
)
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    save(make(SMALL), tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 64, (8).to_bytes(8, "little") + b"[1, 2,3]", b"\x02" + bytes(7) + b"{}"]
)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, data: bytes) -> None:
    save(make(SMALL), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=r"is damaged|does not fit this model"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(data + bytes(10**6))
    with pytest.raises(UserError, match="is damaged"):
        load_model(tmp_path)
