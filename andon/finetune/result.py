"""What fine-tuning gives: an adapter in PEFT's own format, or a model folder; with a manifest, whole or not at all."""

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError
from torch import nn

from andon.checkpoint.disk.format import record_of, write_tensors
from andon.checkpoint.disk.manifest import ADAPTER, render, verify_named
from andon.checkpoint.disk.manifest import NAME as MANIFEST
from andon.errors import UserError
from andon.files import expand, sync
from andon.finetune.base import Base, read_small
from andon.finetune.model import import_peft, load_adapter, refuse_tied
from andon.finetune.samples.sample_set import SampleSet

RESULTS: Final = ("adapter", "model")
"""Where a run's folder has its result."""
SAMPLING: Final = "generation_config.json"
ONE_FILE: Final = "100000GB"
ELSEWHERE: Final = "Choose another folder: --out FOLDER"


def write_result(run: Path, model: nn.Module, base: Base, samples: SampleSet, state: Mapping[str, Any]) -> Path:
    """Write `adapter/`, or without adapters `model/`, into a run's folder; gives the new folder."""
    facts = {**state, "task": samples.task, "columns": samples.columns, "labels": samples.labels}
    adapted = hasattr(model, "peft_config")

    def write(folder: Path) -> None:
        (_write_adapter if adapted else _write_model)(model, base, folder)
        _write_state(folder, {**facts, "model": str(base.folder)})

    return publish(run / RESULTS[0 if adapted else 1], write, state["step"])


def merge(adapter: Path, out: Path | None) -> Path:
    """Write the model of an adapter with the adapter merged into its weights; gives the new folder."""
    adapter = expand(adapter).absolute()
    if not (adapter / "adapter_config.json").is_file():
        cause = "It has no adapter_config.json"
        raise UserError(f"{adapter} is not an adapter", cause, "Name the folder `adapter` of a fine-tuning run")
    known = verify_named(adapter)
    target = expand(out).absolute() if out else adapter.with_name("merged")
    if target.exists() and "adapter" not in read_state(target):
        cause = "Something else is there, which is not replaced"
        raise UserError(f"{target} is in the way", cause, ELSEWHERE)
    model, base, _ = load_adapter(adapter)
    refuse_tied(model)
    for needed in (adapter, base.folder):
        if needed.resolve().is_relative_to(target.resolve()):
            raise UserError(f"{target} cannot be replaced", f"It holds {needed}, which is merged", ELSEWHERE)
    merged: nn.Module = model.merge_and_unload()  # type: ignore[operator]

    def write(folder: Path) -> None:
        _write_model(merged, base, folder)
        _write_state(folder, {"step": 0, **read_state(adapter), "adapter": str(adapter)})

    return publish(target, write, known.step if known else 0)


def read_state(folder: Path) -> dict[str, Any]:
    """The `state.json` of a folder; nothing if it has none."""
    return read_small(folder / "state.json")


def publish(folder: Path, write: Callable[[Path], None], step: int) -> Path:
    """Have files written into a temporary folder, seal them with a manifest and give the folder its name."""
    try:
        return _publish(folder, write, step)
    except (OSError, SafetensorError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        remedy = "Free some space there; the same command writes it again"
        raise UserError(f"{folder} could not be written", cause, remedy) from None


def _publish(folder: Path, write: Callable[[Path], None], step: int) -> Path:
    temporary, aside = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for leftover in (temporary, aside):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    files = sorted(path for path in temporary.iterdir() if path.is_file())
    records = {path.name: record_of(path).fields() for path in files}
    (temporary / MANIFEST).write_bytes(render(step, records, {}))
    for path in (*files, temporary / MANIFEST, temporary):
        sync(path)
    if folder.exists():
        folder.rename(aside)
    temporary.rename(folder)
    sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)
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
    own = base.folder / SAMPLING
    # Many models come with settings of sampling that the library loads and then refuses to save: they are copied.
    copied = settings is not None and own.is_file()
    if copied:
        model.generation_config = type(settings)()
    model.save_pretrained(str(folder), max_shard_size=ONE_FILE)
    if copied:
        model.generation_config = settings
        shutil.copyfile(own, folder / SAMPLING)
    base.tokenizer.save_pretrained(str(folder))


def _write_state(folder: Path, state: Mapping[str, Any]) -> None:
    (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
