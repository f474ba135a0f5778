"""The loop of a fine-tuning run: accuracy, answers before and after, and the result in its folder."""

from collections.abc import Sequence
from typing import Any

import torch

from andon.config.finetune import FinetuneConfig
from andon.engine.recovery.commit import Recovery
from andon.engine.trainer import Trainer
from andon.finetune.answer import Answering
from andon.finetune.base import Base
from andon.finetune.model import build_model
from andon.finetune.result import write_result
from andon.finetune.samples.sample_set import SampleBatches, SampleSet
from andon.finetune.task import Learning
from andon.run.build import computes_in_bf16
from andon.run.loop import TEXT_CHARS, Loop, while_others_wait
from andon.run.records.events import Emit
from andon.run.records.ledger import LedgerReports


class FineTuning(Loop):
    """One rank's fine-tuning."""

    def __init__(
        self,
        config: FinetuneConfig,
        samples: SampleSet,
        base: Base,
        trainer: Trainer,
        emit: Emit,
        ledger: LedgerReports | None = None,
    ) -> None:
        super().__init__(config, samples.digest, trainer, emit, ledger)
        self.config, self.samples, self.base = config, samples, base
        module = trainer.model.module
        bf16 = computes_in_bf16(config, trainer.model.arena.device)
        self.learning = Learning(module, samples.task, base.padding, trainer.progress, bf16)
        self.answering = Answering(module, base, samples.task, samples.labels)
        trainer.loss = self.learning.loss
        trainer.optimizer.passengers.append(self.learning.accuracy)

    def set_first_weights(self) -> None:
        """Those of the model's folder, and what is new from the seed."""
        first = dict(build_model(self.config, self.samples, self.base).named_parameters())
        for name, value in self.trainer.model.arena.parameters.items():
            value.data.copy_(first[name])

    def go_on(self, recovery: Recovery, recorded: int, since: float) -> None:
        """A step that was not committed is done again, and so are its answers."""
        self.learning.accuracy.forget()
        super().go_on(recovery, recorded, since)

    def step_facts(self, tokens_per_s: float) -> dict[str, Any]:
        """Right answers of the step, over all ranks."""
        return self.learning.accuracy.of(self.trainer.progress.step)

    def texts(self, samples: Sequence[int | str]) -> dict[str, str]:
        """What samples ask and what they answer, by file and line."""
        found = {str(place): self.samples.find(str(place)) for place in samples}
        read = {
            name: self.samples.texts(number, self.base.tokenizer)
            for name, number in found.items()
            if number is not None
        }
        return {name: f"{text} → {answer}"[:TEXT_CHARS] for name, (text, answer) in read.items()}

    def before_first_step(self) -> None:
        """How good the model is before it learns, and its answers to held-out samples."""
        self.evaluate()
        for text in while_others_wait(self.group, self.answers) or []:
            self.emit("sample", step=0, text=text)

    def evaluate(self) -> dict[str, Any]:
        """Loss and accuracy on held-out samples."""
        score = self.learning.evaluate(self.batches.validation(self.config.eval.samples), self.group)
        right = {"correct": score.correct, "total": score.total, "accuracy": score.accuracy}
        result = {"step": self.trainer.progress.step, "loss": score.loss, **right}
        self.emit("eval", **result)
        return result

    @property
    def batches(self) -> SampleBatches:
        batches = self.trainer.batches
        assert isinstance(batches, SampleBatches)
        return batches

    def answers(self) -> list[str]:
        """What the model answers to a few held-out samples, and what it should."""
        numbers = [number for batch in self.batches.validation_windows(self.config.eval.shown) for number in batch]
        with torch.no_grad(), self.learning.autocast():
            return [self.answering.to_sample(self.samples, number, self.config.eval.length) for number in numbers]

    def end(self, result: dict[str, Any]) -> dict[str, Any]:
        """Answers after training, and the folder with the result, which rank 0 writes."""
        right = {key: result[key] for key in ("correct", "total", "accuracy")}
        state = {**self.trainer.progress.fields(), **right}
        model, samples, base = self.trainer.model.module, self.samples, self.base
        folder = self.config.run.dir
        written = while_others_wait(self.group, lambda: write_result(folder, model, base, samples, state))
        return {**right, "result": str(written), "samples": while_others_wait(self.group, self.answers)}
