"""The loading warp: queries of a tile, then keys and values of its blocks, into the slots of a ring.

A slot holds the keys of a block and the values of the block before it, which for a tile's first block are of the tile
before: what one step of a computing warpgroup takes. It awaits them together, and lets them go one after the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from onchip.backends.hopper.parts import Cursor, all_threads, join, keys_free, values_free
from onchip.backends.hopper.shared import publish, published
from onchip.backends.hopper.variant import Variant
from onchip.backends.hopper.work import Work, block_at, draw, load_keys, load_queries, tile_at


@gluon.jit
def with_rows(t, work: Work, C: Variant):
    """t, or the number drawn after it whose tile has rows, and that tile. Packed sequences may be shorter than the
    longest one."""
    tile = tile_at(gl.minimum(t, work.n_tiles - 1), work, C)
    if C.packed:
        while (t < work.n_tiles) & (tile.row0 >= tile.q_len):
            t = draw(work)
            tile = tile_at(gl.minimum(t, work.n_tiles - 1), work, C)
    return t, tile


@gluon.jit
def draw_next(t, n_phase, shared, work: Work, C: Variant):
    """The number of the tile after t, that tile, which is published, and the next phase."""
    if C.dynamic:
        t = draw(work)
    else:
        t += gl.num_programs(0)
    t, tile = with_rows(t, work, C)
    return t, tile, publish(t, tile, n_phase, shared, C)


@gluon.jit
def load_tile_queries(tile, turn, shared, q_desc, C: Variant):
    """`turn`: 0 and 1 in alternation, from tile to tile."""
    for w in gl.static_range(C.warpgroups):
        mbarrier.wait(shared.q_free.index(w), turn ^ 1)
        mbarrier.expect(shared.q_full.index(w), 64 * C.dim * 2)
        if C.held > 0:
            load_queries(q_desc, shared.q_full.index(w), shared.held.index(w), tile, w, 0, C)
        if C.held < C.dim:
            target = shared.q.index(turn * C.warpgroups + w)
            load_queries(q_desc, shared.q_full.index(w), target, tile, w, C.held, C)


@gluon.jit
def load_block(desc, free, at, target, shared, tile, key, C: Variant):
    """Keys or values of a block into the ring's current slot, once every warpgroup has read what is there."""
    join(free + at.slot, all_threads(C.warpgroups))
    mbarrier.expect(shared.full.index(at.slot), C.tile_n * target.shape[2] * 2)
    load_keys(desc, shared.full.index(at.slot), target.index(at.slot), tile, key, C)


@gluon.jit
def skip_block(free, at, shared, C: Variant):
    """Nothing where `load_block` would load."""
    join(free + at.slot, all_threads(C.warpgroups))
    mbarrier.arrive(shared.full.index(at.slot), count=1)


@gluon.jit
def load(shared, q_desc, k_desc, v_desc, work: Work, C: Variant):
    KEYS: gl.constexpr = keys_free(C.stages)
    VALUES: gl.constexpr = values_free(C.stages)
    at = Cursor(gl.to_tensor(0), gl.to_tensor(0), C.stages)
    turn = gl.to_tensor(0)
    n_phase = gl.to_tensor(1)
    t, tile = with_rows(gl.program_id(0), work, C)
    n_phase = publish(t, tile, n_phase, shared, C)
    early = gl.to_tensor(0)  # whether this tile's queries were loaded beside the last tile's blocks
    if t < work.n_tiles:  # else no warpgroup takes a step, and every slot comes back as it is
        # Read back, not the tile at hand: Triton 3.6 does not carry on a second name of it (end of the log).
        _, before = published(shared, work, False, C)  # the tile of the last block
        key_before = gl.to_tensor(0)
        first = gl.to_tensor(1)
        while t < work.n_tiles:
            _, tile = published(shared, work, False, C)
            for position in range(tile.blocks):
                key = block_at(tile, work, position, C)
                load_block(k_desc, KEYS, at, shared.k, shared, tile, key, C)
                if (position == 0) & (early == 0):
                    load_tile_queries(tile, turn, shared, q_desc, C)
                if first == 1:
                    skip_block(VALUES, at, shared, C)  # no values come with the first keys
                else:
                    load_block(v_desc, VALUES, at, shared.v, shared, before, key_before, C)
                first = gl.to_tensor(0)
                before = tile
                key_before = key
                at = at.next()
                if position == tile.blocks - 2:
                    # Late in a long tile: a program that drew earlier could take two long ones while others run out of
                    # them. Behind the loads of the block, so that they do not wait for the counter.
                    t, ahead, n_phase = draw_next(t, n_phase, shared, work, C)
                    if t < work.n_tiles:
                        load_tile_queries(ahead, turn ^ 1, shared, q_desc, C)
            early = (tile.blocks > 1).to(gl.int32)
            if tile.blocks == 1:
                t, ahead, n_phase = draw_next(t, n_phase, shared, work, C)
            turn ^= 1
        skip_block(KEYS, at, shared, C)  # no keys come with the last values
        load_block(v_desc, VALUES, at, shared.v, shared, before, key_before, C)
        at = at.next()
    for _ in gl.static_range(C.stages):  # every slot comes back, so that no barrier is left half counted
        join(KEYS + at.slot, all_threads(C.warpgroups))
        join(VALUES + at.slot, all_threads(C.warpgroups))
        at = at.next()
