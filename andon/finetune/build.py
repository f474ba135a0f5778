"""From a configuration to a trainer: the parts of a fine-tuning run. The step is that of `andon train`."""

import json
from socket import gethostname
from typing import Any, Final

import torch

from andon.checkpoint.store import weights_blake3
from andon.config.finetune import FinetuneConfig
from andon.engine.optimizer import Optimizer
from andon.engine.trainer import Trainer
from andon.errors import UserError
from andon.finetune.base import Base
from andon.finetune.loop import FineTuning
from andon.finetune.model import build_model
from andon.finetune.samples.sample_set import SampleBatches, SampleSet
from andon.finetune.task import Learning
from andon.run.build import build_checkpointer, build_optimizer, inject, step_settings
from andon.run.events import Emit
from andon.transport.base import Group

TOKENIZER_TEXTS: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
)
"""Files of a tokenizer that a checkpoint of all weights takes along."""


def build_finetuning(
    config: FinetuneConfig, samples: SampleSet, group: Group, device: torch.device, emit: Emit
) -> FineTuning:
    """The fine-tuning of one rank; only rank 0 emits events."""
    base = open_base(config, group.rank)
    model = build_model(base, samples.task, samples.labels, config.lora, config.seed).to(device)
    optimizer = build_optimizer(config, model, group, overlap=False)
    optimizer.facts = f"{config.determinism_key} {samples.digest}"
    files = {} if config.lora.rank else hub_files(model, base)
    checkpointer = build_checkpointer(config, optimizer, samples.digest, files, emit, frozen_digest(optimizer))
    trainer = Trainer(optimizer, SampleBatches(samples, config), step_settings(config, device), checkpointer)
    learning = Learning(model, samples.task, base.padding)
    trainer.loss = learning.loss
    optimizer.passengers.append(learning.accuracy)
    if config.fault:
        inject(config, optimizer)
    return FineTuning(config, samples, trainer, learning, base, emit)


def hub_files(model: Any, base: Base) -> dict[str, str]:
    """What makes a checkpoint of all weights a model folder, which `transformers` loads."""
    fields = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    found = (base.folder / name for name in TOKENIZER_TEXTS)
    texts = {file.name: file.read_text(encoding="utf-8") for file in found if file.is_file()}
    return {"config.json": json.dumps(fields, indent=2, default=str) + "\n", **texts}


def open_base(config: FinetuneConfig, rank: int) -> Base:
    """The model's folder, which every worker reads; an error names the one that cannot."""
    try:
        return Base(config.model)
    except UserError as error:
        raise UserError(f"Rank {rank} on {gethostname()}: {error.what}", error.cause, error.remedy) from None


def frozen_digest(optimizer: Optimizer) -> str:
    """BLAKE3 of the weights that are not trained; empty if there are none."""
    trained, module = optimizer.model.arena.parameters, optimizer.model.module
    frozen = {name: value for name, value in module.named_parameters() if name not in trained}
    return weights_blake3(frozen) if frozen else ""
