"""Answers of a model: the text that it generates, or the class that it chooses."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from andon.config.finetune import Task
from andon.finetune.base import Base
from andon.finetune.samples.sample_set import SampleSet


class Predictor:
    """A model with its tokenizer and classes, ready to answer."""

    def __init__(self, model: nn.Module, base: Base, task: Task, labels: Sequence[str]) -> None:
        self.model, self.base, self.task, self.labels = model, base, task, labels

    def answer_sample(self, samples: SampleSet, number: int, length: int) -> str:
        """Answer a sample, and add the answer that is expected."""
        text, expected = samples.texts(number, self.base.tokenizer)
        if self.task == "classes":
            label, probability = self.classify(samples.tokens(number).tolist())
            verdict = "right" if label == expected else f"it is {expected}"
            return f"{text} → {label} ({probability:.0%}); {verdict}"
        return f"{text} → {self.generate(samples.prompt(number).tolist(), length)} (expected: {expected})"

    @torch.no_grad()
    def classify(self, ids: Sequence[int]) -> tuple[str, float]:
        """The most likely class of a text, and its probability."""
        row, was_training = self._row(ids), self.model.training
        self.model.eval()
        probabilities = self.model(input_ids=row, attention_mask=torch.ones_like(row)).logits[0].float().softmax(-1)
        self.model.train(was_training)
        best = int(probabilities.argmax())
        return self.labels[best], float(probabilities[best])

    @torch.no_grad()
    def generate(self, prompt: Sequence[int], length: int, temperature: float = 0.0) -> str:
        """Continue a prompt with the most likely tokens, or at a temperature with torch's random generator."""
        if self.base.positions:  # prompt and answer must fit into the positions of the model
            prompt = prompt[1 - self.base.positions :]
            length = min(length, self.base.positions - len(prompt))
        row, was_training = self._row(prompt), self.model.training
        self.model.eval()
        settings: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": length}
        if temperature > 0:
            settings |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        out: Tensor = self.model.generate(  # type: ignore[operator]
            input_ids=row, attention_mask=torch.ones_like(row), pad_token_id=self.base.padding, **settings
        )
        self.model.train(was_training)
        text: str = self.base.tokenizer.decode(out[0, len(prompt) :].tolist(), skip_special_tokens=True)
        return text.strip()

    def _row(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], dtype=torch.long, device=next(self.model.parameters()).device)
