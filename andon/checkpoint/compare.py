"""Comparing two checkpoints tensor by tensor, whatever the number of workers that wrote them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from andon.checkpoint.disk.manifest import Manifest
from andon.checkpoint.disk.store import PIECE_NAME, Moment, open_moments, reading
from andon.integrity.fingerprint import as_bytes

MODEL = "model.safetensors"
Pair = tuple[Path, Path]


def compare(folders: Pair, known: tuple[Manifest, Manifest]) -> Iterator[tuple[str, str]]:
    """(tensor, how it differs) of every weight and moment; an empty text: it does not."""
    with ExitStack() as stack:
        files = [stack.enter_context(_open(folder)) for folder in folders]
        names = [each.files[MODEL].tensors for each in known]
        for name in dict.fromkeys((*names[0], *names[1])):
            if name not in names[0] or name not in names[1]:
                yield name, "only in one of them"
            elif names[0][name][2] == names[1][name][2]:
                yield name, ""
            else:
                yield name, _difference(files[0](name), files[1](name))
        sizes = [_sizes(each) for each in known]
        readers = [
            stack.enter_context(open_moments(folder, each, size))
            for folder, each, size in zip(folders, known, sizes, strict=True)
        ]
        for kind, name in dict.fromkeys((*sizes[0], *sizes[1])):
            if not all((kind, name) in size for size in sizes):
                yield f"{kind}.{name}", "only in one of them"
            else:
                a, b = (read(kind, name, 0, size[kind, name]) for read, size in zip(readers, sizes, strict=True))
                yield f"{kind}.{name}", _difference(a, b)


@contextmanager
def _open(folder: Path) -> Iterator[Callable[[str], Tensor]]:
    """A reader of a checkpoint's weights by name."""
    with reading(folder):
        opened = safe_open(folder / MODEL, framework="pt")
    with opened as file:

        def read(name: str) -> Tensor:
            with reading(folder):
                tensor: Tensor = file.get_tensor(name)
                return tensor

        yield read


def _difference(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape:
        return f"{list(a.shape)} and {list(b.shape)}"
    if a.dtype == b.dtype and as_bytes(a) == as_bytes(b):
        return ""
    return f"{(a.float() - b.float()).abs().max().item():.3g}"


def _sizes(known: Manifest) -> dict[Moment, int]:
    """The number of elements of each moment."""
    sizes: dict[Moment, int] = {}
    for _, tensor, _ in known.tensors():
        if match := PIECE_NAME.fullmatch(tensor):
            moment = match[1], match[2]
            sizes[moment] = max(sizes.get(moment, 0), int(match[4]))
    return sizes
