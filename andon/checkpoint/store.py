"""What a checkpoint is on disk: a folder `checkpoint-{step}` that appears whole or not at all.

`model.safetensors`, `config.json` and the tokenizer's files are what Hugging Face loads;
`optimizer.safetensors` holds AdamW's moments by parameter name, so that any number of workers can go on from
it; `state.json` says where the run was. Everything is written into a temporary folder beside it, synced, and
renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from andon.checkpoint.listing import checkpoint_path, steps
from andon.errors import UserError

STATE_KEYS = ("step", "loss", "tokens", "skipped", "skips_in_a_row", "data", "config")


@dataclass(frozen=True)
class Snapshot:
    """What is saved: tensors by name, and the files that go beside them."""

    step: int
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    state: Mapping[str, Any]
    files: Mapping[str, str]


class Store:
    """The checkpoints of a run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def save(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint, then remove those that are no longer kept."""
        final = checkpoint_path(self.folder, snapshot.step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _becoming(final) as temporary:
                save_file(dict(snapshot.weights), temporary / "model.safetensors", {"format": "pt"})
                save_file(dict(snapshot.moments), temporary / "optimizer.safetensors", {"format": "pt"})
                (temporary / "state.json").write_text(
                    json.dumps(snapshot.state, indent=2) + "\n", encoding="utf-8"
                )
                for name, text in snapshot.files.items():
                    (temporary / name).write_text(text, encoding="utf-8")
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"Checkpoint {snapshot.step} could not be written to {final}",
                str(error),
                "Free some space or choose another --run.dir; the earlier checkpoints are intact",
            ) from error
        self.prune()
        return final

    def prune(self) -> None:
        """Keep the newest few; also clear away what an interrupted save left."""
        for step in steps(self.folder)[: -self.keep]:
            shutil.rmtree(checkpoint_path(self.folder, step))
        for leftover in self.folder.glob(".checkpoint-*"):
            shutil.rmtree(leftover)


def load_state(folder: Path) -> dict[str, Any]:
    """The `state.json` of a checkpoint."""
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if missing := [key for key in STATE_KEYS if key not in state]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        return state
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} cannot be resumed",
            f"state.json: {error}",
            "Name a checkpoint that Andon wrote, or --resume none",
        ) from None


@contextlib.contextmanager
def open_moments(folder: Path, parameters: Collection[str]) -> Iterator[Callable[[str], Tensor]]:
    """A reader of AdamW's moments by name (`first.NAME`, `second.NAME`), checked to fit the parameters."""
    with reading(folder), safe_open(folder / "optimizer.safetensors", framework="pt") as file:
        if set(file.keys()) != {f"{kind}.{name}" for kind in ("first", "second") for name in parameters}:
            raise UserError(
                f"{folder} does not fit this model",
                "Its optimizer state names other parameters",
                "Use the configuration it was saved with, or another --run.dir",
            )
        yield file.get_tensor


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Say which checkpoint is damaged, and what to do."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{folder} is damaged",
            str(error),
            f"Remove it (rm -r {folder}): the same command takes the one before",
        ) from error


def weights_blake3(parameters: Mapping[str, Tensor]) -> str:
    """BLAKE3 over, in the order of names, each parameter's name and its little-endian bytes."""
    digest = blake3()
    for name in sorted(parameters):
        digest.update(name.encode())
        digest.update(parameters[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _becoming(final: Path) -> Iterator[Path]:
    """A temporary folder that becomes `final` once everything in it has reached the disk."""
    temporary = final.with_name(f".{final.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
        if final.exists():
            replaced = final.with_name(f".{final.name}.replaced")
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        temporary.rename(final)
        _sync(final.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
