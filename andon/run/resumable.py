"""Which checkpoints a run can resume from, and which settings it changes from then on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from andon.config.schema import RunSettings
from andon.errors import UserError
from andon.integrity.probe import differing

FIXED = (
    "seed",
    "data.validation",
    "model",
    "lora",
    "train.slots",
    "train.micro_batch",
    "train.context",
    "train.weights",
)
"""If one of these changed, the model would be another, or some samples would be read twice and others never."""
FREE = ("train", "optim", "on_nonfinite", "max_skips", "numerics", "threads", "deterministic", "group.wire")
"""These may change, which changes the weights from here on: a note names them."""
NAMES = ("model.preset", "model.from", "model")
"""Names of a shape or of a folder: not compared, because the shape or the weights themselves are."""


def check_resumable(
    config: RunSettings, digests: tuple[str, str], note: Callable[[str], None], folder: Path, state: Mapping[str, Any]
) -> None:
    """Refuse a checkpoint of another run, or of other settings than may change; note the changes that are allowed.

    The digests are those of the data, and of the weights that are not trained."""
    data, frozen = digests
    if "config" not in state or "data" not in state:
        raise UserError(
            f"{folder} is not a checkpoint of `andon train`",
            "A script saved it",
            "Load it there with andon.load, or choose another --run.dir",
        )
    if isinstance(state["config"].get("model"), str) != isinstance(config.model, str):
        cause = "One of them is a run of `andon train`, the other of `andon finetune`"
        raise UserError(f"{folder} is a checkpoint of another kind of run", cause, "Choose another --run.dir")
    if state["data"] != data:
        raise UserError(
            f"{folder} was trained on other data",
            f"Its tokens have digest {state['data'][:12]}, these {data[:12]}",
            "Give the same corpus, or start afresh with --resume none",
        )
    if state.get("frozen", "") != frozen:
        cause = "The weights that are not trained differ"
        remedy = "Give the model that the run began with, or start afresh with --resume none"
        raise UserError(f"{folder} was trained with another model", cause, remedy)
    before, now = dict(_flat(state["config"])), dict(_flat(config.model_dump(mode="json")))
    changed = [key for key in before.keys() & now.keys() if before[key] != now[key] and key not in NAMES]
    if refused := _arrows(before, now, [key for key in changed if _within(key, FIXED)]):
        raise UserError(
            f"{folder} was trained with other settings: {refused}",
            "The model would be another, or some samples would be read twice and others never",
            "Keep these, choose another --run.dir, or start afresh with --resume none",
        )
    if free := _arrows(before, now, [key for key in changed if _within(key, FREE)]):
        note(f"Going on with other settings: {free}")
    if operations := differing(config.probe, state["config"].get("probe", {})):
        note(other_bits(operations))


def other_bits(operations: Sequence[str]) -> str:
    """What a user reads when the machine that resumes a run computes some operations differently."""
    return f"Going on with different bits: this machine computes {', '.join(operations)} differently from the last one"


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _within(key: str, keys: tuple[str, ...]) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in keys)


def _arrows(before: Mapping[str, Any], now: Mapping[str, Any], keys: list[str]) -> str:
    return ", ".join(f"{key} {before[key]} → {now[key]}" for key in sorted(keys))
