"""The trainer: one worker's part of a run, step by step."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from andon import evaluation
from andon.arena import Arena
from andon.checkpoint.listing import should_save
from andon.checkpoint.store import Snapshot, Store, load_moments, load_state, weights_blake3
from andon.config import Config
from andon.data import stories
from andon.data.batches import Batches
from andon.data.shards import TokenSet
from andon.errors import UserError
from andon.gradients import Gradients, Totals
from andon.group.base import Group
from andon.integrity.halt import halt_unless_sound
from andon.metrics import Emit, event
from andon.model.hub import load_weights, to_hub
from andon.model.llama import Llama
from andon.optim import schedules
from andon.optim.adamw import AdamW, Settings


class Trainer:
    """Trains one model with the other ranks of a group; every rank runs the same lines."""

    def __init__(
        self, config: Config, tokens: TokenSet, group: Group, transport: str, device: torch.device
    ) -> None:
        self.config, self.tokens, self.group, self.transport, self.device = (
            config,
            tokens,
            group,
            transport,
            device,
        )
        self.tokenizer = tokens.tokenizer()
        check_vocabulary(config, tokens)
        self.batches = Batches(
            tokens,
            config.seed,
            config.train.slots,
            config.train.micro_batch,
            config.train.context,
            config.data.validation,
        )
        self.model = Llama(config.shape)
        self.model.initialise(config.seed)
        self.model.to(device)
        if config.train.compile:
            self.model.compile_blocks()
        optim = config.optim
        self.arena = Arena(self.model)
        self.gradients = Gradients(self.arena, group, config.train.slots)
        self.optimizer = AdamW(self.arena, Settings(optim.beta1, optim.beta2, optim.eps, optim.weight_decay))
        self.store = Store(config.run.dir / "checkpoints", config.checkpoint.keep)
        self.step = 0
        self.last_loss = float("nan")

    def run(self, emit: Emit, stop_wanted: Callable[[], bool]) -> None:
        """Train to the last step, or until someone wants to stop; save on the way and at the end."""
        steps = self.config.train.steps
        sampled = time.monotonic()
        while self.step < steps:
            started = time.perf_counter()
            totals, timings = self.train_step(stop_wanted())
            seconds = time.perf_counter() - started
            if self.group.rank == 0:
                emit(self._step_event(totals, seconds, timings))
            last = totals.stop or self.step == steps
            if totals.stop or should_save(self.step, self.config.checkpoint.every, steps):
                self.save(emit)
            if totals.stop:
                if self.group.rank == 0:
                    emit(event("stopped", step=self.step))
                return
            if due(self.step, self.config.eval.every) and not last:
                self.evaluate(emit)
            every = self.config.eval.sample_every
            if self.group.rank == 0 and every and time.monotonic() - sampled > every and not last:
                emit(event("sample", step=self.step, text=self.write(1, seed=self.step)[0]))
                sampled = time.monotonic()
        self._finish(emit)

    def train_step(self, stop: bool = False) -> tuple[Totals, dict[str, float]]:
        """One step: slots, exchange, verdict, update. No weight changes before all ranks agree."""
        clock = [time.perf_counter()]
        step = self.step + 1
        for slot in self.gradients.slots:
            x, y = self.batch(step, slot)
            with self.autocast():
                loss = self.model(x, y)
            self.gradients.backward(loss, slot, y.numel())
        clock.append(time.perf_counter())
        totals = self.gradients.finish(stop)
        clock.append(time.perf_counter())
        halt_unless_sound(step, totals)
        self.optimizer.step(self.gradients.total, self.scale(totals), self.learning_rate(step))
        clock.append(time.perf_counter())
        self.step, self.last_loss = step, totals.loss
        names = ("compute_ms", "exchange_ms", "optimizer_ms")
        return totals, {
            name: round(1e3 * (b - a), 3) for name, a, b in zip(names, clock, clock[1:], strict=False)
        }

    def batch(self, step: int, slot: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a slot, on the device."""
        x, y = self.batches(step, slot)
        return torch.from_numpy(x).to(self.device), torch.from_numpy(y).to(self.device)

    def scale(self, totals: Totals) -> float:
        """What summed gradients are divided by: the tokens of the step, and the clipping of their norm."""
        clip = self.config.optim.clip
        return totals.tokens * max(1.0, totals.norm / clip if clip else 1.0)

    def learning_rate(self, step: int) -> float:
        optim = self.config.optim
        fraction = schedules.rate(optim.schedule, step, self.config.train.steps, optim.warmup, optim.final_lr)
        return optim.lr * fraction

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """bf16 where the configuration and the device want it."""
        precision = self.config.train.precision
        wanted = precision == "bf16" or (precision == "auto" and self.device.type == "cuda")
        return torch.autocast(self.device.type, torch.bfloat16) if wanted else contextlib.nullcontext()

    def evaluate(self, emit: Emit) -> dict[str, Any]:
        """Loss on held-out windows and, for the built-in stories, the share of valid samples."""
        windows = self.batches.validation(self.config.eval.windows)
        with self.autocast():
            loss = evaluation.validation_loss(self.model, windows, self.group)
        result: dict[str, Any] = {
            "step": self.step,
            "loss": loss,
            "bits_per_byte": evaluation.bits_per_byte(loss, self.tokens.bytes_per_token),
        }
        if self.group.rank == 0:
            if self.config.data.corpus == ("stories",) and self.config.eval.stories:
                score = self.story_score()
                result |= {"valid_share": score.valid_share, "known": score.known}
            emit(event("eval", **result))
        return result

    def story_score(self) -> evaluation.StoryScore:
        """The valid share of sampled stories, and how many of them the training text holds."""
        training = set(stories.stories(self.config.seed, self.config.data.stories))
        return evaluation.story_score(
            self.write(self.config.eval.stories, self.config.seed), training.__contains__
        )

    def floor(self) -> float | None:
        """The least loss that the built-in stories allow: the grammar's entropy per token."""
        if self.config.data.corpus != ("stories",):
            return None
        return stories.entropy() * self.config.data.stories / self.tokens.tokens

    def write(self, count: int, seed: int) -> list[str]:
        """Sample texts from the model as it is."""
        with self.autocast():
            return evaluation.write(self.model, self.tokenizer, count, self.config.eval.temperature, seed)

    def save(self, emit: Emit) -> None:
        """Save a checkpoint of the current step; rank 0 writes, the others wait until it is on disk."""
        if self.group.rank == 0:
            started = time.perf_counter()
            folder = self.store.save(self.snapshot())
            seconds = round(time.perf_counter() - started, 3)
            emit(event("checkpoint", step=self.step, path=str(folder), seconds=seconds))
        self.group.barrier()

    def snapshot(self) -> Snapshot:
        """Everything that an exact resume needs."""
        config = json.dumps(to_hub(self.config.shape, self.tokenizer.end), indent=2) + "\n"
        return Snapshot(
            step=self.step,
            weights={
                name: self.arena.layout.view(self.arena.weights, name).cpu() for name in self.arena.parameters
            },
            moments={name: view.cpu() for name, view in self._moments().items()},
            state={
                "step": self.step,
                "loss": self.last_loss,
                "tokens": self.step * self.config.tokens_per_step,
                "data": self.tokens.digest,
                "config": self.config.model_dump(mode="json"),
            },
            files={"config.json": config, **self._tokenizer_files()},
        )

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint, exactly, with any number of workers."""
        state = load_state(folder)
        if state["data"] != self.tokens.digest:
            raise UserError(
                f"{folder} was trained on other data",
                f"Its tokens have digest {state['data'][:12]}, these {self.tokens.digest[:12]}",
                "Give the same corpus, or start afresh with --resume none",
            )
        load_weights(self.model, folder)
        load_moments(folder, self._moments())
        self.step = self.optimizer.steps_done = int(state["step"])
        self.last_loss = float(state["loss"])

    def _tokenizer_files(self) -> dict[str, str]:
        names = ("tokenizer.json", "tokenizer_config.json")
        return {name: (self.tokens.folder / name).read_text(encoding="utf-8") for name in names}

    def _moments(self) -> dict[str, Tensor]:
        moments = (("first", self.optimizer.first), ("second", self.optimizer.second))
        return {
            f"{kind}.{name}": self.arena.layout.view(flat, name)
            for kind, flat in moments
            for name in self.arena.parameters
        }

    def _step_event(self, totals: Totals, seconds: float, timings: dict[str, float]) -> dict[str, Any]:
        return event(
            "step",
            step=self.step,
            loss=totals.loss,
            tokens=totals.tokens,
            tokens_per_s=round(totals.tokens / seconds, 1),
            lr=self.learning_rate(self.step),
            grad_norm=totals.norm,
            **timings,
        )

    def _finish(self, emit: Emit) -> None:
        result = self.evaluate(emit)
        if self.group.rank == 0:
            summary = {
                "step": self.step,
                "tokens": self.step * self.config.tokens_per_step,
                "loss": self.last_loss,
                "validation_loss": result["loss"],
                "bits_per_byte": result["bits_per_byte"],
                "weights_blake3": weights_blake3(self.arena.parameters),
                "transport": self.transport,
                "workers": self.group.world_size,
            }
            summary |= {key: result[key] for key in ("valid_share", "known") if key in result}
            emit(event("done", **summary, samples=self.write(3, seed=self.step)))
        self.group.barrier()

    def close(self) -> None:
        """Let go of threads and peers."""
        self.gradients.close()
        self.group.close()


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps happens now."""
    return bool(every) and step % every == 0


def check_vocabulary(config: Config, tokens: TokenSet) -> None:
    """Refuse a model whose embedding is smaller than the tokenizer's vocabulary."""
    if tokens.vocab_size > config.model.vocab:
        raise UserError(
            f"A vocabulary of {tokens.vocab_size:,} does not fit model.vocab = {config.model.vocab:,}",
            "The tokenizer uses more tokens than the model has rows",
            f"Set --model.vocab {tokens.vocab_size} or use a smaller tokenizer",
        )
