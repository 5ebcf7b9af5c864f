"""The forward kernel, and the kernel that merges split keys.

One program computes a tile of queries of one head (or of the PACK query heads of a key head, stacked as rows) against
its keys, or against one of `splits` shares of them.
"""

import triton
import triton.language as tl

from onchip.backends.compiled.intervals import Rows
from onchip.backends.compiled.terms import Scores, hide, modified, visible_pairs
from onchip.backends.triton.parts import (
    LENGTHS,
    LN2,
    LOG2E,
    Drop,
    Place,
    View,
    keep_bits,
    key_offsets,
    load_block,
    load_rows,
    philox_key,
    row_offsets,
    sequence,
    statistic_offsets,
    store_rows,
    tile_number,
    tile_of,
    tile_range,
)


@triton.jit
def attend(acc, row_max, row_sum, q, k: View, v: View, k_desc, v_desc, place: Place, band, rows: Rows, lists,
           mask_args, score: Scores, drop: Drop, seed, b, head, head_k, h, qi, i, lo, hi, full_lo, full_hi, width,
           k_start, q_len, k_len, heads_q, scale, D: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr,
           DIM_V: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, FN: tl.constexpr, MOD: tl.constexpr,
           CLEAN: tl.constexpr, MASKED: tl.constexpr, MIXED: tl.constexpr, MODIFIED: tl.constexpr):  # fmt: skip
    """Online softmax over the tiles at positions [lo, hi). row_max is in units of log2 unless scores are MODIFIED.

    MIXED: of the MASKED tiles, those at [full_lo, full_hi) go without.
    """
    AHEAD: tl.constexpr = lists is not None  # see tile_number
    number = lo
    if AHEAD:
        number = tile_number(lists, b, head, i, lo, width)
    for position in tl.range(lo, hi):
        if not AHEAD:
            number = tile_number(lists, b, head, i, position, width)
        n0 = number * TILE_N
        if AHEAD:
            number = tile_number(lists, b, head, i, position + 1, width)
        keys = n0 + tl.arange(0, TILE_N)
        if k_desc is not None:
            batch = b if place.cu_k is None else 0
            k_tile = load_block(k_desc, batch, head_k, k_start + n0, TILE_N, DIM)
        else:
            ok = keys < k_len if MASKED else None
            inside = tl.minimum(keys, k_len - 1) if MASKED else keys
            k_off = key_offsets(k, place, b, k_start, inside)
            k_tile = load_rows(k.ptr + head_k.to(tl.int64) * k.head, k_off, k.dim, ok, D, DIM)
        s = tl.dot(q, tl.trans(k_tile), input_precision="ieee")  # [TILE_M, TILE_N]
        if MODIFIED:
            s, _ = modified(s * scale, score, b, h[:, None], qi[:, None], keys[None, :], q_len, k_len, MOD)
        if MIXED:
            if (position < full_lo) | (position >= full_hi):
                s = hide(s, float("-inf"), band, rows, mask_args, b, h[:, None], qi[:, None], keys[None, :], q_len,
                         k_len, FN)  # fmt: skip
        elif MASKED:
            visible = visible_pairs(
                band, rows, mask_args, b, h[:, None], qi[:, None], keys[None, :], q_len, k_len, FN
            )
            s = tl.where(visible, s, float("-inf"))
        # Modified scores may be of any size, and keep their unit: a difference of two of them is exact.
        unit = 1.0 if MODIFIED else scale * LOG2E
        new_max = tl.maximum(row_max, tl.max(s, 1) * unit)
        base = new_max
        if MASKED or MODIFIED:  # a row without a key so far: -inf - -inf would be NaN
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        if MODIFIED:
            p = tl.math.exp2((s - base[:, None]) * LOG2E)
            alpha = tl.math.exp2((row_max - base) * LOG2E)
        else:
            p = tl.math.exp2(s * unit - base[:, None])
            alpha = tl.math.exp2(row_max - base)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        row_max = new_max
        if drop is not None:
            p = tl.where(keep_bits(drop, seed, b, h, heads_q, qi, n0, TILE_M, TILE_N), p, 0.0)
        if v_desc is not None:
            batch = b if place.cu_k is None else 0
            v_tile = load_block(v_desc, batch, head_k, k_start + n0, TILE_N, DIM_V)
        else:
            ok = keys < k_len if MASKED else None
            inside = tl.minimum(keys, k_len - 1) if MASKED else keys
            v_off = key_offsets(v, place, b, k_start, inside)
            v_tile = load_rows(v.ptr + head_k.to(tl.int64) * v.head, v_off, v.dim, ok, DV, DIM_V)
        if MASKED and CLEAN:  # keys that no query here sees may hold NaN, and 0 * NaN is NaN
            seen = tl.max(visible.to(tl.int32), 0) > 0
            v_tile = tl.where(seen[:, None], v_tile, 0.0)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["new", "lse_stride", "seed_lo", "seed_hi", *LENGTHS])
def forward_kernel(q: View, k: View, v: View, k_desc, v_desc, place: Place, new, score: Scores, seed_lo, seed_hi,
                   out: View, lse, rest, lse_stride, drop: Drop, band, rows: Rows, lists, order, mask_args, scale,
                   len_q, len_k, heads_q, m_blocks, section, width, splits, GROUP: tl.constexpr, PACK: tl.constexpr,
                   D: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, DIM_V: tl.constexpr, TILE_M: tl.constexpr,
                   TILE_N: tl.constexpr, FN: tl.constexpr, MOD: tl.constexpr, CLEAN: tl.constexpr,
                   FIRST: tl.constexpr, LAST: tl.constexpr, SIGN: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    TILE_Q: tl.constexpr = TILE_M // PACK
    MODIFIED: tl.constexpr = (
        (score.softcap is not None)
        or (score.alibi is not None)
        or (score.bias is not None)
        or (MOD is not None)
    )
    pid = tl.program_id(0)
    steps = heads_q // PACK
    RIGHT: tl.constexpr = (band.right is not None) or (band.top_right is not None)
    i, head, b = tile_of(pid, m_blocks, section, steps, lists, order, RIGHT, 1)  # head: of packs
    seed = philox_key(seed_lo, seed_hi)
    q_start, k_start, q_len, k_len = sequence(place, b, len_q, len_k, new)
    if i * TILE_Q >= q_len:
        return

    r = tl.arange(0, TILE_M)
    qi = i * TILE_Q + r // PACK
    h = head * PACK + r % PACK
    head_k = head * PACK // GROUP
    row_ok = (qi < q_len) & (r < TILE_Q * PACK)
    q_off = row_offsets(q, place, b, q_start, qi) + h.to(tl.int64) * q.head
    q_tile = load_rows(q.ptr, q_off, q.dim, row_ok, D, DIM)
    if SIGN == -1:
        q_tile = -q_tile
    if SIGN == 0:
        q_tile = tl.zeros_like(q_tile)

    acc = tl.zeros([TILE_M, DIM_V], tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    if score.sink is not None:  # the sink is a key without value, which the first split takes
        sink = tl.load(score.sink + h, mask=row_ok, other=0.0).to(tl.float32)
        if not MODIFIED:
            sink *= LOG2E
        if SPLIT:
            sink = tl.where(tl.program_id(1) == 0, sink, float("-inf"))
        row_max = sink
        row_sum = tl.where(sink == float("-inf"), 0.0, 1.0)

    lo, full_lo, full_hi, hi = tile_range(place, band, rows, lists, b, head, i, qi, row_ok, q_len, k_len,
                                          TILE_Q, TILE_N, FN, FIRST)  # fmt: skip
    if SPLIT:
        share = tl.program_id(1)
        first = lo + (hi - lo) * share // splits
        last = lo + (hi - lo) * (share + 1) // splits
        lo = first
        full_lo = min(max(full_lo, first), last)
        full_hi = min(max(full_hi, first), last)
        hi = last
    # One loop loads ahead over its whole length and takes fewer registers: 5 to 11 % at dim 64, 0 to 3 % at 128 (H200).
    # Not at 256, where a branch in full attention costs 1.5 %, nor where a mask costs more than the branch.
    PLAIN: tl.constexpr = (lists is None) and (FN is None) and not CLEAN
    MIXED: tl.constexpr = PLAIN and (k_desc is not None) and DIM <= 128 and LAST - FIRST > 1
    for part in tl.static_range(FIRST, FIRST + 1 if MIXED else LAST):
        if MIXED:
            start = lo
            stop = hi
        else:
            start = lo if part == 0 else (full_lo if part == 1 else full_hi)
            stop = full_lo if part == 0 else (full_hi if part == 1 else hi)
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, q_tile, k, v, k_desc, v_desc, place, band, rows, lists, mask_args, score, drop, seed,
            b, head, head_k, h, qi, i, start, stop, full_lo, full_hi, width, k_start, q_len, k_len, heads_q, scale,
            D, DIM, DV, DIM_V, TILE_M, TILE_N, FN, MOD, CLEAN, MIXED or part != 1, MIXED, MODIFIED)  # fmt: skip

    total = tl.where(row_sum == 0.0, 1.0, row_sum)
    if DIM_V <= 128:
        acc = acc * (1.0 / total)[:, None]  # up to 1 % at N = 2048; at 256 the loop gets 1 % slower (H200)
    else:
        acc = acc / total[:, None]
    if drop is not None:
        acc = acc * drop.keep_scale
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_log = tl.math.log2(row_sum) * LN2
    if MODIFIED:
        row_lse = base + row_log
    else:
        row_lse = (base + tl.math.log2(row_sum)) * LN2
    if SPLIT:  # partial results: split outermost, then as out and lse
        b_out = tl.program_id(1) * (tl.num_programs(0) // m_blocks // steps) + b
    else:
        b_out = b
    out_off = row_offsets(out, place, b_out, q_start, qi) + h.to(tl.int64) * out.head
    store_rows(out.ptr, out_off, out.dim, row_ok, acc, DV, DIM_V)
    lse_off = statistic_offsets(place, b_out, h, q_start, qi, heads_q, lse_stride)
    tl.store(lse + lse_off, row_lse, mask=row_ok)
    if rest is not None:  # what the sum of the two terms lost to rounding
        lost = tl.where(row_sum == 0.0, 0.0, row_log - (row_lse - base))
        tl.store(rest + lse_off, lost, mask=row_ok)


@triton.jit(do_not_specialize=["batch", "len_q", "heads_q", "splits"])
def combine_kernel(out: View, lse, partial, partial_lse, batch, len_q, heads_q, splits, DV: tl.constexpr,
                   DIM_V: tl.constexpr):  # fmt: skip
    """Merge the splits of one row in a fixed order: partial (splits, batch, seqlen_q, heads_q, DV) fp32."""
    row = tl.program_id(0).to(tl.int64)
    head = row % heads_q
    qi = (row // heads_q) % len_q
    b = row // heads_q // len_q
    rows = batch.to(tl.int64) * len_q * heads_q
    place = (b * heads_q + head) * len_q + qi  # in lse
    d = tl.arange(0, DIM_V)
    acc = tl.zeros([DIM_V], tl.float32)
    row_max = tl.full([], float("-inf"), tl.float32)
    row_sum = tl.zeros([], tl.float32)
    for s in range(splits):
        part_lse = tl.load(partial_lse + s * rows + place)
        part = tl.load(partial + (s * rows + row) * DV + d, mask=d < DV, other=0.0)
        new_max = tl.maximum(row_max, part_lse)
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.exp(row_max - base)
        weight = tl.exp(part_lse - base)
        acc = acc * alpha + part * weight
        row_sum = row_sum * alpha + weight
        row_max = new_max
    total = tl.where(row_sum == 0.0, 1.0, row_sum)
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    offset = b * out.batch + qi * out.row + head * out.head
    tl.store(out.ptr + offset + d * out.dim, (acc / total).to(out.ptr.dtype.element_ty), mask=d < DV)
    tl.store(lse + place, base + tl.log(row_sum))
