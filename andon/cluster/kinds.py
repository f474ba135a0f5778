"""The kinds of runs, pretraining and fine-tuning: what launcher and workers do differently for each.

Everything else about a run is the same for both. torch is loaded only where a run is built or measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from andon.config.finetune import FinetuneConfig
from andon.config.load import is_finetuning
from andon.config.schema import Config, RunSettings
from andon.data.batches import Windows
from andon.data.cache import Prepared
from andon.data.token_set import TokenSet
from andon.run.plan import Plan, make_plan
from andon.run.prepare import build_batches, prepare_tokens
from andon.run.screen import outlook

if TYPE_CHECKING:
    from andon.run.build import Builder


def read_config(values: Mapping[str, Any]) -> RunSettings:
    """The configuration of a job; `ValueError` if it is none."""
    schema = FinetuneConfig if is_finetuning(values) else Config
    return schema.model_validate(values)


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
    return outlook.show_plan(console, _pretraining(config))


def inputs(config: RunSettings) -> tuple[str, ...]:
    """What a run reads that its user has named: files, folders and globs."""
    if isinstance(config, FinetuneConfig):
        return (config.model, *config.data.files)
    config = _pretraining(config)
    return (*config.data.corpus, config.data.tokenizer, *([config.model.source] if config.model.source else []))


def planner(config: RunSettings) -> Callable[[Any], Plan]:
    """What makes the plan of a settled run, and of the same run with other settings."""
    if isinstance(config, FinetuneConfig):
        from andon.finetune.plan import sizes_of

        return sizes_of(config).plan
    return make_plan


def prepare(config: RunSettings, console: Console) -> Prepared:
    """The data of a run, made now or taken from the cache."""
    if isinstance(config, FinetuneConfig):
        from andon.finetune.base import Base
        from andon.finetune.samples.tokenize import prepare_samples

        return prepare_samples(config, Base(config.model))
    return prepare_tokens(_pretraining(config), console)


def show_data(console: Console, config: RunSettings, data: Prepared) -> None:
    """Print what the data holds, where the plan has not said it."""
    if isinstance(data, TokenSet):
        outlook.show_corpus_plan(console, _pretraining(config), data.meta["documents"], data.token_count)


def open_data(config: RunSettings, folder: Path) -> Prepared:
    """The data in a folder of the cache."""
    if isinstance(config, FinetuneConfig):
        from andon.finetune.samples.sample_set import SampleSet

        return SampleSet.open(folder)
    return TokenSet.open(folder)


def samples_of(config: RunSettings, data: Prepared) -> Windows:
    """Which samples each slot of a step takes."""
    if isinstance(config, FinetuneConfig):
        from andon.finetune.samples.sample_set import SampleBatches, SampleSet

        assert isinstance(data, SampleSet)
        return SampleBatches(data, config)
    assert isinstance(data, TokenSet)
    return build_batches(_pretraining(config), data)


def libraries(config: RunSettings) -> tuple[str, ...]:
    """Modules that take a worker seconds to load."""
    if isinstance(config, FinetuneConfig):
        return ("andon.finetune.build", "transformers.models.auto.modeling_auto", "peft")
    return ("andon.run.pretraining",)


def builder_of(config: RunSettings, data: Prepared) -> Builder:
    """What builds one rank's run."""
    if isinstance(config, FinetuneConfig):
        from andon.finetune.build import FineTuningBuilder
        from andon.finetune.samples.sample_set import SampleSet

        assert isinstance(data, SampleSet)
        return FineTuningBuilder(config, data)
    from andon.run.pretraining import PretrainingBuilder

    assert isinstance(data, TokenSet)
    return PretrainingBuilder(_pretraining(config), data)


def _pretraining(config: RunSettings) -> Config:
    assert isinstance(config, Config), type(config)
    return config
