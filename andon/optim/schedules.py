"""Learning-rate schedules: pure functions of the step."""

import math


def rate(schedule: str, step: int, steps: int, warmup: int, final: float) -> float:
    """The learning rate of a step (from 1 to `steps`), as a fraction of the peak."""
    if step <= warmup:
        return step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - final) * done
        case "cosine":
            return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * done))
        case "wsd":
            decay = max(1, round(0.2 * steps))
            return 1.0 - (1.0 - final) * max(0.0, (step - (steps - decay)) / decay)
    raise ValueError(f"unknown schedule {schedule!r}")
