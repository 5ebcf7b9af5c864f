"""From a problem and its operands to one launch of the kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from onchip import rules
from onchip.backends.compiled import arguments, intervals, launch, lists
from onchip.backends.compiled.intervals import Rows
from onchip.backends.compiled.launch import Step, aligned, prepared
from onchip.backends.compiled.terms import Scores
from onchip.backends.hopper import copies
from onchip.backends.hopper.kernel import forward_kernel
from onchip.backends.hopper.parts import Lse, Packed
from onchip.backends.hopper.table import Config, config
from onchip.backends.hopper.unseen import without_unseen
from onchip.backends.hopper.variant import Variant, grain, packs, sections, variant
from onchip.layout import Varlen
from onchip.problem import Operands, Output, Problem
from onchip.tiles import Tiles

_KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_counters: dict[tuple[int, int], Tensor] = {}


@lru_cache(maxsize=16)
def multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def zero(device: torch.device) -> Tensor:
    """A counter at 0, which a launch leaves at 0. Launches of one stream follow one another, so they share one.

    A captured launch gets its own, set in the graph: graphs of one stream may be replayed side by side on others.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    index = device.index or 0
    key = index, driver.active.get_current_stream(index)  # by its number: torch would make an object of it
    if key not in _counters:
        _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counters[key]


@lru_cache(maxsize=256)
def _block(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[list[int], Any]:
    return list(shape), gl.NVMMASharedLayout.get_default_for(list(shape), _KINDS[dtype])


def addressable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where the bulk copy engine cannot address it: strides and start in steps of 16 bytes."""
    if tensor.data_ptr() % 16 == 0 and not copies(tensor):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def descriptor(tensor: Tensor, rows: int, columns: int, pack: int = 1) -> TensorDescriptor:
    """Of [rows, columns] blocks over (batch, row, head, dim), or over packed (row, head, dim).

    Dense: dims (batch, head, row, dim), or (batch, pack of heads, row, head of the pack, dim) where blocks stack the
    heads of a row. Packed: two more before (head, row, dim), so that a block ends where its sequence ends (see
    `parts.packed_rows`). The stride of a dim of size 1 is never used, but must be allowed.
    """
    strides = [8 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    if tensor.dim() == 3:
        _, heads, dim = tensor.shape
        row, head, _ = strides
        shape, steps = [0x7FFF0000, 0x7FFF0000, heads, 1 << 30, dim], [2**34 - row, row, head, row, 1]
        block, layout = _block(tensor.dtype, (1, 1, 1, rows, columns))
        return TensorDescriptor(tensor, shape, steps, block, layout)
    batch, total, heads, dim = tensor.shape
    by_batch, row, head, _ = strides
    if pack == 1:
        block, layout = _block(tensor.dtype, (1, 1, rows, columns))
        return TensorDescriptor(tensor, [batch, heads, total, dim], [by_batch, head, row, 1], block, layout)
    block, layout = _block(tensor.dtype, (1, 1, rows // pack, pack, columns))
    shape, steps = [batch, heads // pack, total, pack, dim], [by_batch, head * pack, row, head, 1]
    return TensorDescriptor(tensor, shape, steps, block, layout)


def cut(problem: Problem, band: rules.Band) -> tuple[int, int] | None:
    """Keys [lo, hi) of dense tensors that the band shows to any query, if not all: past them the engine reads 0.

    `work.tile_at` counts keys from the same first one.
    """
    length_q, length_k = problem.seqlen_q, problem.seqlen_k
    (left, right), lo, hi = rules.bounded(band), 0, length_k
    if left:
        lo = max(rules.first_diagonal(length_q, length_k, band), 0)
    if right:
        hi = max(min(length_k, length_q + rules.last_diagonal(length_q, length_k, band)), 0)
    if (lo, hi) == (0, length_k):
        return None
    lo = min(lo, length_k - 1)
    return lo, max(hi, lo + 1)  # a descriptor cannot be empty; what is not seen is masked


class Plan(NamedTuple):
    """What a launch needs besides its tensors."""

    chosen: Config
    C: Variant
    constants: Variant  # C, as the kernel wants it
    heads: int  # or packs of them
    m_blocks: int
    section: int
    n_tiles: int
    programs: int


@lru_cache(maxsize=1024)
def plan(problem: Problem, by_head: bool, index: int, divisor: tuple[int, int] | None = None) -> Plan:
    chosen = config(problem)
    pack = packs(problem, chosen.tile_m, by_head)
    C = variant(problem, chosen, pack, divisor)
    heads = problem.heads_q // pack
    m_blocks = -(-problem.seqlen_q // (chosen.tile_m // pack))
    n_tiles = m_blocks * heads * problem.batch
    programs = min(n_tiles, multiprocessors(index))
    section = sections(problem, heads) if C.dynamic else 1
    return Plan(chosen, C, Variant(*map(gl.constexpr, C)), heads, m_blocks, section, n_tiles, programs)


def forward(problem: Problem, operands: Operands) -> Output:
    q, packed = operands.q, problem.layout == "varlen"
    if q.is_cuda and q.get_device() != torch.cuda.current_device():
        with torch.cuda.device(q.get_device()):  # a kernel runs on the current device
            return forward(problem, operands)
    out = torch.empty(*q.shape[:-1], problem.dim_v, dtype=q.dtype, device=q.device)
    shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.empty(shape, device=q.device, dtype=torch.float32)
    if packed:  # rows past a sequence's length are not written
        out.zero_()
        lse.fill_(-torch.inf)
    if out.numel() == 0 or operands.k.numel() == 0 or problem.seqlen_k == 0:
        sink = operands.score.sink
        rows = -torch.inf if sink is None else sink.to(lse.dtype).unsqueeze(-1)
        return Output(out.zero_(), lse.copy_(torch.as_tensor(rows, device=q.device).expand_as(lse)))
    _attend(problem, operands, out, lse)
    return Output(out, lse)


def _attend(problem: Problem, operands: Operands, out: Tensor, lse: Tensor) -> None:
    layout, sink = operands.layout, operands.score.sink
    place, lengths = None, ()
    if isinstance(layout, Varlen):
        found = layout.cu_seqlens_q, layout.cu_seqlens_k, layout.used_q, layout.used_k
        place = Packed(*(x if x is None else x.contiguous() for x in found))  # kernels step through them
        lengths = tuple(x for x in place if x is not None)
    inputs = operands.q, operands.k, operands.v
    # Of a single row in all, descriptors hold another stride (see `descriptor`).
    single = isinstance(layout, Varlen) and 1 in (len(operands.q), len(operands.k))
    steady = not single and aligned(*inputs, sink, *lengths) and not any(map(copies, inputs))
    whole = launch.key(problem, operands, place) if steady else None
    if whole is not None:
        # Triton compiles for what it sees of a stride, which in packed lse is the rows of all sequences.
        whole = ("hopper", *whole, lse.stride(-2) % 16 == 0)
    attend = prepared(lambda: Attend(problem, operands), whole, problem, operands)
    attend.run(operands, out, lse, place, whole is not None)


class Attend:
    """The launch for a problem but for its tensors."""

    def __init__(self, problem: Problem, operands: Operands):
        mask, band = operands.mask, operands.mask.band or rules.Band()
        parts = set(problem.mask_parts) - {"band"}
        by_head, index = bool(parts) and mask.dependence(problem)[1], operands.q.device.index or 0
        made = plan(problem, by_head, index, grain(problem, mask))
        C = made.C
        tiles_of, order, width, function, mask_args, rows_of = None, None, 0, None, None, Rows()
        self.problem, self.made, self.looks, self.cut = problem, made, bool(parts), None
        if parts:
            tiles = Tiles(made.chosen.tile_m // C.pack, C.tile_n)
            tiles_of, width = lists.build(problem, operands, tiles, False, rows=True)
            order = lists.longest_first(problem, operands, tiles, tiles_of)
            if not C.exact:
                function, mask_args = arguments.mask_function(problem, operands)
            rows_of = intervals.rows(problem, operands)
        elif problem.mask_parts and not C.packed:
            self.cut = cut(problem, band)
        mod = arguments.mod(operands) if problem.score_parts else None
        self.step = Step(
            forward_kernel, (made.programs,),
            (band, rows_of, tiles_of, order, mask_args, problem.scale, problem.seqlen_q, problem.seqlen_k, made.heads,
             made.m_blocks, made.section, width, made.n_tiles),
            FN=function, MOD=mod, C=made.constants, num_warps=4, maxnreg=made.chosen.registers)  # fmt: skip

    def run(self, operands: Operands, out: Tensor, lse: Tensor, place: Packed | None, steady: bool) -> None:
        C, (q, k, v), score = self.made.C, operands[:3], Scores()
        if self.looks:
            v = without_unseen(self.problem, operands)
            steady = steady and not copies(v)
        if self.cut is not None:
            lo, hi = self.cut
            k, v = k[:, lo:hi], v[:, lo:hi]
            steady = steady and aligned(k, v)
        if self.problem.score_parts:
            score = arguments.scores(operands)
        counter = zero(q.device) if C.dynamic else None
        rows = Lse(lse, 0 if C.packed else lse.stride(0), lse.stride(-2))
        changing = *self._descriptors(q, k, v, out, steady), rows, place, score, counter
        self.step.run(changing, steady)

    def _descriptors(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, steady: bool) -> list[Any]:
        C = self.made.C
        if steady and self.step.again is not None:
            return [q, k, v, out]
        columns = C.held if 0 < C.held < C.dim else C.dim
        return [
            descriptor(addressable(q), 64, columns, C.pack),
            descriptor(addressable(k), C.tile_n, C.dim),
            descriptor(addressable(v), C.tile_n, C.dim_v),
            descriptor(out, 64, C.held if C.share_q else C.dim_v, C.pack),
        ]
