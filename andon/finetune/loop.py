"""The loop of a fine-tuning run: accuracy, answers before and after training, and the result in the run's folder."""

from collections.abc import Sequence
from typing import Any

import torch

from andon.config.finetune import FinetuneConfig
from andon.engine.recovery.commit import Recovery
from andon.engine.trainer import Trainer
from andon.finetune.answer import Predictor
from andon.finetune.base import Base
from andon.finetune.model import build_model
from andon.finetune.result import write_result
from andon.finetune.samples.sample_set import SampleBatches, SampleSet
from andon.finetune.task import Scorer, accuracy_fields
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
        self.scorer = Scorer(module, samples.task, base.padding, trainer.progress, bf16)
        self.predictor = Predictor(module, base, samples.task, samples.labels)
        trainer.loss = self.scorer.loss
        trainer.optimizer.passengers.append(self.scorer.accuracy)

    def set_first_weights(self) -> None:
        """Set the weights of the model's folder; new ones come from the seed."""
        first = dict(build_model(self.config, self.samples, self.base).named_parameters())
        for name, value in self.trainer.model.arena.parameters.items():
            value.data.copy_(first[name])

    def go_on(self, recovery: Recovery, recorded: int, since: float) -> None:
        """Forget the answers of a step that was not committed, because it is done again."""
        self.scorer.accuracy.forget()
        super().go_on(recovery, recorded, since)

    def step_facts(self, tokens_per_s: float) -> dict[str, Any]:
        """Right answers of the step, over all ranks."""
        return self.scorer.accuracy.of(self.trainer.progress.step)

    def texts(self, samples: Sequence[int | str]) -> dict[str, str]:
        """The texts of samples and their expected answers, by file and line."""
        found = {}
        for place in map(str, samples):
            if (number := self.samples.find(place)) is not None:
                text, answer = self.samples.texts(number, self.base.tokenizer)
                found[place] = f"{text} → {answer}"[:TEXT_CHARS]
        return found

    def before_first_step(self) -> None:
        """Evaluate the model before it learns, and show its answers to held-out samples."""
        self.evaluate()
        for text in while_others_wait(self.group, self.answers) or []:
            self.emit("sample", step=0, text=text)

    def evaluate(self) -> dict[str, Any]:
        """Loss and accuracy on held-out samples."""
        samples = self.batches.validation(self.config.eval.samples)
        loss, correct, total = self.scorer.evaluate(samples, self.group)
        result = {"step": self.trainer.progress.step, "loss": loss, **accuracy_fields(correct, total)}
        self.emit("eval", **result)
        return result

    @property
    def batches(self) -> SampleBatches:
        batches = self.trainer.batches
        assert isinstance(batches, SampleBatches)
        return batches

    def answers(self) -> list[str]:
        """The model's answers to a few held-out samples, with the expected ones."""
        numbers = [number for batch in self.batches.validation_windows(self.config.eval.shown) for number in batch]
        with torch.no_grad(), self.scorer.autocast():
            return [self.predictor.answer_sample(self.samples, number, self.config.eval.length) for number in numbers]

    def end(self, result: dict[str, Any]) -> dict[str, Any]:
        """Have rank 0 write the result, and show its answers after training."""
        right = {key: result[key] for key in ("correct", "total", "accuracy")}
        state = {**self.trainer.progress.fields(), **right}
        model, samples, base = self.trainer.model.module, self.samples, self.base
        folder = self.config.run.dir
        written = while_others_wait(self.group, lambda: write_result(folder, model, base, samples, state))
        return {**right, "result": str(written), "samples": while_others_wait(self.group, self.answers)}
