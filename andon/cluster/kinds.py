"""The kinds of runs, pretraining and fine-tuning: what launcher and workers do differently for each.

Everything else about a run is the same for both. torch is loaded only where a run is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from andon.config.finetune import FinetuneConfig
from andon.config.load import is_finetuning
from andon.config.schema import Config, RunSettings
from andon.data.build import Prepared
from andon.data.token_set import TokenSet
from andon.run import display
from andon.run.plan import Changes, Plan, changes, make_plan
from andon.run.prepare import prepare_tokens

if TYPE_CHECKING:
    import torch

    from andon.run.events import Emit
    from andon.run.loop import Loop
    from andon.transport.base import Group


def read_config(values: Mapping[str, Any]) -> RunSettings:
    """The configuration of a job; `ValueError` if it is none."""
    schema = FinetuneConfig if is_finetuning(values) else Config
    return schema.model_validate(values)


def describe(config: RunSettings) -> str:
    """What is trained, in a word."""
    return config.model if isinstance(config, FinetuneConfig) else _pretraining(config).model.preset


def settle(config: RunSettings, console: Console) -> RunSettings:
    """The configuration with what only the data decides: how many steps its epochs take."""
    if not isinstance(config, FinetuneConfig):
        return config
    from andon.finetune.plan import settle as settle_finetuning

    return settle_finetuning(config, console)


def show_plan(console: Console, config: RunSettings) -> None:
    """Print the plan of a run."""
    if isinstance(config, FinetuneConfig):
        from andon.finetune.plan import show_plan as show_finetuning

        return show_finetuning(console, config)
    return display.show_plan(console, _pretraining(config))


def plans(config: RunSettings) -> tuple[Plan, Changes]:
    """Memory and traffic of a settled run, and what other settings would make of them."""
    if isinstance(config, FinetuneConfig):
        from andon.finetune.plan import sizes_of

        make = sizes_of(config).plan
        return make(config), changes(config, make)
    pretraining = _pretraining(config)
    return make_plan(pretraining), changes(pretraining, make_plan)


def prepare(config: RunSettings, console: Console) -> Prepared:
    """The data of a run, made now or taken from the cache."""
    if isinstance(config, FinetuneConfig):
        from andon.finetune.base import Base
        from andon.finetune.samples.tokenize import prepare_samples

        return prepare_samples(config, Base(config.model))
    return prepare_tokens(_pretraining(config), console)


def open_data(config: RunSettings, folder: Path) -> Prepared:
    """The data in a folder of the cache."""
    if isinstance(config, FinetuneConfig):
        from andon.finetune.samples.sample_set import SampleSet

        return SampleSet.open(folder)
    return TokenSet.open(folder)


def make_run(config: RunSettings, data: Prepared, group: Group, device: torch.device, emit: Emit) -> Loop:
    """One rank's run with its trainer."""
    if isinstance(config, FinetuneConfig):
        from andon.finetune.build import build_finetuning
        from andon.finetune.samples.sample_set import SampleSet

        assert isinstance(data, SampleSet)
        return build_finetuning(config, data, group, device, emit)
    from andon.run.build import build_trainer
    from andon.run.loop import Run

    assert isinstance(data, TokenSet)
    pretraining = _pretraining(config)
    return Run(pretraining, data, build_trainer(pretraining, data, group, device, emit), emit)


def _pretraining(config: RunSettings) -> Config:
    assert isinstance(config, Config), type(config)
    return config
