"""`andon checkpoint ls | verify | diff | prune`, as a person types them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from rich.console import Console

from andon.checkpoint.disk.listing import checkpoint_path, kept, steps
from andon.checkpoint.disk.manifest import render
from andon.commands.checkpoint import diff, prune, show, verify
from andon.commands.generate import generate
from andon.errors import UserError
from andon.run.records.folder import RunFolder
from tests.checkpoint.saving import quick_config, run_alone, run_to_end
from tests.kit.group_harness import World
from tests.kit.runs import andon
from tests.kit.training import small_tokens


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokens(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def run(tmp_path: Path, tokens: Path) -> Path:
    """A run with checkpoints 2, 4 and 6."""
    run_alone(tokens, quick_config(tmp_path / "run"))
    return tmp_path / "run"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def said(command: Callable[..., object], *arguments: object) -> str:
    """What a command prints, with its exit code or the error it ends with."""
    console = Console(file=io.StringIO(), width=200)
    try:
        code = command(*arguments, console)
    except UserError as error:
        code = error
    assert isinstance(console.file, io.StringIO)
    return f"{console.file.getvalue()}{code}"


def test_the_command_line_knows_them(run: Path) -> None:
    code, output = andon("checkpoint", "ls", "run", cwd=run.parent)
    assert code == 0 and output.count("complete") >= 3 and "checkpoint-4" in output, output
    flip(checkpoint_path(run / "checkpoints", 4) / "tokenizer.json", 50)
    code, output = andon("checkpoint", "verify", "run", cwd=run.parent)
    assert code == 1 and output.count("good") == 2 and "tokenizer.json" in output, output


def test_ls_verify_and_diff(run: Path) -> None:
    first, second, last = (checkpoint_path(run / "checkpoints", step) for step in (2, 4, 6))
    flip(second / "optimizer-00000-of-00001.safetensors", -5)
    output = said(verify, run)
    assert output.endswith("1") and output.count("good") == 2, output
    assert "tensor second.model.embed_tokens.weight[0:9600]" in output, output
    output = said(show, run, True, False)
    assert output.count("good") == 2 and "damaged" in output, output
    output = said(diff, first, last)
    assert output.endswith("0 tensors are equal, 63 differ\n1"), output
    assert said(diff, last, last) == "63 tensors are equal, 0 differ\n0"
    assert "checkpoint-4 is damaged" in said(diff, first, second)
    with pytest.raises(UserError, match="checkpoint-4 is damaged"):
        generate(second, "", count=1, length=1, temperature=1, seed=0)
    assert "There is no checkpoint in" in said(verify, run.parent)


def rewrite_manifest(checkpoint: Path, files: dict[str, Any]) -> None:
    known = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_bytes(render(known["step"], files, known["units"]))


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_manifest_that_does_not_list_what_a_checkpoint_needs_is_damage(run: Path, name: str) -> None:
    last = checkpoint_path(run / "checkpoints", 6)
    files = json.loads((last / "manifest.json").read_text())["files"]
    del files[name]
    (last / name).unlink()
    rewrite_manifest(last, files)
    output = said(verify, last)
    assert f"damaged: {name}: the manifest does not list it" in output and output.endswith("1"), output
    assert f"checkpoint-6 is damaged\n{name}" in said(diff, last, checkpoint_path(run / "checkpoints", 4))


@pytest.mark.parametrize("offset", [0, 1], ids=["start", "end"])
def test_an_offset_that_is_not_a_whole_number_is_damage(run: Path, offset: int) -> None:
    last = checkpoint_path(run / "checkpoints", 6)
    files = json.loads((last / "manifest.json").read_text())["files"]
    files["model.safetensors"]["tensors"]["model.norm.weight"][offset] += 0.0
    rewrite_manifest(last, files)
    output = said(verify, last)
    assert "damaged: manifest.json: 'model.norm.weight' cannot be at" in output, output
    assert output.endswith("1"), output


def test_a_header_that_is_no_safetensors_is_named_though_the_manifest_agrees(run: Path) -> None:
    first, last = (checkpoint_path(run / "checkpoints", step) for step in (2, 6))
    files = json.loads((first / "manifest.json").read_text())["files"]
    for name in ("model.safetensors", "optimizer-00000-of-00001.safetensors"):
        flip(first / name, 9)
        files[name]["blake3"] = blake3((first / name).read_bytes()).hexdigest()
        rewrite_manifest(first, files)
        assert "good" in said(verify, first)
        assert "checkpoint-2 is damaged" in said(diff, first, last) and "checkpoint-2 is" in said(diff, last, first)
    code, output = andon("generate", str(first), cwd=run.parent)
    assert code == 1 and "checkpoint-2 is damaged" in output and "Traceback" not in output, output


def test_checkpoints_of_different_numbers_of_workers_can_be_compared(run: Path, tokens: Path) -> None:
    with World("shm", 2) as world:
        world.run(run_to_end, tokens, quick_config(run.parent / "two", zero__policy="even"))
    last, other = (checkpoint_path(run.parent / name / "checkpoints", 6) for name in ("run", "two"))
    assert said(diff, last, other) == "63 tensors are equal, 0 differ\n0"


def test_prune_never_removes_the_only_good_one(run: Path) -> None:
    for step in (4, 6):
        flip(checkpoint_path(run / "checkpoints", step) / "model.safetensors", 2000)
    assert "would remove" in said(prune, run, 1, 0, True) and steps(run / "checkpoints") == [2, 4, 6]
    assert "removed" in said(prune, run, 1, 0, False) and steps(run / "checkpoints") == [2, 6]
    flip(checkpoint_path(run / "checkpoints", 2) / "state.json", 20)
    assert "nothing was removed" in said(prune, run, 1, 0, False) and steps(run / "checkpoints") == [2, 6]
    holder = RunFolder(run)
    holder.take()
    assert "is in use" in said(prune, run, 1, 0, False)
    holder.close()


def test_the_last_few_and_every_nth_are_kept(tmp_path: Path, tokens: Path) -> None:
    assert kept([1, 2, 3, 4, 5, 6], keep=2, every=3) == {3, 5, 6}
    settings = {"checkpoint__every": 1, "checkpoint__keep": 1, "checkpoint__keep_every": 3}
    run_alone(tokens, quick_config(tmp_path / "run", train__steps=7, **settings))
    assert steps(tmp_path / "run" / "checkpoints") == [3, 6, 7]
