"""Hugging Face's `config.json` of a Llama model, out and in; needs no torch."""

import json
from pathlib import Path
from typing import Any

from andon.errors import UserError
from andon.model.shape import Shape

PLAIN = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""The values that every `config.json` must have; a missing key means the same."""
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
CHECK_FOLDER = "Check the checkpoint's folder"


def to_hub(shape: Shape, end_token: int, dtype: object = "torch.float32") -> dict[str, Any]:
    """The `config.json` of a shape, with weights of a dtype."""
    sizes = {name: getattr(shape, field) for field, name in FIELDS.items()} | {"head_dim": shape.head_dim}
    ends = {"bos_token_id": end_token, "eos_token_id": end_token}
    return {"architectures": ["LlamaForCausalLM"], **PLAIN, **sizes, **ends, "dtype": str(dtype).removeprefix("torch.")}


def from_hub(config: Any, source: Path) -> Shape:
    """The shape of a `config.json`; an error names the features that this decoder does not have."""
    if not isinstance(config, dict):
        raise UserError(f"{source} is not a configuration", "It is JSON, but not an object", CHECK_FOLDER)
    expected = {**PLAIN, "rope_scaling": None}
    unsupported = [f"{key} = {config[key]!r}" for key, only in expected.items() if config.get(key, only) != only]
    rope = config.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    if rope.get("rope_type", "default") != "default":
        unsupported.append(f"rope_type = {rope['rope_type']!r}")
    if unsupported:
        raise _not_plain(source, unsupported)
    defaults = {"num_key_value_heads": config.get("num_attention_heads"), "tie_word_embeddings": False}
    theta = config.get("rope_theta") or rope.get("rope_theta", 10_000.0)
    given = {key: value for key, value in config.items() if value is not None}
    known = {**defaults, **given, "rope_theta": theta}
    try:
        shape = Shape(**{field: known[name] for field, name in FIELDS.items()})
    except KeyError as missing:
        raise UserError(f"{source} lacks {missing}", "It does not describe a Llama model", CHECK_FOLDER) from None
    if problem := shape.problem():
        raise UserError(f"{source} describes an impossible model", problem, CHECK_FOLDER)
    if config.get("head_dim") not in (None, shape.head_dim):
        raise _not_plain(source, [f"head_dim = {config['head_dim']!r}"])
    return shape


def _not_plain(source: Path, features: list[str]) -> UserError:
    return UserError(f"{source} is not a plain Llama", ", ".join(features), "Use a Llama model without these")


def read_shape(folder: Path) -> Shape:
    """The shape of the model in a folder, ours or Hugging Face's."""
    source = folder / "config.json"
    try:
        config = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        remedy = "Name a folder such as runs/demo/checkpoints/checkpoint-400"
        reason = error.strerror if isinstance(error, OSError) else "not the JSON of a model"
        raise UserError(f"{folder} is not a checkpoint", f"config.json: {reason}", remedy) from None
    return from_hub(config, source)
