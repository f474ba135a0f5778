"""`andon bench train --device cuda`: Andon's step on one GPU, with and without checks and determinism, against a
transformers model of the same shape.

All contestants hold their models at the same time and take turns of a few steps, so that a card that grows warm slows
all of them alike. MFU is the share of the card's peak that the model's own arithmetic takes (`run.mfu`).
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from andon.bench.kit.report import ratio, show
from andon.bench.ranks.train import RandomBatches, make_optimizer, make_trainer
from andon.errors import UserError
from andon.model.llama import Llama
from andon.model.shape import CHEAP, SHAPES, Shape
from andon.optim.sharding import Zero
from andon.run.mfu import mfu, peak_of
from andon.transport.local import LocalGroup

STEPS: Final = 4  # in a turn
LR: Final = 1e-4
Step = Callable[[], Any]


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Use torch's deterministic algorithms inside the context, or the fastest ones."""
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def andon_step(shape: Shape, batch: int, checks: bool, is_deterministic: bool, activation_memory: float) -> Step:
    """The step of `andon train` on one GPU."""
    from andon.model.gpu.compiled import compile_model

    model = Llama(shape)
    model.initialise(seed=1)
    model.to("cuda")
    model.compute = torch.bfloat16
    compile_model(model, is_deterministic, activation_memory)
    trainer = make_trainer(
        make_optimizer(model, LocalGroup(), Zero("off")), RandomBatches(shape, batch * shape.context, seed=1)
    )
    trainer.model.exchange.checks = checks
    return trainer.train_step


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


def contestants(shape: Shape, batch: int) -> dict[str, tuple[bool, Callable[[], Step]]]:
    """By name: whether torch must be deterministic, and a function that builds the step."""
    found: dict[str, tuple[bool, Callable[[], Step]]] = {
        "andon": (True, lambda: andon_step(shape, batch, True, True, CHEAP)),
        "andon without checks": (True, lambda: andon_step(shape, batch, False, True, CHEAP)),
        "andon, all activations kept": (True, lambda: andon_step(shape, batch, True, True, 1.0)),
        "the same, not deterministic": (False, lambda: andon_step(shape, batch, True, False, 1.0)),
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
    if not torch.cuda.is_available():
        raise UserError("--device cuda needs a GPU", "torch sees no CUDA device", "Try --device cpu")
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    shape, name = SHAPES[preset], torch.cuda.get_device_name()
    batch = max(1, tokens // shape.context)
    steps: dict[str, tuple[bool, Step]] = {}
    peak_gib, first_s = {}, {}
    for who, (fixed, make) in contestants(shape, batch).items():
        gc.collect()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        try:
            steps[who] = fixed, _started(fixed, make)
        except torch.OutOfMemoryError:
            if not steps:
                what = f"{batch} windows do not fit into the GPU's memory"
                raise UserError(what, name, "Try fewer --tokens") from None
            print(f"{who}: left out, does not fit into memory next to the others; try fewer --tokens", file=sys.stderr)
            continue
        first_s[who] = time.perf_counter() - began
        peak_gib[who] = (torch.cuda.max_memory_allocated() - held) / 2**30
    seconds: dict[str, list[float]] = {who: [] for who in steps}
    for _ in range(repetitions + 1):
        for who, (fixed, step) in steps.items():
            with deterministic(fixed):
                step()
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(STEPS):
                    step()
                torch.cuda.synchronize()
            seconds[who].append((time.perf_counter() - began) / STEPS)
    rows = [_row(who, shape, batch, each[1:], seconds["andon"][1:], name) for who, each in seconds.items()]
    for row in rows:
        row |= {"peak_gib": peak_gib[row["who"]], "first_step_s": first_s[row["who"]]}
    show(f"{preset}, {batch} windows of {shape.context} tokens, {name}, one GPU, bf16", rows, as_json)


def _started(is_deterministic: bool, make: Callable[[], Step]) -> Step:
    """Build a contestant's step and do it once, so that everything is compiled."""
    with deterministic(is_deterministic):
        step = make()
        step()
        torch.cuda.synchronize()
    return step


def _row(who: str, shape: Shape, batch: int, mine: list[float], andons: list[float], name: str) -> dict[str, Any]:
    rate, peak = batch * shape.context / statistics.median(mine), peak_of(name)
    used = mfu(shape, rate, peak) if peak else None
    return {"who": who, "tokens_per_s": rate, "mfu": used, "andon_is_faster": ratio(mine, andons)}
