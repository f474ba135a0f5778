"""Which checkpoints there are, when one is saved and removed, and what is never published."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from andon.checkpoint.disk.listing import kept, newest, should_save, step_of, steps
from andon.checkpoint.disk.manifest import Record
from andon.checkpoint.disk.store import Store, remove


def nowhere(place: str) -> None:
    """Nothing strikes."""


def test_a_checkpoint_is_a_folder_whose_name_tells_its_step(tmp_path: Path) -> None:
    for name in ("checkpoint-0", "checkpoint-10", "checkpoint-9", "checkpoint-007", "checkpoint-", ".checkpoint-3"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-11").write_text("a file")
    assert steps(tmp_path) == [0, 9, 10]
    assert newest(tmp_path) == tmp_path / "checkpoint-10"
    assert [step_of(Path(name)) for name in ("checkpoint-12", "checkpoint-007", "model")] == [12, -1, -1]
    assert steps(tmp_path / "nothing") == [] and newest(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("every", "last", "saved"), [(3, 10, [3, 6, 9, 10]), (5, 10, [5, 10]), (0, 10, [10]), (20, 10, [10])]
)
def test_every_interval_is_saved_and_always_the_last_step(every: int, last: int, saved: list[int]) -> None:
    assert [step for step in range(last + 1) if should_save(step, every, step == last)] == saved


def test_the_last_ones_and_every_nth_are_kept() -> None:
    assert kept([2, 4, 6, 8], keep=1, every=0) == {8}
    assert kept([2, 4, 6, 8], keep=3, every=0) == {4, 6, 8}
    assert kept([2, 4, 6, 8], keep=1, every=4) == {4, 8}


def test_a_removal_takes_the_name_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoint-2").mkdir()

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            assert not (tmp_path / "checkpoint-2").exists()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove(tmp_path / "checkpoint-2")
    assert steps(tmp_path) == []


def test_what_was_not_reported_or_has_lost_bytes_is_not_published(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=1)
    folder = store.begin(7, 1)
    (folder / "a.txt").write_text("whole")
    with pytest.raises(OSError, match=r"also holds a\.txt"):
        store.publish(7, 1, {}, {}, nowhere)
    with pytest.raises(OSError, match="does not have the 6 bytes"):
        store.publish(7, 1, {"a.txt": Record(6, "")}, {}, nowhere)
    assert steps(tmp_path) == []
    assert store.publish(7, 1, {"a.txt": Record(5, "")}, {}, nowhere) == tmp_path / "checkpoint-7"
    assert steps(tmp_path) == [7]
