"""f32 to bf16 and back, each in one pass over memory.

torch has no operation that adds f32 to bf16 and rounds; its way takes three passes, and on a network as fast
as memory that is most of an all-reduce. These loops are compiled when the module is imported, which takes a
second and some 100 MB: only those who put bf16 on the wire import it. bf16 numbers are held as uint16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from andon.transport.tcp.frames import Floats, Halves


@njit(inline="always")
def _rounded(value: Any) -> Any:
    """To the nearest, ties to even; what is not a number stays so."""
    bits = np.float32(value).view(np.uint32)
    if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
        return np.uint16(0x7FC0)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(inline="always")
def _widened(half: Any) -> Any:
    return np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)


@njit("void(f4[::1], u2[::1])", nogil=True)
def round_off(values: Floats, halves: Halves) -> None:
    """halves = values"""
    for i in range(halves.size):
        halves[i] = _rounded(values[i])


@njit("void(f4[::1])", nogil=True)
def round_in_place(values: Floats) -> None:
    """values, as bf16 would have them"""
    for i in range(values.size):
        values[i] = _widened(_rounded(values[i]))


@njit("void(u2[::1], f4[::1])", nogil=True)
def widen(halves: Halves, values: Floats) -> None:
    """values = halves"""
    for i in range(halves.size):
        values[i] = _widened(halves[i])


@njit("void(u2[::1], f4[::1])", nogil=True)
def add(halves: Halves, values: Floats) -> None:
    """halves += values"""
    for i in range(halves.size):
        halves[i] = _rounded(_widened(halves[i]) + values[i])


@njit("void(u2[::1], f4[::1])", nogil=True)
def add_to_both(halves: Halves, values: Floats) -> None:
    """halves += values, which are rounded first, as those of two ranks are on any other transport;
    values = halves"""
    for i in range(halves.size):
        halves[i] = _rounded(_widened(halves[i]) + _widened(_rounded(values[i])))
        values[i] = _widened(halves[i])
