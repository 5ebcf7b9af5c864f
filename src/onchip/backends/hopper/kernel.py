"""The forward kernel: one warp loads keys and values, two or three warpgroups of 64 queries each compute.

Block after block, a computing warpgroup issues the scores of its next block and the values of its last one, and while
the tensor cores work on the values it does the softmax of the new scores. That step exists once, masked or not: each
warpgroup has its own code, and beyond about 100 KB in all the instruction cache no longer holds it.
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

from onchip.backends.compiled.terms import Rows, Scores, modified, visible_pairs
from onchip.backends.hopper.parts import (
    FLOOR,
    K_EMPTY,
    LN2,
    LOG2E,
    Cursor,
    Lse,
    accumulator,
    aggregate,
    arrive,
    column_of,
    exp2,
    join,
    quad_max,
    quad_sum,
    row_of,
    turn,
    v_empty,
    warpgroup_barrier,
)
from onchip.backends.hopper.tiles import Work, block_at, draw, load_keys, load_queries, store_output, tile_at
from onchip.backends.hopper.variant import Variant


@aggregate
class Shared:
    """Tiles in shared memory and the barriers that pass them on; [warpgroup, ...] or [slot, ...]."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    number: gl.shared_memory_descriptor
    number_full: gl.shared_memory_descriptor
    number_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, v, out, q_full, q_empty, k_full, v_full, number, number_full, number_empty):
        self.q = q
        self.k = k
        self.v = v
        self.out = out
        self.q_full = q_full
        self.q_empty = q_empty
        self.k_full = k_full
        self.v_full = v_full
        self.number = number
        self.number_full = number_full
        self.number_empty = number_empty


@gluon.jit
def read_number(shared, phase):
    """What the loading warp drew."""
    mbarrier.wait(shared.number_full, phase)
    number = gl.max(shared.number.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(shared.number_empty, count=1)
    return number


@gluon.jit
def load(shared, q_desc, k_desc, v_desc, work: Work, C: Variant):
    """The loading warp."""
    THREADS: gl.constexpr = 128 * C.warpgroups + 32
    k_at = Cursor(gl.to_tensor(0), gl.to_tensor(0), C.stages)
    v_at = Cursor(gl.to_tensor(0), gl.to_tensor(0), C.stages)
    q_phase = gl.to_tensor(1)
    n_phase = gl.to_tensor(1)
    t = gl.program_id(0)
    while t < work.n_tiles:
        tile = tile_at(t, work, C)
        if tile.row0 < tile.q_len:
            for w in gl.static_range(C.warpgroups):
                if C.persistent:
                    mbarrier.wait(shared.q_empty.index(w), q_phase)
                mbarrier.expect(shared.q_full.index(w), 64 * C.dim * 2)
                load_queries(q_desc, shared.q_full.index(w), shared.q.index(w), tile, w, C)
            q_phase ^= 1
            for position in range(tile.blocks + 1):
                if position < tile.blocks:
                    join(K_EMPTY + k_at.slot, THREADS)
                    mbarrier.expect(shared.k_full.index(k_at.slot), C.tile_n * C.dim * 2)
                    key = block_at(tile, work, position, C)
                    load_keys(k_desc, shared.k_full.index(k_at.slot), shared.k.index(k_at.slot), tile, key, C)
                    k_at = k_at.next()
                if position > 0:
                    join(v_empty(C.stages) + v_at.slot, THREADS)
                    mbarrier.expect(shared.v_full.index(v_at.slot), C.tile_n * C.dim_v * 2)
                    key = block_at(tile, work, position - 1, C)
                    load_keys(v_desc, shared.v_full.index(v_at.slot), shared.v.index(v_at.slot), tile, key, C)
                    v_at = v_at.next()
        if C.dynamic:
            # After the loads: a program that drew earlier could take two long tiles while others run out of them.
            t = draw(work)
            mbarrier.wait(shared.number_empty, n_phase)
            shared.number.store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + t)
            mbarrier.arrive(shared.number_full, count=1)
            n_phase ^= 1
        else:
            t += gl.num_programs(0)
    for _ in gl.static_range(C.stages):  # every slot comes back, so that no barrier is left half counted
        join(K_EMPTY + k_at.slot, THREADS)
        join(v_empty(C.stages) + v_at.slot, THREADS)
        k_at = k_at.next()
        v_at = v_at.next()


@gluon.jit
def softmax(s, row_max, row_sum, unit):
    """Weights of a block of scores [64, tile_n], and the running maximum (in units of log2) and sums with it.

    row_sum stays split over the lanes of a quad, [64, 4], until the tile ends.
    """
    quads = quad_max(s)
    top = gl.convert_layout(gl.max(quads, 1), row_max.type.layout, assert_trivial=True)
    new_max = gl.maximum(row_max, top * unit)
    alpha = exp2(row_max - new_max)
    p = exp2(s * unit - new_max[:, None])
    sums = quad_sum(p)
    share = gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    return p, new_max, row_sum * share[:, None] + sums, alpha


@gluon.jit
def hide(s, tile, key, q, h, k, work, FN: gl.constexpr, C: Variant):
    """-inf for the pairs that are not visible. q [64], k [tile_n] counts from the block's first key."""
    if C.band_only:
        # A column is a constant plus a part that is the same for all columns of a thread: with that part on the other
        # side, each comparison is one instruction with an immediate, and no column number takes a register.
        fixed, lane = (k & ~6)[None, :], (k & 6)[None, :]
        end = gl.full([64], 0, gl.int32, row_of(C.tile_n)) + (tile.seen_k - key)
        if C.right:
            end = gl.minimum(end, q + (tile.end + 1 - key))
        s = gl.where(fixed < end[:, None] - lane, s, float("-inf"))
        if C.left:
            s = gl.where((q + (tile.first - key))[:, None] - lane <= fixed, s, float("-inf"))
    else:
        k = (key + k)[None, :]
        visible = visible_pairs(
            work.band, work.rows, work.mask_args, tile.b, h, q[:, None], k, tile.q_len, tile.k_len, FN
        )
        s = gl.where(visible, s, float("-inf"))
    return s


@gluon.jit
def weights(s, row_max, row_sum, tile, key, masked, work, score, scale, W: gl.constexpr,
            FN: gl.constexpr, MOD: gl.constexpr, C: Variant):  # fmt: skip
    """The softmax of a block of scores, after what modifies and what hides them."""
    unit = scale * LOG2E
    r = W * 64 + gl.arange(0, 64, row_of(C.tile_n))
    q = tile.row0 + r // C.pack
    h = tile.head
    if C.pack > 1:
        h = (tile.head * C.pack + r % C.pack)[:, None]
    k = gl.arange(0, C.tile_n, column_of(C.tile_n))
    if C.modified:
        number = (tile.origin + key + k)[None, :]
        s, _ = modified(s * scale, score, tile.b, h, q[:, None], number, tile.q_len, tile.k_len, MOD)
        s = s * LOG2E
        unit = 1.0
    if masked:
        s = hide(s, tile, key, q, h, k, work, FN, C)
    return softmax(s, row_max, row_sum, unit)


@gluon.jit
def step(o, p, row_max, row_sum, shared, k_at, v_at, tile, key, masked, more, work, score, scale,
         W: gl.constexpr, FN: gl.constexpr, MOD: gl.constexpr, C: Variant):  # fmt: skip
    """Scores of this block and values of the last one on the tensor cores; the softmax beside the latter."""
    S: gl.constexpr = accumulator(C.tile_n)
    OUT: gl.constexpr = accumulator(C.dim_v)
    THREADS: gl.constexpr = 128 * C.warpgroups + 32
    if C.ping_pong:
        join(gl.to_tensor(turn(C.stages) + W), 256)
    zeros = gl.zeros([64, C.tile_n], gl.float32, S)
    s = warpgroup_mma(
        shared.q.index(W), shared.k.index(k_at.slot).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    o = warpgroup_mma(p, shared.v.index(v_at.slot), o, is_async=True)
    if C.ping_pong:
        arrive(gl.to_tensor(turn(C.stages) + (W + 1) % C.warpgroups), 256)
    s = warpgroup_mma_wait(1, deps=(s,))
    arrive(K_EMPTY + k_at.slot, THREADS)
    x, row_max, row_sum, alpha = weights(s, row_max, row_sum, tile, key, masked, work, score, scale, W,
                                         FN, MOD, C)  # fmt: skip
    k_next = k_at.next()
    v_next = v_at.next()
    # Before the wait for the values, else the assembler moves that one above the softmax.
    mbarrier.wait(shared.k_full.index(k_next.slot), k_next.phase, pred=more)
    mbarrier.wait(shared.v_full.index(v_next.slot), v_next.phase)
    o, p = warpgroup_mma_wait(0, deps=(o, p))
    arrive(v_empty(C.stages) + v_at.slot, THREADS)
    o = o * gl.convert_layout(alpha, row_of(C.dim_v))[:, None]
    p = gl.convert_layout(x.to(shared.k.dtype), gl.DotOperandLayout(0, OUT, 2))
    if C.ping_pong:
        warpgroup_barrier()  # here, not between the turn and the products
    return o, p, row_max, row_sum, k_next, v_next


@gluon.jit
def finish(o, row_max, row_sum, shared, o_desc, lse, score, tile, W: gl.constexpr, C: Variant):
    """Divide by the sums, and write out and lse."""
    rows: gl.constexpr = row_of(C.tile_n)
    r = W * 64 + gl.arange(0, 64, rows)
    q = tile.row0 + r // C.pack
    h = tile.head * C.pack + r % C.pack
    total = gl.convert_layout(gl.sum(row_sum, 1), rows, assert_trivial=True)
    factor = 1.0 / total
    if score.sink is not None:
        sink = gl.load(score.sink + h).to(gl.float32) * LOG2E
        top = gl.maximum(row_max, sink)
        own = exp2(row_max - top)
        with_sink = total * own + exp2(sink - top)
        factor = gl.where(total == 0.0, 0.0, own / with_sink)
        row_lse = (top + gl.log2(with_sink)) * LN2
    else:
        row_lse = (row_max + gl.log2(total)) * LN2
    at = tile.b.to(gl.int64) * lse.batch + h.to(gl.int64) * lse.head + tile.q_start + q
    gl.store(lse.ptr + at, row_lse, mask=q < tile.q_len)
    o = o * gl.convert_layout(factor, row_of(C.dim_v))[:, None]
    if C.masked:  # a row that sees no key: 0, whatever it was multiplied with
        none = gl.convert_layout(total, row_of(C.dim_v)) == 0.0
        o = gl.where(none[:, None], 0.0, o)
    out = shared.q.index(W) if C.share_q else shared.out.index(W)
    if C.persistent and not C.share_q:
        tma.store_wait(0)
        warpgroup_barrier()
    out.store(o.to(shared.k.dtype))
    fence_async_shared()
    store_output(o_desc, out, tile, W, C)


@gluon.jit
def compute(shared, o_desc, lse, work: Work, score, scale, W: gl.constexpr, FN: gl.constexpr, MOD: gl.constexpr,
            C: Variant):  # fmt: skip
    """A computing warpgroup: 64 rows of every tile."""
    S: gl.constexpr = accumulator(C.tile_n)
    OUT: gl.constexpr = accumulator(C.dim_v)
    THREADS: gl.constexpr = 128 * C.warpgroups + 32
    k_at = Cursor(gl.to_tensor(0), gl.to_tensor(0), C.stages)
    v_at = Cursor(gl.to_tensor(0), gl.to_tensor(0), C.stages)
    q_phase = gl.to_tensor(0)
    n_phase = gl.to_tensor(0)
    for slot in gl.static_range(C.stages):  # all slots are empty
        arrive(gl.to_tensor(K_EMPTY + slot), THREADS)
        arrive(gl.to_tensor(v_empty(C.stages) + slot), THREADS)
    if C.ping_pong and C.warpgroups - 1 == W:
        arrive(gl.to_tensor(turn(C.stages)), 256)
    t = gl.program_id(0)
    while t < work.n_tiles:
        tile = tile_at(t, work, C)
        if tile.row0 < tile.q_len:
            row_max = gl.full([64], FLOOR, gl.float32, row_of(C.tile_n))
            zeros = gl.zeros([64, C.tile_n], gl.float32, S)
            row_sum = quad_sum(zeros)
            o = gl.zeros([64, C.dim_v], gl.float32, OUT)
            mbarrier.wait(shared.q_full.index(W), q_phase)
            q_phase ^= 1
            mbarrier.wait(shared.k_full.index(k_at.slot), k_at.phase)
            s = warpgroup_mma(
                shared.q.index(W),
                shared.k.index(k_at.slot).permute((1, 0)),
                zeros,
                use_acc=False,
                is_async=True,
            )
            s = warpgroup_mma_wait(0, deps=(s,))
            arrive(K_EMPTY + k_at.slot, THREADS)
            k_at = k_at.next()
            key = block_at(tile, work, 0, C)
            x, row_max, row_sum, _ = weights(s, row_max, row_sum, tile, key, C.masked, work, score,
                                             scale, W, FN, MOD, C)  # fmt: skip
            mbarrier.wait(shared.k_full.index(k_at.slot), k_at.phase, pred=tile.blocks > 1)
            mbarrier.wait(shared.v_full.index(v_at.slot), v_at.phase)
            p = gl.convert_layout(x.to(shared.k.dtype), gl.DotOperandLayout(0, OUT, 2))
            for position in range(1, tile.blocks):
                key = block_at(tile, work, position, C)
                masked = ((position < tile.partial) | (position >= tile.full)) if C.edges else False
                o, p, row_max, row_sum, k_at, v_at = step(
                    o, p, row_max, row_sum, shared, k_at, v_at, tile, key, masked, position + 1 < tile.blocks, work,
                    score, scale, W, FN, MOD, C)  # fmt: skip
            if C.persistent and not C.share_q:
                mbarrier.arrive(shared.q_empty.index(W), count=1)
            o = warpgroup_mma(p, shared.v.index(v_at.slot), o, is_async=True)
            o, p = warpgroup_mma_wait(0, deps=(o, p))
            arrive(v_empty(C.stages) + v_at.slot, THREADS)
            v_at = v_at.next()
            finish(o, row_max, row_sum, shared, o_desc, lse, score, tile, W, C)
            if C.persistent and C.share_q:
                tma.store_wait(0)
                mbarrier.arrive(shared.q_empty.index(W), count=1)
        if C.dynamic:
            t = read_number(shared, n_phase)
            n_phase ^= 1
        else:
            t += gl.num_programs(0)
    tma.store_wait(0)
    if C.ping_pong and W == 0:
        join(gl.to_tensor(turn(C.stages)), 256)


@gluon.jit(do_not_specialize=["len_q", "len_k", "heads", "m_blocks", "section", "width", "n_tiles"])
def forward_kernel(q_desc, k_desc, v_desc, o_desc, lse: Lse, place, band, rows: Rows, lists, mask_args, score: Scores,
                   scale, len_q, len_k, heads, m_blocks, section, width, counter, n_tiles, FN: gl.constexpr,
                   MOD: gl.constexpr, C: Variant):  # fmt: skip
    kind: gl.constexpr = q_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, C.dim], kind)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.tile_n, C.dim], kind)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.tile_n, C.dim_v], kind)
    o_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, C.dim_v], kind)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(kind, [C.warpgroups, 64, C.dim], q_layout)
    if C.share_q:
        out = q
    else:
        out = gl.allocate_shared_memory(kind, [C.warpgroups, 64, C.dim_v], o_layout)
    shared = Shared(
        q,
        gl.allocate_shared_memory(kind, [C.stages, C.tile_n, C.dim], k_layout),
        gl.allocate_shared_memory(kind, [C.stages, C.tile_n, C.dim_v], v_layout),
        out,
        gl.allocate_shared_memory(gl.int64, [C.warpgroups, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [C.warpgroups, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [C.stages, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [C.stages, 1], barrier),
        gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [1], barrier),
        gl.allocate_shared_memory(gl.int64, [1], barrier),
    )
    mbarrier.init(shared.number_full, count=1)
    mbarrier.init(shared.number_empty, count=C.warpgroups)
    for w in gl.static_range(C.warpgroups):
        mbarrier.init(shared.q_full.index(w), count=1)
        mbarrier.init(shared.q_empty.index(w), count=1)
    for slot in gl.static_range(C.stages):
        mbarrier.init(shared.k_full.index(slot), count=1)
        mbarrier.init(shared.v_full.index(slot), count=1)
    work = Work(
        place, band, rows, lists, mask_args, len_q, len_k, heads, m_blocks, section, width, counter, n_tiles
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
