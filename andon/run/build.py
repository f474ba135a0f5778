"""From a configuration to a trainer: the one place where the parts of a run are put together."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from andon.checkpoint.checkpointer import Checkpointer, RunFacts, SaveSettings
from andon.config.schema import Config, RunSettings
from andon.data.batches import Batches
from andon.data.token_set import TokenSet
from andon.engine.optimizer import AdamW, Optimizer
from andon.engine.parallel import DataParallel
from andon.engine.trainer import StepSettings, Trainer
from andon.errors import UserError
from andon.files import expand
from andon.integrity.faults import Faults
from andon.model.hub import load_tensors
from andon.model.hub_config import to_hub
from andon.model.llama import Llama
from andon.optim import schedules
from andon.optim.sharding import Zero
from andon.run.events import Emit, event
from andon.run.folder import read_mark
from andon.run.resumable import check_resumable
from andon.transport.base import TRANSPORTS, Group


def build_trainer(config: Config, tokens: TokenSet, group: Group, device: torch.device, emit: Emit) -> Trainer:
    """The trainer of one rank; only rank 0 emits events."""
    check_vocabulary(config, tokens)
    # A transport that computes on the workers' cores would take them from forward.
    overlap = not TRANSPORTS[group.transport].uses_worker_cores and not config.train.compile
    optimizer = build_optimizer(config, build_model(config, device, group.rank == 0), group, overlap)
    optimizer.facts = f"{config.determinism_key} {tokens.digest}"
    files = hub_files(config, tokens, optimizer.model.arena.weights.dtype)
    checkpointer = build_checkpointer(config, optimizer, tokens.digest, files, emit)
    trainer = Trainer(optimizer, build_batches(config, tokens), step_settings(config, device), checkpointer)
    if config.fault:
        inject(config, optimizer)
    return trainer


def build_model(config: Config, device: torch.device, is_rank_0: bool) -> Llama:
    """The model with its first weights, which the seed determines, or the folder that rank 0 reads for all."""
    model = Llama(config.shape)
    model.initialise(config.seed)
    if config.model.source and is_rank_0:
        load_tensors(dict(model.named_parameters()), expand(config.model.source))
    model.to(device)
    if config.train.weights == "bf16":
        model.hold_weights_in(torch.bfloat16)
    if config.train.compile:
        torch.use_deterministic_algorithms(True)  # of the compiler, too
        model.compile_blocks()
    return model


def build_optimizer(config: RunSettings, model: nn.Module, group: Group, overlap: bool) -> Optimizer:
    """The model on its group, and AdamW over it; `overlap` gathers weights while forward computes."""
    parallel = DataParallel(model, group, config.train.slots, config.seed, overlap)
    optim = config.optim
    zero = Zero(config.zero.resolve(config.group.transport), config.zero.replicas)
    betas = (optim.beta1, optim.beta2)
    return AdamW(parallel, optim.lr, betas, optim.eps, optim.weight_decay, zero)


def build_batches(config: Config, tokens: TokenSet) -> Batches:
    """The batches of a run, a pure function of step and slot."""
    train = config.train
    return Batches(tokens, config.seed, train.slots, train.micro_batch, train.context, config.data.validation)


def step_settings(config: RunSettings, device: torch.device) -> StepSettings:
    """What a step needs to know."""
    precision = config.train.precision
    bf16 = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    return StepSettings(
        learning_rate=partial(learning_rate, config),
        last_step=config.train.steps,
        clip=config.optim.clip,
        skips_allowed=config.max_skips - 1 if config.on_nonfinite == "skip" else 0,
        autocast=torch.bfloat16 if bf16 else None,
    )


def learning_rate(config: RunSettings, step: int) -> float:
    """The learning rate of a step."""
    optim = config.optim
    fraction = schedules.rate(optim.schedule, step, config.train.steps, optim.warmup, optim.final_lr)
    return optim.lr * fraction


def build_checkpointer(
    config: RunSettings, optimizer: Optimizer, data: str, files: Mapping[str, str], emit: Emit, frozen: str = ""
) -> Checkpointer:
    """The checkpoints of a run, in its folder: the digests of its data and of what is not trained, and text files."""
    save = config.checkpoint
    state = {"seed": config.seed, "data": data, "frozen": frozen, "config": config.model_dump(mode="json")}

    def note(text: str) -> None:
        emit(event("note", text=text))

    facts = RunFacts(
        folder=config.run.dir / "checkpoints",
        state=state,
        files=files,
        holder=partial(read_mark, config.run.dir),
        check=partial(check_resumable, config, (data, frozen), note),
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
    return {"config.json": json.dumps(fields, indent=2) + "\n", **texts}


def inject(config: RunSettings, optimizer: Optimizer) -> None:
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
