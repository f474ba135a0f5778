"""The trainer: one worker's part of a step, and the state that a step changes."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from andon.checkpoint.manifest import Damaged
from andon.checkpoint.manifest import read as read_manifest
from andon.checkpoint.saver import Saver
from andon.checkpoint.store import ReadMoments, check_units, load_state, open_moments, reading
from andon.config.schema import Config
from andon.data.batches import Batches
from andon.data.token_set import TokenSet
from andon.engine.accumulate import Totals
from andon.engine.parallel import DataParallel
from andon.errors import UserError
from andon.integrity.faults import Faults
from andon.integrity.halt import Finding, Flaw, Inspection, JidokaHalt, share_findings
from andon.model.hub import load_weights, to_hub
from andon.model.llama import Llama
from andon.optim import schedules
from andon.optim.adamw import Settings
from andon.optim.sharding import Zero
from andon.transport.base import Group


class Trainer:
    """Trains one model with the other ranks of a group; every rank runs the same lines."""

    def __init__(self, config: Config, tokens: TokenSet, group: Group, device: torch.device) -> None:
        self.config, self.tokens, self.group, self.device = config, tokens, group, device
        check_vocabulary(config, tokens)
        train, optim = config.train, config.optim
        self.batches = Batches(
            tokens, config.seed, train.slots, train.micro_batch, train.context, config.data.validation
        )
        self.model = Llama(config.shape)
        self.model.initialise(config.seed)
        self.model.to(device)
        if train.weights == "bf16":
            self.model.hold_weights_in(torch.bfloat16)
        if train.compile:
            torch.use_deterministic_algorithms(True)  # of the compiler, too
            self.model.compile_blocks()
        self.faults = Faults(config.fault, group.rank)
        settings = Settings(optim.beta1, optim.beta2, optim.eps, optim.weight_decay)
        zero = Zero(config.zero.resolve(config.group.transport), config.zero.replicas)
        on_gradient = self._poison if config.fault else None
        self.parallel = DataParallel(self.model, group, train.slots, settings, zero, on_gradient)
        self.arena, self.gradients = self.parallel.arena, self.parallel.gradients
        self.faults.check(self.gradients.order, self.arena.layout, self.parallel.state)
        self.step = self.skipped = self.skips = self.tokens_seen = 0
        self.last_loss = float("nan")
        self._beside = self._read_beside()
        self.resumed: Path | None = None
        """The checkpoint that training goes on from."""

    def train_step(self, stop: bool = False, saver: Saver | None = None) -> tuple[Totals, dict[str, float]]:
        """One step: slots, exchange, proof, verdict, update. No weight changes before all ranks agree.

        A save that runs beside it speaks with the words of the exchange."""
        step, clock = self.step + 1, Clock()
        self.faults.at("forward", step)
        if self.config.fault:
            self.parallel.gather.settle()  # or what is flipped may be overwritten
        self.faults.flip(step, self.arena.layout, self.parallel.state)
        for slot in self.gradients.slots:
            x, y = self.batch(step, slot)
            with self.autocast():
                loss = self.model(x, y)
            self.faults.at("backward", step)
            self.gradients.backward(loss, slot, y.numel())
            del loss  # or its graph lies scattered where the next slot's activations have to go
        clock.lap("compute_ms")
        self.faults.at("exchange", step)
        self.parallel.gather.settle()
        prints = self.parallel.fingerprints.take(self.facts(step))  # beside what is left of the exchange
        clock.lap("fingerprint_ms")
        totals = self.gradients.finish(stop, saver.word() if saver else None)
        if saver:
            saver.hear(totals.words)
        self.parallel.compare(step, prints)
        clock.lap("exchange_ms")
        if self.halt_unless_sound(step, totals):
            self.faults.at("optimizer", step)
            self.parallel.update(totals, self.learning_rate(step), self.config.optim.clip)
        clock.lap("optimizer_ms")
        self.step, self.last_loss = step, totals.loss
        self.tokens_seen += totals.tokens
        return totals, clock.laps

    def halt_unless_sound(self, step: int, totals: Totals) -> bool:
        """Pull the cord on a loss or gradient that is not finite (F-DP-003); False: the step is dropped."""
        if totals.sound:
            self.skips = 0
            return True
        if self.config.on_nonfinite == "skip" and self.skips + 1 < self.config.max_skips:
            self.skips += 1
            self.skipped += 1
            return False
        raise JidokaHalt(step, totals.complaint, share_findings(self.group, self.findings(step, totals)))

    def findings(self, step: int, totals: Totals) -> list[Finding]:
        """Compute this rank's slots again, one by one, and look at every gradient."""
        units = {unit for rank, unit in totals.bad_units if rank == self.group.rank}
        found = []
        for slot in self.gradients.slots:
            inspection = Inspection()
            x, y = self.batch(step, slot)
            with self.autocast():
                loss = self.model(x, y)
            inspection.look("loss", loss.detach())
            self.gradients.inspect(loss, slot, inspection.look)
            for flaw in inspection.flaws:
                unit = self.arena.layout.unit_of(flaw.name) if flaw.name != "loss" else "loss"
                units.discard(unit)
                found.append(self._finding(step, slot, unit, flaw))
        passing = Flaw("", 0, 0, "a value that is not finite")
        return found + [self._finding(step, None, unit, passing) for unit in sorted(units)]

    def _finding(self, step: int, slot: int | None, unit: str, flaw: Flaw) -> Finding:
        samples = () if slot is None else tuple(self.batches.windows(step, slot))
        return Finding(self.group.rank, socket.gethostname(), slot, samples, unit, flaw)

    def facts(self, step: int) -> str:
        """What the ranks must agree on besides their bits: step, learning rate, configuration, data."""
        return f"{step} {self.learning_rate(step)} {self.config.determinism_key} {self.tokens.digest}"

    def batch(self, step: int, slot: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a slot, on the device."""
        x, y = self.batches(step, slot)
        return torch.from_numpy(x).to(self.device), torch.from_numpy(y).to(self.device)

    def learning_rate(self, step: int) -> float:
        optim = self.config.optim
        fraction = schedules.rate(optim.schedule, step, self.config.train.steps, optim.warmup, optim.final_lr)
        return optim.lr * fraction

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """bf16 where the configuration and the device want it."""
        precision = self.config.train.precision
        wanted = precision == "bf16" or (precision == "auto" and self.device.type == "cuda")
        return torch.autocast(self.device.type, torch.bfloat16) if wanted else contextlib.nullcontext()

    def texts(self) -> dict[str, str]:
        """The files of a checkpoint besides its tensors: what Hugging Face needs, and where the run is."""
        config = self.config
        state = {
            "step": self.step,
            "loss": self.last_loss if math.isfinite(self.last_loss) else None,
            "tokens": self.tokens_seen,
            "skipped": self.skipped,
            "skips_in_a_row": self.skips,
            "learning_rate": self.learning_rate(self.step),
            # Batches and first weights are pure functions of the seed, and nothing else is drawn in training.
            "seed": config.seed,
            "next": {"step": self.step + 1, "slot": 0},
            "slots": config.train.slots,
            "world_size": self.group.world_size,
            "data": self.tokens.digest,
            "config": config.model_dump(mode="json"),
        }
        return {
            "state.json": json.dumps(state, indent=2) + "\n",
            **self._beside,
        }

    def resume(self, folder: Path) -> None:
        """Go on from a verified checkpoint, exactly, with any number of workers.

        Ranks that do not see rank 0's checkpoint get everything from it."""
        seen = [word.decode() for word in self.group.all_gather_bytes(manifest_digest(folder).encode())]
        together = len(set(seen)) == 1
        with contextlib.ExitStack() as stack:
            reader = stack.enter_context(self._open(folder)) if together or self.group.rank == 0 else None
            words = self.group.all_gather_bytes(json.dumps(reader.said if reader else None).encode())
            state, units = json.loads(words[0])
            if together and reader:
                self.parallel.load_moments(reader.moments)
            else:
                self.group.broadcast(self.arena.weights, src=0)
                self.parallel.receive_moments(reader.moments if reader else None)
        check_units(folder, units, self.arena)
        self.step, self.skipped, self.skips = state["step"], state["skipped"], state["skips_in_a_row"]
        self.parallel.optimizer.steps_done = self.step - self.skipped
        self.tokens_seen = state["tokens"]
        self.last_loss = math.nan if state["loss"] is None else state["loss"]
        self.resumed = folder.resolve()

    @contextlib.contextmanager
    def _open(self, folder: Path) -> Iterator[Reader]:
        """Read a checkpoint: weights into the model, the rest on demand."""
        state = load_state(folder)
        check_resumable(folder, state, self.config, self.tokens)
        sizes = {
            (kind, name): parameter.numel()
            for kind in self.parallel.optimizer.moments
            for name, parameter in self.arena.parameters.items()
        }
        with reading(folder):
            known = read_manifest(folder)
            load_weights(self.model, folder)
            with open_moments(folder, known, sizes) as moments:
                yield Reader((state, dict(known.units)), moments)

    def _read_beside(self) -> dict[str, str]:
        """What Hugging Face needs besides the weights; read once, for the cache may be gone when we save."""
        fields = to_hub(self.config.shape, self.tokens.tokenizer().end, self.arena.weights.dtype)
        config = json.dumps(fields, indent=2) + "\n"
        names = ("tokenizer.json", "tokenizer_config.json")
        texts = {name: (self.tokens.folder / name).read_text(encoding="utf-8") for name in names}
        return {"config.json": config, **texts}

    def _poison(self, slot: int, name: str, gradient: Tensor) -> None:
        self.faults.poison(self.step + 1, slot, self.gradients.slots[0], name, gradient)

    def close(self) -> None:
        """Let go of threads and peers."""
        self.parallel.close()


@dataclass(frozen=True)
class Reader:
    """An open checkpoint: its state and the digests of its units, and AdamW's moments."""

    said: tuple[dict[str, Any], dict[str, str]]
    moments: ReadMoments


def manifest_digest(folder: Path) -> str:
    """Which checkpoint this rank sees; nothing if it sees none, or one that is damaged."""
    try:
        return read_manifest(folder).digest
    except Damaged:
        return ""


class Clock:
    """How long each part of a step took, in milliseconds."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """A part ends here."""
        now = time.perf_counter()
        self.laps[name] = round(1e3 * (now - self._last), 3)
        self._last = now


def check_resumable(folder: Path, state: dict[str, Any], config: Config, tokens: TokenSet) -> None:
    """Refuse to go on with other data, another seed or another batch: samples would repeat or be missed."""
    if state["data"] != tokens.digest:
        raise UserError(
            f"{folder} was trained on other data",
            f"Its tokens have digest {state['data'][:12]}, these {tokens.digest[:12]}",
            "Give the same corpus, or start afresh with --resume none",
        )
    before, now = state["config"], config.model_dump(mode="json")
    pairs = {
        "seed": (before["seed"], now["seed"]),
        "data.validation": (before["data"]["validation"], now["data"]["validation"]),
        **{
            f"model.{key}": (old, now["model"].get(key))
            for key, old in before["model"].items()
            if key != "preset" and old is not None
        },
        **{
            f"train.{key}": (before["train"][key], now["train"][key])
            for key in ("slots", "micro_batch", "context")
        },
        "train.weights": (before["train"].get("weights", "f32"), now["train"]["weights"]),
    }
    changed = [f"{key} {old} → {new}" for key, (old, new) in pairs.items() if old != new]
    if changed:
        raise UserError(
            f"{folder} was trained with other settings: {', '.join(changed)}",
            "It would go on with another model, or see some samples twice and others never",
            "Keep these, choose another --run.dir, or start afresh with --resume none",
        )


def check_vocabulary(config: Config, tokens: TokenSet) -> None:
    """Refuse a model whose embedding is smaller than the tokenizer's vocabulary."""
    if tokens.vocab_size > config.model.vocab:
        raise UserError(
            f"A vocabulary of {tokens.vocab_size:,} does not fit model.vocab = {config.model.vocab:,}",
            "The tokenizer uses more tokens than the model has rows",
            f"Set --model.vocab {tokens.vocab_size} or use a smaller tokenizer",
        )
