"""From a configuration to one rank's fine-tuning, with the step of `andon train`."""

import json
from collections.abc import Mapping
from socket import gethostname
from typing import Any, Final

import torch
from torch import nn

from andon.config.finetune import FinetuneConfig
from andon.engine.parallel import DataParallel
from andon.engine.trainer import Trainer
from andon.errors import UserError
from andon.finetune.base import Base
from andon.finetune.loop import FineTuning
from andon.finetune.model import build_model
from andon.finetune.samples.sample_set import SampleBatches, SampleSet
from andon.run.build import Builder
from andon.run.records.events import Emit
from andon.run.records.ledger import LedgerReports

TOKENIZER_TEXTS: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
)
"""Files of a tokenizer that a checkpoint of all weights includes."""


class FineTuningBuilder(Builder):
    """Builds one rank's fine-tuning; every worker reads the model's folder itself."""

    def __init__(self, config: FinetuneConfig, samples: SampleSet) -> None:
        super().__init__(config, samples)
        self.config, self.samples = config, samples
        try:
            self.base = Base(config.model)
        except UserError as error:
            raise UserError(f"{gethostname()}: {error.what}", error.cause, error.remedy) from None

    def model(self, device: torch.device, reads_weights: bool = True) -> nn.Module:
        """The model of the folder; new weights come from the seed."""
        return build_model(self.config, self.samples, self.base).to(device)

    def batches(self) -> SampleBatches:
        """The samples as micro-batches, padded to the longest sample of each slot."""
        return SampleBatches(self.samples, self.config)

    def files(self, model: DataParallel) -> Mapping[str, str]:
        """The configuration and tokenizer of a whole model; none if only adapters are trained."""
        if self.config.lora.rank:
            return {}
        module: Any = model.module
        fields = {**module.config.to_dict(), "architectures": [type(module).__name__]}
        found = (self.base.folder / name for name in TOKENIZER_TEXTS)
        texts = {file.name: file.read_text(encoding="utf-8") for file in found if file.is_file()}
        return {"config.json": json.dumps(fields, indent=2, default=str) + "\n", **texts}

    def loop(self, trainer: Trainer, emit: Emit, ledger: LedgerReports | None = None) -> FineTuning:
        """The loop over the steps of a trainer."""
        return FineTuning(self.config, self.samples, self.base, trainer, emit, ledger)
