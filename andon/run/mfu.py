"""MFU: the share of the GPUs' peak that the model's own arithmetic takes (`model.shape.Shape.operations_per_token`)."""

from typing import Final

import torch

from andon.machine import machine_id
from andon.model.shape import Shape
from andon.transport.base import Group

PEAK_BF16: Final = {
    "B200": 2250e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Dense bf16 operations a second from the data sheets, by words of the card's name."""
OTHERS: Final = frozenset(("D", "Laptop", "MIG", "Ti"))
"""Words in the names of cards that are slower or faster than those of the table, and of slices of a card."""


def peak_of(card: str) -> float | None:
    """The peak of a card in bf16; None if it is not known."""
    words = card.replace("-", " ").split()
    if not OTHERS.isdisjoint(words):
        return None
    known = [name for name in PEAK_BF16 if all(word in words for word in name.split())]
    return PEAK_BF16[max(known, key=len)] if known else None


def mfu(shape: Shape, tokens_per_s: float, peak: float) -> float:
    """The share of a peak that a model uses at `tokens_per_s`."""
    return tokens_per_s * shape.operations_per_token / peak


def peak_of_all(group: Group, device: torch.device) -> float | None:
    """The peak of all cards that the ranks use, each counted once; all ranks call it together."""
    if device.type != "cuda":
        return None
    card = torch.cuda.get_device_properties(device)
    cards = set(group.all_gather_bytes(f"{machine_id()} {card.uuid}\n{card.name}".encode()))
    peaks = [peak_of(text.decode().split("\n")[1]) for text in cards]
    return sum(peak for peak in peaks if peak) if all(peaks) else None
