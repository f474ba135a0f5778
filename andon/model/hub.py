"""Hugging Face's Llama format: `model.safetensors` and `config.json`, out and in."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from andon.errors import UserError
from andon.model.llama import Llama
from andon.model.shape import Shape

PLAIN = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""What every `config.json` must say, or leave to these defaults."""
FIELDS = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "intermediate": "intermediate_size",
    "context": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
}
"""The fields of a shape, with their names in `config.json`."""
WEIGHTS = "model*.safetensors"
CHECK_FOLDER = "Check the checkpoint's folder"


def to_hub(shape: Shape, end_token: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The `config.json` of a shape, with weights of a dtype."""
    sizes = {name: getattr(shape, field) for field, name in FIELDS.items()} | {"head_dim": shape.head_dim}
    ends = {"bos_token_id": end_token, "eos_token_id": end_token}
    return {"architectures": ["LlamaForCausalLM"], **PLAIN, **sizes, **ends, "dtype": str(dtype).removeprefix("torch.")}


def from_hub(config: Any, source: Path) -> Shape:
    """The shape of a `config.json`; an error names the features that this decoder does not have."""
    if not isinstance(config, dict):
        raise UserError(f"{source} is not a configuration", "It is JSON, but no object", CHECK_FOLDER)
    expected = {**PLAIN, "rope_scaling": None}
    unsupported = [f"{key} = {config[key]!r}" for key, only in expected.items() if config.get(key, only) != only]
    rope = config.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    if rope.get("rope_type", "default") != "default":
        unsupported.append(f"rope_type = {rope['rope_type']!r}")
    if unsupported:
        raise UserError(f"{source} is not a plain Llama", ", ".join(unsupported), "Use a Llama model without these")
    defaults = {"num_key_value_heads": config.get("num_attention_heads"), "tie_word_embeddings": False}
    theta = config.get("rope_theta") or rope.get("rope_theta", 10_000.0)
    given = {key: value for key, value in config.items() if value is not None}
    known = {**defaults, **given, "rope_theta": theta}
    try:
        shape = Shape(**{field: known[name] for field, name in FIELDS.items()})
    except KeyError as missing:
        raise UserError(f"{source} lacks {missing}", "It does not describe a Llama model", CHECK_FOLDER) from None
    if problem := shape.problem():
        raise UserError(f"{source} describes no model that there can be", problem, CHECK_FOLDER)
    return shape


def load_model(folder: Path) -> Llama:
    """The model of a checkpoint folder, ours or Hugging Face's."""
    source = folder / "config.json"
    try:
        config = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        remedy = "Name a folder such as runs/demo/checkpoints/checkpoint-400"
        raise UserError(f"{folder} is not a checkpoint", f"config.json: {error}", remedy) from None
    shape = from_hub(config, source)
    size = sum(part.stat().st_size for part in folder.glob(WEIGHTS))
    if shape.parameters > size > 0:  # even in 8 bits they would take more
        raise _another_shape(folder, f"{shape.parameters:,} weights of config.json are not in {size:,} bytes")
    try:
        model = Llama(shape)
    except RuntimeError as error:
        raise UserError(f"{folder} cannot be loaded", f"{error}", "Use a machine with more memory") from None
    load_tensors(dict(model.named_parameters()), folder)
    return model


def load_tensors(wanted: Mapping[str, Tensor], folder: Path, exactly: bool = False) -> None:
    """Copy tensors of `model.safetensors` (or its numbered parts) into those that are wanted, by name.

    With `exactly`, the file must hold no others, and have their dtypes."""
    found: set[str] = set()
    for part in sorted(folder.glob(WEIGHTS)):
        with _open(part) as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                if name not in wanted:
                    if exactly:
                        raise _another_shape(part, f"the model has no {name}")
                    continue
                tensor = file.get_tensor(name)
                if exactly and tensor.dtype != wanted[name].dtype:
                    raise _another_shape(part, f"{name} is {tensor.dtype}, not {wanted[name].dtype}")
                if tensor.shape != wanted[name].shape:
                    raise _another_shape(part, f"{name} is {list(tensor.shape)}, not {list(wanted[name].shape)}")
                wanted[name].data.copy_(tensor)
                found.add(name)
    if missing := sorted(wanted.keys() - found):
        raise _another_shape(folder, f"{len(missing)} tensors are missing, first {missing[0]}")


@contextmanager
def _open(part: Path) -> Iterator[Any]:
    """A safetensors file; what is wrong with it is an error that names it."""
    try:
        with safe_open(part, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        remedy = "Copy it again from where it came"
        raise UserError(f"{part.parent} is damaged", f"{part.name}: {error}", remedy) from None


def _another_shape(place: Path, detail: str) -> UserError:
    remedy = "Use the model it was saved with, or another folder"
    return UserError(f"{place} does not fit this model", detail, remedy)
