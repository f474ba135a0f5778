"""Configuration: presets, YAML, overrides, and what is said when a key or a value is wrong."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from andon.config.load import build, keys, load, parse_arguments
from andon.config.presets import DEFAULTS
from andon.errors import UserError
from andon.model.shape import SHAPES
from tests.kit.runs import andon


def refusal(**overrides: object) -> UserError:
    with pytest.raises(UserError) as caught:
        load(None, {key.replace("__", "."): value for key, value in overrides.items()})
    return caught.value


@pytest.mark.parametrize("preset", SHAPES)
def test_every_preset_is_valid_and_keeps_its_shape(preset: str) -> None:
    config = load(None, {"model.preset": preset})
    assert config.shape == SHAPES[preset]
    assert config.optim.lr == DEFAULTS[preset]["optim"]["lr"]


def test_later_sources_win_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {preset: 30m, layers: 2}\noptim: {lr: 1e-2}\ntrain: {steps: 7}\n")
    config = load(file, {"train.steps": "9"})
    assert (config.model.layers, config.model.hidden) == (2, 512)
    assert (config.optim.lr, config.train.steps) == (0.01, 9)


def test_the_resolved_configuration_reads_back_the_same() -> None:
    config = load(None, {"model.preset": "124m", "workers": 3, "data.corpus": ["a.txt", "b"]})
    assert build(yaml.safe_load(config.to_yaml()), {}) == config


def test_the_resolved_configuration_is_a_file_that_loads(tmp_path: Path) -> None:
    config = load(None, {"data.corpus": ["a.txt", "b"], "fault": ["nan:rank=0,step=1"]})
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load(tmp_path / "config.yaml") == config


def test_the_global_batch_does_not_depend_on_the_workers() -> None:
    assert {load(None, {"workers": n}).tokens_per_step for n in (1, 2, 4)} == {4 * 4 * 128}


def test_an_unknown_key_gets_a_suggestion() -> None:
    assert "Did you mean optim.lr?" in str(refusal(lr=1))
    assert refusal(train__stepz=1).cause == "Did you mean train.steps?"
    assert refusal(every=1).cause == "Did you mean eval.every or checkpoint.every?"
    assert refusal(worker=1).cause == "Did you mean workers?"
    assert refusal(zzz=1).cause == "No key has a similar name"
    assert "its keys are zero.policy, zero.replicas" in refusal(zero=1).cause
    with pytest.raises(UserError, match=r"no configuration key 'optim\.lrr'"):
        build({"optim": {"lrr": 1}}, {})
    with pytest.raises(UserError, match=r"Did you mean train\?"):
        build({"trian": {"steps": 1}}, {})


@pytest.mark.parametrize("key", ["workers", "threads", "train.slots", "optim.lr"])
def test_yes_and_no_are_no_numbers(tmp_path: Path, key: str) -> None:
    (tmp_path / "bad.yaml").write_text(f"{key}: yes")
    with pytest.raises(UserError, match=f"^{key} = True is not valid\nInput should not be true or false"):
        load(tmp_path / "bad.yaml")


def test_a_dotted_key_stands_for_a_key_in_its_section(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train.steps: 7\ntrain: {slots: 3}\nmodel.preset: 30m")
    config = load(tmp_path / "run.yaml")
    assert (config.train.steps, config.train.slots, config.model.preset) == (7, 3, "30m")
    (tmp_path / "run.yaml").write_text("train.steps: 7\ntrain: {steps: 3}")
    with pytest.raises(UserError, match=r"gives train\.steps twice"):
        load(tmp_path / "run.yaml")


def test_a_key_given_twice_is_named_with_its_lines(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("seed: 1\ntrain:\n  steps: 7\n  slots: 4\n  steps: 8")
    with pytest.raises(UserError, match="line 5 gives steps again, after line 3"):
        load(tmp_path / "bad.yaml")
    (tmp_path / "bad.yaml").write_text("{seed: 1, seed: 2}")
    with pytest.raises(UserError, match="line 1 gives seed again, after line 1"):
        load(tmp_path / "bad.yaml")


@pytest.mark.parametrize("argument", ["--foo=bar", "--foo", "-x", "--seed"])
def test_an_option_that_does_not_exist_or_has_no_value_is_an_error_of_usage(tmp_path: Path, argument: str) -> None:
    code, output = andon("train", argument, cwd=tmp_path)
    assert code == 2 and argument.split("=")[0].lstrip("-") in output and len(output.splitlines()) == 3, output


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("optim.lr", "-1", "greater than 0"),
        ("optim.lr", "fast", "valid number"),
        ("group.transport", "tcp", "'shm', 'star', 'ring', 'torch' or 'protocol2'"),
        ("device", "tpu", "'auto', 'cpu' or 'cuda'"),
        ("train.steps", "0", "greater than 0"),
        ("data.validation", "0.9", "less than 0.5"),
    ],
)
def test_a_refused_value_names_the_key_the_value_and_what_is_allowed(key: str, value: str, allowed: str) -> None:
    error = refusal(**{key: value})
    assert key in error.what and repr(value) in error.what and allowed in error.cause


def test_sizes_that_do_not_divide_are_refused() -> None:
    assert "5 workers need at least one slot each, but train.slots = 4" in refusal(workers=5).what
    assert "local is for one worker, not for 2" in refusal(workers=2, group__transport="local").what
    assert "multiple of kv_heads 3" in refusal(model__kv_heads=3).what
    assert "even multiple of heads" in refusal(model__hidden=100).what


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    for text, what in [("a: [", "not valid YAML"), ("- 1", "is not a configuration")]:
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(UserError, match=what):
            load(tmp_path / "bad.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "missing.yaml")


BILLION = "a: &a [x, x]\n" + "".join(f"{new}: &{new} [*{old}, *{old}]\n" for old, new in pairwise("abcdefgh"))


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (BILLION, "an alias"),
        (f"seed: {'9' * 5000}", "5000 digits"),
        ("[" * 3000, "recursion"),
        ("seed: !!int ''", "string index"),
        ("seed: !!timestamp x", "attribute"),
    ],
    ids=["aliases", "digits", "depth", "no number", "no date"],
)
def test_yaml_that_breaks_its_reader_is_refused(tmp_path: Path, text: str, cause: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match="not valid YAML") as caught:
        load(tmp_path / "bad.yaml")
    assert cause in caught.value.cause and len(str(caught.value).splitlines()) == 3


def test_a_number_too_long_to_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(f"seed: 0x{'f' * 6000}")
    with pytest.raises(UserError, match="seed = a number with thousands of digits is not valid"):
        load(tmp_path / "bad.yaml")


def test_each_part_of_the_optimizer_state_is_held_once_or_twice() -> None:
    assert load(None, {"zero.replicas": "2"}).zero.replicas == 2
    assert "less than or equal to 2" in refusal(zero__replicas="3").cause
    assert "greater than or equal to 1" in refusal(zero__replicas="0").cause


@pytest.mark.parametrize(
    "key",
    [
        *("model.vocab", "model.hidden", "model.layers", "model.heads", "model.kv_heads", "model.intermediate"),
        *("train.context", "train.slots", "train.micro_batch", "train.steps", "threads", "group.timeout"),
        *("data.stories", "eval.stories", "eval.windows", "checkpoint.timeout"),
    ],
)
def test_a_size_that_no_machine_has_is_refused(key: str) -> None:
    error = refusal(**{key: "1000000000000000"})
    assert error.what.startswith(f"{key} = ") and "less than or equal to" in error.cause


def test_no_text_to_train_on_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.corpus = \[\] is not valid"):
        build({"data": {"corpus": []}}, {})
    with pytest.raises(UserError, match=r"data\.corpus = '' is not valid"):
        build({"data": {"corpus": ""}}, {})


@pytest.mark.parametrize("name", ["a\0b", "a\udcffb"], ids=["NUL", "not UTF-8"])
@pytest.mark.parametrize("key", ["run.dir", "data.cache", "data.tokenizer", "data.corpus"])
def test_a_name_that_no_file_can_have_is_refused(key: str, name: str) -> None:
    error = refusal(**{key: [name] if key == "data.corpus" else name})
    assert "holds a NUL or is not valid UTF-8" in error.what and key in error.cause


def test_arguments_split_into_words_and_overrides() -> None:
    words, overrides = parse_arguments(["a.txt", "--optim.lr", "3e-4", "--train.steps=100", "--compile", "b"])
    assert words == ["a.txt", "b"]
    assert overrides == {"optim.lr": "3e-4", "train.steps": "100", "train.compile": "true"}
    with pytest.raises(UserError, match="--seed needs a value"):
        parse_arguments(["--seed"])


def test_every_key_has_a_help_text() -> None:
    assert not [key for key, text in keys().items() if not text]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_no_value_breaks_the_reader(value: object) -> None:
    try:
        build({"train": value, "optim": value, "model": value}, {"seed": value})
    except UserError as error:
        assert len(str(error).splitlines()) >= 3
    else:
        json.dumps(value)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_number_that_is_not_finite_is_refused(value: str) -> None:
    assert "finite number" in refusal(**{"optim.lr": value}).cause


def test_a_head_of_odd_size_is_refused() -> None:
    assert "even multiple of heads" in refusal(model__hidden=36, model__heads=4).what


def test_the_optimizer_state_is_shared_out_except_alone_and_over_a_star() -> None:
    policies = {
        transport: load(None, {"workers": 2}).with_transport(transport).zero.policy
        for transport in ("local", "shm", "star", "ring", "torch")
    }
    assert policies == {"local": "off", "shm": "even", "star": "off", "ring": "even", "torch": "even"}
    assert load(None, {"zero.policy": "contiguous"}).with_transport("star").zero.policy == "contiguous"


DECIDE = {
    **{"seed": 2, "model.layers": 3, "train.slots": 8, "train.context": 64, "optim.lr": 0.5},
    **{"optim.clip": 0.5, "on_nonfinite": "skip", "max_skips": 7, "data.validation": 0.25},
}
DO_NOT_DECIDE = {
    **{"workers": 2, "threads": 2, "group.transport": "ring", "zero.policy": "even", "run.dir": "elsewhere"},
    **{"checkpoint.every": 7, "eval.every": 7, "data.cache": "elsewhere", "group.timeout": 3},
}


def test_ranks_agree_on_what_decides_the_weights_and_on_nothing_else() -> None:
    answer = load(None).determinism_key
    for key, value in DECIDE.items():
        assert load(None, {key: value}).determinism_key != answer, key
    for key, value in DO_NOT_DECIDE.items():
        assert load(None, {key: value}).determinism_key == answer, key
