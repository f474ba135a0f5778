"""Resuming from a checkpoint: checks that it fits, and how weights and optimizer state reach every rank.

If all ranks see the same checkpoint, each reads and verifies its own part. If not, rank 0 reads everything and sends it
to the others.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from andon.checkpoint.disk.format import tensor_blake3
from andon.checkpoint.disk.manifest import Damage, Damaged, Manifest
from andon.checkpoint.disk.manifest import read as read_manifest
from andon.checkpoint.disk.store import check_units, load_state, open_moments, reading
from andon.checkpoint.moments import Moments, ReadMoments
from andon.checkpoint.snapshot import saved_buffers
from andon.engine.optimizer import Optimizer
from andon.engine.recovery.transfer import share_buffers
from andon.model.hub import load_tensors


@dataclass(frozen=True)
class _Opened:
    """A checkpoint that this rank can read: its `state.json`, the digests of its units, a reader of its moments."""

    state: dict[str, Any]
    units: dict[str, str]
    moments: ReadMoments


Check = Callable[[Path, Mapping[str, Any]], None]
"""Called with the folder and the `state.json` of a checkpoint; refuses one from which the run cannot resume."""


def load_checkpoint(folder: Path, optimizer: Optimizer, check: Check) -> dict[str, Any]:
    """Load weights, buffers and optimizer state on every rank; returns `state.json`."""
    model, group = optimizer.model, optimizer.model.group
    moments = Moments(optimizer, rank_0_writes_all=False)
    seen = group.all_gather_bytes(_manifest_digest(folder).encode())
    same_for_all = len(set(seen)) == 1
    with contextlib.ExitStack() as stack:
        opened = None
        if same_for_all or group.rank == 0:
            opened = stack.enter_context(_open(folder, moments, check))
        mine = json.dumps([opened.state, opened.units] if opened else None).encode()
        state, units = json.loads(group.all_gather_bytes(mine)[0])
        if same_for_all and opened:
            moments.load(opened.moments)
        else:
            group.broadcast(model.arena.weights, src=0)
            share_buffers(group, saved_buffers(model.module).values(), source=0)
            moments.receive(opened.moments if opened else None)
    check_units(folder, units, model.arena)
    return dict(state)


@contextlib.contextmanager
def _open(folder: Path, moments: Moments, check: Check) -> Iterator[_Opened]:
    """Check that a checkpoint fits this run, load its weights into the model, and open its moments."""
    state = load_state(folder)
    check(folder, state)
    with reading(folder):
        manifest = read_manifest(folder)
        buffers = saved_buffers(moments.model.module)
        load_tensors(moments.model.arena.parameters | buffers, folder, exactly=True)
        _check_buffers(folder, manifest, buffers)
        with open_moments(folder, manifest, moments.sizes) as read:
            yield _Opened(state, dict(manifest.units), read)


def _check_buffers(folder: Path, known: Manifest, buffers: Mapping[str, Tensor]) -> None:
    """Refuse buffers that are not those that were saved; `check_units` does so for weights."""
    saved = {tensor: (file, digest) for file, tensor, digest in known.tensors()}
    for name, buffer in buffers.items():
        file, digest = saved[name]
        if tensor_blake3(buffer) != digest:
            raise Damaged(Damage(file, name, "its bytes are not what was saved"))


def _manifest_digest(folder: Path) -> str:
    """The digest of the checkpoint that this rank sees; empty if it sees none, or a damaged one."""
    try:
        return read_manifest(folder).digest
    except Damaged:
        return ""
