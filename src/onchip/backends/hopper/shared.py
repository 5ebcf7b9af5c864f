"""What the kernel's roles share: tiles in shared memory, the barriers that pass them on, and the tile that is next."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from onchip.backends.hopper.parts import aggregate, fresh
from onchip.backends.hopper.variant import Variant
from onchip.backends.hopper.work import Tile, Work, own_edges

# Where the fields of the next tile stand. Those behind LAST are of a band, or of packed sequences; else they are known.
FIELDS = gl.constexpr(16)
(
    NUMBER, B, HEAD, ROW0, PARTIAL, FULL, BLOCKS, LAST,
    ORIGIN, SEEN_K, FIRST, END, Q_START, K_START, Q_LEN, K_LEN,
) = map(gl.constexpr, range(16))  # fmt: skip


@aggregate
class Shared:
    """[warpgroup, ...], [slot of the ring, ...], or [2 * warpgroups, ...] where two tiles' queries lie side by side."""

    held: gl.shared_memory_descriptor  # queries' columns on their way to registers
    q: gl.shared_memory_descriptor  # their other columns
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor  # the queries of the next tile may be loaded
    full: gl.shared_memory_descriptor  # a slot has its keys, and the values of the block before
    tile: gl.shared_memory_descriptor  # fields of the next tile, a word each
    tile_full: gl.shared_memory_descriptor
    tile_free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, held, q, k, v, out, q_full, q_free, full, tile, tile_full, tile_free):
        self.held = held
        self.q = q
        self.k = k
        self.v = v
        self.out = out
        self.q_full = q_full
        self.q_free = q_free
        self.full = full
        self.tile = tile
        self.tile_full = tile_full
        self.tile_free = tile_free


@gluon.jit
def _tiles(count: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, KIND: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], KIND)
    return gl.allocate_shared_memory(KIND, [count, rows, columns], layout)


@gluon.jit
def _barriers(count: gl.constexpr):
    return gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())


@gluon.jit
def allocate(KIND: gl.constexpr, C: Variant):
    """Shared memory for tiles of numbers of KIND, its barriers ready for their first phase."""
    k = _tiles(C.stages, C.tile_n, C.dim, KIND)
    v = _tiles(C.stages, C.tile_n, C.dim_v, KIND)
    held = k  # what a variant has no place for is never used, but a field must hold something
    q = k
    out = k
    if C.held > 0:
        held = _tiles(C.warpgroups, 64, C.held, KIND)
    if C.held < C.dim:
        q = _tiles(2 * C.warpgroups, 64, C.dim - C.held, KIND)
    if not C.share_q:
        out = _tiles(C.warpgroups, 64, C.dim_v, KIND)
    shared = Shared(
        held,
        q,
        k,
        v,
        out,
        _barriers(C.warpgroups),
        _barriers(C.warpgroups),
        _barriers(C.stages),
        gl.allocate_shared_memory(
            gl.int32, [_word(FIELDS, C.tight), 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
        ),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
    )
    mbarrier.init(shared.tile_full, count=1)
    mbarrier.init(shared.tile_free, count=C.warpgroups)
    for w in gl.static_range(C.warpgroups):
        mbarrier.init(shared.q_full.index(w), count=1)
        mbarrier.init(shared.q_free.index(w), count=1)
    for slot in gl.static_range(C.stages):
        mbarrier.init(shared.full.index(slot), count=2)
    return shared


@gluon.constexpr_function
def _word(field, tight):
    # Every second word: else several are read at once, into neighbouring registers, which have to be cleared first.
    return 2 * field if tight else field


@gluon.jit
def _put(shared, field: gl.constexpr, value, C: Variant):
    shared.tile.index(_word(field, C.tight)).store(
        gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + value
    )


@gluon.jit
def _get(shared, field: gl.constexpr, C: Variant):
    """On any number of warps, all of which read the same word."""
    return gl.max(
        shared.tile.index(_word(field, C.tight)).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0
    )


@gluon.jit
def publish(t, tile: Tile, n_phase, shared, C: Variant):
    """Tell the computing warpgroups the next tile and its number; returns the next phase.

    Which spares each of them, between two tiles, the divisions of `tile_at` and its looks at lists and lengths.
    """
    mbarrier.wait(shared.tile_free, n_phase)
    _put(shared, NUMBER, t, C)
    _put(shared, B, tile.b, C)
    _put(shared, HEAD, tile.head, C)
    _put(shared, ROW0, tile.row0, C)
    _put(shared, PARTIAL, tile.partial, C)
    _put(shared, FULL, tile.full, C)
    _put(shared, BLOCKS, tile.blocks, C)
    _put(shared, LAST, tile.last, C)
    if C.left or C.right:
        _put(shared, ORIGIN, tile.origin, C)
        _put(shared, SEEN_K, tile.seen_k, C)
        _put(shared, FIRST, tile.first, C)
        _put(shared, END, tile.end, C)
    if C.packed:
        _put(shared, Q_START, tile.q_start, C)
        _put(shared, K_START, tile.k_start, C)
        _put(shared, Q_LEN, tile.q_len, C)
        _put(shared, K_LEN, tile.k_len, C)
    mbarrier.arrive(shared.tile_full, count=1)
    return n_phase ^ 1


@gluon.jit
def published(shared, work: Work, FRESH: gl.constexpr, C: Variant):
    """The tile that was published, and its number. `FRESH`: what follows from its lengths is worked out anew."""
    zero = gl.to_tensor(0)
    q_start, k_start, q_len, k_len = zero, zero, gl.to_tensor(work.len_q), gl.to_tensor(work.len_k)
    if FRESH and C.tight:
        q_len, k_len = fresh(q_len), fresh(k_len)
    if C.packed:
        q_start, k_start = _get(shared, Q_START, C), _get(shared, K_START, C)
        q_len, k_len = _get(shared, Q_LEN, C), _get(shared, K_LEN, C)
    origin, seen_k, first, end = zero, k_len, zero, zero
    if C.left or C.right:
        origin, seen_k, first, end = (
            _get(shared, ORIGIN, C),
            _get(shared, SEEN_K, C),
            _get(shared, FIRST, C),
            _get(shared, END, C),
        )
    b, head, row0 = _get(shared, B, C), _get(shared, HEAD, C), _get(shared, ROW0, C)
    partial, full, blocks, last = (
        _get(shared, PARTIAL, C),
        _get(shared, FULL, C),
        _get(shared, BLOCKS, C),
        _get(shared, LAST, C),
    )
    tile = Tile(b, head, row0, q_start, k_start, q_len, k_len, origin, seen_k, first, end, partial, full, blocks,
                last)  # fmt: skip
    return _get(shared, NUMBER, C), tile


@gluon.jit
def next_tile(n_phase, shared, work: Work, W: gl.constexpr, C: Variant):
    """For a computing warpgroup: the next tile, its number, and the next phase."""
    mbarrier.wait(shared.tile_full, n_phase)
    t, tile = published(shared, work, True, C)
    if C.uneven:
        tile = own_edges(tile, W, C)
    mbarrier.arrive(shared.tile_free, count=1)
    return t, tile, n_phase ^ 1
