"""Pretraining: a Llama on windows of a corpus. Its model, its loop, its evaluation."""

import contextlib
import gc
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from andon.config.schema import Config
from andon.data.batches import Batches
from andon.data.token_set import TokenSet
from andon.engine.parallel import DataParallel
from andon.engine.trainer import Trainer
from andon.errors import UserError
from andon.files import expand
from andon.model.hub import load_tensors
from andon.model.hub_config import to_hub
from andon.model.llama import Llama
from andon.run import evaluate as evaluation
from andon.run.build import Builder, computes_in_bf16
from andon.run.loop import TEXT_CHARS, Loop, while_others_wait
from andon.run.mfu import mfu, peak_of_all
from andon.run.prepare import build_batches
from andon.run.records.events import Emit, event
from andon.run.records.ledger import LedgerReports
from andon.transport.base import Group
from andon.transport.registry import TRANSPORTS


class PretrainingBuilder(Builder):
    """Builds one rank's pretraining."""

    def __init__(self, config: Config, tokens: TokenSet) -> None:
        super().__init__(config, tokens)
        self.config, self.tokens = config, tokens

    def model(self, device: torch.device, reads_weights: bool) -> Llama:
        """Build the model; its first weights follow from the seed, or rank 0 reads them from a folder."""
        vocabulary, rows = self.tokens.vocab_size, self.config.model.vocab
        if vocabulary > rows:
            raise UserError(
                f"A vocabulary of {vocabulary:,} does not fit model.vocab = {rows:,}",
                "The tokenizer uses more tokens than the model has rows",
                f"Set --model.vocab {vocabulary} or use a smaller tokenizer",
            )
        return build_model(self.config, device, reads_weights)

    def overlaps_gather(self, module: nn.Module) -> bool:
        """Not if the exchange needs the cores on which forward runs, and not for compiled blocks."""
        uses_cores = TRANSPORTS[self.config.group.transport].uses_worker_cores
        return not uses_cores and not is_compiled(module)

    def first(self, group: Group, device: torch.device, emit: Emit) -> Trainer:
        """Note first why the first step takes long."""
        if group.rank == 0 and compiles(self.config, device):
            text = "Compiling the model: the first step takes about half a minute, less when repeated"
            emit(event("note", text=text))
        return super().first(group, device, emit)

    def warm_up(self, model: DataParallel) -> None:
        """Compute one slot, if the model is compiled; `enter` resets the step afterwards."""
        if is_compiled(model.module):
            compute_one_slot(model, self.config.train.micro_batch, self.config.train.context)

    def batches(self) -> Batches:
        """Windows of the corpus."""
        return build_batches(self.config, self.tokens)

    def files(self, model: DataParallel) -> Mapping[str, str]:
        """The configuration and the tokenizer; read once, because the cache may be gone at a later save."""
        fields = to_hub(self.config.shape, self.tokens.tokenizer().end, model.arena.weights.dtype)
        names = ("tokenizer.json", "tokenizer_config.json")
        texts = {name: (self.tokens.folder / name).read_text(encoding="utf-8") for name in names}
        settings = json.loads(texts["tokenizer_config.json"])
        # Fine-tuning pads batches; the end token is the only special one.
        texts["tokenizer_config.json"] = json.dumps({**settings, "pad_token": settings["eos_token"]}, indent=2) + "\n"
        return {"config.json": json.dumps(fields, indent=2) + "\n", **texts}

    def loop(self, trainer: Trainer, emit: Emit, ledger: LedgerReports | None = None) -> Loop:
        """The loop over the steps of a trainer."""
        return Pretraining(self.config, self.tokens, trainer, emit, ledger)


def build_model(config: Config, device: torch.device, reads_weights: bool = True) -> Llama:
    """Build the model on a device, compiled where that is faster; with its first weights if it `reads_weights`."""
    model = Llama(config.shape)
    if reads_weights:
        set_first_weights(model, config)
    model.to(device)
    if config.train.weights == "bf16":
        model.hold_weights_in(torch.bfloat16)
    if computes_in_bf16(config, device):
        model.compute = torch.bfloat16
    if compiles(config, device):
        from andon.model.gpu.compiled import compile_model

        deterministic = config.deterministic or device.type != "cuda"
        torch.use_deterministic_algorithms(deterministic)  # the compiler reads this, too
        compile_model(model, deterministic, config.train.activation_memory)
    return model


def compiles(config: Config, device: torch.device) -> bool:
    """Whether the model is compiled on a device."""
    wanted = config.train.compile
    return device.type == "cuda" if wanted is None else wanted


def is_compiled(module: nn.Module) -> bool:
    """Whether a model has compiled blocks."""
    return isinstance(module, Llama) and module.compiled


def compute_one_slot(model: DataParallel, windows: int, context: int) -> None:
    """Run forward and backward of one slot, with arbitrary tokens."""
    tokens = torch.zeros((windows, context), dtype=torch.int64, device=model.arena.device)
    model.backward(model(tokens, tokens), tokens.numel(), reduction="sum")


def set_first_weights(model: Llama, config: Config) -> None:
    """Draw the weights from the seed, or load those of `model.from`."""
    if config.model.source:
        load_tensors(dict(model.named_parameters()), expand(config.model.source))
    else:
        model.initialise(config.seed)


class Pretraining(Loop):
    """One rank's pretraining."""

    def __init__(
        self, config: Config, tokens: TokenSet, trainer: Trainer, emit: Emit, ledger: LedgerReports | None = None
    ) -> None:
        super().__init__(config, tokens.digest, trainer, emit, ledger)
        self.config, self.tokens = config, tokens
        self.tokenizer = tokens.tokenizer()
        self.on_stories = config.data.corpus == ("stories",)
        self._sampled = time.monotonic()
        self._peak: float | None = None
        """Bf16 operations a second of all GPUs of this generation."""
        self._just_compiled = self.llama.compiled

    @property
    def llama(self) -> Llama:
        model = self.trainer.model.module
        assert isinstance(model, Llama)
        return model

    def set_first_weights(self) -> None:
        """Those of the seed, or of `model.from`."""
        set_first_weights(self.llama, self.config)

    def floor(self) -> float | None:
        """The least loss that the built-in stories allow: the grammar's entropy per token."""
        if not self.on_stories:
            return None
        return evaluation.loss_floor(self.config.data.stories, self.tokens.token_count)

    def generation_begins(self) -> None:
        """Add up the peaks of the GPUs; they are known for bf16 only."""
        if self.llama.compute == torch.bfloat16:
            self._peak = peak_of_all(self.group, self.trainer.model.arena.device)

    def step_facts(self, tokens_per_s: float) -> dict[str, Any]:
        """The MFU of the step, if the peak of the GPUs is known."""
        return {} if self._peak is None else {"mfu": round(mfu(self.config.shape, tokens_per_s, self._peak), 4)}

    def texts(self, samples: Sequence[int | str]) -> dict[str, str]:
        """The beginnings of windows."""
        context = self.config.train.context
        read = [(window, self.tokens.read(int(window) * context, context)) for window in samples]
        return {str(window): self.tokenizer.decode(tokens.tolist())[:TEXT_CHARS] for window, tokens in read}

    def between_steps(self) -> None:
        """Emit a sample every `eval.sample_every` seconds."""
        if self._just_compiled:
            gc.freeze()  # the compiler leaves so many objects that a garbage collection takes half a second
            self._just_compiled = False
        seconds, step = self.config.eval.sample_every, self.trainer.progress.step
        if self.is_rank_0 and seconds and time.monotonic() - self._sampled > seconds:
            self.emit("sample", step=step, text=self.sample_texts(1, seed=step)[0])
            self._sampled = time.monotonic()

    def evaluate(self) -> dict[str, Any]:
        """Loss on held-out windows and, for the built-in stories, the share of valid samples."""
        trainer, batches = self.trainer, self.trainer.batches
        assert isinstance(batches, Batches)
        with self._eager():
            windows = batches.validation(self.config.eval.windows)
            loss = evaluation.validation_loss(self.llama, windows, self.group)
        bits = evaluation.bits_per_byte(loss, self.tokens.bytes_per_token)
        result: dict[str, Any] = {"step": trainer.progress.step, "loss": loss, "bits_per_byte": bits}
        if self.on_stories and self.config.eval.stories:
            score = while_others_wait(self.group, self.story_score)
            result |= {"valid_share": score.valid_share, "known": score.known} if score else {}
        self.emit("eval", **result)
        return result

    def story_score(self) -> evaluation.StoryScore:
        """The share of valid samples, and how many of them are in the training text."""
        samples = self.sample_texts(self.config.eval.stories, self.config.seed)
        return evaluation.story_score(samples, self.config.seed, self.config.data.stories)

    def sample_texts(self, count: int, seed: int) -> list[str]:
        """Sample texts from the current model."""
        with self._eager():
            temperature = self.config.eval.temperature
            return evaluation.sample_texts(self.llama, self.tokenizer, count, temperature, seed)

    def _eager(self) -> contextlib.AbstractContextManager[Any]:
        """Run compiled blocks eagerly: sampling has other shapes at every token, each of which would be compiled."""
        # `set_stance` loads torch's compiler, which takes 1.5 s, so it is called only for a compiled model.
        return torch.compiler.set_stance("force_eager") if self.llama.compiled else contextlib.nullcontext()

    def end(self, result: dict[str, Any]) -> dict[str, Any]:
        """Bits per byte, stories and samples."""
        step = self.trainer.progress.step
        found: dict[str, Any] = {key: result[key] for key in ("bits_per_byte", "valid_share", "known") if key in result}
        return {**found, "samples": while_others_wait(self.group, lambda: self.sample_texts(3, seed=step))}
