"""What the kernel's roles share: tiles in shared memory, the barriers that pass them on, and the numbers of tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from onchip.backends.hopper.parts import aggregate
from onchip.backends.hopper.variant import Variant


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
    number: gl.shared_memory_descriptor
    number_full: gl.shared_memory_descriptor
    number_free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, held, q, k, v, out, q_full, q_free, full, number, number_full, number_free):
        self.held = held
        self.q = q
        self.k = k
        self.v = v
        self.out = out
        self.q_full = q_full
        self.q_free = q_free
        self.full = full
        self.number = number
        self.number_full = number_full
        self.number_free = number_free


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
        gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
    )
    mbarrier.init(shared.number_full, count=1)
    mbarrier.init(shared.number_free, count=C.warpgroups)
    for w in gl.static_range(C.warpgroups):
        mbarrier.init(shared.q_full.index(w), count=1)
        mbarrier.init(shared.q_free.index(w), count=1)
    for slot in gl.static_range(C.stages):
        mbarrier.init(shared.full.index(slot), count=2)
    return shared


@gluon.jit
def publish(t, n_phase, shared, C: Variant):
    """Tell the computing warpgroups the number of the next tile; returns the next phase."""
    if C.dynamic:
        mbarrier.wait(shared.number_free, n_phase)
        shared.number.store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + t)
        mbarrier.arrive(shared.number_full, count=1)
        n_phase ^= 1
    return n_phase


@gluon.jit
def next_number(t, n_phase, shared, C: Variant):
    """The number after t, and the next phase."""
    if C.dynamic:
        mbarrier.wait(shared.number_full, n_phase)
        t = gl.max(shared.number.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        mbarrier.arrive(shared.number_free, count=1)
        n_phase ^= 1
    else:
        t += gl.num_programs(0)
    return t, n_phase
