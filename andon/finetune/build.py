"""From a configuration to a trainer: the parts of a fine-tuning run. The step is that of `andon train`."""

import torch

from andon.checkpoint.store import weights_blake3
from andon.config.finetune import FinetuneConfig
from andon.engine.optimizer import Optimizer
from andon.engine.trainer import Trainer
from andon.finetune.base import Base
from andon.finetune.loop import FineTuning
from andon.finetune.model import build_model
from andon.finetune.samples import SampleBatches, SampleSet
from andon.finetune.task import Learning
from andon.run.build import build_checkpointer, build_optimizer, inject, step_settings
from andon.run.events import Emit
from andon.transport.base import Group


def build_finetuning(
    config: FinetuneConfig, samples: SampleSet, group: Group, device: torch.device, emit: Emit
) -> FineTuning:
    """The fine-tuning of one rank; only rank 0 emits events."""
    base = Base(config.model)
    model = build_model(base, samples.task, samples.labels, config.lora, config.seed).to(device)
    optimizer = build_optimizer(config, model, group, overlap=False)
    optimizer.facts = f"{config.determinism_key} {samples.digest}"
    checkpointer = build_checkpointer(config, optimizer, samples.digest, {}, emit, frozen_digest(optimizer))
    trainer = Trainer(optimizer, SampleBatches(samples, config), step_settings(config, device), checkpointer)
    learning = Learning(model, samples.task, base.padding)
    trainer.loss = learning.loss
    optimizer.passengers.append(learning.accuracy)
    if config.fault:
        inject(config, optimizer)
    return FineTuning(config, samples, trainer, learning, base, emit)


def frozen_digest(optimizer: Optimizer) -> str:
    """BLAKE3 of the weights that are not trained; empty if there are none."""
    trained, module = optimizer.model.arena.parameters, optimizer.model.module
    frozen = {name: value for name, value in module.named_parameters() if name not in trained}
    return weights_blake3(frozen) if frozen else ""
