"""One rank of the fine-tuning benchmark: after each turn of Hugging Face's Trainer comes a turn of Andon."""

import os
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler
from transformers import PrinterCallback, TrainerCallback, TrainingArguments
from transformers import Trainer as HuggingFaceTrainer

from andon.bench.kit.rank import join, open_gloo
from andon.config.finetune import FinetuneConfig
from andon.data.batches import NO_TARGET
from andon.finetune.base import Base
from andon.finetune.build import FineTuningBuilder
from andon.finetune.loop import FineTuning
from andon.finetune.model import build_model
from andon.finetune.samples.sample_set import SampleBatches, SampleSet
from andon.finetune.samples.tokenize import prepare_samples
from andon.run.records.events import no_event
from andon.transport.base import Group
from andon.transport.registry import open_group


class InOrder(Dataset[dict[str, list[int]]]):
    """The samples in the order of Andon's steps and slots; within a step those of rank 0 come first."""

    def __init__(self, samples: SampleSet, config: FinetuneConfig) -> None:
        batches, slots = SampleBatches(samples, config), range(config.train.slots)
        steps = range(1, config.train.steps + 1)
        self.samples = samples
        self.numbers = [number for step in steps for slot in slots for number in batches.windows(step, slot)]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> dict[str, list[int]]:
        number = self.numbers[place]
        return {"ids": self.samples.tokens(number).tolist(), "labels": self.samples.answer(number).tolist()}


class Plain(HuggingFaceTrainer):  # type: ignore[misc]
    """The Trainer, reading the samples in order and keeping the loss of every step."""

    losses: list[Tensor]

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def training_step(self, *inputs: Any, **named: Any) -> Tensor:
        loss: Tensor = super().training_step(*inputs, **named)
        self.losses.append(loss.detach())
        return loss


class Turns(TrainerCallback):  # type: ignore[misc]
    """Does a turn of Andon after each turn of the Trainer, and keeps the seconds of a step of both."""

    def __init__(self, run: FineTuning, gloo: Group, steps: int) -> None:
        self.run, self.gloo, self.steps = run, gloo, steps
        self.seconds: dict[str, list[float]] = {"trainer": [], "andon": []}
        self.losses: list[float] = []
        self._began = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.gloo.barrier()
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.steps:
            return
        self.seconds["trainer"].append((time.perf_counter() - self._began) / self.steps)
        self.gloo.barrier()
        started = time.perf_counter()
        self.losses += [self.run.trainer.train_step().loss for _ in range(self.steps)]
        self.seconds["andon"].append((time.perf_counter() - started) / self.steps)
        self.gloo.barrier()
        self._began = time.perf_counter()


def collate(padding: int, rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Pad samples into a batch."""
    longest = max(len(row["ids"]) for row in rows)

    def padded(name: str, filler: int) -> Tensor:
        return torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["ids"]) + [0] * (longest - len(row["ids"])) for row in rows])
    return {"input_ids": padded("ids", padding), "attention_mask": mask, "labels": padded("labels", NO_TARGET)}


def make_trainer(config: FinetuneConfig, samples: SampleSet, steps: int, folder: str) -> Plain:
    """The Trainer with the same model, adapters, samples, batch and optimizer."""
    base = Base(config.model)
    model = build_model(config, samples, base)
    optim = config.optim
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=config.train.micro_batch,
        max_steps=steps,
        learning_rate=optim.lr,
        lr_scheduler_type="constant",
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_epsilon=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.clip,
        optim="adamw_torch_fused",
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = Plain(
        model=model,
        args=arguments,
        train_dataset=InOrder(samples, config),
        data_collator=lambda rows: collate(base.padding, rows),
    )
    trainer.remove_callback(PrinterCallback)  # it would print where the results go
    trainer.losses = []
    return trainer


def measure(task: dict[str, Any], group: Group, gloo: Group) -> dict[str, Any]:
    """Train with both in turn: seconds of a step in each turn, losses of every step."""
    config = FinetuneConfig.model_validate(task["config"])
    samples = prepare_samples(config, Base(config.model))
    builder = FineTuningBuilder(config, samples)
    run = builder.loop(builder.first(group, torch.device("cpu"), no_event), no_event)
    trainer = make_trainer(config, samples, task["turns"] * task["steps"], f"{config.run.dir}-trainer")
    turns = Turns(run, gloo, task["steps"])
    trainer.add_callback(turns)
    trainer.train()
    run.trainer.close()
    return {"seconds": turns.seconds, "andon": turns.losses, "trainer": [float(loss) for loss in trainer.losses]}


def main(task: dict[str, Any]) -> dict[Any, Any]:
    """Measure; returns seconds and losses."""
    rank, ranks = str(task["rank"]), str(task["ranks"])
    # The Trainer reads these variables, and then uses the process group that is open already.
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(task["port"]))
    rendezvous = join(task)
    with open_gloo(rendezvous) as gloo, open_group(task["transport"], rendezvous) as group:
        found = measure(task, group, gloo)
    return found
