"""The backward kernels: delta, then dK and dV by key tile, dQ by query tile, and dBias by bias tile.

Each gradient element is summed by one program in a fixed order, so results are deterministic without atomics.
Scores are recomputed from q, k and lse. dK and dV work on transposed tiles [TILE_N, TILE_M].
"""

import triton
import triton.language as tl

from onchip.backends.triton.parts import (
    LOG2E,
    Drop,
    Place,
    Rows,
    Scores,
    View,
    keep_bits,
    key_offsets,
    load_block,
    load_rows,
    modified,
    row_offsets,
    sequence,
    store_rows,
    tanh,
    tile_number,
    tile_range,
    visible_pairs,
)
from onchip.backends.triton.rules import modify_grad, spans


@triton.jit(do_not_specialize=["len_q", "len_k", "m_blocks", "heads_q"])
def delta_kernel(out: View, dout: View, lse: View, dlse: View, delta, place: Place, len_q, len_k, heads_q, m_blocks,
                 DV: tl.constexpr, DIM_V: tl.constexpr, TILE_M: tl.constexpr):  # fmt: skip
    """delta = rowsum(out * dout) - dlse, shaped as lse; 0 in rows without a key, whatever their dout holds."""
    pid = tl.program_id(0)
    i = pid % m_blocks
    h = (pid // m_blocks) % heads_q
    b = pid // m_blocks // heads_q
    q_start, _, q_len, _ = sequence(place, b, len_q, len_k)
    rows = i * TILE_M + tl.arange(0, TILE_M)
    ok = rows < q_len
    o = load_rows(out.ptr + h.to(tl.int64) * out.head, row_offsets(out, place, b, q_start, rows), out.dim, ok, DV,
                  DIM_V)  # fmt: skip
    do = load_rows(dout.ptr + h.to(tl.int64) * dout.head, row_offsets(dout, place, b, q_start, rows), dout.dim, ok,
                   DV, DIM_V)  # fmt: skip
    sums = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    offsets = row_offsets(lse, place, b, q_start, rows) + h.to(tl.int64) * lse.head
    if dlse is not None:
        d_off = row_offsets(dlse, place, b, q_start, rows) + h.to(tl.int64) * dlse.head
        sums -= tl.load(dlse.ptr + d_off, mask=ok, other=0.0).to(tl.float32)
    row_lse = tl.load(lse.ptr + offsets, mask=ok, other=float("-inf"))
    tl.store(delta + offsets, tl.where(row_lse == float("-inf"), 0.0, sums), mask=ok)


@triton.jit
def row_statistics(lse: View, delta, place: Place, b, q_start, h, qi, ok):
    """lse in units of log2 and delta of query rows. exp2(s - inf) = 0: rows without a key get no weight."""
    offsets = row_offsets(lse, place, b, q_start, qi) + h.to(tl.int64) * lse.head
    row_lse = tl.load(lse.ptr + offsets, mask=ok, other=float("-inf")) * LOG2E
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
    return row_lse, tl.load(delta + offsets, mask=ok, other=0.0)


@triton.jit
def weights(s, scale, score: Scores, b, h, q, k, q_len, k_len, row_lse, visible, MOD: tl.constexpr,
            MODIFIED: tl.constexpr):  # fmt: skip
    """Softmax weights of a tile of raw q.k, and the scores before the softcap and before the mod."""
    raw = s
    before = s
    if MODIFIED:
        raw = s * scale
        after, before = modified(raw, score, b, h, q, k, q_len, k_len, MOD)
        p = tl.math.exp2(after * LOG2E - row_lse)
    else:
        p = tl.math.exp2(s * (scale * LOG2E) - row_lse)
    if visible is not None:
        p = tl.where(visible, p, 0.0)
    return p, raw, before


@triton.jit
def unwind(ds, raw, before, score: Scores, b, h, q, k, q_len, k_len, visible, MOD_GRAD: tl.constexpr):
    """d loss / d scaled score from d loss / d modified score; also the one between them that bias and ALiBi get."""
    if MOD_GRAD is not None:
        slope = MOD_GRAD(before, b, h, tl.minimum(q, q_len - 1), tl.minimum(k, k_len - 1), score.args).to(
            tl.float32
        )
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
def key_tile_loop(dk, dv, k_tile, v_tile, q: View, dout: View, q_desc, do_desc, lse: View, delta, place: Place, band,
                  rows: Rows, lists, mask_args, score: Scores, drop: Drop, b, h, j, n0, lo, hi, width, q_start,
                  q_len, k_len, heads_q, scale, D: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr,
                  DIM_V: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, FN: tl.constexpr,
                  MOD: tl.constexpr, MOD_GRAD: tl.constexpr, CLEAN: tl.constexpr, MASKED: tl.constexpr,
                  MODIFIED: tl.constexpr):  # fmt: skip
    """dK and dV of a key tile from the query tiles at positions [lo, hi) of one head."""
    keys = (n0 + tl.arange(0, TILE_N))[:, None]
    for position in tl.range(lo, hi):
        m0 = tile_number(lists, b, h, j, position, width) * TILE_M
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
        row_lse, row_delta = row_statistics(lse, delta, place, b, q_start, h, qi, ok)
        visible = None
        if MASKED:
            visible = visible_pairs(band, rows, mask_args, b, h, qi[None, :], keys, q_len, k_len, FN)
            if CLEAN:
                sees = tl.max(visible.to(tl.int32), 0) > 0  # rows that see nothing here may hold NaN
                q_tile = tl.where(sees[:, None], q_tile, 0.0)
                do_tile = tl.where(sees[:, None], do_tile, 0.0)
        st = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")  # [TILE_N, TILE_M]
        p, raw, before = weights(st, scale, score, b, h, qi[None, :], keys, q_len, k_len, row_lse[None, :], visible,
                                 MOD, MODIFIED)  # fmt: skip
        dpt = tl.dot(v_tile, tl.trans(do_tile), input_precision="ieee")
        dropped = p
        if drop is not None:
            kept = tl.trans(keep_bits(drop, b, h + 0 * qi, heads_q, qi, n0, TILE_M, TILE_N))
            dropped = tl.where(kept, p * drop.keep_scale, 0.0)
            dpt = tl.where(kept, dpt * drop.keep_scale, 0.0)
        dv = tl.dot(dropped.to(do_tile.dtype), do_tile, dv, input_precision="ieee")
        dst = p * (dpt - row_delta[None, :])
        if MODIFIED or MASKED:
            dst, _ = unwind(dst, raw, before, score, b, h, qi[None, :], keys, q_len, k_len, visible, MOD_GRAD)
        dk = tl.dot(dst.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["len_q", "len_k", "n_blocks", "width", "heads_q"])
def dkdv_kernel(q: View, k: View, v: View, dout: View, dk: View, dv: View, q_desc, do_desc, lse: View, delta,
                place: Place, band, flipped, rows: Rows, lists, mask_args, score: Scores, drop: Drop, scale, len_q,
                len_k, heads_q, n_blocks, width, GROUP: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
                DV: tl.constexpr, DIM_V: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, FN: tl.constexpr,
                MOD: tl.constexpr, MOD_GRAD: tl.constexpr, CLEAN: tl.constexpr, FIRST: tl.constexpr,
                LAST: tl.constexpr):  # fmt: skip
    """One program a key tile of one key head: every query head of its group in turn."""
    MODIFIED: tl.constexpr = (
        (score.softcap is not None)
        or (score.alibi is not None)
        or (score.bias is not None)
        or (MOD is not None)
    )
    pid = tl.program_id(0)
    j = pid % n_blocks
    heads_k = heads_q // GROUP
    head_k = (pid // n_blocks) % heads_k
    b = pid // n_blocks // heads_k
    q_start, k_start, q_len, k_len = sequence(place, b, len_q, len_k)
    n0 = j * TILE_N
    if n0 >= k_len:
        return
    keys = n0 + tl.arange(0, TILE_N)
    ok = keys < k_len
    k_off = key_offsets(k, place, b, k_start, keys)
    k_tile = load_rows(k.ptr + head_k.to(tl.int64) * k.head, k_off, k.dim, ok, D, DIM)
    v_off = key_offsets(v, place, b, k_start, keys)
    v_tile = load_rows(v.ptr + head_k.to(tl.int64) * v.head, v_off, v.dim, ok, DV, DIM_V)
    dk_acc = tl.zeros([TILE_N, DIM], tl.float32)
    dv_acc = tl.zeros([TILE_N, DIM_V], tl.float32)
    for g in range(GROUP):
        h = head_k * GROUP + g
        if lists is not None:
            base = lists.counts + 2 * (b.to(tl.int64) * lists.batch + h * lists.head + j * lists.row)
            lo = 0
            full_lo = tl.load(base)
            full_hi = full_lo + tl.load(base + 1)
            hi = full_hi
        else:
            lo, full_lo, full_hi, hi = spans(j, TILE_N, TILE_M, k_len, q_len, flipped)
            full_hi = max(min(full_hi, q_len // TILE_M), full_lo)  # the last query tile's tail needs the mask
        for part in tl.static_range(FIRST, LAST):
            start = lo if part == 0 else (full_lo if part == 1 else full_hi)
            stop = full_lo if part == 0 else (full_hi if part == 1 else hi)
            dk_acc, dv_acc = key_tile_loop(
                dk_acc, dv_acc, k_tile, v_tile, q, dout, q_desc, do_desc, lse, delta, place, band, rows, lists,
                mask_args, score, drop, b, h, j, n0, start, stop, width, q_start, q_len, k_len, heads_q, scale,
                D, DIM, DV, DIM_V, TILE_M, TILE_N, FN, MOD, MOD_GRAD, CLEAN, part != 1, MODIFIED)  # fmt: skip
    dk_off = key_offsets(dk, place, b, k_start, keys)
    store_rows(dk.ptr + head_k.to(tl.int64) * dk.head, dk_off, dk.dim, ok, dk_acc * scale, D, DIM)
    dv_off = key_offsets(dv, place, b, k_start, keys)
    store_rows(dv.ptr + head_k.to(tl.int64) * dv.head, dv_off, dv.dim, ok, dv_acc, DV, DIM_V)


@triton.jit
def score_tile_grad(q_tile, do_tile, row_lse, row_delta, k: View, v: View, k_desc, v_desc, place: Place, band,
                    rows: Rows, mask_args, score: Scores, drop: Drop, b, h, head_k, qi, n0, k_start, q_len, k_len,
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
                             visible, MOD, MODIFIED)  # fmt: skip
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
    if drop is not None:
        kept = keep_bits(drop, b, h + 0 * qi, heads_q, qi, n0, TILE_M, TILE_N)
        dp = tl.where(kept, dp * drop.keep_scale, 0.0)
    ds = p * (dp - row_delta[:, None])
    inner = ds
    if MODIFIED or MASKED:
        ds, inner = unwind(
            ds, raw, before, score, b, h, qi[:, None], keys[None, :], q_len, k_len, visible, MOD_GRAD
        )
    return ds, inner, k_tile


@triton.jit(do_not_specialize=["len_q", "len_k", "m_blocks", "width", "heads_q"])
def dq_kernel(q: View, k: View, v: View, dout: View, dq: View, k_desc, v_desc, lse: View, delta, dslope,
              place: Place, band, rows: Rows, lists, mask_args, score: Scores, drop: Drop, scale, len_q, len_k,
              heads_q, m_blocks, width, GROUP: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr,
              DIM_V: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, FN: tl.constexpr, MOD: tl.constexpr,
              MOD_GRAD: tl.constexpr, CLEAN: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):  # fmt: skip
    """One program a query tile of one head. dslope (shaped as lse, or None): each row's share of the ALiBi slope."""
    MODIFIED: tl.constexpr = (
        (score.softcap is not None)
        or (score.alibi is not None)
        or (score.bias is not None)
        or (MOD is not None)
    )
    pid = tl.program_id(0)
    i = pid % m_blocks
    if band.right is not None:
        i = m_blocks - 1 - i
    h = (pid // m_blocks) % heads_q
    b = pid // m_blocks // heads_q
    head_k = h // GROUP
    q_start, k_start, q_len, k_len = sequence(place, b, len_q, len_k)
    if i * TILE_M >= q_len:
        return
    qi = i * TILE_M + tl.arange(0, TILE_M)
    ok = qi < q_len
    q_off = row_offsets(q, place, b, q_start, qi)
    q_tile = load_rows(q.ptr + h.to(tl.int64) * q.head, q_off, q.dim, ok, D, DIM)
    do_off = row_offsets(dout, place, b, q_start, qi)
    do_tile = load_rows(dout.ptr + h.to(tl.int64) * dout.head, do_off, dout.dim, ok, DV, DIM_V)
    row_lse, row_delta = row_statistics(lse, delta, place, b, q_start, h, qi, ok)
    if CLEAN:  # rows that see no key may hold NaN
        do_tile = tl.where((row_lse == float("inf"))[:, None], 0.0, do_tile)
    dq_acc = tl.zeros([TILE_M, DIM], tl.float32)
    slope = tl.zeros([TILE_M], tl.float32)
    lo, full_lo, full_hi, hi = tile_range(place, band, rows, lists, b, h, i, qi, ok, q_len, k_len, TILE_M, TILE_N,
                                          FN)  # fmt: skip
    for part in tl.static_range(FIRST, LAST):
        start = lo if part == 0 else (full_lo if part == 1 else full_hi)
        stop = full_lo if part == 0 else (full_hi if part == 1 else hi)
        for position in tl.range(start, stop):
            n0 = tile_number(lists, b, h, i, position, width) * TILE_N
            ds, inner, k_tile = score_tile_grad(
                q_tile, do_tile, row_lse, row_delta, k, v, k_desc, v_desc, place, band, rows, mask_args, score, drop,
                b, h, head_k, qi, n0, k_start, q_len, k_len, heads_q, scale,
                D, DIM, DV, DIM_V, TILE_M, TILE_N, FN, MOD, MOD_GRAD, CLEAN, part != 1, MODIFIED)  # fmt: skip
            dq_acc = tl.dot(ds.to(k_tile.dtype), k_tile, dq_acc, input_precision="ieee")
            if dslope is not None:
                distance = tl.abs(qi[:, None] + (k_len - q_len) - (n0 + tl.arange(0, TILE_N))[None, :])
                slope -= tl.sum(inner * distance, 1)
    dq_off = row_offsets(dq, place, b, q_start, qi)
    store_rows(dq.ptr + h.to(tl.int64) * dq.head, dq_off, dq.dim, ok, dq_acc * scale, D, DIM)
    if dslope is not None:
        tl.store(dslope + row_offsets(lse, place, b, q_start, qi) + h.to(tl.int64) * lse.head, slope, mask=ok)


@triton.jit(do_not_specialize=["len_q", "len_k", "batch", "heads_q", "m_blocks", "n_blocks"])
def dbias_kernel(q: View, k: View, v: View, dout: View, dbias, db_batch, db_head, db_row, db_key, lse: View, delta,
                 place: Place, band, rows: Rows, mask_args, score: Scores, drop: Drop, scale, len_q, len_k, batch,
                 heads_q, m_blocks, n_blocks, GROUP: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
                 DV: tl.constexpr, DIM_V: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, FN: tl.constexpr,
                 MOD: tl.constexpr, MOD_GRAD: tl.constexpr, BY_BATCH: tl.constexpr, BY_HEAD: tl.constexpr,
                 BY_ROW: tl.constexpr, BY_KEY: tl.constexpr):  # fmt: skip
    """One program a tile of the bias, summing over the axes in which the bias is broadcast."""
    MODIFIED: tl.constexpr = True
    pid = tl.program_id(0)
    n_lo = 0
    n_hi = n_blocks
    if BY_KEY:
        n_lo = pid % n_blocks
        n_hi = n_lo + 1
        pid = pid // n_blocks
    m_lo = 0
    m_hi = m_blocks
    if BY_ROW:
        m_lo = pid % m_blocks
        m_hi = m_lo + 1
        pid = pid // m_blocks
    h_lo = 0
    h_hi = heads_q
    if BY_HEAD:
        h_lo = pid % heads_q
        h_hi = h_lo + 1
        pid = pid // heads_q
    b_lo = 0
    b_hi = batch
    if BY_BATCH:
        b_lo = pid
        b_hi = b_lo + 1
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for b_number in range(b_lo, b_hi):
        b = pid * 0 + b_number  # a tensor, also under the interpreter
        q_start, k_start, q_len, k_len = sequence(place, b, len_q, len_k)
        for h_number in range(h_lo, h_hi):
            h = pid * 0 + h_number
            for m in range(m_lo, m_hi):
                qi = m * TILE_M + tl.arange(0, TILE_M)
                ok = qi < q_len
                q_off = row_offsets(q, place, b, q_start, qi)
                q_tile = load_rows(q.ptr + h.to(tl.int64) * q.head, q_off, q.dim, ok, D, DIM)
                do_off = row_offsets(dout, place, b, q_start, qi)
                do_tile = load_rows(dout.ptr + h.to(tl.int64) * dout.head, do_off, dout.dim, ok, DV, DIM_V)
                row_lse, row_delta = row_statistics(lse, delta, place, b, q_start, h, qi, ok)
                do_tile = tl.where((row_lse == float("inf"))[:, None], 0.0, do_tile)
                for n in range(n_lo, n_hi):
                    _, inner, _ = score_tile_grad(
                        q_tile, do_tile, row_lse, row_delta, k, v, None, None, place, band, rows, mask_args, score,
                        drop, b, h, h // GROUP, qi, n * TILE_N, k_start, q_len, k_len, heads_q, scale,
                        D, DIM, DV, DIM_V, TILE_M, TILE_N, FN, MOD, MOD_GRAD, True, True, MODIFIED)  # fmt: skip
                    acc += inner
    rows_out = m_lo * TILE_M + tl.arange(0, TILE_M)
    keys_out = n_lo * TILE_N + tl.arange(0, TILE_N)
    base = dbias
    if BY_BATCH:
        base += b_lo.to(tl.int64) * db_batch
    if BY_HEAD:
        base += h_lo.to(tl.int64) * db_head
    if BY_ROW and BY_KEY:
        offsets = rows_out[:, None].to(tl.int64) * db_row + keys_out[None, :].to(tl.int64) * db_key
        tl.store(base + offsets, acc, mask=(rows_out < len_q)[:, None] & (keys_out < len_k)[None, :])
    elif BY_ROW:
        tl.store(base + rows_out.to(tl.int64) * db_row, tl.sum(acc, 1), mask=rows_out < len_q)
    elif BY_KEY:
        tl.store(base + keys_out.to(tl.int64) * db_key, tl.sum(acc, 0), mask=keys_out < len_k)
    else:
        tl.store(base, tl.sum(tl.sum(acc, 1), 0))
