"""The loading warp: queries of a tile, then keys and values of its blocks, into the slots of a ring.

A slot holds the keys of a block and the values of the block before it, which for a tile's first block are of the tile
before: what one step of a computing warpgroup takes, behind one barrier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from onchip.backends.hopper.parts import EMPTY, Cursor, join
from onchip.backends.hopper.shared import publish
from onchip.backends.hopper.variant import Variant
from onchip.backends.hopper.work import Work, block_at, draw, load_keys, load_queries, tile_at


@gluon.jit
def with_rows(t, work: Work, C: Variant):
    """t, or the number drawn after it whose tile has rows. Packed sequences may be shorter than the longest one."""
    if C.packed:
        tile = tile_at(gl.minimum(t, work.n_tiles - 1), work, C)
        while (t < work.n_tiles) & (tile.row0 >= tile.q_len):
            t = draw(work)
            tile = tile_at(gl.minimum(t, work.n_tiles - 1), work, C)
    return t


@gluon.jit
def following(t, n_phase, shared, work: Work, C: Variant):
    """The number of the tile after t, published; and the next phase."""
    if C.dynamic:
        t = draw(work)
    else:
        t += gl.num_programs(0)
    t = with_rows(t, work, C)
    return t, publish(t, n_phase, shared, C)


@gluon.jit
def load_tile_queries(t, turn, shared, q_desc, work: Work, C: Variant):
    """`turn`: 0 and 1 in alternation, from tile to tile."""
    tile = tile_at(t, work, C)
    for w in gl.static_range(C.warpgroups):
        mbarrier.wait(shared.q_free.index(w), turn ^ 1)
        mbarrier.expect(shared.q_full.index(w), 64 * C.dim * 2)
        if C.held > 0:
            load_queries(q_desc, shared.q_full.index(w), shared.held.index(w), tile, w, 0, C)
        if C.held < C.dim:
            target = shared.q.index(turn * C.warpgroups + w)
            load_queries(q_desc, shared.q_full.index(w), target, tile, w, C.held, C)


@gluon.jit
def load(shared, q_desc, k_desc, v_desc, work: Work, C: Variant):
    THREADS: gl.constexpr = 128 * C.warpgroups + 32
    at = Cursor(gl.to_tensor(0), gl.to_tensor(0), C.stages)
    turn = gl.to_tensor(0)
    n_phase = gl.to_tensor(1)
    t = with_rows(gl.program_id(0), work, C)
    n_phase = publish(t, n_phase, shared, C)
    early = gl.to_tensor(0)  # whether this tile's queries were loaded beside the last tile's blocks
    if t < work.n_tiles:  # else no warpgroup takes a step, and every slot comes back as it is
        join(EMPTY + at.slot, THREADS)
        mbarrier.arrive(shared.full.index(at.slot), count=1)  # no values come with the first keys
        while t < work.n_tiles:
            tile = tile_at(t, work, C)
            for position in range(tile.blocks):
                key = block_at(tile, work, position, C)
                mbarrier.expect(shared.full.index(at.slot), C.tile_n * C.dim * 2)
                load_keys(k_desc, shared.full.index(at.slot), shared.k.index(at.slot), tile, key, C)
                if (position == 0) & (early == 0):
                    load_tile_queries(t, turn, shared, q_desc, work, C)
                if (position > 0) & (position == tile.blocks - 2):
                    # Late in a long tile: a program that drew earlier could take two long ones while others run out of
                    # them. But not before a tile's second keys: a warpgroup may need those to let the queries go.
                    t, n_phase = following(t, n_phase, shared, work, C)
                    if t < work.n_tiles:
                        load_tile_queries(t, turn ^ 1, shared, q_desc, work, C)
                at = at.next()
                join(EMPTY + at.slot, THREADS)
                mbarrier.expect(shared.full.index(at.slot), C.tile_n * C.dim_v * 2)
                load_keys(v_desc, shared.full.index(at.slot), shared.v.index(at.slot), tile, key, C)
            early = (tile.blocks > 2).to(gl.int32)
            if tile.blocks <= 2:
                t, n_phase = following(t, n_phase, shared, work, C)
            turn ^= 1
        mbarrier.arrive(shared.full.index(at.slot), count=1)  # no keys come with the last values
        at = at.next()
    for _ in gl.static_range(C.stages):  # every slot comes back, so that no barrier is left half counted
        join(EMPTY + at.slot, THREADS)
        at = at.next()
