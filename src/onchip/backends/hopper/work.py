"""Which tiles there are, which blocks of keys each visits, and where its rows lie."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onchip.backends.compiled.rules import first_diagonal, last_diagonal, spans
from onchip.backends.hopper.parts import BOUND, aggregate, load_async, packed_rows, row_at, store_async
from onchip.backends.hopper.variant import Variant
from onchip.rules import Band


class Work(NamedTuple):
    """All tiles of a launch, and the mask that they share."""

    place: Any  # Packed, or None where sequences are dense
    band: Any
    rows: Any
    lists: Any
    order: Any  # of their rows, the longest first
    mask_args: Any
    len_q: Any
    len_k: Any
    heads: Any  # or packs of heads, of a sequence
    m_blocks: Any
    section: Any  # heads whose tiles are taken together
    width: Any  # of the lists
    counter: Any  # of the tiles that were drawn
    n_tiles: Any


@aggregate
class Tile:
    """A tile of queries and the blocks of keys it visits, from the last to the first or in a list's order.

    Blocks [0, partial) and [full, blocks) of the visit are masked, for a warpgroup as `own_edges` says. Rows below 0
    are none (`Variant.from_end`). Keys count from `origin`; `seen_k` of them are loaded.
    A band shows key k to query q iff first <= k - q <= end, where it is bounded.
    """

    b: gl.tensor
    head: gl.tensor
    row0: gl.tensor
    q_start: gl.tensor
    k_start: gl.tensor
    q_len: gl.tensor
    k_len: gl.tensor
    origin: gl.tensor
    seen_k: gl.tensor
    first: gl.tensor
    end: gl.tensor
    partial: gl.tensor
    full: gl.tensor
    blocks: gl.tensor
    last: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        b,
        head,
        row0,
        q_start,
        k_start,
        q_len,
        k_len,
        origin,
        seen_k,
        first,
        end,
        partial,
        full,
        blocks,
        last,
    ):
        self.b = b
        self.head = head
        self.row0 = row0
        self.q_start = q_start
        self.k_start = k_start
        self.q_len = q_len
        self.k_len = k_len
        self.origin = origin
        self.seen_k = seen_k
        self.first = first
        self.end = end
        self.partial = partial
        self.full = full
        self.blocks = blocks
        self.last = last


@gluon.jit
def draw(work: Work):
    """The number of the next tile that no program has taken. Every tile's program draws once, so the last one is known:
    it leaves the counter at 0 for the next launch."""
    ticket = gl.atomic_add(work.counter, 1, sem="relaxed")
    if ticket == work.n_tiles - 1:
        gl.store(work.counter, 0)
    return ticket + gl.num_programs(0)


@gluon.jit
def tile_at(t, work: Work, C: Variant):
    """Tile number t, the longest tiles of a mask first.

    Where programs draw their tiles: in sections of `section` heads, whose keys and values fit the L2 cache, by length.
    """
    TILE_Q: gl.constexpr = 64 * C.warpgroups // C.pack
    if C.dynamic:
        within = t % (work.m_blocks * work.section)
        i = within // work.section
        number = t // (work.m_blocks * work.section) * work.section + within % work.section
    else:
        i = t % work.m_blocks
        number = t // work.m_blocks
    head = number % work.heads
    b = number // work.heads
    if work.lists is not None:
        i = gl.load(work.order + b.to(gl.int64) * work.lists.batch + head * work.lists.head + i)
    elif C.right:
        i = work.m_blocks - 1 - i
    spare = gl.to_tensor(0)  # rows before the first query, of whole warpgroups
    if C.from_end:
        spare = (work.m_blocks * TILE_Q - work.len_q) // 64 * 64
    q_start = gl.to_tensor(0)
    k_start = gl.to_tensor(0)
    q_len = gl.to_tensor(work.len_q)
    k_len = gl.to_tensor(work.len_k)
    if C.packed:
        q_start = gl.load(work.place.cu_q + b).to(gl.int32)
        k_start = gl.load(work.place.cu_k + b).to(gl.int32)
        q_len = gl.load(work.place.cu_q + b + 1).to(gl.int32) - q_start
        k_len = gl.load(work.place.cu_k + b + 1).to(gl.int32) - k_start
        if work.place.used_q is not None:
            q_len = gl.load(work.place.used_q + b).to(gl.int32)
        if work.place.used_k is not None:
            k_len = gl.load(work.place.used_k + b).to(gl.int32)
    origin = gl.to_tensor(0)
    seen_k = k_len
    first = gl.to_tensor(0)
    end = gl.to_tensor(0)
    if work.lists is not None:
        counts = work.lists.counts + 2 * (
            b.to(gl.int64) * work.lists.batch + head * work.lists.head + i * work.lists.row
        )
        partial = gl.load(counts)
        full = partial + gl.load(counts + 1)
        blocks = full
        last = gl.to_tensor(0)
    else:
        if C.left:
            first = first_diagonal(q_len, k_len, work.band)
            origin = gl.maximum(first, 0)
            first -= origin
        if C.right:
            end = last_diagonal(q_len, k_len, work.band)
            seen_k = gl.maximum(gl.minimum(k_len, q_len + end), 0)
            end -= origin
        seen_k = gl.maximum(seen_k - origin, 0)
        shifted = Band(None, None, spare - first if C.left else None, end - spare if C.right else None)
        lo, full_lo, full_hi, hi = spans(i, TILE_Q, C.tile_n, q_len + spare, seen_k, shifted)
        full_hi = gl.minimum(full_hi, seen_k // C.tile_n)  # the tail needs the mask
        full_hi = gl.minimum(gl.maximum(full_hi, full_lo), hi)
        partial = hi - full_hi
        full = hi - full_lo
        blocks = hi - lo
        last = gl.maximum(hi - 1, 0)
    # A tile that sees nothing visits one block, which its mask hides, or `finish` leaves out where none is compiled in.
    blocks = gl.maximum(blocks, 1)
    row0 = i * TILE_Q - spare
    return Tile(b, head, row0, q_start, k_start, q_len, k_len, origin, seen_k, first, end, partial, full, blocks,
                last)  # fmt: skip


@gluon.jit
def own_edges(tile, W: gl.constexpr, C: Variant):
    """The tile for a warpgroup, whose own rows may see a block to its end where the tile's first rows do not."""
    first_row = tile.row0 + W * 64 // C.pack
    # Blocks that this row, and so all of them, sees to the end; the tail of the keys needs the mask.
    whole = gl.minimum((first_row + tile.end + 1) // C.tile_n, tile.seen_k // C.tile_n)
    partial = gl.minimum(tile.partial, tile.last + 1 - whole)
    return Tile(tile.b, tile.head, tile.row0, tile.q_start, tile.k_start, tile.q_len, tile.k_len, tile.origin,
                tile.seen_k, tile.first, tile.end, partial, tile.full, tile.blocks, tile.last)  # fmt: skip


@gluon.jit
def sees_nothing(tile, W: gl.constexpr, C: Variant):
    """Whether a tile's first block of keys lies behind all that a warpgroup's own rows see; the last one's are not
    asked, as they see some of it wherever the tile sees anything."""
    if C.uneven and C.warpgroups - 1 != W:
        last_row = tile.row0 + (W * 64 + 63) // C.pack
        nothing = tile.last * C.tile_n > last_row + tile.end
    else:
        nothing = False
    return nothing


@gluon.jit
def block_at(tile, work: Work, position, C: Variant):
    """First key of the block at a position of the visit."""
    number = tile.last - position
    if work.lists is not None:
        i = tile.row0 // (64 * C.warpgroups // C.pack)
        row = tile.b * work.lists.batch + tile.head * work.lists.head + i * work.lists.row
        number = gl.load(row_at(work.lists.tiles, row, work.width) + position)
    return number * C.tile_n


@gluon.jit
def load_keys(desc, barrier, target, tile, key, C: Variant):
    head_k = tile.head * C.pack // C.group
    if C.packed:
        end, row = packed_rows(tile.k_start + tile.origin, tile.seen_k, key)
        load_async(desc, [BOUND, end, head_k, row, 0], barrier, target.reshape(desc.block_shape))
    else:
        load_async(desc, [tile.b, head_k, key, 0], barrier, target.reshape(desc.block_shape))


@gluon.jit
def query_place(tile, W: gl.constexpr, column: gl.constexpr, C: Variant):
    """Coordinates of a warpgroup's 64 rows, from a column on, in the descriptors of q and out."""
    row = tile.row0 + W * 64 // C.pack
    if C.packed:
        end, row = packed_rows(tile.q_start, tile.q_len, row)
        return BOUND, end, tile.head, row, column
    elif C.pack > 1:
        return tile.b, tile.head, row, 0, column
    else:
        return tile.b, tile.head, row, column, 0


@gluon.jit
def load_queries(desc, barrier, target, tile, W: gl.constexpr, column: gl.constexpr, C: Variant):
    c0, c1, c2, c3, c4 = query_place(tile, W, column, C)
    if len(desc.block_shape) == 5:
        load_async(desc, [c0, c1, c2, c3, c4], barrier, target.reshape(desc.block_shape))
    else:
        load_async(desc, [c0, c1, c2, c3], barrier, target.reshape(desc.block_shape))


@gluon.jit
def store_output(desc, source, tile, W: gl.constexpr, column: gl.constexpr, C: Variant):
    c0, c1, c2, c3, c4 = query_place(tile, W, column, C)
    # Loads from rows below 0 bring zeros, but stores there end the kernel as an illegal instruction.
    there = tile.row0 + W * 64 >= 0 if C.from_end else True
    if there:
        if len(desc.block_shape) == 5:
            store_async(desc, [c0, c1, c2, c3, c4], source.reshape(desc.block_shape))
        else:
            store_async(desc, [c0, c1, c2, c3], source.reshape(desc.block_shape))
