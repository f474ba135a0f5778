"""A checkpoint on disk: a folder `checkpoint-{step}` that appears complete or not at all.

Hugging Face loads `model.safetensors`, `config.json` and the tokenizer's files. Each rank writes AdamW's moments in
pieces (`first.NAME[lo:hi]`, `second…` and, where the weights are bf16, their f32 `master…`) into its
`optimizer-RRRRR-of-NNNNN.safetensors`. `state.json` holds the progress of the run, `manifest.json` the digests of all
files. Everything is written into a temporary folder on the same disk, synced, and renamed.
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
from andon.checkpoint.disk.listing import aside_of, checkpoint_path, kept, put_back, steps
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
"""(`first`, `second` or `master`, parameter)."""
Piece = tuple[int, int, str, str]
"""(lo, hi, file, tensor)."""


class Store:
    """The checkpoints of a run. It keeps the newest `keep`, and those of every `keep_every`-th step (0: none).

    `may_write` raises `OSError` if another run has taken the folder."""

    def __init__(
        self, folder: Path, keep: int, keep_every: int = 0, may_write: Callable[[], None] = lambda: None
    ) -> None:
        self.folder, self.keep, self.keep_every, self._may_write = folder, keep, keep_every, may_write

    def temporary(self, step: int, turn: int) -> Path:
        """The folder into which an attempt writes a checkpoint."""
        return self.folder / f".checkpoint-{step}.{turn}"

    def begin(self, step: int, turn: int) -> Path:
        """Make the temporary folder into which all ranks write their files, unless another rank has made it."""
        self._may_write()
        if not self.folder.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            sync(self.folder.parent)
        temporary = self.temporary(step, turn)
        temporary.mkdir(exist_ok=True)
        return temporary

    def discard(self, step: int, turn: int) -> None:
        """Remove what an attempt has written."""
        shutil.rmtree(self.temporary(step, turn), ignore_errors=True)  # what stays is removed at the next start

    def publish(self, step: int, turn: int, files: Mapping[str, Record], units: Mapping[str, str], at: At) -> Path:
        """Write the manifest of an attempt's files, which are on disk; sync, and rename the temporary folder."""
        temporary, final = self.temporary(step, turn), checkpoint_path(self.folder, step)
        records = {name: record.fields() for name, record in sorted(files.items())}
        for name, record in files.items():
            if (temporary / name).stat().st_size != record.size:
                raise OSError(f"{name} does not have the {record.size:,} bytes that were written")
        if strange := {path.name for path in temporary.iterdir()} - files.keys():
            raise OSError(f"{temporary} also holds {', '.join(sorted(strange))}")
        # A checkpoint that is there already is damaged, or its save was given up: the new one replaces it.
        publish_folder(temporary, final, manifest.render(step, records, units), at)
        return final

    def prune(self, newest: int, at: At = lambda place: None) -> None:
        """Remove the checkpoints before `newest` that are not to be kept."""
        before = [step for step in steps(self.folder) if step <= newest]
        for step in before:
            if step not in kept(before, self.keep, self.keep_every):
                at("prune")
                remove(checkpoint_path(self.folder, step))
        shutil.rmtree(aside_of(checkpoint_path(self.folder, newest)), ignore_errors=True)

    def clean(self) -> None:
        """Remove what interrupted saves and removals have left."""
        put_back(self.folder)
        for leftover in self.folder.glob(".checkpoint-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def publish_folder(temporary: Path, final: Path, content: bytes, at: At = lambda place: None) -> None:
    """Write the manifest of a folder whose files are on disk; sync, and rename the folder.

    A folder that has the name is set aside first, and stays there until the caller removes it: if a kill comes before
    the new one has the name, `put_back` renames it back."""
    at("manifest")
    (temporary / manifest.NAME).write_bytes(content)
    sync(temporary / manifest.NAME)
    sync(temporary)
    at("rename")
    if final.exists():
        _rename(final, aside_of(final))
    temporary.rename(final)
    at("renamed")
    sync(final.parent)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that a kill leaves no incomplete checkpoint."""
    shutil.rmtree(_rename(checkpoint, checkpoint.with_name(f".{checkpoint.name}.removed")))


def _rename(folder: Path, target: Path) -> Path:
    """Rename a folder; an earlier one of that name is removed."""
    shutil.rmtree(target, ignore_errors=True)
    return folder.rename(target)


def load_state(folder: Path) -> dict[str, Any]:
    """The `state.json` of a checkpoint."""
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise ValueError("it is not a JSON object")
        if missing := [key for key in STATE_KEYS if key not in state]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        return state
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{folder} is not a checkpoint that Andon wrote",
            f"state.json: {error}",
            "Name one, such as runs/default/checkpoints/checkpoint-500; `andon checkpoint ls runs/default` shows them",
        ) from None


def moment_pieces(known: Manifest) -> dict[Moment, list[Piece]]:
    """The pieces of each moment, ascending."""
    pieces: dict[Moment, list[Piece]] = defaultdict(list)
    for file, tensor, _ in known.tensors():
        if match := PIECE_NAME.fullmatch(tensor):
            pieces[match[1], match[2]].append((int(match[3]), int(match[4]), file, tensor))
    return {moment: sorted(found) for moment, found in pieces.items()}


@contextlib.contextmanager
def open_moments(folder: Path, known: Manifest, sizes: Mapping[Moment, int]) -> Iterator[ReadMoments]:
    """A reader of AdamW's moments by parameter and range; the checkpoint must have exactly those in `sizes`.

    Every piece is verified when it is read, because this rank may see another copy of the files than rank 0 has."""
    pieces = moment_pieces(known)
    _check_cover(folder, pieces, sizes)
    with reading(folder), contextlib.ExitStack() as stack:
        names = {file for found in pieces.values() for _, _, file, _ in found}
        files = {name: stack.enter_context(safe_open(folder / name, framework="pt")) for name in sorted(names)}

        @lru_cache(1)  # several ranges of a piece may be read, one after the other
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


def _check_cover(folder: Path, pieces: Mapping[Moment, list[Piece]], sizes: Mapping[Moment, int]) -> None:
    """Refuse moments of other parameters, and pieces that do not cover a parameter exactly once."""
    wrong = "Its optimizer state is of other parameters" if pieces.keys() != sizes.keys() else ""
    for moment, found in pieces.items():
        ends = [0, *(stop for _, stop, _, _ in found)]
        if not wrong and ([start for start, *_ in found] != ends[:-1] or ends[-1] != sizes[moment]):
            wrong = f"The optimizer state of {moment[1]} does not have its {sizes[moment]:,} elements"
    if wrong:
        remedy = "Use the configuration it was saved with, or another --run.dir"
        raise UserError(f"{folder} does not fit this model", wrong, remedy)


def check_units(folder: Path, units: Mapping[str, str], arena: Arena) -> None:
    """Refuse weights that are not those that all ranks agreed on when they were saved."""
    found = weights_digests(arena)
    if wrong := [name for name, digest in found.items() if units.get(name) != digest]:
        raise manifest.damage_error(folder, f"the weights of {', '.join(wrong)} are not those that were saved")


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn an error of reading into one that names the checkpoint and what to do."""
    try:
        yield
    except (SafetensorError, OSError, manifest.Damaged) as error:
        raise manifest.damage_error(folder, str(error)) from error


def weights_blake3(parameters: Mapping[str, Tensor]) -> str:
    """BLAKE3 over each parameter's name and little-endian bytes, in the order of names."""
    digest = blake3()
    for name in sorted(parameters):
        digest.update(name.encode())
        digest.update(as_bytes(parameters[name]))
    return digest.hexdigest()
