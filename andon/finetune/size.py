"""Memory and traffic of a fine-tuning run, before it starts.

The model is built and run once on tensors without data, which takes no memory. This counts the parameters and the
activations that autograd would keep, for any architecture.
"""

import copy
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from andon.config.finetune import FinetuneConfig
from andon.data.batches import NO_TARGET
from andon.engine.gradients.arena import backward_order
from andon.errors import UserError
from andon.finetune.base import Base, first_line
from andon.finetune.model import add_adapters, cannot_load
from andon.finetune.samples.sample_set import SampleSet
from andon.finetune.task import keeps_logits
from andon.run.plan import Plan, Trained, memory_of, sent


class Sizes:
    """The sizes of a model with its adapters, and of its activations."""

    def __init__(self, config: FinetuneConfig, base: Base, samples: SampleSet) -> None:
        self.base, self.samples = base, samples
        lengths = np.diff(samples.starts)
        self.longest, self.mean_length = int(lengths.max()), float(lengths.mean())
        self._model = self._build(config)
        units = [(name, sum(value.numel() for _, value in found)) for name, found in backward_order(self._model)]
        blocks = [size for name, size in units if _is_block(name)]
        self.trained = Trained(blocks, [size for name, size in units if not _is_block(name)])
        self.all_parameters = sum(value.numel() for value in self._model.parameters())
        self.activations = cache(self._activations)

    def plan(self, config: FinetuneConfig) -> Plan:
        """The memory and traffic of a configuration with this model and these samples."""
        train = config.train
        tokens = round(train.slots * train.micro_batch * self.mean_length)
        frozen = 4 * (self.all_parameters - self.trained.parameters)
        memory = memory_of(config, self.trained, self.activations(train.micro_batch), frozen)
        return Plan(self.all_parameters, tokens, tokens * train.steps, memory, sent(config, self.trained))

    def _build(self, config: FinetuneConfig) -> nn.Module:
        import transformers

        settings, kind = copy.deepcopy(self.base.config), transformers.AutoModelForCausalLM
        settings.get_text_config().pad_token_id = self.base.padding
        if self.samples.task == "classes":
            settings.num_labels, kind = len(self.samples.labels), transformers.AutoModelForSequenceClassification
        with torch.device("meta"):
            try:
                model: nn.Module = kind.from_config(settings, dtype=torch.float32, trust_remote_code=False)
            except Exception as error:  # the library raises many kinds of errors
                raise cannot_load(self.base, error) from None
            return (add_adapters(model, self.samples.task, config.lora) if config.lora.rank else model).train()

    def _activations(self, rows: int) -> int:
        """Bytes alive at the start of backward, for a slot with this many rows of the longest sample: the tensors that
        autograd keeps, and two gradients of the logits."""
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[_storage_id(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with FakeTensorMode():  # unlike tensors on the device `meta`, these select the kernels of a CPU
            tensors = (*self._model.named_parameters(), *self._model.named_buffers())
            weights = {name: _like(value) for name, value in tensors}
            tokens = torch.zeros(rows, self.longest, dtype=torch.long)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                logits = self._logits(weights, tokens).float().flatten(0, -2)
                loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
            del loss
        own = {_storage_id(value) for value in weights.values()}
        return sum(size for storage, size in kept.items() if storage not in own) + 2 * 4 * logits.numel()

    def _logits(self, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": tokens}
        if self.samples.task == "answers":
            inputs["use_cache"] = False
            if keeps_logits(self._model):
                counts = [(self.samples.answer(number) != NO_TARGET).sum() for number in range(len(self.samples))]
                inputs["logits_to_keep"] = int(max(counts))
        try:
            logits: Tensor = functional_call(self._model, weights, kwargs=inputs).logits
        except Exception as error:  # models raise many kinds of errors
            remedy = "`andon finetune` itself may work: a plan needs a model that runs on tensors without data"
            raise UserError(f"There is no plan for {self.base.folder}", first_line(error), remedy) from None
        return logits


def _is_block(unit: str) -> bool:
    return unit.rpartition(".")[2].isdigit()


def _storage_id(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _like(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, requires_grad=value.requires_grad)
