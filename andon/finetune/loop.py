"""The loop of a fine-tuning run: accuracy, answers before and after, and the result in its folder."""

from typing import Any

import torch

from andon.config.finetune import FinetuneConfig
from andon.engine.trainer import Trainer
from andon.finetune.answer import Answering
from andon.finetune.base import Base
from andon.finetune.result import write_result
from andon.finetune.samples.sample_set import SampleBatches, SampleSet
from andon.finetune.task import Learning
from andon.run.events import Emit, event
from andon.run.loop import Loop, while_others_wait


class FineTuning(Loop):
    """One rank's fine-tuning run."""

    def __init__(
        self, config: FinetuneConfig, samples: SampleSet, trainer: Trainer, learning: Learning, base: Base, emit: Emit
    ) -> None:
        super().__init__(config, samples.digest, trainer, emit)
        self.config, self.samples, self.learning, self.base = config, samples, learning, base
        self.answering = Answering(trainer.model.module, base, samples.task, samples.labels)

    def step_facts(self) -> dict[str, Any]:
        """Right answers of the step, over all ranks."""
        accuracy = self.learning.accuracy
        share = accuracy.correct / max(1, accuracy.total)
        return {"correct": accuracy.correct, "total": accuracy.total, "accuracy": share}

    def before_first_step(self) -> None:
        """How good the model is before it learns, and its answers to held-out samples."""
        self.evaluate()
        for text in while_others_wait(self.group, self.answers) or []:
            self.emit(event("sample", step=0, text=text))

    def evaluate(self) -> dict[str, Any]:
        """Loss and accuracy on held-out samples."""
        with self.trainer.autocast():
            score = self.learning.evaluate(self.batches.validation(self.config.eval.samples), self.group)
        right = {"correct": score.correct, "total": score.total, "accuracy": score.accuracy}
        result = {"step": self.trainer.progress.step, "loss": score.loss, **right}
        self.emit(event("eval", **result))
        return result

    @property
    def batches(self) -> SampleBatches:
        batches = self.trainer.batches
        assert isinstance(batches, SampleBatches)
        return batches

    def answers(self) -> list[str]:
        """What the model answers to a few held-out samples, and what it should."""
        numbers = [number for batch in self.batches.validation_windows(self.config.eval.shown) for number in batch]
        with torch.no_grad(), self.trainer.autocast():
            return [self.answering.to_sample(self.samples, number, self.config.eval.length) for number in numbers]

    def end(self, result: dict[str, Any]) -> dict[str, Any]:
        """Answers after training, and the folder with the result, which rank 0 writes."""
        right = {key: result[key] for key in ("correct", "total", "accuracy")}
        state = {**self.trainer.progress.fields(), **right}
        model, samples, base = self.trainer.model.module, self.samples, self.base
        folder = self.config.run.dir
        written = while_others_wait(self.group, lambda: write_result(folder, model, base, samples, state))
        return {**right, "result": str(written), "samples": while_others_wait(self.group, self.answers)}
