"""From a configuration to a trainer: the one place where the parts of a run are put together."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from andon.checkpoint.checkpointer import Checkpointer, RunFacts, SaveSettings
from andon.config.schema import Config
from andon.data.batches import Batches
from andon.data.token_set import TokenSet
from andon.engine.optimizer import AdamW, Optimizer
from andon.engine.parallel import DataParallel
from andon.engine.trainer import StepSettings, Trainer
from andon.errors import UserError
from andon.integrity.faults import Faults
from andon.model.hub import to_hub
from andon.model.llama import Llama
from andon.optim import schedules
from andon.optim.sharding import Zero
from andon.run.events import Emit, event, no_event
from andon.run.folder import read_mark
from andon.run.resumable import check_resumable
from andon.transport.base import TRANSPORTS, Group


def build_trainer(config: Config, tokens: TokenSet, group: Group, device: torch.device, emit: Emit) -> Trainer:
    """The trainer of one rank; only rank 0 emits events."""
    optimizer = build_optimizer(config, tokens, group, device, emit)
    trainer = trainer_of(config, tokens, optimizer, emit)
    if config.fault:
        inject(config, optimizer)
    return trainer


def trainer_of(config: Config, tokens: TokenSet, optimizer: Optimizer, emit: Emit) -> Trainer:
    """The trainer of an optimizer that is there: its batches and its checkpoints."""
    checkpointer = build_checkpointer(config, tokens, optimizer, emit)
    return Trainer(optimizer, build_batches(config, tokens), step_settings(config), checkpointer)


def build_model(config: Config, device: torch.device, emit: Emit = no_event) -> Llama:
    """The model with its first weights, which the seed determines."""
    model = Llama(config.shape)
    model.initialise(config.seed)
    model.to(device)
    if config.train.weights == "bf16":
        model.hold_weights_in(torch.bfloat16)
    precision, compiles = config.train.precision, config.train.compile
    on_gpu = device.type == "cuda"
    if precision == "bf16" or (precision == "auto" and on_gpu):
        model.compute = torch.bfloat16
    deterministic = config.deterministic or not on_gpu
    if not deterministic:
        torch.set_deterministic_debug_mode("default")
    if compiles or (compiles is None and on_gpu):
        emit(event("note", text="Compiling the model: the first step takes about half a minute, less when repeated"))
        torch.use_deterministic_algorithms(deterministic)  # the compiler's algorithms as well
        from andon.model.compiled import compile_model

        compile_model(model, deterministic, config.train.activation_memory)
    return model


def build_optimizer(
    config: Config, tokens: TokenSet, group: Group, device: torch.device, emit: Emit = no_event
) -> Optimizer:
    """The model of a run on its group, and its optimizer."""
    check_vocabulary(config, tokens)
    model = build_model(config, device, emit if group.rank == 0 else no_event)
    optimizer = optimizer_of(config, model, group)
    optimizer.facts = f"{config.determinism_key} {tokens.digest}"
    return optimizer


def optimizer_of(config: Config, model: Llama, group: Group) -> Optimizer:
    """A model that is there on its group, and AdamW over it."""
    # A transport that computes on the workers' cores would take them from forward.
    overlap = not TRANSPORTS[config.group.transport].uses_worker_cores and not model.compiled
    parallel = DataParallel(model, group, config.train.slots, config.seed, overlap)
    optim = config.optim
    zero = Zero(config.zero.resolve(config.group.transport), config.zero.replicas)
    betas = (optim.beta1, optim.beta2)
    return AdamW(parallel, optim.lr, betas, optim.eps, optim.weight_decay, zero)


def warm_up(config: Config, model: DataParallel) -> None:
    """Compute one slot, of any tokens, so that what is compiled is compiled now. The step begins again with `enter`."""
    shape = (config.train.micro_batch, config.train.context)
    tokens = torch.zeros(shape, dtype=torch.int64, device=model.arena.device)
    model.backward(model(tokens, tokens), tokens.numel(), reduction="sum")


def build_batches(config: Config, tokens: TokenSet) -> Batches:
    """The batches of a run, a pure function of step and slot."""
    train = config.train
    return Batches(tokens, config.seed, train.slots, train.micro_batch, train.context, config.data.validation)


def step_settings(config: Config) -> StepSettings:
    """What a step needs to know."""
    return StepSettings(
        learning_rate=partial(learning_rate, config),
        last_step=config.train.steps,
        clip=config.optim.clip,
        skips_allowed=config.max_skips - 1 if config.on_nonfinite == "skip" else 0,
    )


def learning_rate(config: Config, step: int) -> float:
    """The learning rate of a step."""
    optim = config.optim
    fraction = schedules.rate(optim.schedule, step, config.train.steps, optim.warmup, optim.final_lr)
    return optim.lr * fraction


def build_checkpointer(config: Config, tokens: TokenSet, optimizer: Optimizer, emit: Emit) -> Checkpointer:
    """The checkpoints of a run, in its folder."""
    save = config.checkpoint
    state = {"seed": config.seed, "data": tokens.digest, "config": config.model_dump(mode="json")}

    def note(text: str) -> None:
        emit(event("note", text=text))

    facts = RunFacts(
        folder=config.run.dir / "checkpoints",
        state=state,
        files=hub_files(config, tokens, optimizer.model.arena.weights.dtype),
        holder=partial(read_mark, config.run.dir),
        check=partial(check_resumable, config, tokens.digest, note),
    )
    settings = SaveSettings(save.every, save.keep, save.keep_every, save.on_failure, save.timeout)

    def tell(kind: str, **fields: Any) -> None:
        emit(event(kind, **fields))

    return Checkpointer(optimizer, facts, settings, tell)


def hub_files(config: Config, tokens: TokenSet, dtype: torch.dtype) -> Mapping[str, str]:
    """What Hugging Face needs besides the weights; read once, because the cache may be gone when a save is due."""
    fields = to_hub(config.shape, tokens.tokenizer().end, dtype)
    names = ("tokenizer.json", "tokenizer_config.json")
    texts = {name: (tokens.folder / name).read_text(encoding="utf-8") for name in names}
    settings = json.loads(texts["tokenizer_config.json"])
    # Fine-tuning pads batches, and there is no other special token.
    texts["tokenizer_config.json"] = json.dumps({**settings, "pad_token": settings["eos_token"]}, indent=2) + "\n"
    return {"config.json": json.dumps(fields, indent=2) + "\n", **texts}


def inject(config: Config, optimizer: Optimizer) -> None:
    """Arm the configuration's faults on purpose."""
    model = optimizer.model
    membership, phases = model.membership, model.phases
    faults = Faults(config.fault, membership.order, membership.rank, model.arena.layout, optimizer.compared_state)
    phases.on_enter = faults.strike
    model.gradients.on_gradient = lambda *gradient: faults.poison(phases.step, *gradient)


def check_vocabulary(config: Config, tokens: TokenSet) -> None:
    """Refuse a model whose embedding is smaller than the tokenizer's vocabulary."""
    if tokens.vocab_size > config.model.vocab:
        raise UserError(
            f"A vocabulary of {tokens.vocab_size:,} does not fit model.vocab = {config.model.vocab:,}",
            "The tokenizer uses more tokens than the model has rows",
            f"Set --model.vocab {tokens.vocab_size} or use a smaller tokenizer",
        )
