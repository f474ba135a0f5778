"""`andon checkpoint ls | verify | diff | prune`."""

import contextlib
import json
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from andon.checkpoint.disk.listing import checkpoint_path, kept, step_of, steps
from andon.checkpoint.disk.manifest import NAME as MANIFEST
from andon.checkpoint.disk.manifest import Damage, Damaged, Manifest, find_damage, read
from andon.errors import UserError, harmless
from andon.run.records.folder import RunFolder
from andon.run.screen.display import progress_bar
from andon.run.screen.terminal import human_age, human_bytes


def find(path: Path) -> list[Path]:
    """Find the checkpoints of a run, or of its folder of checkpoints, oldest first; or the one that is named."""
    if (path / MANIFEST).exists() or (step_of(path) >= 0 and path.is_dir()):
        return [path]
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if found := [checkpoint_path(folder, step) for step in steps(folder)]:
        return found
    is_run = (path / "config.yaml").exists() or (path / ".lock").exists()
    if is_run:
        cause, remedy = "The run has not saved yet", "Wait for its first save"
    else:
        cause = "It is not a run and contains no folder checkpoint-STEP" if path.is_dir() else "There is no such folder"
        remedy = "Name the folder of a run, such as runs/default"
    raise UserError(f"There is no checkpoint in {path}", cause, remedy)


def show(path: Path, deep: bool, as_json: bool, console: Console) -> None:
    """Print a row for each checkpoint; `deep` verifies every byte."""
    numbers = [Column(heading, justify="right") for heading in ("step", "loss", "size", "age")]
    table = Table("checkpoint", *numbers, "verdict")
    for checkpoint in find(path):
        damages = _damages(checkpoint, console) if deep else list(find_damage(checkpoint, sizes_only=True))
        if not checkpoint.exists():
            continue  # a live run has removed it
        if as_json:
            fields = {"path": str(checkpoint), "step": step_of(checkpoint), "bytes": _size(checkpoint)}
            verdict = "damaged" if damages else "good" if deep else "complete"
            print(json.dumps({**fields, "verdict": verdict, "damage": [str(damage) for damage in damages]}))
            continue
        size, age = human_bytes(_size(checkpoint)), human_age(time.time() - checkpoint.stat().st_mtime)
        good = "[green]good[/]" if deep else "complete"
        verdict = f"[bold red]damaged[/] {escape(str(damages[0]))}" if damages else good
        table.add_row(escape(checkpoint.name), *_step_and_loss(checkpoint), size, age, verdict)
    if as_json:
        return
    console.print(table)
    if not deep:
        console.print("complete: the manifest and all sizes match; --verify reads every byte", style="dim")


def verify(path: Path, console: Console) -> int:
    """Verify every byte of each checkpoint; returns 1 if any is damaged."""
    bad = 0
    for checkpoint in find(path):
        size = human_bytes(_size(checkpoint))
        damages = _damages(checkpoint, console)
        name = escape(str(checkpoint))
        if not checkpoint.exists():
            console.print(f"{name} was removed by its run", soft_wrap=True)
            continue
        bad += bool(damages)
        if not damages:
            console.print(f"{name} is [green]good[/], {size}", soft_wrap=True)
        for damage in damages:
            console.print(f"{name} is [bold red]damaged[/]: {escape(str(damage))}", soft_wrap=True)
    return 1 if bad else 0


def diff(first: Path, second: Path, console: Console) -> int:
    """Verify two checkpoints and compare them by tensor; returns 1 if they differ."""
    from andon.checkpoint.compare import compare

    manifests = _verified(first, console), _verified(second, console)
    differences = Column("largest difference", justify="right")
    table = Table("tensor", "verdict", differences, title=escape(f"{first} and {second}"))
    compared = list(compare((first, second), manifests))
    for name, difference in compared:
        if difference:
            table.add_row(escape(name), "differs", difference)
    if table.row_count:
        console.print(table)
        console.print("first.… and second.…: AdamW's moments, exp_avg and exp_avg_sq, of both checkpoints", style="dim")
    console.print(f"{len(compared) - table.row_count} tensors are equal, {table.row_count} differ")
    return 1 if table.row_count else 0


def prune(path: Path, keep: int, keep_every: int, dry_run: bool, console: Console) -> None:
    """Remove all checkpoints but the last `keep`, those at multiples of `keep_every`, and the newest good one."""
    from andon.checkpoint.disk.store import remove

    folder = find(path)[0].parent
    with contextlib.closing(RunFolder(folder.parent)) as run:
        if (folder.parent / ".lock").exists():  # a copied folder has no lock
            run.take()
        found = {step_of(checkpoint): checkpoint for checkpoint in find(path)}
        good = next((step for step in sorted(found, reverse=True) if not _damages(found[step], console)), None)
        if good is None:
            cause = "A damaged checkpoint may still be useful, so nothing was removed"
            remedy = f"`andon checkpoint verify {folder}` names the damage"
            raise UserError(f"No checkpoint in {folder} is good", cause, remedy)
        staying = kept(sorted(found), keep, keep_every) | {good}
        for step, checkpoint in found.items():
            if step not in staying:
                if not dry_run:
                    remove(checkpoint)
                what = "would remove" if dry_run else "removed"
                console.print(f"{what} {checkpoint}", soft_wrap=True, markup=False)
    console.print("kept", ", ".join(found[step].name for step in sorted(staying)), soft_wrap=True)


def _damages(checkpoint: Path, console: Console) -> list[Damage]:
    """Verify every byte with a progress bar; returns all damage."""
    with contextlib.suppress(Damaged), progress_bar(console) as bar:
        task = bar.add_task(escape(harmless(checkpoint.name)), total=read(checkpoint).size)
        return list(find_damage(checkpoint, lambda count: bar.advance(task, count)))
    return list(find_damage(checkpoint))


def _verified(checkpoint: Path, console: Console) -> Manifest:
    if find(checkpoint) != [checkpoint]:
        remedy = f"Name one that `andon checkpoint ls {checkpoint}` lists"
        raise UserError(f"{checkpoint} is not one checkpoint", "Checkpoints are compared, not runs", remedy)
    if damages := _damages(checkpoint, console):
        remedy = "Compare good checkpoints: `andon checkpoint ls --verify` lists them"
        raise UserError(f"{checkpoint} is damaged", str(damages[0]), remedy)
    return read(checkpoint)


def _step_and_loss(checkpoint: Path) -> tuple[str, str]:
    """Step and loss; `?` for a loss that cannot be read."""
    try:
        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        return f"{state['step']:,}", "—" if state["loss"] is None else f"{state['loss']:.4f}"
    except (OSError, ValueError, KeyError, TypeError):
        return str(step_of(checkpoint)), "?"


def _size(checkpoint: Path) -> int:
    with contextlib.suppress(OSError):  # a broken link, or the run is removing it
        return sum(file.stat().st_size for file in checkpoint.iterdir())
    return 0
