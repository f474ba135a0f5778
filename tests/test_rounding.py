"""bf16 arithmetic of the wire: the bits of torch's, for every kind of number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from andon.transport.tcp import rounding
from andon.transport.tcp.frames import Floats, Halves

SPECIAL = [
    *(0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00008000, 0x00018000, 0x007FFFFF),  # around zero
    *(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000, 0xBF818000),  # ties, and next to them
    *(0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000),  # up to infinity
]
NOT_NUMBERS = [0x7F800001, 0x7F80FFFF, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF]


def numbers(seed: int) -> Floats:
    """Every special number, and many of random bits that are numbers."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, 100_003, dtype=np.uint32)
    values = np.concatenate([np.array(SPECIAL, np.uint32), bits]).view(np.float32)
    return values[~np.isnan(values)].copy()


def to_halves(values: Floats) -> Halves:
    return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()


def to_floats(halves: Halves) -> Floats:
    floats: Floats = torch.from_numpy(halves.copy()).view(torch.bfloat16).float().numpy()
    return floats


def same_bits(one: Floats | Halves, other: Floats | Halves) -> bool:
    return one.tobytes() == other.tobytes()


def test_rounding_and_widening_have_the_bits_of_torch() -> None:
    values = numbers(1)
    halves, back, in_place = np.empty(len(values), np.uint16), np.empty_like(values), values.copy()
    rounding.round_off(values, halves)
    rounding.widen(halves, back)
    rounding.round_in_place(in_place)
    assert same_bits(halves, to_halves(values))
    assert same_bits(back, to_floats(halves)) and same_bits(in_place, back)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_sums_are_taken_in_f32_and_rounded_once() -> None:
    values, other = numbers(2), numbers(3)
    size = min(len(values), len(other))
    values, halves = values[:size], to_halves(other[:size])
    plain = to_floats(halves) + values
    rounded_first = to_floats(halves) + to_floats(to_halves(values))
    numeric = ~np.isnan(plain) & ~np.isnan(rounded_first)
    values, halves, plain, rounded_first = (x[numeric].copy() for x in (values, halves, plain, rounded_first))
    into_halves, into_both, kept = halves.copy(), halves.copy(), values.copy()
    rounding.add(into_halves, values)
    rounding.add_to_both(into_both, kept)
    assert same_bits(into_halves, to_halves(plain))
    assert same_bits(into_both, to_halves(rounded_first)) and same_bits(kept, to_floats(into_both))


def test_what_is_not_a_number_stays_so() -> None:
    bad = np.array(NOT_NUMBERS, np.uint32).view(np.float32)
    halves, ones = np.empty(len(bad), np.uint16), np.ones(len(bad), np.float32)
    rounding.round_off(bad, halves)
    assert np.isnan(to_floats(halves)).all()
    rounding.add(halves, ones)
    assert np.isnan(to_floats(halves)).all()
    halves = to_halves(ones)
    rounding.add_to_both(halves, bad)
    assert np.isnan(bad).all() and np.isnan(to_floats(halves)).all()
