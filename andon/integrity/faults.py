"""Injected faults, for tests and drills, written as `kind:key=value,…`.

nan:rank=1,step=7[,slot=S][,parameter=NAME]   a gradient element becomes NaN (inf: infinity)
bitflip:rank=2,step=9[,unit=NAME][,buffer=weights|first|second|master][,bit=K]   a bit flips before forward
die:rank=1,step=5[,at=forward|backward|exchange|optimizer]   the process kills itself
    or, while it saves that step, at=snapshot|write|sync|wrote, and on rank 0 at=manifest|rename|renamed|prune
stall:rank=1,step=5[,at=…][,seconds=…]   the process sleeps
"""

from __future__ import annotations

import difflib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from andon.errors import UserError

if TYPE_CHECKING:  # the configuration checks faults, and needs no torch for it
    from torch import Tensor

    from andon.engine.gradients.arena import Layout
    from andon.engine.gradients.order import Order

State = Callable[[], Mapping[str, "Tensor"]]
"""The flat buffers that a bit can be flipped in, by name."""
KEYS = {
    "nan": ("rank", "step", "slot", "parameter"),
    "inf": ("rank", "step", "slot", "parameter"),
    "bitflip": ("rank", "step", "unit", "buffer", "bit"),
    "die": ("rank", "step", "at"),
    "stall": ("rank", "step", "at", "seconds"),
}
NUMBERS = ("rank", "step", "slot", "bit", "seconds")
SAVE_PLACES = ("snapshot", "write", "sync", "wrote", "manifest", "rename", "renamed", "prune")
PLACES = ("forward", "backward", "exchange", "optimizer", *SAVE_PLACES)


@dataclass(frozen=True)
class Fault:
    """One fault, as parsed."""

    kind: str
    rank: int
    step: int
    arguments: Mapping[str, str]

    @property
    def place(self) -> str:
        """Where the process dies or stalls; a bit flips before forward."""
        return self.arguments.get("at", "forward")


def parse(text: str) -> Fault:
    """Read one fault; an error says what is wrong with it."""
    kind, _, rest = text.partition(":")
    if kind not in KEYS:
        raise _refused(text, f"'{kind}' is not one of {', '.join(KEYS)}")
    arguments = dict(pair.partition("=")[::2] for pair in rest.split(",") if pair)
    if unknown := [key for key in arguments if key not in KEYS[kind]]:
        raise _refused(text, f"'{unknown[0]}' is not one of {', '.join(KEYS[kind])}")
    for key, value in ({"rank": "", "step": ""} | arguments).items():
        if key in NUMBERS and not value.isdigit():
            raise _refused(text, f"{key}= must be a number")
    if arguments.get("at", "forward") not in PLACES:
        raise _refused(text, f"at= must be one of {', '.join(PLACES)}")
    return Fault(kind, int(arguments.pop("rank")), int(arguments.pop("step")), arguments)


class Faults:
    """The faults of one rank. In a step a fault strikes once, in a save on every attempt."""

    def __init__(self, texts: Sequence[str], order: Order, rank: int, layout: Layout, state: State) -> None:
        faults = [parse(text) for text in texts]
        for text, fault in zip(texts, faults, strict=True):
            _check(text, fault, order, layout, state)
        self._layout, self._state, self._first_slot = layout, state, order.range_of(rank).start
        self._mine = [fault for fault in faults if fault.rank == rank]

    def strike(self, place: str, step: int) -> None:
        """Die, stall or flip a bit, if a fault is due at this place of this step."""
        due = [fault for fault in self._mine if fault.step == step and fault.place == place]
        for fault in due:
            if fault.kind in ("stall", "bitflip") and place not in SAVE_PLACES:
                self._mine.remove(fault)
            if fault.kind == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "stall":
                time.sleep(float(fault.arguments.get("seconds", "3600")))
            elif fault.kind == "bitflip":
                self._flip(fault)

    def poison(self, step: int, slot: int, name: str, gradient: Tensor) -> None:
        """Make an element of a gradient NaN or Inf, if a fault is due for this parameter in this slot."""
        for fault in self._mine:
            wanted = (fault.step, fault.arguments.get("parameter", name))
            in_slot = int(fault.arguments.get("slot", self._first_slot)) == slot
            if fault.kind in ("nan", "inf") and wanted == (step, name) and in_slot:
                gradient.view(-1)[gradient.numel() // 2] = float(fault.kind)

    def _flip(self, fault: Fault) -> None:
        buffer = self._state()[fault.arguments.get("buffer", "weights")]
        name = fault.arguments.get("unit", self._layout.units[0].name)
        unit = next(unit for unit in self._layout.units if unit.name == name)
        bit = int(fault.arguments.get("bit", "20"))
        import torch

        bits = buffer[unit.slices[0].start :].view(torch.uint8)
        bits[bit // 8] ^= 1 << bit % 8


def _check(text: str, fault: Fault, order: Order, layout: Layout, state: State) -> None:
    """Refuse a fault that could never happen: its rank, slot, parameter, unit or buffer does not exist."""
    if fault.rank >= order.world_size:
        raise _refused(text, f"there are only {order.world_size} ranks")
    for key, known in (
        ("slot", [str(slot) for slot in order.range_of(fault.rank)]),
        ("parameter", list(layout.slices)),
        ("unit", [unit.name for unit in layout.units]),
        ("buffer", list(state())),
    ):
        if key in fault.arguments and fault.arguments[key] not in known:
            near = ", ".join(difflib.get_close_matches(fault.arguments[key], known, n=3, cutoff=0.0))
            raise _refused(text, f"rank {fault.rank} has no {key} '{fault.arguments[key]}' (it has {near} …)")


def _refused(text: str, cause: str) -> UserError:
    return UserError(f"--fault {text} is refused", cause, "For example: --fault nan:rank=1,step=7")
