"""From backward to the sum over all workers: order of addition, arena, exchange."""
