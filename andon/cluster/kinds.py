"""The two kinds of runs, pretraining and fine-tuning: everything that launcher and workers do differently for them.

torch and transformers are imported only by the functions that need them.
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
    """Validate the configuration of a job, of either kind; `ValueError` if it is not valid."""
    schema = FinetuneConfig if is_finetuning(values) else Config
    return schema.model_validate(values)


def resolve_steps(config: RunSettings, console: Console) -> RunSettings:
    """Fill in what depends on the data: the number of steps in its epochs, and the context."""
    if not isinstance(config, FinetuneConfig):
        return config
    from andon.finetune import plan

    return plan.resolve_steps(config, console)


def show_plan(console: Console, config: RunSettings) -> None:
    """Print the plan of a run."""
    if isinstance(config, FinetuneConfig):
        from andon.finetune import plan

        return plan.show_plan(console, config)
    return outlook.show_plan(console, _pretraining(config))


def inputs(config: RunSettings) -> tuple[str, ...]:
    """The files, folders and globs that the user named as input."""
    if isinstance(config, FinetuneConfig):
        return (config.model, *config.data.files)
    config = _pretraining(config)
    return (*config.data.corpus, config.data.tokenizer, *([config.model.source] if config.model.source else []))


def planner(config: RunSettings) -> Callable[[Any], Plan]:
    """A function that makes the plan of this run, also with other settings; its steps must be resolved."""
    if isinstance(config, FinetuneConfig):
        from andon.finetune.plan import sizes_of

        return sizes_of(config).plan
    return make_plan


def prepare(config: RunSettings, console: Console) -> Prepared:
    """Make the data of a run, or take it from the cache."""
    if isinstance(config, FinetuneConfig):
        from andon.finetune.base import Base
        from andon.finetune.samples.tokenize import prepare_samples

        return prepare_samples(config, Base(config.model))
    return prepare_tokens(_pretraining(config), console)


def show_data(console: Console, config: RunSettings, data: Prepared) -> None:
    """Print the size of the corpus; the plan of a fine-tuning already shows its data."""
    if isinstance(data, TokenSet):
        outlook.show_corpus_plan(console, _pretraining(config), data.meta["documents"], data.token_count)


def open_data(config: RunSettings, folder: Path) -> Prepared:
    """Open the data in a folder of the cache."""
    if isinstance(config, FinetuneConfig):
        from andon.finetune.samples.sample_set import SampleSet

        return SampleSet.open(folder)
    return TokenSet.open(folder)


def samples_of(config: RunSettings, data: Prepared) -> Windows:
    """The samples of each slot of each step."""
    if isinstance(config, FinetuneConfig):
        from andon.finetune.samples.sample_set import SampleBatches, SampleSet

        assert isinstance(data, SampleSet)
        return SampleBatches(data, config)
    assert isinstance(data, TokenSet)
    return build_batches(_pretraining(config), data)


def libraries(config: RunSettings) -> tuple[str, ...]:
    """Modules that take seconds to import."""
    if isinstance(config, FinetuneConfig):
        return ("andon.finetune.build", "transformers.models.auto.modeling_auto", "peft")
    return ("andon.run.pretraining",)


def builder_of(config: RunSettings, data: Prepared) -> Builder:
    """The builder of one rank's run."""
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
