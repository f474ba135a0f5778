"""`andon checkpoint …`: one function per command, which parses and makes one call."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from andon.cli.arguments import AsJson, Checkpoint, Checkpoints, new_app, terminal

checkpoint_app = new_app(name="checkpoint", help="List, verify, compare and remove checkpoints.")


@checkpoint_app.command("ls")
def checkpoint_ls(
    path: Checkpoints,
    verify: Annotated[bool, typer.Option("--verify", help="Read and verify every byte, not only sizes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print step, loss, size, age and verdict of every checkpoint."""
    from andon.commands.checkpoint import show

    show(path, verify, as_json, terminal())


@checkpoint_app.command("verify")
def checkpoint_verify(path: Checkpoints) -> None:
    """Read every byte and compare it with the manifest. The exit code is 1 if anything is damaged."""
    from andon.commands.checkpoint import verify

    sys.exit(verify(path, terminal()))


@checkpoint_app.command("diff")
def checkpoint_diff(first: Checkpoint, second: Checkpoint) -> None:
    """Compare two checkpoints tensor by tensor. The exit code is 1 if they differ."""
    from andon.commands.checkpoint import diff

    sys.exit(diff(first, second, terminal()))


@checkpoint_app.command("prune")
def checkpoint_prune(
    path: Checkpoints,
    keep: Annotated[int, typer.Option(min=1, help="Keep the newest N checkpoints.")] = 3,
    keep_every: Annotated[int, typer.Option(min=0, help="Also keep those at multiples of N steps; 0: none.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, only print what would be.")] = False,
) -> None:
    """Remove old checkpoints, but never the newest good one."""
    from andon.commands.checkpoint import prune

    prune(path, keep, keep_every, dry_run, terminal())
