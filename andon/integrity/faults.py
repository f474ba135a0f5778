"""Faults on purpose: what tests and drills do to a run, written as `kind:key=value,…`.

nan:rank=1,step=7[,slot=S][,parameter=NAME]   a gradient element becomes NaN (inf: infinity)
bitflip:rank=2,step=9[,unit=NAME][,buffer=weights|first|second|master][,bit=K]   a bit flips before forward
die:rank=1,step=5[,at=forward|backward|exchange|optimizer]   the process kills itself
    or, while it saves that step, at=snapshot|write|sync|wrote, and on rank 0 at=manifest|rename|renamed|prune
stall:rank=1,step=5[,at=…][,seconds=…]   it stands still
"""

from __future__ import annotations

import difflib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from andon.errors import UserError

if TYPE_CHECKING:  # the configuration checks faults, and needs no torch for it
    from torch import Tensor

    from andon.engine.arena import Layout
    from andon.engine.order import Order

KEYS = {
    "nan": ("rank", "step", "slot", "parameter"),
    "inf": ("rank", "step", "slot", "parameter"),
    "bitflip": ("rank", "step", "unit", "buffer", "bit"),
    "die": ("rank", "step", "at"),
    "stall": ("rank", "step", "at", "seconds"),
}
SAVE_PLACES = ("snapshot", "write", "sync", "wrote", "manifest", "rename", "renamed", "prune")
PLACES = ("forward", "backward", "exchange", "optimizer", *SAVE_PLACES)


@dataclass(frozen=True)
class Fault:
    """One fault, as parsed."""

    kind: str
    rank: int
    step: int
    words: Mapping[str, str]


def parse(text: str) -> Fault:
    """Read one fault; what is wrong with it is said."""
    kind, _, rest = text.partition(":")
    if kind not in KEYS:
        raise _refused(text, f"'{kind}' is none of {', '.join(KEYS)}")
    words = dict(pair.partition("=")[::2] for pair in rest.split(",") if pair)
    if unknown := [key for key in words if key not in KEYS[kind]]:
        raise _refused(text, f"'{unknown[0]}' is none of {', '.join(KEYS[kind])}")
    for key in ("rank", "step"):
        if not words.get(key, "").isdigit():
            raise _refused(text, f"{key}= must be a number")
    for key in ("slot", "bit", "seconds"):
        if key in words and not words[key].isdigit():
            raise _refused(text, f"{key}= must be a number")
    if words.get("at", "forward") not in PLACES:
        raise _refused(text, f"at= must be one of {', '.join(PLACES)}")
    return Fault(kind, int(words.pop("rank")), int(words.pop("step")), words)


class Faults:
    """The faults of one rank."""

    def __init__(self, texts: Sequence[str], rank: int) -> None:
        self.all = [(text, parse(text)) for text in texts]
        self.mine = [fault for _, fault in self.all if fault.rank == rank]

    def check(self, order: Order, layout: Layout, buffers: Mapping[str, Tensor]) -> None:
        """Refuse a fault that could never happen: of a rank, slot, parameter, unit or buffer not there."""
        units = [unit.name for unit in layout.units]
        for text, fault in self.all:
            if fault.rank >= order.world_size:
                raise _refused(text, f"there are only {order.world_size} ranks")
            slots = order.range_of(fault.rank)
            for key, known in (
                ("slot", [str(slot) for slot in slots]),
                ("parameter", list(layout.slices)),
                ("unit", units),
                ("buffer", list(buffers)),
            ):
                if key in fault.words and fault.words[key] not in known:
                    near = difflib.get_close_matches(fault.words[key], known, n=3, cutoff=0.0)
                    raise _refused(
                        text,
                        f"rank {fault.rank} has no {key} '{fault.words[key]}' (it has {', '.join(near)} …)",
                    )

    def at(self, place: str, step: int) -> None:
        """Die or stall, if that is to happen here."""
        for fault in self.mine:
            if (
                fault.step != step
                or fault.kind not in ("die", "stall")
                or fault.words.get("at", "forward") != place
            ):
                continue
            if fault.kind == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(float(fault.words.get("seconds", "3600")))

    def poison(self, step: int, slot: int, first_slot: int, name: str, gradient: Tensor) -> None:
        """Spoil an element of a gradient, if that is to happen to this parameter in this slot."""
        for fault in self.mine:
            if fault.kind not in ("nan", "inf") or fault.step != step:
                continue
            if (
                int(fault.words.get("slot", first_slot)) == slot
                and fault.words.get("parameter", name) == name
            ):
                gradient.view(-1)[gradient.numel() // 2] = float(fault.kind)

    def flip(self, step: int, layout: Layout, buffers: Mapping[str, Tensor]) -> None:
        """Flip a bit of the state, if that is to happen in this step."""
        for fault in self.mine:
            if fault.kind != "bitflip" or fault.step != step:
                continue
            buffer = buffers[fault.words.get("buffer", "weights")]
            name = fault.words.get("unit", layout.units[0].name)
            unit = next(unit for unit in layout.units if unit.name == name)
            piece = unit.slices[0]
            bit = int(fault.words.get("bit", "20"))
            import torch

            bits = buffer[piece.start :].view(torch.uint8)
            bits[bit // 8] ^= 1 << bit % 8


def _refused(text: str, cause: str) -> UserError:
    return UserError(f"--fault {text} is refused", cause, "For example: --fault nan:rank=1,step=7")
