"""The kernels' vocabulary: where rows live, which tiles to visit, scores, masks and random bits.

Every structure is a NamedTuple whose absent fields are None and vanish when a kernel is compiled.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from onchip.backends.triton.rules import allow, dropout_counter, modify, spans

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


class View(NamedTuple):
    """A tensor by its strides in elements; `batch` is the stride of a page in a paged cache."""

    ptr: Any
    batch: Any
    row: Any
    head: Any
    dim: Any


class Place(NamedTuple):
    """Where sequences start and how long they are; without any field they are dense."""

    cu_q: Any = None
    cu_k: Any = None
    used_q: Any = None
    used_k: Any = None
    lengths: Any = None  # keys of each sequence of a cache
    leftpad: Any = None
    index: Any = None  # cache row of each sequence
    page_table: Any = None
    page_stride: Any = None
    page_size: Any = None


class Rows(NamedTuple):
    """Keys [lo, hi) of each query, one of them may be absent; (batch, row) strides."""

    lo: Any = None
    hi: Any = None
    batch: Any = 0
    row: Any = 0


class Lists(NamedTuple):
    """Tiles to visit in each row of tiles: the partial ones, then the full ones."""

    tiles: Any
    counts: Any  # [..., 2] partial, full
    batch: Any
    head: Any
    row: Any


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


class Drop(NamedTuple):
    threshold: Any
    seed: Any
    offset: Any
    keep_scale: Any  # 1 / (1 - p)


@triton.jit
def sequence(place: Place, b, len_q, len_k):
    """(q_start, k_start, q_len, k_len) of sequence b."""
    q_start = 0
    k_start = 0
    q_len = len_q
    k_len = len_k
    if place.cu_q is not None:
        q_start = tl.load(place.cu_q + b).to(tl.int32)
        k_start = tl.load(place.cu_k + b).to(tl.int32)
        q_len = tl.load(place.cu_q + b + 1).to(tl.int32) - q_start
        k_len = tl.load(place.cu_k + b + 1).to(tl.int32) - k_start
    if place.used_q is not None:
        q_len = tl.load(place.used_q + b).to(tl.int32)
    if place.used_k is not None:
        k_len = tl.load(place.used_k + b).to(tl.int32)
    if place.lengths is not None:
        k_len = tl.load(place.lengths + b).to(tl.int32)
        k_start = tl.load(place.leftpad + b).to(tl.int32)
    return q_start, k_start, q_len, k_len


@triton.jit
def row_offsets(view: View, place: Place, b, start, rows):
    """Element offsets of rows of sequence b in q, out and their gradients: int64."""
    offsets = (start + rows).to(tl.int64) * view.row
    if place.cu_q is None:
        offsets += b.to(tl.int64) * view.batch
    return offsets


@triton.jit
def key_offsets(view: View, place: Place, b, start, keys):
    """Element offsets of keys of sequence b in k and v: int64; keys must lie inside the sequence when paged."""
    if place.page_table is not None:
        slot = start + keys
        page = tl.load(place.page_table + b.to(tl.int64) * place.page_stride + slot // place.page_size)
        offsets = page.to(tl.int64) * view.batch + (slot % place.page_size).to(tl.int64) * view.row
    elif place.cu_k is not None:
        offsets = (start + keys).to(tl.int64) * view.row
    elif place.index is not None:
        row = tl.load(place.index + b)
        offsets = row.to(tl.int64) * view.batch + (start + keys).to(tl.int64) * view.row
    else:
        offsets = b.to(tl.int64) * view.batch + (start + keys).to(tl.int64) * view.row
    return offsets


@triton.jit
def load_rows(ptr, offsets, stride, ok, D: tl.constexpr, DIM: tl.constexpr):
    """[rows, DIM] from row offsets; rows that are not ok, and dims past D, are 0. ok=None: every row is."""
    d = tl.arange(0, DIM)
    pointers = ptr + offsets[:, None] + d[None, :] * stride
    if ok is None:
        if D == DIM:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=d[None, :] < D, other=0.0)
    else:
        if D == DIM:
            tile = tl.load(pointers, mask=ok[:, None], other=0.0)
        else:
            tile = tl.load(pointers, mask=ok[:, None] & (d[None, :] < D), other=0.0)
    return tile


@triton.jit
def store_rows(ptr, offsets, stride, ok, tile, D: tl.constexpr, DIM: tl.constexpr):
    d = tl.arange(0, DIM)
    pointers = ptr + offsets[:, None] + d[None, :] * stride
    tl.store(pointers, tile.to(ptr.dtype.element_ty), mask=ok[:, None] & (d[None, :] < D))


@triton.jit
def load_block(desc, b, head, row, ROWS: tl.constexpr, DIM: tl.constexpr):
    """[ROWS, DIM] by the bulk copy engine, from a descriptor over (batch, head, row, dim); 0 outside it."""
    return desc.load([b, head, row, 0]).reshape(ROWS, DIM)


@triton.jit
def tile_range(place, band, rows: Rows, lists, b, head, i, qi, row_ok, q_len, k_len,
               TILE_Q: tl.constexpr, TILE_N: tl.constexpr, FN: tl.constexpr):  # fmt: skip
    """Positions to visit, as [lo, full_lo) masked, [full_lo, full_hi) unmasked, [full_hi, hi) masked.

    A position is a key tile, or an entry of the tile row's list. The last key tile's tail needs the mask.
    """
    if lists is not None:
        base = lists.counts + 2 * (b.to(tl.int64) * lists.batch + head * lists.head + i * lists.row)
        lo = 0
        full_lo = tl.load(base)
        full_hi = full_lo + tl.load(base + 1)
        hi = full_hi
    else:
        lo, full_lo, full_hi, hi = spans(i, TILE_Q, TILE_N, q_len, k_len, band)
        if rows.lo is not None:
            row_lo = tl.load(
                rows.lo + b.to(tl.int64) * rows.batch + qi.to(tl.int64) * rows.row, mask=row_ok, other=0
            )
            lo = max(lo, tl.min(tl.where(row_ok, row_lo, k_len), 0) // TILE_N)
            full_lo = max(full_lo, (tl.max(row_lo, 0) + TILE_N - 1) // TILE_N)
        if rows.hi is not None:
            row_hi = tl.load(
                rows.hi + b.to(tl.int64) * rows.batch + qi.to(tl.int64) * rows.row, mask=row_ok, other=0
            )
            hi = min(hi, (tl.max(row_hi, 0) + TILE_N - 1) // TILE_N)
            full_hi = min(full_hi, tl.min(tl.where(row_ok, row_hi, k_len), 0) // TILE_N)
        full_hi = min(full_hi, k_len // TILE_N)
        hi = max(hi, lo)
        full_lo = min(max(full_lo, lo), hi)
        full_hi = min(max(full_hi, full_lo), hi)
        if FN is not None:
            full_lo = hi
            full_hi = hi
    return lo, full_lo, full_hi, hi


@triton.jit
def tile_number(lists, b, head, i, position, width):
    """The key tile at a position of tile row i."""
    number = position
    if lists is not None:
        row = b.to(tl.int64) * lists.batch + head * lists.head + i * lists.row
        number = tl.load(lists.tiles + row * width + position)
    return number


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
        visible = visible & FN(b, h, tl.minimum(q, q_len - 1), tl.minimum(k, k_len - 1), q_len, k_len, args)
    return visible


@triton.jit
def tanh(x):
    """By the exponential, and near 0, where that cancels, by its series (error below 2e-8 for |x| < 0.3)."""
    y = tl.abs(x)
    t = tl.math.exp2(y * -2.8853900817779268)
    large = (1.0 - t) / (1.0 + t)
    z = x * x
    small = x * (1.0 + z * (-0.3333333333 + z * (0.1333333333 + z * (-0.05396825397 + z * 0.02186948854))))
    return tl.where(y < 0.3, small, tl.where(x < 0, -large, large))


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
        after = MOD(before, b, h, tl.minimum(q, q_len - 1), tl.minimum(k, k_len - 1), score.args).to(
            tl.float32
        )
        after = tl.broadcast_to(after, before.shape)
    return after, before


@triton.jit
def keep_bits(drop: Drop, b, h, heads, q, n0, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Which pairs survive dropout: [TILE_M, TILE_N] for rows q, h [TILE_M] and keys n0 ... (n0 a multiple of 4)."""
    k = n0 + 4 * tl.arange(0, TILE_N // 4)
    c0, c1, c2, c3 = dropout_counter(b, h[:, None], heads, q[:, None], k[None, :], drop.offset)
    zero = tl.zeros([TILE_M, TILE_N // 4], tl.uint32)
    c0, c1 = zero + c0.to(tl.uint32), zero + c1.to(tl.uint32)
    c2, c3 = zero + c2.to(tl.uint32), zero + c3.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(drop.seed, c0, c1, c2, c3)
    # Key 4 * i + 2 * y + x takes word 2 * y + x: join makes the last axis.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(TILE_M, TILE_N)
    return words.to(tl.int64) >= drop.threshold
