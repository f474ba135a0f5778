"""Comparing two checkpoints tensor by tensor, whatever the number of workers that wrote them."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from andon.checkpoint.disk.manifest import Manifest
from andon.checkpoint.disk.store import moment_pieces, open_moments, reading
from andon.integrity.fingerprint import as_bytes

MODEL = "model.safetensors"
ONE_ONLY = "only in one of them"


def compare(folders: tuple[Path, Path], known: tuple[Manifest, Manifest]) -> Iterator[tuple[str, str]]:
    """(tensor, how it differs) of every weight and moment; the text is empty if the tensor is equal."""
    weights = [each.files[MODEL].tensors for each in known]
    for name in dict.fromkeys((*weights[0], *weights[1])):
        if not all(name in tensors for tensors in weights):
            yield name, ONE_ONLY
        elif weights[0][name][2] == weights[1][name][2]:
            yield name, ""
        else:
            yield name, _difference(*(_weight(folder, name) for folder in folders))
    sizes = [{moment: found[-1][1] for moment, found in moment_pieces(each).items()} for each in known]
    with ExitStack() as stack:
        opened = [open_moments(*checkpoint) for checkpoint in zip(folders, known, sizes, strict=True)]
        readers = [stack.enter_context(each) for each in opened]
        for kind, name in dict.fromkeys((*sizes[0], *sizes[1])):
            if not all((kind, name) in size for size in sizes):
                yield f"{kind}.{name}", ONE_ONLY
            else:
                a, b = (read(kind, name, 0, size[kind, name]) for read, size in zip(readers, sizes, strict=True))
                yield f"{kind}.{name}", _difference(a, b)


def _weight(folder: Path, name: str) -> Tensor:
    with reading(folder), safe_open(folder / MODEL, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _difference(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape:
        return f"{list(a.shape)} and {list(b.shape)}"
    if a.dtype == b.dtype and as_bytes(a) == as_bytes(b):
        return ""
    return f"{(a.float() - b.float()).abs().max().item():.3g}"
