"""Hugging Face's Llama format: loading `model.safetensors`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from andon.errors import UserError
from andon.model.hub_config import read_shape
from andon.model.llama import Llama

WEIGHTS = "model*.safetensors"


def load_model(folder: Path) -> Llama:
    """The model of a checkpoint folder, ours or Hugging Face's."""
    shape = read_shape(folder)
    size = sum(part.stat().st_size for part in folder.glob(WEIGHTS))
    if shape.parameters > size > 0:  # too small even for 8-bit weights
        raise _another_shape(folder, f"config.json has {shape.parameters:,} weights, the files only {size:,} bytes")
    try:
        model = Llama(shape)
    except RuntimeError as error:
        raise UserError(f"{folder} cannot be loaded", f"{error}", "Use a machine with more memory") from None
    load_tensors(dict(model.named_parameters()), folder)
    return model


def load_tensors(wanted: Mapping[str, Tensor], folder: Path, exactly: bool = False) -> None:
    """Copy tensors of `model.safetensors` (or its numbered parts) into the wanted ones, by name.

    With `exactly`, the files must hold no other tensors, and the same dtypes."""
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
    """Open a safetensors file; an error names it."""
    try:
        with safe_open(part, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        remedy = "Copy it again from its source"
        raise UserError(f"{part.parent} is damaged", f"{part.name}: {error}", remedy) from None


def _another_shape(place: Path, detail: str) -> UserError:
    remedy = "Use the model it was saved with, or another folder"
    return UserError(f"{place} does not fit this model", detail, remedy)
