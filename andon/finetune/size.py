"""Memory and traffic of a fine-tuning run, before it starts.

The model is built and run once on tensors that are only shapes, which takes no memory. So its parameters are counted
and its activations are what autograd would keep, whatever the architecture.
"""

import copy
from functools import cache
from typing import Any

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
from andon.finetune.model import add_adapters
from andon.finetune.samples.sample_set import SampleSet
from andon.finetune.task import keeps_logits
from andon.run.plan import Plan, Trained, memory_of, sent


class Sizes:
    """How large a model is with its adapters, and how large its activations are."""

    def __init__(self, config: FinetuneConfig, base: Base, samples: SampleSet) -> None:
        self.base, self.samples = base, samples
        lengths = [samples.starts[at + 1] - samples.starts[at] for at in range(len(samples))]
        self.longest, self.mean_length = int(max(lengths)), float(sum(lengths)) / len(lengths)
        self._model = self._build(config)
        units = [(name, sum(value.numel() for _, value in found)) for name, found in backward_order(self._model)]
        blocks = [size for name, size in units if name.rpartition(".")[2].isdigit()]
        self.trained = Trained(blocks, [size for name, size in units if not name.rpartition(".")[2].isdigit()])
        self.all_parameters = sum(value.numel() for value in self._model.parameters())
        self.activations = cache(self._activations)

    def plan(self, config: FinetuneConfig) -> Plan:
        """The arithmetic of a configuration of this model and these samples."""
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
            model: nn.Module = kind.from_config(settings, dtype=torch.float32)
            return (add_adapters(model, self.samples.task, config.lora) if config.lora.rank else model).train()

    def _activations(self, rows: int) -> int:
        """Bytes alive when backward of a slot with so many of the longest sample begins: what autograd keeps, and two
        gradients of the logits."""
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[_memory(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with FakeTensorMode():  # unlike those on the device `meta`, such tensors choose the kernels of a CPU
            tensors = (*self._model.named_parameters(), *self._model.named_buffers())
            weights = {name: _like(value) for name, value in tensors}
            tokens = torch.zeros(rows, self.longest, dtype=torch.long)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                logits = self._logits(weights, tokens).float().flatten(0, -2)
                loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
            del loss
        own = {_memory(value) for value in weights.values()}
        return sum(size for memory, size in kept.items() if memory not in own) + 2 * 4 * logits.numel()

    def _logits(self, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
        more: dict[str, Any] = {"input_ids": tokens}
        if self.samples.task == "answers":
            more["use_cache"] = False
            if keeps_logits(self._model):
                more["logits_to_keep"] = self._most_answers()
        try:
            logits: Tensor = functional_call(self._model, weights, kwargs=more).logits
        except Exception as error:  # models raise nearly everything
            remedy = "`andon finetune` itself may work: a plan needs a model that computes with shapes alone"
            raise UserError(f"There is no plan for {self.base.folder}", first_line(error), remedy) from None
        return logits

    def _most_answers(self) -> int:
        counts = [int((self.samples.answer(number) != NO_TARGET).sum()) for number in range(len(self.samples))]
        return max(counts)


def _memory(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _like(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, requires_grad=value.requires_grad)
