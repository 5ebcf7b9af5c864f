"""The forward kernel: one warp loads (loader.py), two or three warpgroups of 64 queries each compute.

Block after block, and in turns, each computing warpgroup issues the scores of its next block and the values of its last
one, and does the softmax of the new scores while the tensor cores work on its values and on the others' products. This
goes on from tile to tile: the first scores of a tile are issued with the last values of the tile before, whose output
is written beside them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from onchip.backends.compiled.intervals import Rows
from onchip.backends.compiled.terms import Scores
from onchip.backends.hopper.loader import load
from onchip.backends.hopper.parts import (
    FLOOR,
    LN2,
    LOG2E,
    SLACK,
    TWO,
    Cursor,
    Lse,
    accumulator,
    all_threads,
    arrive,
    both,
    computed,
    exp2,
    halves,
    join,
    keys_free,
    log2,
    no_sums,
    pack,
    quad_max,
    quad_sum,
    reciprocal,
    rescaled,
    row_of,
    sides,
    turn_of,
    unpack,
    values_free,
    warpgroup_barrier,
    wide,
    zero_of,
)
from onchip.backends.hopper.scores import needs_mask, seen
from onchip.backends.hopper.shared import allocate, next_tile
from onchip.backends.hopper.variant import Variant
from onchip.backends.hopper.work import Work, block_at, sees_nothing, store_output


@gluon.jit
def maxima(s, row_max, unit):
    """What is taken from a row's scores, in units of log2, and the factor of what came before.

    The maximum of an earlier block stays, and the factor is 1, until a later one is above it by more than SLACK:
    weights are then at most 2^8, and the output is rarely rescaled.
    """
    top = gl.convert_layout(gl.max(quad_max(s), 1), row_max.type.layout, assert_trivial=True) * unit
    new_max = gl.where(top > row_max + SLACK, top, row_max)
    return new_max, exp2(row_max - new_max)


@gluon.jit
def weights(s, row_max, row_sum, unit, KIND: gl.constexpr):
    """Weights of scores, packed, and the running sums with them.

    row_sum stays split over the lanes of a quad, [64, 4], until the tile ends.
    """
    p = exp2(s * unit - gl.convert_layout(row_max, row_of(s.shape[1]))[:, None])
    return pack(p, KIND), quad_sum(p, row_sum)


@gluon.jit
def take_queries(held, turn, tile, shared, W: gl.constexpr, C: Variant):
    """Wait for a tile's queries, and keep the first `held` columns of them in registers."""
    mbarrier.wait(shared.q_full.index(W), turn)
    if C.held > 0:
        # By a number unknown before: addresses made of a known one take registers from tile to tile.
        held = shared.held.index(W + zero_of(tile.b)).load(gl.DotOperandLayout(0, accumulator(C.tile_n), 2))
    if not C.share_q:
        mbarrier.arrive(shared.q_free.index(W), count=1)
    return held


@gluon.jit
def issue_scores(held, turn, at, shared, W: gl.constexpr, C: Variant):
    """Queries times the keys of a slot, [64, tile_n], on the tensor cores."""
    s = gl.zeros([64, C.tile_n], gl.float32, accumulator(C.tile_n))
    k = shared.k.index(at.slot)
    if C.held > 0:
        s = warpgroup_mma(held, k.slice(0, C.held, 1).permute((1, 0)), s, use_acc=False, is_async=True)
    if C.held < C.dim:
        q = shared.q.index(turn * C.warpgroups + W)
        k = k.slice(C.held, C.dim - C.held, 1)
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=C.held > 0, is_async=True)
    return s


@gluon.jit
def release(at, C: Variant):
    """Let keys and values of a slot go."""
    arrive(keys_free(C.stages) + at.slot, all_threads(C.warpgroups))
    arrive(values_free(C.stages) + at.slot, all_threads(C.warpgroups))


@gluon.jit
def step(o, p, row_max, row_sum, held, turn, at, shared, tile, position, work, score, scale,
         FIRST: gl.constexpr, W: gl.constexpr, FN: gl.constexpr, MOD: gl.constexpr, C: Variant):  # fmt: skip
    """Scores of this block and values of the last one on the tensor cores; the softmax beside the latter.

    `FIRST`: this block is its tile's first, and the last one is another tile's: o and p are that one's.
    """
    KIND: gl.constexpr = shared.k.dtype
    key = block_at(tile, work, position, C)
    masked = needs_mask(tile, position, FIRST, C)
    if FIRST:
        row_max = gl.full([64], FLOOR, gl.float32, row_of(C.tile_n))
        row_sum = no_sums(C.tile_n)
    mbarrier.wait(shared.full.index(at.slot), at.phase)
    join(gl.to_tensor(turn_of(C.stages) + W), TWO)
    s = issue_scores(held, turn, at, shared, W, C)
    p = unpack(p, KIND, gl.DotOperandLayout(0, accumulator(C.dim_v), 2))
    o = warpgroup_mma(p, shared.v.index(at.slot), o, is_async=True)
    arrive(gl.to_tensor(turn_of(C.stages) + (W + 1) % C.warpgroups), TWO)
    s = warpgroup_mma_wait(1, deps=(s,))
    arrive(keys_free(C.stages) + at.slot, all_threads(C.warpgroups))
    s = warpgroup_mma_wait(1, deps=(s,))  # as below
    s, unit = seen(s, tile, key, masked, work, score, scale, W, FN, MOD, C)
    row_max, alpha = maxima(s, row_max, unit)
    row_sum *= gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout), assert_trivial=True)[:, None]
    left, right = sides(s)
    if C.ahead:
        first, second = sides(left)
        first, row_sum = weights(first, row_max, row_sum, unit, KIND)
        row_sum = computed(row_sum)
    o, p = warpgroup_mma_wait(0, deps=(o, p))
    arrive(values_free(C.stages) + at.slot, all_threads(C.warpgroups))
    # Once more, at the price of one instruction: what needs o then stands behind the arrival, which the assembler
    # otherwise moved to the end of the block.
    o = warpgroup_mma_wait(0, deps=(o,))
    if C.ahead:
        second, row_sum = weights(second, row_max, row_sum, unit, KIND)
    else:
        left, row_sum = weights(left, row_max, row_sum, unit, KIND)
    if not FIRST:
        o = rescaled(o, alpha)
    right, row_sum = weights(right, row_max, row_sum, unit, KIND)
    if C.ahead:
        left = gl.convert_layout(both(first, second), right.type.layout, assert_trivial=True)
    return o, both(left, right), row_max, row_sum, at.next()


@gluon.jit
def begin(held, turn, at, shared, tile, work, score, scale, W: gl.constexpr, FN: gl.constexpr, MOD: gl.constexpr,
          C: Variant):  # fmt: skip
    """The first step of all, which has no last block."""
    KIND: gl.constexpr = shared.k.dtype
    row_max = gl.full([64], FLOOR, gl.float32, row_of(C.tile_n))
    mbarrier.wait(shared.full.index(at.slot), at.phase)
    s = issue_scores(held, turn, at, shared, W, C)
    s = warpgroup_mma_wait(0, deps=(s,))
    release(at, C)
    key = block_at(tile, work, 0, C)
    s, unit = seen(s, tile, key, needs_mask(tile, 0, True, C), work, score, scale, W, FN, MOD, C)
    row_max, _ = maxima(s, row_max, unit)
    left, right = sides(s)
    left, row_sum = weights(left, row_max, no_sums(C.tile_n), unit, KIND)
    right, row_sum = weights(right, row_max, row_sum, unit, KIND)
    return both(left, right), row_max, row_sum, at.next()


@gluon.jit
def values_only(o, p, at, shared, LAST: gl.constexpr, W: gl.constexpr, C: Variant):
    """A step without scores: the last of all, or one whose block shows nothing to this warpgroup."""
    mbarrier.wait(shared.full.index(at.slot), at.phase)
    if not LAST:
        join(gl.to_tensor(turn_of(C.stages) + W), TWO)
    p = unpack(p, shared.k.dtype, gl.DotOperandLayout(0, accumulator(C.dim_v), 2))
    o = warpgroup_mma(p, shared.v.index(at.slot), o, is_async=True)
    if not LAST:
        arrive(gl.to_tensor(turn_of(C.stages) + (W + 1) % C.warpgroups), TWO)
    o, p = warpgroup_mma_wait(0, deps=(o, p))
    release(at, C)
    return o, at.next()


@gluon.jit
def finish(o, row_max, row_sum, turn, shared, o_desc, lse, score, tile, W: gl.constexpr, C: Variant):
    """Divide by the sums, and write out and lse."""
    rows: gl.constexpr = row_of(C.tile_n)
    r = W * 64 + gl.arange(0, 64, rows)
    q = tile.row0 + r // C.pack
    h = tile.head * C.pack + r % C.pack
    total = gl.convert_layout(gl.sum(row_sum, 1), rows, assert_trivial=True)
    if C.exact:  # without a mask, what a tile that sees nothing has visited must not count
        total = gl.where(tile.full == 0, 0.0, total)
        row_max = gl.where(tile.full == 0, FLOOR, row_max)
    factor = reciprocal(total)
    if score.sink is not None:
        sink = gl.load(score.sink + h).to(gl.float32) * LOG2E
        top = gl.maximum(row_max, sink)
        own = exp2(row_max - top)
        with_sink = total * own + exp2(sink - top)
        factor = gl.where(total == 0.0, 0.0, own / with_sink)
        row_lse = (top + log2(with_sink)) * LN2
    else:
        row_lse = (row_max + log2(total)) * LN2
    if C.tight:
        at = wide(tile.b, lse.batch) + wide(h, lse.head)
    else:
        at = tile.b.to(gl.int64) * lse.batch + h.to(gl.int64) * lse.head
    there = q < tile.q_len
    if C.from_end:
        there &= q >= 0
    gl.store(lse.ptr + (at + tile.q_start + q), row_lse, mask=there)
    o *= gl.convert_layout(factor, row_of(C.dim_v))[:, None]
    # A row that sees no key, or none whose score is above -inf: 0, not 0 * inf.
    if C.masked or C.exact or C.modified:
        none = gl.convert_layout(total, row_of(C.dim_v)) == 0.0
        o = gl.where(none[:, None], 0.0, o)
    o = o.to(shared.k.dtype)
    if C.share_q:  # where this tile's queries were
        left, right = halves(o)
        low, high = shared.held.index(W + zero_of(tile.b)), shared.q.index(turn * C.warpgroups + W)
        low.store(left)
        high.store(right)
        fence_async_shared()
        store_output(o_desc, low, tile, W, 0, C)
        store_output(o_desc, high, tile, W, C.held, C)
    else:
        tma.store_wait(0)
        warpgroup_barrier()
        shared.out.index(W).store(o)
        fence_async_shared()
        store_output(o_desc, shared.out.index(W), tile, W, 0, C)


@gluon.jit
def free_queries(shared, W: gl.constexpr, C: Variant):
    """Where outputs leave through them: once the copy engine has read what `finish` wrote."""
    if C.share_q:
        tma.store_wait(0)
        mbarrier.arrive(shared.q_free.index(W), count=1)


@gluon.jit
def compute(shared, o_desc, lse, work: Work, score, scale, W: gl.constexpr, FN: gl.constexpr, MOD: gl.constexpr,
            C: Variant):  # fmt: skip
    """A computing warpgroup: 64 rows of every tile."""
    at = Cursor(gl.to_tensor(0), gl.to_tensor(0), C.stages)
    turn = gl.to_tensor(0)
    for slot in gl.static_range(C.stages):
        release(Cursor(gl.to_tensor(slot), gl.to_tensor(0), C.stages), C)
    if C.warpgroups - 1 == W:
        arrive(gl.to_tensor(turn_of(C.stages)), TWO)
    t, tile, n_phase = next_tile(gl.to_tensor(0), shared, work, W, C)
    if t < work.n_tiles:
        held = gl.to_tensor(0)
        if C.held > 0:
            held = gl.zeros([64, C.held], shared.k.dtype, gl.DotOperandLayout(0, accumulator(C.tile_n), 2))
        held = take_queries(held, turn, tile, shared, W, C)
        free_queries(shared, W, C)
        p, row_max, row_sum, at = begin(held, turn, at, shared, tile, work, score, scale, W, FN, MOD, C)
        o = gl.zeros([64, C.dim_v], gl.float32, accumulator(C.dim_v))
        while t < work.n_tiles:
            for position in range(1, tile.blocks):
                o, p, row_max, row_sum, at = step(
                    o, p, row_max, row_sum, held, turn, at, shared, tile, position, work, score, scale,
                    False, W, FN, MOD, C)  # fmt: skip
            # Not as `tile`, which the last step still needs, nor as a second name of it (end of the log).
            t, following, n_phase = next_tile(n_phase, shared, work, W, C)
            if t < work.n_tiles:
                turn ^= 1
                held = take_queries(held, turn, following, shared, W, C)
                last_max, last_sum = row_max, row_sum
                if sees_nothing(following, W, C):
                    o, at = values_only(o, p, at, shared, False, W, C)
                    p = gl.zeros_like(p)
                    row_max = gl.full([64], FLOOR, gl.float32, row_of(C.tile_n))
                    row_sum = no_sums(C.tile_n)
                else:
                    o, p, row_max, row_sum, at = step(
                        o, p, row_max, row_sum, held, turn, at, shared, following, 0, work, score, scale,
                        True, W, FN, MOD, C)  # fmt: skip
                # True, but not known to be: in one block with the step, the assembler leaves its weights unpacked, in
                # twice the registers, until the output is written.
                apart = tile.head >= 0 if C.held > 0 or C.modified else True
                if apart:
                    finish(o, last_max, last_sum, turn ^ 1, shared, o_desc, lse, score, tile, W, C)
                free_queries(shared, W, C)
                o = gl.zeros([64, C.dim_v], gl.float32, accumulator(C.dim_v))
                tile = following
        o, at = values_only(o, p, at, shared, True, W, C)
        finish(o, row_max, row_sum, turn, shared, o_desc, lse, score, tile, W, C)
    tma.store_wait(0)
    if W == 0:
        join(gl.to_tensor(turn_of(C.stages)), TWO)


@gluon.jit(do_not_specialize=["len_q", "len_k", "heads", "m_blocks", "section", "width", "n_tiles"])
def forward_kernel(q_desc, k_desc, v_desc, o_desc, lse: Lse, place, score: Scores, counter, band, rows: Rows, lists,
                   order, mask_args, scale, len_q, len_k, heads, m_blocks, section, width, n_tiles, FN: gl.constexpr,
                   MOD: gl.constexpr, C: Variant):  # fmt: skip
    shared = allocate(q_desc.dtype, C)
    work = Work(
        place,
        band,
        rows,
        lists,
        order,
        mask_args,
        len_q,
        len_k,
        heads,
        m_blocks,
        section,
        width,
        counter,
        n_tiles,
    )
    # Warps and registers of the others; the first warpgroup has 4 warps and takes what is left, 240 or 160.
    if C.warpgroups == 2:
        gl.warp_specialize(
            [
                (compute, (shared, o_desc, lse, work, score, scale, 0, FN, MOD, C)),
                (compute, (shared, o_desc, lse, work, score, scale, 1, FN, MOD, C)),
                (load, (shared, q_desc, k_desc, v_desc, work, C)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (compute, (shared, o_desc, lse, work, score, scale, 0, FN, MOD, C)),
                (compute, (shared, o_desc, lse, work, score, scale, 1, FN, MOD, C)),
                (compute, (shared, o_desc, lse, work, score, scale, 2, FN, MOD, C)),
                (load, (shared, q_desc, k_desc, v_desc, work, C)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
