"""MFU: the share of the GPUs' peak that the model's own arithmetic takes (`model.shape.Shape.operations_per_token`)."""

from typing import Final

import torch

from andon.machine import machine_id
from andon.model.shape import Shape
from andon.transport.base import Group

PEAKS: Final = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
"""Operations per second in bf16, without sparsity, by a part of the card's name."""


def peak_of(name: str) -> float | None:
    """A card's peak in bf16, if it is known."""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def mfu(shape: Shape, tokens_per_s: float, peak: float) -> float:
    """The share of the peak at a rate."""
    return tokens_per_s * shape.operations_per_token / peak


def peak_of_all(group: Group, device: torch.device) -> float | None:
    """The peak of all cards that the ranks of a group use, each counted once; every rank calls it."""
    if device.type != "cuda":
        return None
    card = torch.cuda.get_device_properties(device)
    cards = {text.decode() for text in group.all_gather_bytes(f"{machine_id()} {card.uuid} {card.name}".encode())}
    peaks = [peak_of(text) for text in cards]
    return sum(peak for peak in peaks if peak) if all(peaks) else None
