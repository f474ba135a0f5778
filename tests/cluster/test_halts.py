"""What `andon train` leaves behind when the line stops: exit code, `halt.json`, the last committed step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from andon.integrity.halt import Flaw, find_flaw
from tests.kit import oracle
from tests.kit.runs import andon, events


def halt(cwd: Path, *options: str) -> dict[str, Any]:
    """Train with the oracle's settings until the line stops; what `halt.json` says."""
    (cwd / "text.txt").write_text(oracle.TEXT)
    code, output = andon("train", *oracle.OPTIONS, "--run.dir=run", *options, cwd=cwd)
    assert code == 3 and "THE LINE STOPPED" in output, output
    assert not (cwd / "run" / "summary.json").exists()
    said: dict[str, Any] = json.loads((cwd / "run" / "halt.json").read_text())
    return said


def saved_steps(cwd: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in (cwd / "run" / "checkpoints").glob("*"))


@pytest.mark.parametrize(("kind", "name"), [("nan", "NaN"), ("inf", "Inf")])
def test_a_bad_gradient_is_named_with_its_rank_slot_samples_and_element(tmp_path: Path, kind: str, name: str) -> None:
    fault = f"--fault={kind}:rank=1,step=3,slot=2,parameter=model.norm.weight"
    said = halt(tmp_path, "--workers=2", "--checkpoint.every=0", fault)
    assert (said["step"], said["committed"], said["sound"]) == (3, 2, True)
    assert said["cause"] == "rank 1 computed a bad gradient of model.norm"
    (found,) = said["findings"]
    assert (found["rank"], found["slot"], found["unit"]) == (1, 2, "model.norm")
    assert found["samples"] == oracle.WINDOWS[2][2]
    assert (found["parameter"], found["count"], found["first"], found["kind"]) == (*("model.norm.weight", 1, 8), name)
    assert [event["step"] for event in events(tmp_path / "run", "step")] == [1, 2]
    assert saved_steps(tmp_path) == [2]


def test_a_flaw_names_the_first_of_its_elements_and_both_kinds() -> None:
    values = torch.tensor([[1.0, 2.0, float("nan")], [float("inf"), 3.0, float("-inf")]])
    assert find_flaw("w", values) == Flaw("w", 3, 2, "NaN and Inf")
    assert find_flaw("w", torch.tensor([0.0, float("-inf")])) == Flaw("w", 1, 1, "Inf")
    assert find_flaw("w", torch.tensor([0.0, 3e38])) is None


def flips(*ranks: int) -> list[str]:
    """The same bit of these ranks' weights flips, in a run that saves nothing before its end."""
    faults = (f"--fault=bitflip:rank={rank},step=2,unit=model.norm,bit=20" for rank in ranks)
    return ["--checkpoint.every=0", *faults]


def test_a_tie_blames_nobody(tmp_path: Path) -> None:
    slots = ["--train.slots=4", "--workers=4", "--zero.policy=off"]
    said = halt(tmp_path, *slots, *flips(0, 1))
    assert said["cause"] == "the weights of model.norm differ between ranks 0, 1, 2, 3"
    assert (said["step"], said["sound"], said["findings"]) == (2, False, [])


def test_a_majority_blames_the_others(tmp_path: Path) -> None:
    said = halt(tmp_path, "--workers=3", *flips(2))
    assert said["cause"] == "the weights of model.norm differ on rank 2"
    assert saved_steps(tmp_path) == []  # nobody knows whose weights are good


def test_two_ranks_alone_cannot_tell_who_is_wrong(tmp_path: Path) -> None:
    said = halt(tmp_path, "--workers=2", *flips(1))
    assert said["cause"] == "the weights of model.norm differ between ranks 0, 1"


def test_a_run_that_goes_on_forgets_how_it_halted(tmp_path: Path) -> None:
    halt(tmp_path, "--fault=nan:rank=0,step=3")
    code, output = andon("train", *oracle.OPTIONS, "--run.dir=run", cwd=tmp_path)
    assert code == 0, output
    assert not (tmp_path / "run" / "halt.json").exists()
    assert (tmp_path / "run" / "summary.json").exists()
    assert [event["step"] for event in events(tmp_path / "run", "step")] == [1, 2, 3, 4, 5, 6]
