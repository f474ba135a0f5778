"""`andon bench train --device cuda`: Andon's step on one GPU, with and without checks and determinism, against a
transformers model of the same shape.

All contestants hold their models at the same time and take turns of a few steps, so that a card that grows warm slows
all of them alike. One that does not fit into memory next to the others is left out. MFU is the share of the card's peak
that the model's own arithmetic takes (`run.mfu`).
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final

import torch

from andon.bench.kit.report import ratio, show
from andon.bench.ranks.train import RandomBatches, make_optimizer, make_trainer, on_gpu
from andon.engine.trainer import Trainer
from andon.errors import UserError
from andon.model.shape import CHEAP, SHAPES, Shape
from andon.optim.sharding import Zero
from andon.run.mfu import mfu, peak_of
from andon.transport.local import LocalGroup

STEPS: Final = 4  # in a turn
LR: Final = 1e-4
WITHOUT_CHECKS: Final = "andon without checks"
Step = Callable[[], Any]


@dataclass
class Contestant:
    """One that takes turns with the others."""

    is_deterministic: bool
    step: Step
    held: int
    """Bytes that were allocated before its model was made."""
    first_step_s: float
    peak_gib: float
    turns: list[float] = field(default_factory=list)
    """Seconds of a step, in each turn."""


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Use torch's deterministic algorithms inside the context, or the fastest ones."""
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def andon_trainer(shape: Shape, batch: int, is_deterministic: bool, activation_memory: float) -> Trainer:
    """The trainer of `andon train` on one GPU."""
    model = on_gpu(shape, is_deterministic, activation_memory)
    batches = RandomBatches(shape, batch * shape.context, seed=1)
    return make_trainer(make_optimizer(model, LocalGroup(), Zero("off")), batches)


def andon_step(trainer: Trainer, checks: bool) -> Step:
    """A step with or without its checks."""

    def step() -> None:
        trainer.model.exchange.checks = checks
        trainer.train_step()

    return step


def transformers_step(shape: Shape, batch: int, compiled: bool) -> Step:
    """A plain PyTorch step with transformers' Llama, autocast and fused AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from andon.model.hub_config import to_hub

    fields = {key: value for key, value in to_hub(shape, 0, torch.float32).items() if key != "architectures"}
    model = LlamaForCausalLM(LlamaConfig(**fields, attn_implementation="sdpa")).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = torch.compile(model) if compiled else model
    tokens = torch.randint(shape.vocab, (batch, shape.context), device="cuda")

    def step() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def makers(shape: Shape, batch: int) -> dict[str, tuple[bool, Callable[[], Step]]]:
    """By name: whether torch must be deterministic, and a function that makes the step."""
    default = cache(partial(andon_trainer, shape, batch, True, CHEAP))
    found: dict[str, tuple[bool, Callable[[], Step]]] = {
        "andon": (True, lambda: andon_step(default(), True)),
        WITHOUT_CHECKS: (True, lambda: andon_step(default(), False)),
        "andon, all activations kept": (True, lambda: andon_step(andon_trainer(shape, batch, True, 1.0), True)),
        "the same, not deterministic": (False, lambda: andon_step(andon_trainer(shape, batch, False, 1.0), True)),
    }
    try:
        import transformers  # noqa: F401

        found["transformers compiled"] = (False, lambda: transformers_step(shape, batch, compiled=True))
        found["transformers"] = (False, lambda: transformers_step(shape, batch, compiled=False))
    except ImportError:
        pass
    return found


def main(preset: str, tokens: int, repetitions: int, as_json: bool) -> None:
    """Measure, and print one row for each contestant; `tokens` is the number per step."""
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    shape, name = SHAPES[preset], torch.cuda.get_device_name()
    batch = max(1, tokens // shape.context)
    entered: dict[str, Contestant] = {}
    for who, (is_deterministic, make) in makers(shape, batch).items():
        try:
            shares = entered["andon"] if who == WITHOUT_CHECKS else None
            entered[who] = _enter(is_deterministic, make, shares)
        except torch.OutOfMemoryError:
            if not entered:
                break
            _leave_out(who)
    for _ in range(repetitions + 1):
        for who in list(entered):
            try:
                _take_turn(entered[who])
            except torch.OutOfMemoryError:
                del entered[who]
                _leave_out(who)
    if "andon" not in entered:
        raise UserError(f"{batch} windows do not fit into the GPU's memory", name, "Try fewer --tokens")
    rows = [_row(who, each, entered["andon"], shape, batch, name) for who, each in entered.items()]
    show(f"{preset}, {batch} windows of {shape.context} tokens, {name}, one GPU, bf16", rows, as_json)


def _leave_out(who: str) -> None:
    print(f"{who}: left out, does not fit into memory next to the others; try fewer --tokens", file=sys.stderr)


def _enter(is_deterministic: bool, make: Callable[[], Step], shares: Contestant | None) -> Contestant:
    """Make a contestant's step and do it once, so that everything is compiled; it may share another one's model."""
    gc.collect()
    held = shares.held if shares else torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with deterministic(is_deterministic):
        step = make()
        step()
        torch.cuda.synchronize()
    seconds, peak = time.perf_counter() - began, torch.cuda.max_memory_allocated() - held
    return Contestant(is_deterministic, step, held, first_step_s=seconds, peak_gib=peak / 2**30)


def _take_turn(contestant: Contestant) -> None:
    """Do a step that is not measured, then some that are."""
    gc.collect()
    with deterministic(contestant.is_deterministic):
        contestant.step()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            contestant.step()
        torch.cuda.synchronize()
    contestant.turns.append((time.perf_counter() - began) / STEPS)


def _row(who: str, each: Contestant, andon: Contestant, shape: Shape, batch: int, name: str) -> dict[str, Any]:
    turns, andons = each.turns[1:], andon.turns[1:]  # the first turn warms the card up
    rate, peak = batch * shape.context / statistics.median(turns), peak_of(name)
    row = {"who": who, "tokens_per_s": rate, "mfu": mfu(shape, rate, peak) if peak else None}
    return row | {"andon_is_faster": ratio(turns, andons), "peak_gib": each.peak_gib, "first_step_s": each.first_step_s}
