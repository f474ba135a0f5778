"""What a checkpoint is on disk: a folder `checkpoint-{step}` that appears whole or not at all.

`model.safetensors`, `config.json` and the tokenizer's files are what Hugging Face loads;
`optimizer-RRRRR-of-NNNNN.safetensors` hold AdamW's moments in pieces (`first.NAME[lo:hi]`, `second…` and, where the
weights are bf16, their f32 `master…`), each file written by one rank; `state.json` says where the run was;
`manifest.json` proves all of it. Everything is written into a temporary folder of the same disk, synced, and renamed.
"""

import contextlib
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from andon.checkpoint.disk import manifest
from andon.checkpoint.disk.format import At, tensor_blake3
from andon.checkpoint.disk.listing import REPLACED, checkpoint_path, kept, put_back, step_of, steps
from andon.checkpoint.disk.manifest import Manifest, Record
from andon.checkpoint.moments import ReadMoments
from andon.checkpoint.snapshot import weights_digests
from andon.engine.gradients.arena import Arena
from andon.errors import UserError
from andon.files import sync
from andon.integrity.fingerprint import as_bytes

STATE_KEYS = ("step", "loss", "tokens", "skipped", "skips_in_a_row")
PIECE_NAME = re.compile(r"([a-z_]+)\.(.+)\[(\d+):(\d+)\]")
Moment = tuple[str, str]
"""A kind of optimizer state (`first`, `second`, `master`), and the parameter."""


class Store:
    """The checkpoints of a run: the newest `keep`, and every `keep_every`-th step (0: none) for ever.

    `may_write` raises `OSError` if the folder is no longer this run's."""

    def __init__(
        self, folder: Path, keep: int, keep_every: int = 0, may_write: Callable[[], None] = lambda: None
    ) -> None:
        self.folder, self.keep, self.keep_every, self._may_write = folder, keep, keep_every, may_write

    def temporary(self, step: int, turn: int) -> Path:
        """Where a checkpoint is written; each attempt has its own."""
        return self.folder / f".checkpoint-{step}.{turn}"

    def begin(self, step: int, turn: int) -> Path:
        """Make the temporary folder; the ranks write their files into it, and the first to come makes it."""
        self._may_write()
        if not self.folder.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            sync(self.folder.parent)
        temporary = self.temporary(step, turn)
        temporary.mkdir(exist_ok=True)
        return temporary

    def discard(self, step: int, turn: int) -> None:
        """Remove what an attempt has written."""
        shutil.rmtree(self.temporary(step, turn), ignore_errors=True)  # if it stays, the next start tries

    def publish(self, temporary: Path, files: Mapping[str, Record], units: Mapping[str, str], at: At) -> Path:
        """The files in a temporary folder are on disk: write the manifest, sync, rename."""
        final = checkpoint_path(self.folder, int(temporary.name.split(".")[1].removeprefix("checkpoint-")))
        records = {name: record.fields() for name, record in sorted(files.items())}
        for name, record in files.items():
            if (temporary / name).stat().st_size != record.size:
                raise OSError(f"{name} does not have the {record.size:,} bytes that were written")
        if strange := {path.name for path in temporary.iterdir()} - files.keys():
            raise OSError(f"{temporary} also holds {', '.join(sorted(strange))}")
        at("manifest")
        (temporary / manifest.NAME).write_bytes(manifest.render(step_of(final), records, units))
        sync(temporary / manifest.NAME)
        sync(temporary)
        at("rename")
        if final.exists():  # damaged, or from an attempt that was given up: this one takes its place
            _set_aside(final, REPLACED)
        temporary.rename(final)
        at("renamed")
        sync(self.folder)
        return final

    def prune(self, newest: int, at: At = lambda place: None) -> None:
        """After the checkpoint `newest`: remove those before it that are not kept."""
        before = [step for step in steps(self.folder) if step <= newest]
        for step in before:
            if step not in kept(before, self.keep, self.keep_every):
                at("prune")
                remove(checkpoint_path(self.folder, step))
        shutil.rmtree(self.folder / f".checkpoint-{newest}{REPLACED}", ignore_errors=True)

    def clean(self) -> None:
        """Remove what interrupted saves and removals have left."""
        put_back(self.folder)
        for leftover in self.folder.glob(".checkpoint-*"):
            shutil.rmtree(leftover, ignore_errors=True)  # if it stays, the next start tries again


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint: its name goes first, so that a kill leaves no half of it behind."""
    shutil.rmtree(_set_aside(checkpoint, ".removed"))


def _set_aside(checkpoint: Path, suffix: str) -> Path:
    aside = checkpoint.with_name(f".{checkpoint.name}{suffix}")
    shutil.rmtree(aside, ignore_errors=True)
    return checkpoint.rename(aside)


def load_state(folder: Path) -> dict[str, Any]:
    """The `state.json` of a checkpoint."""
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise ValueError("it is no object")
        if missing := [key for key in STATE_KEYS if key not in state]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        return state
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{folder} cannot be resumed",
            f"state.json: {error}",
            "Name a checkpoint that Andon wrote, or --resume none",
        ) from None


@contextlib.contextmanager
def open_moments(folder: Path, known: Manifest, sizes: Mapping[Moment, int]) -> Iterator[ReadMoments]:
    """A reader of AdamW's moments by parameter and range, checked to be these, of these sizes.

    What it gives was verified as it was read: a rank may see another copy than the one that verified all."""
    pieces: dict[Moment, list[tuple[int, int, str, str]]] = defaultdict(list)
    for file, tensor, _ in known.tensors():
        if match := PIECE_NAME.fullmatch(tensor):
            kind, name, lo, hi = match[1], match[2], int(match[3]), int(match[4])
            pieces[kind, name].append((lo, hi, file, tensor))
    _check_cover(folder, pieces, sizes)
    with reading(folder), contextlib.ExitStack() as stack:
        names = {file for found in pieces.values() for _, _, file, _ in found}
        files = {name: stack.enter_context(safe_open(folder / name, framework="pt")) for name in sorted(names)}

        @lru_cache(1)  # a piece may be asked for in several ranges, one after the other
        def whole(file: str, tensor: str) -> Tensor:
            found: Tensor = files[file].get_tensor(tensor)
            if tensor_blake3(found) != known.files[file].tensors[tensor][2]:
                raise manifest.Damaged(manifest.Damage(file, tensor, "its bytes are not what was saved"))
            return found

        def read(kind: str, name: str, lo: int, hi: int) -> Tensor:
            parts = [
                whole(file, tensor)[max(lo, start) - start : min(hi, stop) - start]
                for start, stop, file, tensor in pieces[kind, name]
                if start < hi and lo < stop
            ]
            return torch.cat(parts)

        yield read


def _check_cover(
    folder: Path, pieces: dict[Moment, list[tuple[int, int, str, str]]], sizes: Mapping[Moment, int]
) -> None:
    wrong = "Its optimizer state names other parameters" if pieces.keys() != sizes.keys() else ""
    for moment, found in pieces.items():
        found.sort()
        ends = [0, *(stop for _, stop, _, _ in found)]
        if not wrong and ([start for start, *_ in found] != ends[:-1] or ends[-1] != sizes[moment]):
            wrong = f"The optimizer state of {moment[1]} does not have its {sizes[moment]:,} elements"
    if wrong:
        raise UserError(
            f"{folder} does not fit this model", wrong, "Use the configuration it was saved with, or another --run.dir"
        )


def check_units(folder: Path, units: Mapping[str, str], arena: Arena) -> None:
    """Refuse weights that are not those all ranks agreed on when they were saved."""
    found = weights_digests(arena)
    if wrong := [name for name, digest in found.items() if units.get(name) != digest]:
        raise _damaged(folder, f"the weights of {', '.join(wrong)} are not those that were saved")


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Say which checkpoint cannot be read, and what to do."""
    try:
        yield
    except (SafetensorError, OSError, manifest.Damaged) as error:
        raise _damaged(folder, str(error)) from error


def _damaged(folder: Path, how: str) -> UserError:
    return UserError(f"{folder} is damaged", how, f"`andon checkpoint verify {folder}` tells what is wrong")


def weights_blake3(parameters: Mapping[str, Tensor]) -> str:
    """BLAKE3 over, in the order of names, each parameter's name and its little-endian bytes."""
    digest = blake3()
    for name in sorted(parameters):
        digest.update(name.encode())
        digest.update(as_bytes(parameters[name]))
    return digest.hexdigest()
