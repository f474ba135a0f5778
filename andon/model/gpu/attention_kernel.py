"""Causal attention with rotary positions on a GPU, forward and backward, in triton (`attention.attend_by_kernels`).

A program computes one block of 64 queries, or of 64 keys, and each element is written by one program, so every sum has
one order. Forward goes through the keys up to its queries and keeps the maximum and the sum of each row's softmax.
Backward is two kernels: one sums the gradients of a block of queries over the keys, the other those of a block of keys
and values over the queries of all heads that share them. Both compute the softmax again: seven products instead of the
five of a single kernel, which would have to add to the queries' gradients in the order in which its programs run.

Queries, keys and values of a token are side by side: T rows of H + 2 K heads of D in each window. Exponentials and
logarithms are to base 2.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK: Final = tl.constexpr(64)
"""The queries, or keys, of one program."""
LOG2E: Final = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def attention_rotate(heads, rotated, cos, sin, T, TURNED: tl.constexpr, W: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rotate the first TURNED of a row's W heads by the row's position; copy the others."""
    row = tl.program_id(0).to(tl.int64) * BLOCK
    at = _tile(row * W * D + tl.program_id(1) * D, W * D, D // 2)
    left, right = tl.load(heads + at), tl.load(heads + at + D // 2)
    if tl.program_id(1) < TURNED:
        position = _tile(row % T * D, D, D // 2)
        c, s = tl.load(cos + position), tl.load(sin + position)
        x, y = left.to(tl.float32), right.to(tl.float32)
        left, right = (x * c - y * s).to(left.dtype), (y * c + x * s).to(left.dtype)
    tl.store(rotated + at, left)
    tl.store(rotated + at + D // 2, right)


@triton.jit  # type: ignore[untyped-decorator]
def attention_forward(rotated, out, sums, scale, T, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """The output of a block of queries, and the logarithm of each row's sum of exponentials of scores."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK  # the longest rows start first
    batch, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    rows = rotated + batch * T * (H + 2 * K) * D
    keys = rows + (H + head // (H // K)) * D
    q = tl.load(rows + _tile(first * (H + 2 * K) * D + head * D, (H + 2 * K) * D, D))
    top, total = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    y = tl.zeros([BLOCK, D], tl.float32)
    for at in tl.range(0, first, BLOCK, num_stages=3):
        k, v = _keys_and_values(keys, at, H, K, D)
        y, top, total = _attend(q, k, v, y, top, total, scale, False)
    k, v = _keys_and_values(keys, first, H, K, D)
    y, top, total = _attend(q, k, v, y, top, total, scale, True)
    at = _tile((batch * T + first) * H * D + head * D, H * D, D)
    tl.store(out + at, (y / total[:, None]).to(out.dtype.element_ty))
    tl.store(sums + tl.program_id(1).to(tl.int64) * T + first + tl.arange(0, BLOCK), top + tl.log2(total))


@triton.jit  # type: ignore[untyped-decorator]
def attention_queries_backward(  # type: ignore[no-untyped-def]
    rotated,
    out,
    gradient,
    sums,
    deltas,
    for_heads,
    cos,
    sin,
    scale,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
):
    """The gradients of a block of queries before rotation, and `deltas`: each output times its gradient, summed."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK
    batch, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    rows = rotated + batch * T * (H + 2 * K) * D
    keys = rows + (H + head // (H // K)) * D
    q = tl.load(rows + _tile(first * (H + 2 * K) * D + head * D, (H + 2 * K) * D, D))
    at = _tile((batch * T + first) * H * D + head * D, H * D, D)
    g = tl.load(gradient + at)
    delta = tl.sum(tl.load(out + at).to(tl.float32) * g.to(tl.float32), 1)
    row = tl.program_id(1).to(tl.int64) * T + first + tl.arange(0, BLOCK)
    tl.store(deltas + row, delta)
    log_sum, delta = tl.load(sums + row)[:, None], delta[:, None]
    for_q = tl.zeros([BLOCK, D], tl.float32)
    for at in tl.range(0, first, BLOCK, num_stages=2):
        k, v = _keys_and_values(keys, at, H, K, D)
        _, for_scores = _scores_backward(tl.dot(q, tl.trans(k)), tl.dot(g, tl.trans(v)), log_sum, delta, scale)
        for_q = tl.dot(for_scores.to(q.dtype), k, for_q)
    k, v = _keys_and_values(keys, first, H, K, D)
    scores = _masked(tl.dot(q, tl.trans(k)), False)
    _, for_scores = _scores_backward(scores, tl.dot(g, tl.trans(v)), log_sum, delta, scale)
    for_q = tl.dot(for_scores.to(q.dtype), k, for_q)
    to = for_heads + batch * T * (H + 2 * K) * D + first * (H + 2 * K) * D + head * D
    _store_rotated_back(to, for_q * scale, cos, sin, first, H, K, D)


@triton.jit  # type: ignore[untyped-decorator]
def attention_keys_backward(  # type: ignore[no-untyped-def]
    rotated, gradient, sums, deltas, for_heads, cos, sin, scale, T, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr
):
    """The gradients of a block of keys, before rotation, and of their values."""
    first = tl.program_id(0) * BLOCK
    batch, kv = (tl.program_id(1) // K).to(tl.int64), tl.program_id(1) % K
    shared: tl.constexpr = H // K  # heads with these keys
    rows = rotated + batch * T * (H + 2 * K) * D
    k, v = _keys_and_values(rows + (H + kv) * D, first, H, K, D)
    gradient += batch * T * H * D
    sums, deltas = sums + batch * H * T, deltas + batch * H * T
    for_k, for_v = tl.zeros([BLOCK, D], tl.float32), tl.zeros([BLOCK, D], tl.float32)
    for each in tl.range(0, shared, num_stages=3):
        head = kv * shared + each
        q = tl.load(rows + _tile(first * (H + 2 * K) * D + head * D, (H + 2 * K) * D, D))
        g = tl.load(gradient + _tile(first * H * D + head * D, H * D, D))
        row = head * T + first + tl.arange(0, BLOCK)
        log_sum, delta = tl.load(sums + row)[None, :], tl.load(deltas + row)[None, :]
        scores = _masked(tl.dot(k, tl.trans(q)), True)
        p, for_scores = _scores_backward(scores, tl.dot(v, tl.trans(g)), log_sum, delta, scale)
        for_v = tl.dot(p.to(q.dtype), g, for_v)
        for_k = tl.dot(for_scores.to(q.dtype), q, for_k)
    after = T // BLOCK - 1 - tl.program_id(0)  # blocks of later queries
    for each in tl.range(0, shared * after, num_stages=3):
        divisor = tl.maximum(after, 1)  # the pipeline divides before it knows whether there is a first turn
        head, later = kv * shared + each // divisor, first + (1 + each % divisor) * BLOCK
        q = tl.load(rows + _tile(later * (H + 2 * K) * D + head * D, (H + 2 * K) * D, D))
        g = tl.load(gradient + _tile(later * H * D + head * D, H * D, D))
        row = head * T + later + tl.arange(0, BLOCK)
        log_sum, delta = tl.load(sums + row)[None, :], tl.load(deltas + row)[None, :]
        p, for_scores = _scores_backward(tl.dot(k, tl.trans(q)), tl.dot(v, tl.trans(g)), log_sum, delta, scale)
        for_v = tl.dot(p.to(q.dtype), g, for_v)
        for_k = tl.dot(for_scores.to(q.dtype), q, for_k)
    to = for_heads + batch * T * (H + 2 * K) * D + first * (H + 2 * K) * D + (H + kv) * D
    _store_rotated_back(to, for_k * scale, cos, sin, first, H, K, D)
    tl.store(to + K * D + _tile(0, (H + 2 * K) * D, D), for_v.to(for_heads.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _tile(start, stride, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of BLOCK rows of WIDTH elements."""
    return start + tl.arange(0, BLOCK)[:, None] * stride + tl.arange(0, WIDTH)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _keys_and_values(keys, at, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    tile = keys + _tile(at * (H + 2 * K) * D, (H + 2 * K) * D, D)
    return tl.load(tile), tl.load(tile + K * D)


@triton.jit  # type: ignore[untyped-decorator]
def _masked(scores, TRANSPOSED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores of queries (rows) and keys (columns) of one block, without the keys after each query."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    return tl.where(row <= column if TRANSPOSED else row >= column, scores, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _attend(q, k, v, y, top, total, scale, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add a block of keys to the outputs and sums of the softmax; `top` is the highest score so far."""
    scores = tl.dot(q, tl.trans(k))
    if MASKED:
        scores = _masked(scores, False)
    higher = tl.maximum(top, tl.max(scores, 1) * (scale * LOG2E))
    p = tl.exp2(scores * (scale * LOG2E) - higher[:, None])
    keep = tl.exp2(top - higher)
    return tl.dot(p.to(q.dtype), v, y * keep[:, None]), higher, total * keep + tl.sum(p, 1)


@triton.jit
def _scores_backward(scores, for_p, log_sum, delta, scale):  # type: ignore[no-untyped-def]
    """The softmax of scores and the gradient of scaled scores."""
    p = tl.exp2(scores * (scale * LOG2E) - log_sum)
    return p, p * (for_p - delta)


@triton.jit  # type: ignore[untyped-decorator]
def _store_rotated_back(to, x, cos, sin, first, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    left, right = tl.split(tl.permute(tl.reshape(x, [BLOCK, 2, D // 2]), [0, 2, 1]))
    position = _tile(first * D, D, D // 2)
    c, s = tl.load(cos + position), tl.load(sin + position)
    at = to + _tile(0, (H + 2 * K) * D, D // 2)
    tl.store(at, (left * c + right * s).to(to.dtype.element_ty))
    tl.store(at + D // 2, (right * c - left * s).to(to.dtype.element_ty))


def forward(heads: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Heads with rotated queries and keys (B T H+2K D), outputs (B T H D), and the sums that backward needs (B H T)."""
    batch, length, width, size = heads.shape
    assert length % BLOCK.value == 0 and len(cos) == length and cos.dtype == torch.float32, (heads.shape, cos)
    count = width - 2 * kv_heads
    rotated, out = torch.empty_like(heads), heads.new_empty(batch, length, count, size)
    sums = heads.new_empty(batch, count, length, dtype=torch.float32)
    blocks, sizes = length // BLOCK.value, (size**-0.5, length, count, kv_heads, size)
    with torch.cuda.device(heads.device):
        turned = (length, count + kv_heads, width, size)
        attention_rotate[batch * blocks, width](heads, rotated, cos, sin, *turned, num_warps=4)
        attention_forward[blocks, batch * count](rotated, out, sums, *sizes, num_warps=4)
    return rotated, out, sums


def backward(
    gradient: Tensor, rotated: Tensor, out: Tensor, sums: Tensor, tables: tuple[Tensor, Tensor], kv_heads: int
) -> Tensor:
    """The gradient of `heads`, from that of the outputs."""
    batch, length, width, size = rotated.shape
    count = width - 2 * kv_heads
    for_heads, deltas = torch.empty_like(rotated), torch.empty_like(sums)
    blocks, sizes = length // BLOCK.value, (size**-0.5, length, count, kv_heads, size)
    with torch.cuda.device(rotated.device):
        attention_queries_backward[blocks, batch * count](
            rotated, out, gradient, sums, deltas, for_heads, *tables, *sizes, num_warps=4
        )
        attention_keys_backward[blocks, batch * kv_heads](
            rotated, gradient, sums, deltas, for_heads, *tables, *sizes, num_warps=4
        )
    return for_heads
