"""`andon checkpoint ls | verify | diff | prune`, as a person types them."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.checkpoint.listing import checkpoint_path, kept, steps
from andon.cluster.run_folder import RunFolder
from tests.runs import andon
from tests.saving import quick_config, run_alone
from tests.training import small_tokens


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


def test_ls_verify_and_diff(run: Path) -> None:
    code, output = andon("checkpoint", "ls", "run", cwd=run.parent)
    assert code == 0 and output.count("complete") >= 3 and "checkpoint-4" in output, output
    second = checkpoint_path(run / "checkpoints", 4)
    flip(second / "optimizer-00000-of-00001.safetensors", -5)
    code, output = andon("checkpoint", "verify", "run", cwd=run.parent)
    assert code == 1 and output.count("good") == 2, output
    assert "tensor second.model.embed_tokens.weight[0:9600]" in output, output
    code, output = andon("checkpoint", "ls", "run", "--verify", cwd=run.parent)
    assert code == 0 and output.count("good") == 2 and "damaged" in output, output
    first, last = (f"run/checkpoints/checkpoint-{step}" for step in (2, 6))
    code, output = andon("checkpoint", "diff", first, last, cwd=run.parent)
    assert code == 1 and "0 tensors are equal, 63 differ" in output, output
    code, output = andon("checkpoint", "diff", last, last, cwd=run.parent)
    assert code == 0 and "63 tensors are equal, 0 differ" in output, output
    code, output = andon("checkpoint", "diff", first, str(second), cwd=run.parent)
    assert code == 1 and "is damaged" in output and "Traceback" not in output, output
    code, output = andon("generate", str(second), cwd=run.parent)
    assert code == 1 and "checkpoint-4 is damaged" in output, output


def test_prune_never_removes_the_only_good_one(run: Path) -> None:
    for step in (4, 6):
        flip(checkpoint_path(run / "checkpoints", step) / "model.safetensors", 2000)
    code, output = andon("checkpoint", "prune", "run", "--keep=1", "--dry-run", cwd=run.parent)
    assert code == 0 and "would remove" in output and steps(run / "checkpoints") == [2, 4, 6], output
    code, output = andon("checkpoint", "prune", "run", "--keep=1", cwd=run.parent)
    assert code == 0 and steps(run / "checkpoints") == [2, 6], output
    flip(checkpoint_path(run / "checkpoints", 2) / "state.json", 20)
    code, output = andon("checkpoint", "prune", "run", "--keep=1", cwd=run.parent)
    assert code == 1 and "nothing was removed" in output and steps(run / "checkpoints") == [2, 6], output
    holder = RunFolder(run)
    holder.take()
    code, output = andon("checkpoint", "prune", "run", "--keep=1", cwd=run.parent)
    holder.release()
    assert code == 1 and "is in use" in output, output


def test_the_last_few_and_every_nth_are_kept(tmp_path: Path, tokens: Path) -> None:
    assert kept([1, 2, 3, 4, 5, 6], keep=2, every=3) == {3, 5, 6}
    settings = {"checkpoint__every": 1, "checkpoint__keep": 1, "checkpoint__keep_every": 3}
    run_alone(tokens, quick_config(tmp_path / "run", train__steps=7, **settings))
    assert steps(tmp_path / "run" / "checkpoints") == [3, 6, 7]
