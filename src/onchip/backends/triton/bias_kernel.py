"""The gradient of a bias: each tile of it summed by one program in a fixed order, over the axes that share it."""

import triton
import triton.language as tl

from onchip.backends.compiled.intervals import Rows
from onchip.backends.compiled.terms import Scores
from onchip.backends.triton.backward_kernels import row_statistics, score_tile_grad
from onchip.backends.triton.parts import (
    LENGTHS,
    Drop,
    Place,
    Statistics,
    View,
    load_rows,
    philox_key,
    row_offsets,
    sequence,
)


@triton.jit(do_not_specialize=["seed_lo", "seed_hi", "db_batch", "db_head", "db_row", *LENGTHS])
def dbias_kernel(q: View, k: View, v: View, dout: View, stats: Statistics, place: Place, score: Scores,
                 seed_lo, seed_hi, dbias, db_batch, db_head, db_row, db_key, drop: Drop, band, rows: Rows, mask_args,
                 scale, len_q, len_k, batch, heads_q, m_blocks, n_blocks, GROUP: tl.constexpr, D: tl.constexpr,
                 DIM: tl.constexpr, DV: tl.constexpr, DIM_V: tl.constexpr, TILE_M: tl.constexpr,
                 TILE_N: tl.constexpr, FN: tl.constexpr, MOD: tl.constexpr, MOD_GRAD: tl.constexpr,
                 BY_BATCH: tl.constexpr, BY_HEAD: tl.constexpr, BY_ROW: tl.constexpr,
                 BY_KEY: tl.constexpr):  # fmt: skip
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
    seed = philox_key(seed_lo, seed_hi)
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for b_number in range(b_lo, b_hi):
        b = pid * 0 + b_number  # a tensor, also under the interpreter
        q_start, k_start, q_len, k_len = sequence(place, b, len_q, len_k, 0)
        for h_number in range(h_lo, h_hi):
            h = pid * 0 + h_number
            for m in range(m_lo, m_hi):
                qi = m * TILE_M + tl.arange(0, TILE_M)
                ok = qi < q_len
                q_off = row_offsets(q, place, b, q_start, qi)
                q_tile = load_rows(q.ptr + h.to(tl.int64) * q.head, q_off, q.dim, ok, D, DIM)
                do_off = row_offsets(dout, place, b, q_start, qi)
                do_tile = load_rows(dout.ptr + h.to(tl.int64) * dout.head, do_off, dout.dim, ok, DV, DIM_V)
                row_lse, row_rest, row_delta = row_statistics(
                    stats, place, b, h, q_start, qi, heads_q, ok, MODIFIED
                )
                do_tile = tl.where((row_lse == float("inf"))[:, None], 0.0, do_tile)
                for n in range(n_lo, n_hi):
                    _, inner, _ = score_tile_grad(
                        q_tile, do_tile, row_lse, row_rest, row_delta, k, v, None, None, place, band, rows, mask_args,
                        score, drop, seed, b, h, h // GROUP, qi, n * TILE_N, k_start, q_len, k_len, heads_q, scale,
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
