"""Attention of a few hundred tokens, from the output of one linear layer and back to its gradient.

torch's kernels take queries, keys and values apart, and in backward give three gradients, which one more kernel packs
for the products and sums for the bias: it reads and writes 6 times tokens x width. Here backward writes the packed
gradient and the sums itself.

| kernel   | a program computes, for TILE tokens of a head           | in a loop over |
|----------|---------------------------------------------------------|----------------|
| forward  | the output of queries                                   | keys           |
| backward | the gradients of keys and values (every second program) | queries        |
| backward | the gradient of queries (the others)                    | keys           |

So backward computes the scores twice. In return nothing is added up between programs, which makes results repeat bit by
bit, and weights go from one product to the next in registers.

The method is FlashAttention-2's (arXiv 2307.08691).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, STEP, STAGES = 64, 32, 2
"""Tokens that a program holds, tokens of a turn of its loop, and turns whose loads are under way at once."""
NARROW = 64
"""Most features of a head for 4 warps a program; more need 8, or registers spill."""


@triton.jit
def _tile(start, rows, columns, stride, tokens, features):
    """Return rows x columns of a matrix [tokens, features] in memory, zeros outside of it."""
    inside = (rows[:, None] < tokens) & (columns[None, :] < features)
    return tl.load(start + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _place(tokens, heads, head, features):
    """Return where a sample's head begins in packed tensors and in outputs, and the distance of their rows."""
    sample, of_sample = (head // heads).to(tl.int64), head % heads
    stride = heads * features
    packed = sample * tokens * 3 * stride + of_sample * 3 * features
    return packed, 3 * stride, sample * tokens * stride + of_sample * features, stride


@triton.jit
def _forward_kernel(
    qkv,  # [batch, tokens, heads, q|k|v, features]
    out,  # [batch, tokens, heads, features]
    logs,  # float32 [batch, heads, tokens]: logarithm to base 2 of the sums of weights
    scale,  # of scores, times log2(e)
    tokens,
    heads,
    features: tl.constexpr,
    width: tl.constexpr,  # the power of 2 from features on
    tile: tl.constexpr,
    step: tl.constexpr,
):
    tiles = tl.cdiv(tokens, tile)
    number, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    at, stride, at_out, stride_out = _place(tokens, heads, head, features)
    rows, columns = number * tile + tl.arange(0, tile), tl.arange(0, width)
    q = _tile(qkv + at, rows, columns, stride, tokens, features)
    most, total = tl.full([tile], -float("inf"), tl.float32), tl.zeros([tile], tl.float32)
    y = tl.zeros([tile, width], tl.float32)
    for start in range(0, tokens, step):
        others = start + tl.arange(0, step)
        k = _tile(qkv + at + features, others, columns, stride, tokens, features)
        v = _tile(qkv + at + 2 * features, others, columns, stride, tokens, features)
        scores = tl.where(others[None, :] < tokens, tl.dot(q, tl.trans(k)) * scale, -float("inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrunk = tl.exp2(most - higher)
        total = total * shrunk + tl.sum(weights, 1)
        y = tl.dot(weights.to(v.dtype), v, y * shrunk[:, None])
        most = higher
    inside = (rows[:, None] < tokens) & (columns[None, :] < features)
    tl.store(out + at_out + rows[:, None] * stride_out + columns[None, :], y / total[:, None], mask=inside)
    tl.store(logs + head.to(tl.int64) * tokens + rows, most + tl.log2(total), mask=rows < tokens)


@triton.jit
def _store(packed, sums, x, rows, columns, stride, tokens, features):
    """Store a tile of the gradient of queries, keys or values, and its sums over tokens."""
    inside = (rows[:, None] < tokens) & (columns[None, :] < features)
    tl.store(packed + rows[:, None] * stride + columns[None, :], x, mask=inside)
    tl.store(sums + columns, tl.sum(tl.where(inside, x, 0.0), 0), mask=columns < features)


@triton.jit
def _backward_kernel(
    gradient,  # [batch, tokens, heads, features]
    qkv,  # [batch, tokens, heads, q|k|v, features]
    out,  # [batch, tokens, heads, features]
    logs,  # float32 [batch, heads, tokens]
    packed,  # gradient of qkv
    sums,  # float32 [batch, tiles, heads, q|k|v, features]: its sums over the tokens of a tile
    scale,  # of scores, times log2(e)
    factor,  # of scores
    tokens,
    heads,
    features: tl.constexpr,
    width: tl.constexpr,  # the power of 2 from features on
    tile: tl.constexpr,
    step: tl.constexpr,
):
    # Programs of a head are neighbours, so that they find its tensors in the cache.
    tiles = tl.cdiv(tokens, tile)
    number, head = (tl.program_id(0) // 2) % tiles, (tl.program_id(0) // 2) // tiles
    at, stride, at_out, stride_out = _place(tokens, heads, head, features)
    queries, keys, values = qkv + at, qkv + at + features, qkv + at + 2 * features
    rows, columns = number * tile + tl.arange(0, tile), tl.arange(0, width)
    logs += head.to(tl.int64) * tokens
    gradient, out, packed = gradient + at_out, out + at_out, packed + at
    sums += (((head // heads) * tiles + number) * heads + head % heads).to(tl.int64) * 3 * features

    if tl.program_id(0) % 2 == 0:
        k = _tile(keys, rows, columns, stride, tokens, features)
        v = _tile(values, rows, columns, stride, tokens, features)
        dk, dv = tl.zeros([tile, width], tl.float32), tl.zeros([tile, width], tl.float32)
        for start in range(0, tokens, step):
            others = start + tl.arange(0, step)
            q = _tile(queries, others, columns, stride, tokens, features)
            dy = _tile(gradient, others, columns, stride_out, tokens, features)
            y = _tile(out, others, columns, stride_out, tokens, features)
            mean = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
            log = tl.load(logs + others, mask=others < tokens, other=0.0)
            weights = tl.exp2(tl.dot(k, tl.trans(q)) * scale - log[None, :])  # transposed: [keys, queries]
            dv = tl.dot(weights.to(dy.dtype), dy, dv)
            scores = weights * (tl.dot(v, tl.trans(dy)) - mean[None, :])
            dk = tl.dot(scores.to(q.dtype), q, dk)
        _store(packed + features, sums + features, dk * factor, rows, columns, stride, tokens, features)
        _store(packed + 2 * features, sums + 2 * features, dv, rows, columns, stride, tokens, features)
    else:
        q = _tile(queries, rows, columns, stride, tokens, features)
        dy = _tile(gradient, rows, columns, stride_out, tokens, features)
        y = _tile(out, rows, columns, stride_out, tokens, features)
        mean = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
        log = tl.load(logs + rows, mask=rows < tokens, other=0.0)
        dq = tl.zeros([tile, width], tl.float32)
        for start in range(0, tokens, step):
            others = start + tl.arange(0, step)
            k = _tile(keys, others, columns, stride, tokens, features)
            v = _tile(values, others, columns, stride, tokens, features)
            # Keys beyond the last are zeros, so that their weights add nothing.
            weights = tl.exp2(tl.dot(q, tl.trans(k)) * scale - log[:, None])
            scores = weights * (tl.dot(dy, tl.trans(v)) - mean[:, None])
            dq = tl.dot(scores.to(k.dtype), k, dq)
        _store(packed, sums, dq * factor, rows, columns, stride, tokens, features)


def forward(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return the output of attention and the logarithms that backward needs.

    qkv: 16-bit, contiguous, [batch, tokens, heads · 3 · features], ordered (head, q|k|v, feature).
    Returns [batch, tokens, heads · features] of the same type, and float32 [batch, heads, tokens].
    """
    batch, tokens, features = qkv.shape[0], qkv.shape[1], qkv.shape[2] // (3 * heads)
    out = qkv.new_empty(batch, tokens, heads * features)
    logs = qkv.new_empty(batch, heads, tokens, dtype=torch.float32)
    scale = math.log2(math.e) / math.sqrt(features)
    _forward_kernel[(triton.cdiv(tokens, TILE) * batch * heads,)](
        qkv, out, logs, scale, tokens, heads, **constants(features)
    )
    return out, logs


def backward(gradient: Tensor, qkv: Tensor, out: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of `qkv`, and its sums over tokens: those of TILE tokens of a sample in each row, in float32.

    gradient: that of `out`, contiguous.
    qkv, out, logs: as `forward` takes and returns them.
    """
    (batch, heads, tokens), features = logs.shape, out.shape[2] // logs.shape[1]
    packed = torch.empty_like(qkv)
    tiles = triton.cdiv(tokens, TILE)
    sums = qkv.new_empty(batch * tiles, qkv.shape[2], dtype=torch.float32)
    factor = 1 / math.sqrt(features)
    scale = math.log2(math.e) * factor
    _backward_kernel[(2 * tiles * batch * heads,)](
        gradient, qkv, out, logs, packed, sums, scale, factor, tokens, heads, **constants(features)
    )
    return packed, sums


def constants(features: int) -> dict[str, int]:
    """Return the constants of both kernels, and the warps and stages that they are compiled for."""
    sizes = {"features": features, "width": max(16, triton.next_power_of_2(features)), "tile": TILE, "step": STEP}
    return sizes | {"num_warps": 4 if features <= NARROW else 8, "num_stages": STAGES}
