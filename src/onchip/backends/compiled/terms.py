"""A kernel's view of a mask and of what modifies a score.

Every structure, here and in `lists` and `intervals`, is a NamedTuple whose absent fields are None and vanish when a
kernel is compiled.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from onchip.backends.compiled.intervals import Rows
from onchip.backends.compiled.rules import allow, modify, tanh


class Scores(NamedTuple):
    """What modifies a score; `args` are the mod's tensors."""

    softcap: Any = None
    alibi: Any = None
    alibi_batch: Any = None
    bias: Any = None
    bias_batch: Any = None
    bias_head: Any = None
    bias_row: Any = None
    bias_key: Any = None
    sink: Any = None
    args: Any = None


@triton.jit
def within(position, length):
    """Positions that a function of the user may read a table at: a pair that does not exist asks about one that may."""
    return tl.maximum(tl.minimum(position, length - 1), 0)


@triton.jit
def visible_pairs(band, rows: Rows, args, b, h, q, k, q_len, k_len, FN: tl.constexpr):
    """Which pairs of a tile are visible; q and k broadcast against one another."""
    lo = None
    hi = None
    inside = q < q_len
    if rows.lo is not None:
        lo = tl.load(rows.lo + b.to(tl.int64) * rows.batch + q.to(tl.int64) * rows.row, mask=inside, other=0)
    if rows.hi is not None:
        hi = tl.load(rows.hi + b.to(tl.int64) * rows.batch + q.to(tl.int64) * rows.row, mask=inside, other=0)
    visible = allow(q, k, q_len, k_len, band, lo, hi)
    if FN is not None:
        visible = visible & FN(b, h, within(q, q_len), within(k, k_len), q_len, k_len, args)
    return visible


@triton.jit
def hide(x, instead, band, rows: Rows, args, b, h, q, k, q_len, k_len, FN: tl.constexpr):
    """x, with something else for the pairs that are not visible."""
    return tl.where(visible_pairs(band, rows, args, b, h, q, k, q_len, k_len, FN), x, instead)


@triton.jit
def modified(s, score: Scores, b, h, q, k, q_len, k_len, MOD: tl.constexpr):
    """Scaled scores after every modification, and before the mod."""
    slope = None
    distance = None
    bias = None
    if score.alibi is not None:
        slope = tl.load(score.alibi + b * score.alibi_batch + h).to(tl.float32)
        distance = tl.abs(q + (k_len - q_len) - k)
    if score.bias is not None:
        offsets = b.to(tl.int64) * score.bias_batch + h.to(tl.int64) * score.bias_head
        offsets += q.to(tl.int64) * score.bias_row + k.to(tl.int64) * score.bias_key
        bias = tl.load(score.bias + offsets, mask=(q < q_len) & (k < k_len), other=0.0).to(tl.float32)
    before = modify(s, tanh, score.softcap, slope, distance, bias)
    after = before
    if MOD is not None:
        after = MOD(before, b, h, within(q, q_len), within(k, k_len), score.args).to(tl.float32)
        after = tl.broadcast_to(after, before.shape)
    return after, before
