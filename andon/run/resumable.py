"""Which checkpoints a run can resume from, which settings it changes from then on, and whether it is done."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from andon.checkpoint.disk.listing import step_of
from andon.config.load import load_run
from andon.config.schema import RunSettings
from andon.errors import UserError
from andon.files import expand
from andon.integrity.probe import differing
from andon.run.records.folder import newest_good

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
DATA = ("data.corpus", "data.stories", "data.tokenizer", "data.files")
"""Keys that determine the tokens or samples, besides those of `FIXED`."""
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
    if state["data"] != data:
        named = _arrows(before, now, [key for key in changed if _within(key, DATA)])
        if named:
            cause, remedy = "These keys determine the tokens or samples", "Keep these"
        else:
            cause = f"The corpus has changed: its digest is {data[:12]}, and was {state['data'][:12]}"
            remedy = "Give the same corpus"
        what = f"{folder} was trained on other data{': ' if named else ''}{named}"
        raise UserError(what, cause, f"{remedy}, or start afresh with --resume none")
    if free := _arrows(before, now, [key for key in changed if _within(key, FREE)]):
        note(f"Going on with other settings: {free}")
    if operations := differing(config.probe, state["config"].get("probe", {})):
        note(other_bits(operations))


def summary_if_done(config: RunSettings) -> dict[str, Any] | None:
    """The summary of the run in the configuration's folder, if its last step is done, with these settings, and its
    checkpoint is good."""
    folder = expand(config.run.dir)
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        saved, last = load_run(folder / "config.yaml"), newest_good(folder / "checkpoints", [])
    except (OSError, ValueError):
        return None
    if not config.train.steps:  # the epochs of a fine-tuning have determined them
        config = config.model_copy(update={"train": config.train.model_copy(update={"steps": saved.train.steps})})
    same = (config.determinism_key, _data(config)) == (saved.determinism_key, _data(saved))
    done = last is not None and step_of(last) == summary.get("step") == config.train.steps
    return summary if same and done else None


def _data(config: RunSettings) -> list[Any]:
    values = dict(_flat(config.model_dump(mode="json")))
    return [values.get(key) for key in DATA]


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
