"""The plan of a run: sizes and memory by arithmetic, before anything heavy is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from andon.config import Config
from andon.order import plan as plan_order


@dataclass(frozen=True)
class Plan:
    """What a run will take."""

    parameters: int
    tokens_per_step: int
    tokens: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int

    @property
    def worker_bytes(self) -> int:
        """Memory of one worker, besides torch itself."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes


def make_plan(config: Config) -> Plan:
    """The arithmetic of a configuration."""
    shape, train = config.shape, config.train
    size = 4 * shape.parameters
    order = plan_order(train.slots, config.workers)
    rows = max(order.rows(rank) for rank in range(config.workers))
    window_tokens = train.micro_batch * train.context
    # Kept for backward, per token: about 14 vectors of the width and 4 of the SwiGLU a block, and the logits.
    kept = shape.layers * (14 * shape.hidden + 4 * shape.intermediate) + 3 * shape.vocab
    return Plan(
        parameters=shape.parameters,
        tokens_per_step=config.tokens_per_step,
        tokens=config.tokens_per_step * train.steps,
        weights_bytes=size,
        gradients_bytes=rows * size,
        optimizer_bytes=2 * size,
        activations_bytes=4 * kept * window_tokens,
    )


def human_bytes(count: float) -> str:
    """Bytes as a person reads them."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def human_count(count: float) -> str:
    """A large number as a person reads it."""
    for unit in ("", "K", "M", "B"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}T"
