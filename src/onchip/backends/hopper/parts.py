"""The kernel's vocabulary: layouts, the ring of key blocks, named barriers, exponentials; names that Triton changed."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate

from onchip.backends.hopper import table

# Renamed after Triton 3.6.
load_async: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_async: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
warpgroup_barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
# Where a row's maximum starts: below every score, and finite, so that a masked score minus it is -inf and never NaN.
FLOOR = gl.constexpr(-3.0e38)
# By how much, in units of log2, a row's scores may pass what is taken from them, as FlashAttention-4 lets them by 8. A
# sum with 7 rounds to at most 8 more wherever float32 is so coarse, where one with 8 may be 16: too much for float16.
SLACK = gl.constexpr(7.0)
keys_free = gluon.constexpr_function(table.keys_free)
values_free = gluon.constexpr_function(table.values_free)
turn_of = gluon.constexpr_function(table.turn_of)
all_threads = gluon.constexpr_function(table.all_threads)
TWO = gl.constexpr(256)  # threads of two warpgroups
# A packed sequence ends where a coordinate passes this bound of the descriptor (see `packed_rows`).
BOUND = gl.constexpr(1 << 30)


class Packed(NamedTuple):
    """Boundaries of packed sequences, and how many rows of each are used."""

    cu_q: Any
    cu_k: Any
    used_q: Any = None
    used_k: Any = None


class Lse(NamedTuple):
    """lse by its strides; a packed one has no batch."""

    ptr: Any
    batch: Any
    head: Any


@gluon.constexpr_function
def accumulator(columns):
    """64 rows of an accumulator of one warpgroup's products: a row lies in the four lanes of a quad."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def row_of(columns):
    """A value for each row of such an accumulator."""
    return gl.SliceLayout(1, accumulator(columns))


@gluon.constexpr_function
def column_of(columns):
    return gl.SliceLayout(0, accumulator(columns))


@aggregate
class Cursor:
    """A position in the ring of key blocks: its slot, and the parity of the trip around the ring."""

    slot: gl.tensor
    phase: gl.tensor
    slots: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, slot, phase, slots):
        self.slot = slot
        self.phase = phase
        self.slots = gl.constexpr(slots)

    @gluon.jit
    def next(self):
        last = self.slot == self.slots - 1
        return Cursor(gl.where(last, 0, self.slot + 1), self.phase ^ last.to(gl.int32), self.slots)


@gluon.constexpr_function
def _barrier_asm(operation, threads):
    return f"bar.{operation} $1, {threads}; mov.b32 $0, $1;"


@gluon.jit
def arrive(barrier, THREADS: gl.constexpr):
    """Count this warpgroup's warps at a named barrier, without waiting for one another as an mbarrier's arrive does."""
    gl.inline_asm_elementwise(
        _barrier_asm("arrive", THREADS), "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def join(barrier, THREADS: gl.constexpr):
    """Wait at a named barrier until THREADS threads have come, these included."""
    gl.inline_asm_elementwise(
        _barrier_asm("sync", THREADS), "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def packed_rows(start, size, row):
    """Two coordinates of a row of the sequence [start, start + size) in a descriptor of packed rows.

    The second passes the descriptor's bound exactly where the row leaves the sequence, so the copy engine reads zeros
    and writes nothing there. The address is right because it wraps modulo 2^64.
    """
    return start + size, BOUND - size + row


# `wide` to `zero_of`: what follows from arguments alone, LLVM works out where the kernel starts, and where registers
# are few, the assembler keeps it in memory. By these it is made where it is used, once a tile.


@gluon.jit
def wide(x, y):
    """The product of two numbers that are not negative, in 64 bits, without an upper half of either."""
    return gl.inline_asm_elementwise(
        "mul.wide.u32 $0, $1, $2;", "=l,r,r", [x, y], dtype=gl.int64, is_pure=True, pack=1
    )


@gluon.jit
def row_at(first, row, width):
    """Where a row of a table of 32-bit numbers begins."""
    asm: gl.constexpr = "{.reg .b64 n; mul.wide.u32 n, $1, $2; shl.b64 n, n, 2; add.s64 $0, $3, n;}"
    at = gl.inline_asm_elementwise(
        asm, "=l,r,r,l", [row, width, first.to(gl.int64)], dtype=gl.int64, is_pure=True, pack=1
    )
    return at.to(first.dtype)


@gluon.jit
def fresh(x):
    """x, of which nothing that was computed before is known."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def zero_of(x):
    """0, which the compiler does not know: x is never negative."""
    return x >> 31


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def log2(x):
    """Within 2^-22, of itself or, between 1/2 and 2, of 1."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(x):
    """Within 2^-23 of itself."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def quad_max(s):
    """The maximum over this thread's columns: [64, 4], one column for each lane of a quad."""
    # Two columns of a thread are neighbours: reduced first, then half by half, which keeps two chains in flight.
    part = gl.max(s.reshape([64, 2, s.shape[1] // 16, 4, 2]), 4)
    return gl.max(gl.max(part, 2), 1)


@gluon.jit
def no_sums(columns: gl.constexpr):
    """Sums of no columns: [64, 4], one for each lane of a quad."""
    s = gl.zeros([64, columns], gl.float32, accumulator(columns))
    return gl.sum(s.reshape([64, columns // 8, 4, 2]).permute((0, 2, 1, 3)).reshape([64, 4, columns // 4]), 2)


@gluon.jit
def quad_sum(s, start):
    """`start` [64, 4], and this thread's columns of s with it: one column for each lane of a quad.

    In one chain: the exponentials that it waits for are issued one by one, and between them what can be.
    """
    columns: gl.constexpr = s.shape[1] // 4
    part = s.reshape([64, columns // 2, 4, 2]).permute((0, 2, 1, 3)).reshape([64, 4, columns])
    number = gl.arange(0, columns, gl.SliceLayout(0, gl.SliceLayout(1, part.type.layout)))
    first = gl.convert_layout(start, gl.SliceLayout(2, part.type.layout), assert_trivial=True)
    part = gl.where(number[None, None, :] == 0, part + first[:, :, None], part)
    return gl.convert_layout(gl.sum(part, 2), start.type.layout, assert_trivial=True)


@gluon.jit
def sides(s):
    """The left and the right half of the columns of scores, as accumulators."""
    left, right = halves(s)
    layout: gl.constexpr = accumulator(s.shape[1] // 2)
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(
        right, layout, assert_trivial=True
    )


@gluon.jit
def both(left, right):
    """Columns side by side again."""
    return gl.join(left, right).permute((0, 2, 1)).reshape([left.shape[0], 2 * left.shape[1]])


@gluon.constexpr_function
def _pack_asm(kind):
    name = "bf16x2" if kind == gl.bfloat16 else "f16x2"
    return f"cvt.rn.{name}.f32 $0, $2, $1;"


@gluon.jit
def pack(x, KIND: gl.constexpr):
    """Neighbouring columns in 16 bits each, two to a register: [rows, columns / 2] of int32.

    As a loop's variable: the assembler kept 16-bit ones in halves of registers that do not match, and moved them back
    each time, 32 or 64 instructions a block.
    """
    even, odd = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(
        _pack_asm(KIND), "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _half(packed, ASM: gl.constexpr, KIND: gl.constexpr):
    if gl.bfloat16 == KIND:
        return gl.inline_asm_elementwise(ASM, "=h,r", [packed], dtype=gl.bfloat16, is_pure=True, pack=1)
    else:
        return gl.inline_asm_elementwise(ASM, "=h,r", [packed], dtype=gl.float16, is_pure=True, pack=1)


@gluon.jit
def unpack(packed, KIND: gl.constexpr, layout: gl.constexpr):
    """What `pack` made, as an operand: no instruction."""
    even = _half(packed, "{.reg .b16 odd; mov.b32 {$0, odd}, $1;}", KIND)
    odd = _half(packed, "{.reg .b16 even; mov.b32 {even, $0}, $1;}", KIND)
    both = gl.join(even, odd).reshape([packed.shape[0], packed.shape[1] * 2])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    return gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))


COMPUTED = gl.constexpr(
    "{.reg .pred low; .reg .f32 least; min.f32 least, $2, $3; setp.lt.f32 low, least, 0fFF7843B0;"  # -3.3e38
    f" @low bar.arrive {table.NEVER}, 160; mov.b32 $0, $2; mov.b32 $1, $3;}}"
)


@gluon.jit
def computed(x):
    """x, of two rows a thread, and no less than FLOOR; what it depends on is computed before the next wait or barrier.

    The assembler moved the wait for products above the softmax that stands before it, and the two took turns. It does
    not know that the arrival never happens, and keeps such instructions in order.
    """
    return gl.inline_asm_elementwise(COMPUTED, "=f,=f,f,f", [x], dtype=gl.float32, is_pure=False, pack=2)


@gluon.constexpr_function
def _rescale_asm(count):
    """A warp branches: a predicate on each product would take as many issue slots as the products.

    Outputs are written before all inputs are read: PTX gives either registers of their own.
    """
    lines = ["{.reg .pred moved, any;"]
    lines += [f"mov.b32 ${i}, ${count + i};" for i in range(count)]
    lines += [f"setp.neu.f32 moved, ${2 * count}, 0f3F800000;"]
    lines += [f"setp.neu.or.f32 moved, ${2 * count + 2}, 0f3F800000, moved;"]  # a thread's other row
    lines += ["vote.sync.any.pred any, moved, -1; @!any bra.uni SAME;"]
    lines += [f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    return " ".join([*lines, "SAME: }"])


@gluon.constexpr_function
def _rescale_operands(count):
    return ",".join(["=f"] * count + ["f"] * (2 * count))


@gluon.jit
def rescaled(o, factor):
    """Rows of an accumulator times their factors, which a warp skips where they are 1 for all of its 16 rows."""
    COUNT: gl.constexpr = o.shape[1] // 2  # numbers of a thread
    o, factor = gl.broadcast(o, gl.convert_layout(factor, row_of(o.shape[1]))[:, None])
    return gl.inline_asm_elementwise(
        _rescale_asm(COUNT), _rescale_operands(COUNT), [o, factor], dtype=gl.float32, is_pure=True, pack=COUNT
    )
