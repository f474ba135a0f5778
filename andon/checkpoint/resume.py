"""Going on from a checkpoint: what must fit, and how weights and optimizer state reach every rank.

If all ranks see the same checkpoint, each reads its own part, and what it reads is verified as it is read.
Otherwise rank 0 reads everything and sends it to the others.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andon.checkpoint.manifest import Damaged
from andon.checkpoint.manifest import read as read_manifest
from andon.checkpoint.moments import Moments, ReadMoments
from andon.checkpoint.store import check_units, load_state, open_moments, reading
from andon.engine.optimizer import Optimizer
from andon.errors import UserError
from andon.model.hub import load_weights


@dataclass(frozen=True)
class _Opened:
    """A checkpoint that this rank reads: `state.json`, the digest of each unit's weights, the moments."""

    state: dict[str, Any]
    units: dict[str, str]
    moments: ReadMoments


def load_checkpoint(folder: Path, optimizer: Optimizer, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Load weights and optimizer state on every rank; gives `state.json`. `facts` describe this run."""
    model, group = optimizer.model, optimizer.model.group
    moments = Moments(optimizer, rank_0_writes_all=False)
    seen = group.all_gather_bytes(_manifest_digest(folder).encode())
    same_for_all = len(set(seen)) == 1
    with contextlib.ExitStack() as stack:
        opened = None
        if same_for_all or group.rank == 0:
            opened = stack.enter_context(_open(folder, moments, facts))
        told = json.dumps([opened.state, opened.units] if opened else None).encode()
        state, units = json.loads(group.all_gather_bytes(told)[0])
        if same_for_all and opened:
            moments.load(opened.moments)
        else:
            group.broadcast(model.arena.weights, src=0)
            moments.receive(opened.moments if opened else None)
    check_units(folder, units, model.arena)
    found: dict[str, Any] = state
    return found


@contextlib.contextmanager
def _open(folder: Path, moments: Moments, facts: Mapping[str, Any]) -> Iterator[_Opened]:
    """Check a checkpoint against this run and read it: weights into the model, moments on demand."""
    state = load_state(folder)
    check_resumable(folder, state, facts)
    with reading(folder):
        manifest = read_manifest(folder)
        load_weights(moments.model.module, folder)
        with open_moments(folder, manifest, moments.sizes) as read:
            yield _Opened(state, dict(manifest.units), read)


def _manifest_digest(folder: Path) -> str:
    """Which checkpoint this rank sees; empty if it sees none, or one that is damaged."""
    try:
        return read_manifest(folder).digest
    except Damaged:
        return ""


def check_resumable(folder: Path, state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Refuse to go on with other data, another seed or another batch: samples would repeat or be missed."""
    if state["data"] != facts["data"]:
        raise UserError(
            f"{folder} was trained on other data",
            f"Its tokens have digest {state['data'][:12]}, these {facts['data'][:12]}",
            "Give the same corpus, or start afresh with --resume none",
        )
    before, now = state["config"], facts["config"]
    pairs = {
        "seed": (before["seed"], now["seed"]),
        "data.validation": (before["data"]["validation"], now["data"]["validation"]),
        **{
            f"model.{key}": (old, now["model"].get(key))
            for key, old in before["model"].items()
            if key != "preset" and old is not None
        },
        **{f"train.{key}": (before["train"][key], now["train"][key]) for key in ("slots", "micro_batch", "context")},
        "train.weights": (before["train"].get("weights", "f32"), now["train"]["weights"]),
    }
    changed = [f"{key} {old} → {new}" for key, (old, new) in pairs.items() if old != new]
    if changed:
        raise UserError(
            f"{folder} was trained with other settings: {', '.join(changed)}",
            "It would go on with another model, or see some samples twice and others never",
            "Keep these, choose another --run.dir, or start afresh with --resume none",
        )
