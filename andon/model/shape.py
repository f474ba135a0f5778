"""The shape of a model: sizes, parameter count and the named presets; needs no torch."""

from dataclasses import dataclass
from typing import Final

LARGEST: Final = {
    **{"vocab": 1 << 22, "hidden": 1 << 17, "layers": 1 << 12, "heads": 1 << 12, "kv_heads": 1 << 12},
    **{"intermediate": 1 << 20, "context": 1 << 24},
}
"""Larger sizes are typing errors, or come from a malicious file."""
LOGITS_BYTES: Final = 1 << 30
"""Size of the bf16 logits that the loss on a GPU computes at a time."""
CHEAP: Final = 0.75
"""If backward keeps at least this share of the activations, it recomputes elementwise operations but no products."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-shaped decoder."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    context: int
    tied: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def problem(self) -> str:
        """Why no model can have this shape; empty if one can."""
        for name, largest in LARGEST.items():
            size = getattr(self, name)
            if type(size) is not int or not 0 < size <= largest:
                return f"{name} must be a number from 1 to {largest:,}"
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < 1e30:
                return f"{name} must be a positive number"
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            return f"hidden {self.hidden} must be an even multiple of heads {self.heads}"
        if self.heads % self.kv_heads:
            return f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}"
        return ""

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def block_parameters(self) -> int:
        """The nine components of a block: q, k, v, o, gate, up, down and two norms."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * self.head_dim
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """All weights, a tied embedding counted once."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * self.block_parameters + self.hidden

    @property
    def operations_per_token(self) -> int:
        """Operations of forward and backward for one token: 6 N + 12 L d T, with N the parameters without the input
        embedding."""
        inside = self.parameters - (0 if self.tied else self.vocab * self.hidden)
        return 6 * inside + 12 * self.layers * self.hidden * self.context


SHAPES = {
    "tiny": Shape(vocab=1_024, hidden=128, layers=4, heads=4, kv_heads=2, intermediate=384, context=128),
    "30m": Shape(vocab=8_192, hidden=512, layers=8, heads=8, kv_heads=4, intermediate=1_408, context=512),
    "124m": Shape(vocab=32_768, hidden=768, layers=12, heads=12, kv_heads=3, intermediate=2_048, context=1_024),
    "350m": Shape(vocab=32_768, hidden=1_024, layers=24, heads=16, kv_heads=4, intermediate=4_096, context=1_024),
    "1b": Shape(vocab=32_768, hidden=2_048, layers=22, heads=32, kv_heads=4, intermediate=5_632, context=2_048),
}
