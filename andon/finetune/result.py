"""The result of fine-tuning: an adapter in PEFT's format, or a model folder; written atomically, with a manifest."""

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError
from torch import nn

from andon.checkpoint.disk.format import record_of, write_tensors
from andon.checkpoint.disk.listing import aside_of, put_back_one
from andon.checkpoint.disk.manifest import ADAPTER, render, verify_named
from andon.checkpoint.disk.store import publish_folder
from andon.errors import UserError
from andon.files import expand, sync
from andon.finetune.base import Base, read_json
from andon.finetune.model import import_peft, load_adapter, refuse_tied
from andon.finetune.samples.sample_set import SampleSet

RESULTS: Final = ("adapter", "model")
"""The folders of a run that can hold its result."""
GENERATION_CONFIG: Final = "generation_config.json"
ONE_FILE: Final = "100000GB"
CHOOSE_ANOTHER: Final = "Choose another folder: --out FOLDER"


def write_result(run: Path, model: nn.Module, base: Base, samples: SampleSet, state: Mapping[str, Any]) -> Path:
    """Write `adapter/`, or `model/` if there are no adapters, into a run's folder; returns the new folder."""
    facts = {**state, "task": samples.task, "columns": samples.columns, "labels": samples.labels}
    adapted = hasattr(model, "peft_config")

    def write(folder: Path) -> None:
        (_write_adapter if adapted else _write_model)(model, base, folder)
        _write_state(folder, {**facts, "model": str(base.folder)})

    return publish(run / RESULTS[0 if adapted else 1], write, state["step"])


def merge(adapter: Path, out: Path | None) -> Path:
    """Write the model of an adapter with the adapter merged into its weights; returns the new folder."""
    adapter = expand(adapter).absolute()
    if not (adapter / "adapter_config.json").is_file():
        cause = "It has no adapter_config.json"
        raise UserError(f"{adapter} is not an adapter", cause, "Name the folder `adapter` of a fine-tuning run")
    known = verify_named(adapter)
    target = expand(out).absolute() if out else adapter.with_name("merged")
    if target.exists() and "adapter" not in read_state(target):
        cause = "It is not a merged model, and only such a folder is replaced"
        raise UserError(f"{target} is in the way", cause, CHOOSE_ANOTHER)
    model, base, _ = load_adapter(adapter)
    refuse_tied(model)
    for needed in (adapter, base.folder):
        if needed.resolve().is_relative_to(target.resolve()):
            raise UserError(f"{target} cannot be replaced", f"It holds {needed}, which is merged", CHOOSE_ANOTHER)
    merged: nn.Module = model.merge_and_unload()  # type: ignore[operator]

    def write(folder: Path) -> None:
        _write_model(merged, base, folder)
        _write_state(folder, {"step": 0, **read_state(adapter), "adapter": str(adapter)})

    return publish(target, write, known.step if known else 0)


def read_state(folder: Path) -> dict[str, Any]:
    """The `state.json` of a folder; empty if it has none."""
    return read_json(folder / "state.json")


def publish(folder: Path, write: Callable[[Path], None], step: int) -> Path:
    """Have `write` fill a temporary folder, add a manifest, and rename it to `folder`, which is replaced."""
    temporary = folder.with_name(f".{folder.name}.new")
    try:
        put_back_one(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write(temporary)
        files = sorted(path for path in temporary.iterdir() if path.is_file())
        for path in files:
            sync(path)
        publish_folder(temporary, folder, render(step, {path.name: record_of(path).fields() for path in files}, {}))
    except (OSError, SafetensorError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        remedy = "Free some space there; the same command writes it again"
        raise UserError(f"{folder} could not be written", cause, remedy) from None
    shutil.rmtree(aside_of(folder), ignore_errors=True)
    return folder


def _write_adapter(model: Any, base: Base, folder: Path) -> None:
    peft = import_peft()
    settings = copy.copy(model.peft_config["default"])
    settings.base_model_name_or_path, settings.inference_mode = str(base.folder), True
    settings.save_pretrained(str(folder))
    tensors = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    write_tensors(folder / ADAPTER, plain, {}, lambda place: None)
    base.tokenizer.save_pretrained(str(folder))


def _write_model(model: Any, base: Base, folder: Path) -> None:
    settings: Any = getattr(model, "generation_config", None)
    own = base.folder / GENERATION_CONFIG
    # The library loads the sampling settings of many models but refuses to save them: their file is copied.
    copied = settings is not None and own.is_file()
    if copied:
        model.generation_config = type(settings)()
    model.save_pretrained(str(folder), max_shard_size=ONE_FILE)
    if copied:
        model.generation_config = settings
        shutil.copyfile(own, folder / GENERATION_CONFIG)
    base.tokenizer.save_pretrained(str(folder))


def _write_state(folder: Path, state: Mapping[str, Any]) -> None:
    (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
