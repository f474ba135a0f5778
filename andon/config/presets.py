"""The presets of `model.preset`: each is a shape (`andon.model.shape`) and defaults that train it well."""

from typing import Any, Final, get_args

from andon.config.sections import ModelConfig, Preset
from andon.errors import UserError, shown
from andon.files import expand
from andon.model.hub_config import read_shape
from andon.model.shape import SHAPES

DEFAULTS: dict[str, dict[str, Any]] = {
    "tiny": {
        "train": {"steps": 700, "slots": 4, "micro_batch": 4},
        "optim": {"lr": 4e-3, "warmup": 40, "final_lr": 0.05},
        "eval": {"every": 200, "sample_every": 5.0},
        "checkpoint": {"every": 200},
    },
    "30m": {"train": {"micro_batch": 4}, "optim": {"lr": 1e-3}},
    "124m": {"train": {"slots": 16}, "optim": {"lr": 6e-4, "warmup": 500}},
    "350m": {"train": {"slots": 32}, "optim": {"lr": 4e-4, "warmup": 1_000}},
    "1b": {"train": {"slots": 64, "micro_batch": 4}, "optim": {"lr": 3e-4, "warmup": 2_000}},
}


CONTINUED: Final = {"train": {"micro_batch": 4}, "optim": {"lr": 1e-4, "warmup": 100}}
"""Defaults for a model whose weights were trained before (`model.from`)."""
LONGEST_CONTEXT: Final = 1024
"""The largest default of `train.context` for such a model: many can read far more, which costs memory."""


def with_preset(nested: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of the preset, or of the model to continue from, for keys that are not given."""
    model = nested.get("model", {})
    preset = model.get("preset", "tiny") if isinstance(model, dict) else "tiny"
    if not isinstance(preset, str) or preset not in SHAPES:
        allowed = ", ".join(get_args(Preset))
        raise UserError(f"model.preset = {shown(preset)} is not a preset", f"Presets: {allowed}", "Choose one of these")
    shape, tuned = SHAPES[preset], DEFAULTS[preset]
    sizes = [name for name in ModelConfig.model_fields if name not in ("preset", "source")]
    defaults: dict[str, Any] = {"train": {"context": shape.context}}
    result = dict(nested)
    if isinstance(model, dict) and isinstance(model.get("from"), str) and model["from"]:
        folder = expand(model["from"]).absolute()
        result["model"] = {**model, "from": str(folder)}
        if not model.keys() >= set(sizes):  # a resumed run has all sizes and does not need the folder any more
            shape = read_shape(folder)
            tuned = tuned if "preset" in model else CONTINUED
            defaults = {"train": {"context": min(shape.context, LONGEST_CONTEXT)}, "data": {"tokenizer": str(folder)}}
    defaults["model"] = {name: getattr(shape, name) for name in sizes}
    for source in (tuned, defaults):
        for section, values in source.items():
            given = result.get(section, {})
            if isinstance(given, dict):
                result[section] = {**values, **given}
    return result
