"""The loss of both tasks, the class of a text or the tokens of an answer, and the number of right answers.

`correct` and `total` of a step are summed over all slots of all ranks; they are sent with the step's exchange.
"""

import contextlib
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from andon.config.finetune import Task
from andon.data.batches import NO_TARGET, Batch
from andon.engine.progress import Progress
from andon.engine.reading import Reading
from andon.run.evaluate import score_held_out
from andon.transport.base import Group


def accuracy_fields(correct: int, total: int) -> dict[str, float]:
    """The fields of an event about right answers."""
    return {"correct": correct, "total": total, "accuracy": correct / max(1, total)}


class Scorer:
    """Computes the loss of a model on batches of one task, in bf16 or f32, and counts right answers."""

    def __init__(self, model: nn.Module, task: Task, padding: int, progress: Progress, bf16: bool) -> None:
        self.model, self.task, self.padding = model, task, padding
        self.accuracy = Accuracy(progress)
        self._keeps_logits = keeps_logits(model)
        self._device, self._bf16 = next(model.parameters()).device, bf16

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which the model computes."""
        return torch.autocast(self._device.type, torch.bfloat16) if self._bf16 else contextlib.nullcontext()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a slot, summed over its targets; its right answers count for the step."""
        loss, right = self.score(x, y)
        self.accuracy.count(right, y)
        return loss

    def score(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss summed over targets, and the number of right answers."""
        with self.autocast():
            logits, y = self._classes(x, y) if self.task == "classes" else self._answers(x, y)
        logits = logits.float()
        loss = F.cross_entropy(logits, y, reduction="sum")
        return loss, (logits.detach().argmax(-1) == y).sum()

    def _classes(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        mask = x >= 0
        logits: Tensor = self.model(input_ids=x.where(mask, self.padding), attention_mask=mask.long()).logits
        return logits, y

    def _answers(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        # Padding comes last, and causal attention never looks ahead: no mask is needed.
        tokens = x.clamp(min=0)
        if not self._keeps_logits:
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        else:
            asked = (y != NO_TARGET).any(0).nonzero().flatten()
            logits, y = self.model(input_ids=tokens, use_cache=False, logits_to_keep=asked).logits, y[:, asked]
        counts = y != NO_TARGET
        return logits[counts], y[counts]

    def evaluate(self, batches: Iterable[Batch], group: Group) -> tuple[float, int, int]:
        """The mean loss, right answers and answers of all ranks."""
        was_training = self.model.training
        self.model.eval()
        found = score_held_out(batches, group, self._device, self.score)
        self.model.train(was_training)
        return found


def keeps_logits(model: nn.Module) -> bool:
    """Whether a model can compute the logits of chosen tokens only, which leaves out most of a prompt."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return "logits_to_keep" in inspect.signature(base.forward).parameters


class Accuracy:
    """The right answers of each step over all ranks: a passenger of the step's exchange."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._seen: list[Reading] = []
        self._steps: dict[int, tuple[int, int]] = {}
        """Right answers and all answers of the last committed step and the next one, by step."""

    def of(self, step: int) -> dict[str, float]:
        """The fields of a step's event; none if this rank joined after it."""
        return accuracy_fields(*self._steps[step]) if step in self._steps else {}

    def count(self, right: Tensor, y: Tensor) -> None:
        """Add a slot's right answers, without waiting for a GPU before the step ends."""
        self._seen.append(Reading(torch.stack([right, (y != NO_TARGET).sum()])))

    def forget(self) -> None:
        """Forget the counted slots, because the step is done again from its first slot."""
        self._seen = []

    def status(self) -> list[int]:
        """Right answers and all answers of this rank's slots."""
        seen, self._seen = self._seen, []
        answers = [each.values() for each in seen]
        return [sum(right for right, _ in answers), sum(count for _, count in answers)]

    def receive(self, statuses: Sequence[Sequence[int]]) -> None:
        """Add up the answers of all ranks."""
        done = self._progress.step
        self._steps = {step: answers for step, answers in self._steps.items() if step == done}
        self._steps[done + 1] = sum(right for right, _ in statuses), sum(count for _, count in statuses)
