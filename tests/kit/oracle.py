"""The training of a small Llama in plain PyTorch: an oracle that shares no code with Andon.

The model is written out as matrix products, the sum over slots as a loop; the update is `torch.optim.AdamW`
after `clip_grad_norm_`. Which windows belong to which step is a table: `WINDOWS[step - 1]`, slot by slot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

TEXT = " ".join(f"{number} and {number} make {2 * number}." for number in range(1, 200))
TOKENS = torch.tensor([*TEXT.encode(), 256])  # the bytes, and the end of the document
CONTEXT, SLOTS, STEPS = 16, 3, 6
HIDDEN, LAYERS, HEADS, HEAD, INNER, VOCAB = 16, 2, 2, 8, 24, 257
LR, BETAS, EPS, DECAY, CLIP = 0.02, (0.85, 0.9), 1e-6, 0.3, 1.25
RATES = [0.01, 0.02, 0.0155, 0.011, 0.0065, 0.002]  # two steps of warm-up, then in a straight line to a tenth
WINDOWS = [
    [[212, 141], [185, 190], [221, 137]],
    [[15, 192], [145, 187], [67, 117]],
    [[130, 160], [91, 110], [232, 51]],
    [[131, 111], [21, 105], [182, 191]],
    [[96, 230], [217, 25], [198, 30]],
    [[81, 61], [70, 178], [90, 167]],
]
HELD_OUT = [4, 9, 14, 19, 24, 29, 34]  # every fifth window
OPTIONS = [
    *("text.txt", "--data.tokenizer=bytes", "--data.validation=0.2", "--seed=7", "--device=cpu"),
    *("--model.vocab=257", "--model.hidden=16", "--model.layers=2", "--model.heads=2", "--model.kv_heads=1"),
    *("--model.intermediate=24", "--train.context=16", "--train.micro_batch=2", "--train.slots=3"),
    *("--train.steps=6", "--optim.lr=0.02", "--optim.warmup=2", "--optim.schedule=linear"),
    *("--optim.final_lr=0.1", "--optim.beta1=0.85", "--optim.beta2=0.9", "--optim.eps=1e-6"),
    *("--optim.weight_decay=0.3", "--optim.clip=1.25", "--eval.every=0", "--eval.windows=7"),
    *("--eval.sample_every=0", "--checkpoint.every=1", "--checkpoint.keep=10"),
]


@dataclass
class Trained:
    """What came of a run, step by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


def train(skipped: Sequence[int] = ()) -> Trained:
    """Train all steps; in those that are `skipped` no weight changes."""
    weights = first_weights(seed=7)
    matrices = [weight for weight in weights.values() if weight.dim() == 2]
    vectors = [weight for weight in weights.values() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    found = Trained()
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        losses = [loss_of(weights, windows, "sum") for windows in WINDOWS[step - 1]]
        mean = torch.stack(losses).sum() / (SLOTS * 2 * CONTEXT)
        mean.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = RATES[step - 1]
        if step not in skipped:
            optimizer.step()
        found.losses.append(mean.item())
        found.norms.append(norm.item())
        found.weights.append({name: weight.detach().clone() for name, weight in weights.items()})
    return found


def first_weights(seed: int) -> dict[str, Tensor]:
    """Drawn in this order: normal, narrower where a block writes to the residual stream; norms are one."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        block = {
            "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
            "self_attn.k_proj": (HEAD, HIDDEN),
            "self_attn.v_proj": (HEAD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    chance, weights = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        width = 0.01 if "o_proj" in name or "down_proj" in name else 0.02
        drawn = torch.empty(shape).normal_(0.0, width, generator=chance) if len(shape) > 1 else torch.ones(shape)
        weights[name] = drawn.requires_grad_()
    return weights


def loss_of(weights: dict[str, Tensor], windows: Sequence[int], reduction: str) -> Tensor:
    """The cross entropy of some windows, in nats."""
    rows = torch.stack([TOKENS[window * CONTEXT : (window + 1) * CONTEXT + 1] for window in windows])
    predicted = logits(weights, rows[:, :-1])
    return torch.nn.functional.cross_entropy(predicted.flatten(0, 1), rows[:, 1:].flatten(), reduction=reduction)


def logits(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Llama: norm, attention with rotary positions, norm, SwiGLU; twice."""
    windows, length = tokens.shape
    x = weights["model.embed_tokens.weight"][tokens]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    for layer in range(LAYERS):
        w = {name.removeprefix(f"model.layers.{layer}."): value for name, value in weights.items()}
        h = norm(x, w["input_layernorm.weight"])
        q = turn((h @ w["self_attn.q_proj.weight"].T).view(windows, length, HEADS, HEAD))
        k = turn((h @ w["self_attn.k_proj.weight"].T).view(windows, length, 1, HEAD))
        v = (h @ w["self_attn.v_proj.weight"].T).view(windows, length, 1, HEAD)
        scores = torch.einsum("bthd,bsxd->bhts", q, k) / math.sqrt(HEAD)
        attention = scores.masked_fill(future, -math.inf).softmax(-1)
        mixed = torch.einsum("bhts,bsxd->bthd", attention, v).reshape(windows, length, HEADS * HEAD)
        x = x + mixed @ w["self_attn.o_proj.weight"].T
        h = norm(x, w["post_attention_layernorm.weight"])
        gate, up = h @ w["mlp.gate_proj.weight"].T, h @ w["mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Divided by the root mean square."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def turn(x: Tensor) -> Tensor:
    """Each pair (i, i + D/2) of a head, turned by position / 10000^(2i/D)."""
    position = torch.arange(x.shape[1])[:, None, None]
    angle = position / 10_000 ** (torch.arange(HEAD // 2) * 2 / HEAD)
    left, right = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    turned = (left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin())
    return torch.cat(turned, -1)
