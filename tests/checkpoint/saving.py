"""Saving and resuming inside the ranks of a test world, with real files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from andon.checkpoint.disk.manifest import verify
from andon.config.schema import Config
from andon.data.token_set import TokenSet
from andon.engine.trainer import Trainer
from andon.run.pretraining import Pretraining
from andon.run.records.events import Event, no_event
from andon.run.records.folder import RunFolder
from andon.transport.base import Group
from andon.transport.local import LocalGroup
from tests.kit.training import digest, make_trainer, small_config

STEPS = 6
QUICK = {"train__slots": 4, "train__steps": STEPS, "eval__windows": 2, "eval__stories": 0, "eval__every": 0}


def quick_config(folder: Path, **overrides: Any) -> Config:
    """Six steps of the small model, saved every second one into a folder."""
    settings = {**QUICK, "checkpoint__every": 2, "checkpoint__keep": 10, "eval__sample_every": 0, **overrides}
    return small_config(run__dir=str(folder), **settings)


def run_to_end(
    group: Group,
    tokens: Path,
    config: Config,
    resume: Path | None = None,
    on_event: Callable[[Event, Trainer], None] = lambda said, trainer: None,
) -> str:
    """One rank's run, from a checkpoint if one is given: the digest of weights and moments at its end."""

    def emit(said: Event) -> None:
        on_event(said, trainer)

    trainer = make_trainer(group, tokens, config, emit if group.rank == 0 else no_event)
    try:
        if resume:
            verify(resume)
            trainer.resume(resume)
        Pretraining(config, TokenSet.open(tokens), trainer, emit).train()
        return digest(trainer)
    finally:
        trainer.close()


def run_alone(
    tokens: Path, config: Config, on_event: Callable[[Event, Trainer], None] = lambda said, trainer: None
) -> tuple[str, list[Event]]:
    """A run of one rank in this process: its digest, and its events."""
    events: list[Event] = []

    def heard(said: Event, trainer: Trainer) -> None:
        events.append(said)
        on_event(said, trainer)

    return run_to_end(LocalGroup(), tokens, config, None, heard), events


def newest_good(folder: Path) -> tuple[Path | None, list[str]]:
    """What `--resume auto` takes, and what it says about those that it passes over."""
    run = RunFolder(folder)
    return run.resume_from("auto"), run.notes
