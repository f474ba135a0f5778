"""The state of a script's scheduler comes back from a checkpoint with its types, or the save is refused."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import andon
from andon.transport.local import LocalGroup


class Phase(NamedTuple):
    name: str
    steps: int


class Phases(LambdaLR):
    """A scheduler with a state of its own."""

    def __init__(self, optimizer: andon.AdamW, phases: Any) -> None:
        super().__init__(optimizer, lambda step: 1.0)
        self.phases = phases


def saved(folder: Path, phases: Any) -> Any:
    """What comes back from a checkpoint."""
    for before in (phases, None):
        model = andon.DataParallel(nn.Linear(3, 1), LocalGroup(), slots=1)
        optimizer = andon.AdamW(model, lr=0.1)
        scheduler = Phases(optimizer, before)
        try:
            if andon.load(folder, model, optimizer, scheduler) == 0:
                for _ in model.slots:
                    model.backward(model(torch.ones(1, 3)).mean(), count=1)
                optimizer.step()
                andon.save(folder, model, optimizer, 0, scheduler)
        finally:
            model.close()
            model.group.close()
    return scheduler.phases


def test_the_types_of_a_schedule_come_back(tmp_path: Path) -> None:
    state = [1, 0.5, "a", None, True, (1, [2]), {3: {"b": ()}}, OrderedDict(b=1, a=2), Counter({7: 2})]
    found = saved(tmp_path, state)
    assert found == state and list(map(type, found)) == list(map(type, state))
    assert list(found[7].items()) == [("b", 1), ("a", 2)]


@pytest.mark.parametrize("value", [Phase("warm", 3), defaultdict(int), {1, 2}, object()])
def test_a_schedule_whose_type_would_be_lost_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(TypeError, match=f"a {type(value).__name__} cannot be saved, because its type would be lost"):
        saved(tmp_path, [value])
