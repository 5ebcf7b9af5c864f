"""The backward kernels: delta, then dK and dV by key tile and dQ by query tile (the bias's is in `bias_kernel`).

Each gradient element is summed by one program in a fixed order, so results are deterministic without atomics.
Scores are recomputed from q, k and lse. dK and dV work on transposed tiles [TILE_N, TILE_M].
"""

import triton
import triton.language as tl

from onchip.backends.compiled.intervals import Rows
from onchip.backends.compiled.rules import modify_grad, spans, tanh
from onchip.backends.compiled.terms import Scores, modified, visible_pairs, within
from onchip.backends.triton.parts import (
    LENGTHS,
    LOG2E,
    Drop,
    Place,
    Statistics,
    View,
    keep_bits,
    key_offsets,
    list_range,
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


@triton.jit(do_not_specialize=["lse_stride", *LENGTHS])
def delta_kernel(out: View, dout: View, lse, dlse, rest, stats: Statistics, place: Place, lse_stride, len_q, len_k,
                 heads_q, m_blocks, DV: tl.constexpr, DIM_V: tl.constexpr, TILE_M: tl.constexpr,
                 MODIFIED: tl.constexpr):  # fmt: skip
    """What the other kernels ask of query rows: delta = rowsum(out * dout) - dlse, and lse as they want it."""
    pid = tl.program_id(0)
    i = pid % m_blocks
    h = (pid // m_blocks) % heads_q
    b = pid // m_blocks // heads_q
    q_start, _, q_len, _ = sequence(place, b, len_q, len_k, 0)
    rows = i * TILE_M + tl.arange(0, TILE_M)
    ok = rows < q_len
    o = load_rows(out.ptr + h.to(tl.int64) * out.head, row_offsets(out, place, b, q_start, rows), out.dim, ok, DV,
                  DIM_V)  # fmt: skip
    do = load_rows(dout.ptr + h.to(tl.int64) * dout.head, row_offsets(dout, place, b, q_start, rows), dout.dim, ok,
                   DV, DIM_V)  # fmt: skip
    sums = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    offsets = statistic_offsets(place, b, h, q_start, rows, heads_q, lse_stride)
    if dlse is not None:
        sums -= tl.load(dlse + offsets, mask=ok, other=0.0).to(tl.float32)
    row_lse = tl.load(lse + offsets, mask=ok, other=float("-inf"))
    nothing = row_lse == float("-inf")
    if not MODIFIED:
        row_lse *= LOG2E
    at = stats.ptr + statistic_offsets(place, b, h, q_start, rows, heads_q, stats.head)
    here = ok if place.cu_q is not None else rows < stats.head  # past a packed sequence is its neighbour
    tl.store(at, tl.where(nothing, float("inf"), row_lse), mask=here)
    tl.store(at + stats.plane, tl.where(nothing, 0.0, sums), mask=here)
    if MODIFIED:
        row_rest = tl.zeros_like(sums)
        if rest is not None:
            row_rest = tl.load(rest + offsets, mask=ok, other=0.0) * LOG2E
        tl.store(at + 2 * stats.plane, row_rest, mask=here)


@triton.jit
def row_statistics(stats: Statistics, place: Place, b, h, q_start, qi, heads_q, ok, MODIFIED: tl.constexpr):
    """lse, what it lost to rounding (only of MODIFIED scores), and delta of query rows, as `delta_kernel` left them."""
    at = stats.ptr + statistic_offsets(place, b, h, q_start, qi, heads_q, stats.head)
    if place.cu_q is None:
        row_lse = tl.load(at)
        row_delta = tl.load(at + stats.plane)
        row_rest = row_delta
        if MODIFIED:
            row_rest = tl.load(at + 2 * stats.plane)
    else:
        row_lse = tl.load(at, mask=ok, other=float("inf"))
        row_delta = tl.load(at + stats.plane, mask=ok, other=0.0)
        row_rest = row_delta
        if MODIFIED:
            row_rest = tl.load(at + 2 * stats.plane, mask=ok, other=0.0)
    return row_lse, row_rest, row_delta


@triton.jit
def weights(s, scale, score: Scores, b, h, q, k, q_len, k_len, row_lse, row_rest, visible, MOD: tl.constexpr,
            MODIFIED: tl.constexpr):  # fmt: skip
    """Softmax weights of a tile of raw q.k, and the scores before the softcap and before the mod."""
    raw = s
    before = s
    if MODIFIED:
        raw = s * scale
        after, before = modified(raw, score, b, h, q, k, q_len, k_len, MOD)
        p = tl.math.exp2((after - row_lse) * LOG2E - row_rest)
    else:
        p = tl.math.exp2(s * (scale * LOG2E) - row_lse)
    if visible is not None:
        p = tl.where(visible, p, 0.0)
    return p, raw, before


@triton.jit
def unwind(ds, raw, before, score: Scores, b, h, q, k, q_len, k_len, visible, MOD_GRAD: tl.constexpr):
    """d loss / d scaled score from d loss / d modified score; also the one between them that bias and ALiBi get."""
    if MOD_GRAD is not None:
        slope = MOD_GRAD(before, b, h, within(q, q_len), within(k, k_len), score.args).to(tl.float32)
        ds = ds * slope
    if visible is not None:  # 0 * NaN where a derivative or a value out of sight is NaN
        ds = tl.where(visible, ds, 0.0)
    inner = ds
    if score.softcap is not None:
        ds = ds * modify_grad(raw, tanh, score.softcap)
        if visible is not None:
            ds = tl.where(visible, ds, 0.0)
    return ds, inner


@triton.jit
def key_tile_loop(dk, dv, k_tile, v_tile, q: View, dout: View, q_desc, do_desc, stats: Statistics,
                  place: Place, band, rows: Rows, lists, mask_args, score: Scores, drop: Drop, seed, b, h, j, n0, lo,
                  hi, width, q_start, q_len, k_len, heads_q, scale, D: tl.constexpr, DIM: tl.constexpr,
                  DV: tl.constexpr, DIM_V: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
                  FN: tl.constexpr, MOD: tl.constexpr, MOD_GRAD: tl.constexpr, CLEAN: tl.constexpr,
                  MASKED: tl.constexpr, MODIFIED: tl.constexpr, WANT_K: tl.constexpr,
                  WANT_V: tl.constexpr):  # fmt: skip
    """dK and dV of a key tile, those that are wanted, from the query tiles at positions [lo, hi) of one head."""
    keys = (n0 + tl.arange(0, TILE_N))[:, None]
    AHEAD: tl.constexpr = lists is not None  # see tile_number
    number = lo
    if AHEAD:
        number = tile_number(lists, b, h, j, lo, width)
    for position in tl.range(lo, hi):
        if not AHEAD:
            number = tile_number(lists, b, h, j, position, width)
        m0 = number * TILE_M
        if AHEAD:
            number = tile_number(lists, b, h, j, position + 1, width)
        qi = m0 + tl.arange(0, TILE_M)
        ok = qi < q_len
        batch = b if place.cu_q is None else 0
        if q_desc is not None:
            q_tile = load_block(q_desc, batch, h, q_start + m0, TILE_M, DIM)
            do_tile = load_block(do_desc, batch, h, q_start + m0, TILE_M, DIM_V)
        else:
            q_off = row_offsets(q, place, b, q_start, qi)
            q_tile = load_rows(q.ptr + h.to(tl.int64) * q.head, q_off, q.dim, ok, D, DIM)
            do_off = row_offsets(dout, place, b, q_start, qi)
            do_tile = load_rows(dout.ptr + h.to(tl.int64) * dout.head, do_off, dout.dim, ok, DV, DIM_V)
        row_lse, row_rest, row_delta = row_statistics(stats, place, b, h, q_start, qi, heads_q, ok, MODIFIED)
        visible = None
        if MASKED:
            visible = visible_pairs(band, rows, mask_args, b, h, qi[None, :], keys, q_len, k_len, FN)
            if CLEAN:
                sees = tl.max(visible.to(tl.int32), 0) > 0  # rows that see nothing here may hold NaN
                q_tile = tl.where(sees[:, None], q_tile, 0.0)
                do_tile = tl.where(sees[:, None], do_tile, 0.0)
        st = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")  # [TILE_N, TILE_M]
        p, raw, before = weights(st, scale, score, b, h, qi[None, :], keys, q_len, k_len, row_lse[None, :],
                                 row_rest[None, :], visible, MOD, MODIFIED)  # fmt: skip
        if WANT_K:
            dpt = tl.dot(v_tile, tl.trans(do_tile), input_precision="ieee")
        dropped = p
        if drop is not None:
            kept = tl.trans(keep_bits(drop, seed, b, h + 0 * qi, heads_q, qi, n0, TILE_M, TILE_N))
            dropped = tl.where(kept, p * drop.keep_scale, 0.0)
            if WANT_K:
                dpt = tl.where(kept, dpt * drop.keep_scale, 0.0)
        if WANT_V:
            dv = tl.dot(dropped.to(do_tile.dtype), do_tile, dv, input_precision="ieee")
        if WANT_K:
            dst = p * (dpt - row_delta[None, :])
            if MODIFIED or (MASKED and CLEAN):
                dst, _ = unwind(
                    dst, raw, before, score, b, h, qi[None, :], keys, q_len, k_len, visible, MOD_GRAD
                )
            dk = tl.dot(dst.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["seed_lo", "seed_hi", *LENGTHS])
def dkdv_kernel(q: View, k: View, v: View, dout: View, q_desc, do_desc, stats: Statistics, place: Place,
                score: Scores, seed_lo, seed_hi, dk: View, dv: View, drop: Drop, band, flipped, rows: Rows, lists,
                order, mask_args, scale, len_q, len_k, heads_q, n_blocks, section, width, GROUP: tl.constexpr,
                D: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, DIM_V: tl.constexpr, TILE_M: tl.constexpr,
                TILE_N: tl.constexpr, FN: tl.constexpr, MOD: tl.constexpr, MOD_GRAD: tl.constexpr, CLEAN: tl.constexpr,
                FIRST: tl.constexpr, LAST: tl.constexpr):  # fmt: skip
    """One program a key tile of one key head: every query head of its group in turn. dk or dv may be None."""
    WANT_K: tl.constexpr = dk is not None
    WANT_V: tl.constexpr = dv is not None
    MODIFIED: tl.constexpr = (
        (score.softcap is not None)
        or (score.alibi is not None)
        or (score.bias is not None)
        or (MOD is not None)
    )
    pid = tl.program_id(0)
    LEFT: tl.constexpr = (band.left is not None) or (band.top_left is not None)
    RIGHT: tl.constexpr = (band.right is not None) or (band.top_right is not None)
    j, head_k, b = tile_of(pid, n_blocks, section, heads_q // GROUP, lists, order, LEFT and not RIGHT, GROUP)
    q_start, k_start, q_len, k_len = sequence(place, b, len_q, len_k, 0)
    n0 = j * TILE_N
    if n0 >= k_len:
        return
    keys = n0 + tl.arange(0, TILE_N)
    ok = keys < k_len
    k_off = key_offsets(k, place, b, k_start, keys)
    k_tile = load_rows(k.ptr + head_k.to(tl.int64) * k.head, k_off, k.dim, ok, D, DIM)
    v_off = key_offsets(v, place, b, k_start, keys)
    v_tile = load_rows(v.ptr + head_k.to(tl.int64) * v.head, v_off, v.dim, ok, DV, DIM_V)
    seed = philox_key(seed_lo, seed_hi)
    dk_acc = tl.zeros([TILE_N, DIM if WANT_K else 1], tl.float32)
    dv_acc = tl.zeros([TILE_N, DIM_V if WANT_V else 1], tl.float32)
    for g in range(GROUP):
        h = head_k * GROUP + g
        if lists is not None:
            lo = 0
            full_lo, full_hi = list_range(lists, b, h, j, FIRST == 1)
            hi = full_hi
        else:
            lo, full_lo, full_hi, hi = spans(j, TILE_N, TILE_M, k_len, q_len, flipped)
            # Rows past the end are read as 0, with weight 0; not so a packed neighbour's, nor what a mod makes of 0.
            if (place.cu_q is not None) or (MOD is not None):
                full_hi = max(min(full_hi, q_len // TILE_M), full_lo)
        for part in tl.static_range(FIRST, LAST):
            start = lo if part == 0 else (full_lo if part == 1 else full_hi)
            stop = full_lo if part == 0 else (full_hi if part == 1 else hi)
            dk_acc, dv_acc = key_tile_loop(
                dk_acc, dv_acc, k_tile, v_tile, q, dout, q_desc, do_desc, stats, place, band,
                rows, lists, mask_args, score, drop, seed, b, h, j, n0, start, stop, width, q_start, q_len, k_len,
                heads_q, scale, D, DIM, DV, DIM_V, TILE_M, TILE_N, FN, MOD, MOD_GRAD, CLEAN, part != 1, MODIFIED,
                WANT_K, WANT_V)  # fmt: skip
    if WANT_K:
        dk_off = key_offsets(dk, place, b, k_start, keys)
        store_rows(dk.ptr + head_k.to(tl.int64) * dk.head, dk_off, dk.dim, ok, dk_acc * scale, D, DIM)
    if WANT_V:
        dv_off = key_offsets(dv, place, b, k_start, keys)
        store_rows(dv.ptr + head_k.to(tl.int64) * dv.head, dv_off, dv.dim, ok, dv_acc, DV, DIM_V)


@triton.jit
def score_tile_grad(q_tile, do_tile, row_lse, row_rest, row_delta, k: View, v: View, k_desc, v_desc, place: Place, band,
                    rows: Rows, mask_args, score: Scores, drop: Drop, seed, b, h, head_k, qi, n0, k_start, q_len, k_len,
                    heads_q, scale, D: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, DIM_V: tl.constexpr,
                    TILE_M: tl.constexpr, TILE_N: tl.constexpr, FN: tl.constexpr, MOD: tl.constexpr,
                    MOD_GRAD: tl.constexpr, CLEAN: tl.constexpr, MASKED: tl.constexpr,
                    MODIFIED: tl.constexpr):  # fmt: skip
    """dS of a tile [TILE_M, TILE_N]: by scaled score, and by modified score before its mod; and the tile of K."""
    keys = n0 + tl.arange(0, TILE_N)
    if k_desc is not None:
        batch = b if place.cu_k is None else 0
        k_tile = load_block(k_desc, batch, head_k, k_start + n0, TILE_N, DIM)
        v_tile = load_block(v_desc, batch, head_k, k_start + n0, TILE_N, DIM_V)
    else:
        ok = keys < k_len if MASKED else None
        k_off = key_offsets(k, place, b, k_start, keys)
        k_tile = load_rows(k.ptr + head_k.to(tl.int64) * k.head, k_off, k.dim, ok, D, DIM)
        v_off = key_offsets(v, place, b, k_start, keys)
        v_tile = load_rows(v.ptr + head_k.to(tl.int64) * v.head, v_off, v.dim, ok, DV, DIM_V)
    visible = None
    if MASKED:
        visible = visible_pairs(band, rows, mask_args, b, h, qi[:, None], keys[None, :], q_len, k_len, FN)
        if CLEAN:
            seen = tl.max(visible.to(tl.int32), 0) > 0  # keys that nothing here sees may hold NaN
            k_tile = tl.where(seen[:, None], k_tile, 0.0)
            v_tile = tl.where(seen[:, None], v_tile, 0.0)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    p, raw, before = weights(s, scale, score, b, h, qi[:, None], keys[None, :], q_len, k_len, row_lse[:, None],
                             row_rest[:, None], visible, MOD, MODIFIED)  # fmt: skip
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
    if drop is not None:
        kept = keep_bits(drop, seed, b, h + 0 * qi, heads_q, qi, n0, TILE_M, TILE_N)
        dp = tl.where(kept, dp * drop.keep_scale, 0.0)
    ds = p * (dp - row_delta[:, None])
    inner = ds
    if MODIFIED or (MASKED and CLEAN):
        ds, inner = unwind(
            ds, raw, before, score, b, h, qi[:, None], keys[None, :], q_len, k_len, visible, MOD_GRAD
        )
    return ds, inner, k_tile


@triton.jit(do_not_specialize=["seed_lo", "seed_hi", *LENGTHS])
def dq_kernel(q: View, k: View, v: View, dout: View, k_desc, v_desc, stats: Statistics, place: Place,
              score: Scores, seed_lo, seed_hi, dq: View, dslope, drop: Drop, band, rows: Rows, lists, order, mask_args,
              scale, len_q, len_k, heads_q, m_blocks, section, width, GROUP: tl.constexpr, D: tl.constexpr,
              DIM: tl.constexpr, DV: tl.constexpr, DIM_V: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
              FN: tl.constexpr, MOD: tl.constexpr, MOD_GRAD: tl.constexpr, CLEAN: tl.constexpr, FIRST: tl.constexpr,
              LAST: tl.constexpr):  # fmt: skip
    """One program a query tile of one head. dslope (a plane as of stats) or None: each row's ALiBi slope."""
    MODIFIED: tl.constexpr = (
        (score.softcap is not None)
        or (score.alibi is not None)
        or (score.bias is not None)
        or (MOD is not None)
    )
    pid = tl.program_id(0)
    RIGHT: tl.constexpr = (band.right is not None) or (band.top_right is not None)
    i, h, b = tile_of(pid, m_blocks, section, heads_q, lists, order, RIGHT, 1)
    head_k = h // GROUP
    q_start, k_start, q_len, k_len = sequence(place, b, len_q, len_k, 0)
    if i * TILE_M >= q_len:
        return
    qi = i * TILE_M + tl.arange(0, TILE_M)
    ok = qi < q_len
    q_off = row_offsets(q, place, b, q_start, qi)
    q_tile = load_rows(q.ptr + h.to(tl.int64) * q.head, q_off, q.dim, ok, D, DIM)
    do_off = row_offsets(dout, place, b, q_start, qi)
    do_tile = load_rows(dout.ptr + h.to(tl.int64) * dout.head, do_off, dout.dim, ok, DV, DIM_V)
    row_lse, row_rest, row_delta = row_statistics(stats, place, b, h, q_start, qi, heads_q, ok, MODIFIED)
    if CLEAN:  # rows that see no key may hold NaN
        do_tile = tl.where((row_lse == float("inf"))[:, None], 0.0, do_tile)
    seed = philox_key(seed_lo, seed_hi)
    dq_acc = tl.zeros([TILE_M, DIM], tl.float32)
    slope = tl.zeros([TILE_M], tl.float32)
    lo, full_lo, full_hi, hi = tile_range(place, band, rows, lists, b, h, i, qi, ok, q_len, k_len, TILE_M, TILE_N,
                                          FN, FIRST)  # fmt: skip
    AHEAD: tl.constexpr = lists is not None  # see tile_number
    for part in tl.static_range(FIRST, LAST):
        start = lo if part == 0 else (full_lo if part == 1 else full_hi)
        stop = full_lo if part == 0 else (full_hi if part == 1 else hi)
        number = start
        if AHEAD:
            number = tile_number(lists, b, h, i, start, width)
        for position in tl.range(start, stop):
            if not AHEAD:
                number = tile_number(lists, b, h, i, position, width)
            n0 = number * TILE_N
            if AHEAD:
                number = tile_number(lists, b, h, i, position + 1, width)
            ds, inner, k_tile = score_tile_grad(
                q_tile, do_tile, row_lse, row_rest, row_delta, k, v, k_desc, v_desc, place, band, rows, mask_args,
                score, drop, seed, b, h, head_k, qi, n0, k_start, q_len, k_len, heads_q, scale,
                D, DIM, DV, DIM_V, TILE_M, TILE_N, FN, MOD, MOD_GRAD, CLEAN, part != 1, MODIFIED)  # fmt: skip
            dq_acc = tl.dot(ds.to(k_tile.dtype), k_tile, dq_acc, input_precision="ieee")
            if dslope is not None:
                distance = tl.abs(qi[:, None] + (k_len - q_len) - (n0 + tl.arange(0, TILE_N))[None, :])
                slope -= tl.sum(inner * distance, 1)
    dq_off = row_offsets(dq, place, b, q_start, qi)
    store_rows(dq.ptr + h.to(tl.int64) * dq.head, dq_off, dq.dim, ok, dq_acc * scale, D, DIM)
    if dslope is not None:
        tl.store(dslope + statistic_offsets(place, b, h, q_start, qi, heads_q, stats.head), slope, mask=ok)
