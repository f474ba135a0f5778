"""Hugging Face's Llama format: `model.safetensors` and `config.json`, out and in."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from andon.errors import UserError
from andon.model.llama import Llama
from andon.model.shape import Shape


def to_hub(shape: Shape, end_token: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The `config.json` of a shape, with weights of a dtype."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": shape.tied,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": end_token,
        "eos_token_id": end_token,
        "dtype": str(dtype).removeprefix("torch."),
    }


def from_hub(config: dict[str, Any], source: Path) -> Shape:
    """The shape of a `config.json`; an error names the features that this decoder does not have."""
    unsupported = [
        f"{key} = {config[key]!r}"
        for key, expected in (
            ("model_type", ("llama",)),
            ("hidden_act", ("silu",)),
            ("attention_bias", (False,)),
            ("mlp_bias", (False,)),
            ("rope_scaling", (None,)),
        )
        if key in config and config[key] not in expected
    ]
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        unsupported.append(f"rope_type = {rope['rope_type']!r}")
    if unsupported:
        raise UserError(f"{source} is not a plain Llama", ", ".join(unsupported), "Use a Llama model without these")
    try:
        return Shape(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads", config["num_attention_heads"]),
            intermediate=config["intermediate_size"],
            context=config["max_position_embeddings"],
            tied=config.get("tie_word_embeddings", False),
            rope_theta=config.get("rope_theta") or rope.get("rope_theta", 10_000.0),
            norm_eps=config["rms_norm_eps"],
        )
    except KeyError as missing:
        raise UserError(
            f"{source} lacks {missing}", "It does not describe a Llama model", "Check the checkpoint's folder"
        ) from None


def load_model(folder: Path) -> Llama:
    """The model of a checkpoint folder, ours or Hugging Face's."""
    source = folder / "config.json"
    try:
        config = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} is not a checkpoint",
            f"config.json: {error}",
            "Name a folder such as runs/demo/checkpoints/checkpoint-400",
        ) from None
    model = Llama(from_hub(config, source))
    load_weights(model, folder)
    return model


def load_weights(model: torch.nn.Module, folder: Path) -> None:
    """Copy every tensor of `model.safetensors` (or its numbered parts) into the model."""
    parts = sorted(folder.glob("model*.safetensors"))
    wanted: dict[str, Tensor] = dict(model.named_parameters())
    found: set[str] = set()
    for part in parts:
        with safe_open(part, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                if name not in wanted:
                    continue
                tensor = file.get_tensor(name)
                if tensor.shape != wanted[name].shape:
                    raise _another_shape(part, f"{name} is {list(tensor.shape)}, not {list(wanted[name].shape)}")
                wanted[name].data.copy_(tensor)
                found.add(name)
    if missing := sorted(wanted.keys() - found):
        raise _another_shape(folder, f"{len(missing)} tensors are missing, first {missing[0]}")


def _another_shape(place: Path, detail: str) -> UserError:
    return UserError(
        f"{place} does not fit this model", detail, "Use the configuration it was saved with, or another --run.dir"
    )
