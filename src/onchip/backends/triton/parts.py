"""The kernels' vocabulary: where rows live, which tiles to visit, random bits.

Every structure is a NamedTuple whose absent fields are None and vanish when a kernel is compiled.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from onchip.backends.compiled.intervals import Rows
from onchip.backends.compiled.rules import dropout_counter, spans

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Sizes that a compiled kernel takes as they come: a new length or batch compiles nothing.
LENGTHS = ("len_q", "len_k", "heads_q", "m_blocks", "n_blocks", "section", "width", "splits", "batch")
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
    used: Any = None  # slots in use of each sequence of a cache, before its new keys
    leftpad: Any = None
    index: Any = None  # cache row of each sequence
    page_table: Any = None
    page_stride: Any = None
    page_size: Any = None


class Drop(NamedTuple):
    threshold: Any
    keep_scale: Any  # 1 / (1 - p)


class Statistics(NamedTuple):
    """Planes of numbers of query rows, (batch, heads, rows) with room up to the end of a tile, or (heads, total_q).

    Plane 0: lse, in units of log2 unless scores are modified, and inf in a row without a key: exp2(s - inf) = 0.
    Plane 1: delta, 0 in such a row. Plane 2, where scores are modified: what lse lost to rounding, in units of log2.
    """

    ptr: Any
    plane: Any
    head: Any


@triton.jit
def sequence(place: Place, b, len_q, len_k, new):
    """(q_start, k_start, q_len, k_len) of sequence b; new: keys that this call appended to a cache."""
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
    if place.used is not None:
        k_len = tl.load(place.used + b).to(tl.int32) + new
        if place.leftpad is not None:
            k_start = tl.load(place.leftpad + b).to(tl.int32)
            k_len -= k_start
        k_len = tl.minimum(k_len, len_k)  # no more keys are read than there may be, whatever the lengths hold
    return q_start, k_start, q_len, k_len


@triton.jit
def row_offsets(view: View, place: Place, b, start, rows):
    """Element offsets of rows of sequence b in q, out and their gradients: int64."""
    offsets = (start + rows).to(tl.int64) * view.row
    if place.cu_q is None:
        offsets += b.to(tl.int64) * view.batch
    return offsets


@triton.jit
def statistic_offsets(place: Place, b, h, start, rows, heads, stride):
    """Element offsets in lse and its like, (batch, heads, seqlen_q) or (heads, total_q); stride: of a head."""
    offsets = h.to(tl.int64) * stride + start + rows
    if place.cu_q is None:
        offsets += b.to(tl.int64) * heads * stride
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
               TILE_Q: tl.constexpr, TILE_N: tl.constexpr, FN: tl.constexpr, FIRST: tl.constexpr):  # fmt: skip
    """Positions to visit, as [lo, full_lo) masked, [full_lo, full_hi) unmasked, [full_hi, hi) masked.

    A position is a key tile, or an entry of the tile row's list. The last key tile's tail needs the mask.
    """
    if lists is not None:
        lo = 0
        full_lo, full_hi = list_range(lists, b, head, i, FIRST == 1)
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
def tile_of(pid, blocks, section, heads, lists, order, LAST_FIRST: tl.constexpr, GROUP: tl.constexpr):
    """(tile row, head, sequence) of a program: the longest tiles of a section of heads first (compiled/order.py).

    order: numbers of the lists' rows by their length. GROUP: query heads of each of `heads`, as lists have them.
    """
    within = pid % (blocks * section)
    i = within // section
    number = pid // (blocks * section) * section + within % section
    head = number % heads
    b = number // heads
    if order is not None:
        i = tl.load(order + b.to(tl.int64) * lists.batch + head * GROUP * lists.head + i * lists.row)
    elif LAST_FIRST:
        i = blocks - 1 - i
    return i, head, b


@triton.jit
def tile_number(lists, b, head, i, position, width):
    """The key tile at a position of tile row i; past the last one that is to be visited, any.

    Loops that read a list read it a step ahead: a load of a tile that waits for the load of its number would stop the
    pipeline. For the same reason nothing here waits for the list's length.
    """
    number = position
    if lists is not None:
        row = b.to(tl.int64) * lists.batch + head * lists.head + i * lists.row
        number = tl.load(lists.tiles + row * width + tl.minimum(position, width - 1))
    return number


@triton.jit
def list_range(lists, b, head, i, WHOLE: tl.constexpr):
    """Tile row i's partial tiles are at positions [0, full_lo), its full ones at [full_lo, hi). WHOLE: all are full."""
    base = lists.counts + 2 * (b.to(tl.int64) * lists.batch + head * lists.head + i * lists.row)
    full_lo = 0
    if not WHOLE:
        full_lo = tl.load(base)
    return full_lo, full_lo + tl.load(base + 1)


@triton.jit
def philox_key(lo, hi):
    """The seed from its two words, each passed as int32 so that no value of it compiles a kernel anew.

    Without a high word, `lo` is where the seed lies: what a graph's replay draws is not known before it.
    """
    if hi is None:
        seed = tl.load(lo)
    else:
        seed = (hi.to(tl.int64) << 32) | (lo.to(tl.int64) & 0xFFFFFFFF)
    return seed


@triton.jit
def keep_bits(drop: Drop, seed, b, h, heads, q, n0, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Which pairs survive dropout: [TILE_M, TILE_N] for rows q, h [TILE_M] and keys n0 ... (n0 a multiple of 4)."""
    k = (n0 + 4 * tl.arange(0, TILE_N // 4))[None, :]
    nothing = k * 0  # the offset, as a tensor: n0 may be a number of the host
    c0, c1, c2, c3 = dropout_counter(b, h[:, None], heads, q[:, None], k, nothing)
    zero = tl.zeros([TILE_M, TILE_N // 4], tl.uint32)
    c0, c1 = zero + c0.to(tl.uint32), zero + c1.to(tl.uint32)
    c2, c3 = zero + c2.to(tl.uint32), zero + c3.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3)
    # Key 4 * i + 2 * y + x takes word 2 * y + x: join makes the last axis.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(TILE_M, TILE_N)
    return words.to(tl.int64) >= drop.threshold
