"""The training step: order of addition, arena, exchange, trainer."""
