"""MFU: which part of a GPU's arithmetic a run uses, counting only what the model needs, forward and backward."""

from typing import Final

from andon.model.shape import Shape

PEAK_BF16: Final = {
    "B200": 2250e12,
    "H200": 989e12,
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
"""Dense bf16 operations a second, as the makers state them, by a part of the device's name."""


def peak_of(device: str) -> float | None:
    """The peak of a device; None if it is not known."""
    words = device.replace("-", " ").split()
    known = [name for name in PEAK_BF16 if all(word in words for word in name.split())]
    return PEAK_BF16[max(known, key=len)] if known else None


def flops_per_token(shape: Shape) -> float:
    """Operations of forward and backward for one token: six for every weight of a matrix product, and attention."""
    embedding = 0 if shape.tied else shape.vocab * shape.hidden
    attention = 12 * shape.layers * shape.hidden * shape.context
    return 6.0 * (shape.parameters - embedding) + attention


def mfu(shape: Shape, tokens_per_s: float, workers: int, device: str) -> float | None:
    """The share of the peak of all devices; None where the peak is not known."""
    peak = peak_of(device)
    return tokens_per_s * flops_per_token(shape) / (workers * peak) if peak else None
