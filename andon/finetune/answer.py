"""Answers of a model: the text that it writes, or the class that it chooses."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from andon.config.finetune import Task
from andon.finetune.base import Base
from andon.finetune.samples.sample_set import SampleSet


class Answering:
    """A model that is asked."""

    def __init__(self, model: nn.Module, base: Base, task: Task, labels: Sequence[str]) -> None:
        self.model, self.base, self.task, self.labels = model, base, task, labels

    def to_sample(self, samples: SampleSet, number: int, length: int) -> str:
        """The answer to a sample, with the one that it should be."""
        text, expected = samples.texts(number, self.base.tokenizer)
        if self.task == "classes":
            label, share = self.classify(samples.tokens(number).tolist())
            return f"{text} → {label} ({share:.0%}); {'right' if label == expected else f'it is {expected}'}"
        return f"{text} → {self.write(samples.prompt(number).tolist(), length)} (expected: {expected})"

    @torch.no_grad()
    def classify(self, ids: Sequence[int]) -> tuple[str, float]:
        """The likeliest class of a text, and its probability."""
        row, was_training = self._row(ids), self.model.training
        self.model.eval()
        shares = self.model(input_ids=row, attention_mask=torch.ones_like(row)).logits[0].float().softmax(-1)
        self.model.train(was_training)
        best = int(shares.argmax())
        return self.labels[best], float(shares[best])

    @torch.no_grad()
    def write(self, prompt: Sequence[int], length: int, temperature: float = 0.0) -> str:
        """The text that follows a prompt; the likeliest token each time, or drawn from torch's generator."""
        if self.base.positions:  # more would be read than some models have positions for
            prompt = prompt[1 - self.base.positions :]
            length = min(length, self.base.positions - len(prompt))
        row, was_training = self._row(prompt), self.model.training
        self.model.eval()
        how: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": length}
        if temperature > 0:
            how |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        out: Tensor = self.model.generate(  # type: ignore[operator]
            input_ids=row, attention_mask=torch.ones_like(row), pad_token_id=self.base.padding, **how
        )
        self.model.train(was_training)
        text: str = self.base.tokenizer.decode(out[0, len(prompt) :].tolist(), skip_special_tokens=True)
        return text.strip()

    def _row(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], dtype=torch.long, device=next(self.model.parameters()).device)
