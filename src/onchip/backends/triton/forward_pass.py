"""The forward pass: which kernels run, on which grids."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onchip.backends.compiled import lists
from onchip.backends.compiled.launch import Step, aligned, prepared
from onchip.backends.triton.arguments import (
    Launch,
    four_strides,
    make_view,
    view,
    with_values,
)
from onchip.backends.triton.forward_kernels import combine_kernel, forward_kernel
from onchip.backends.triton.parts import View
from onchip.backends.triton.planning import by_length, cut, device_facts, keeps_rest, partial_shapes, sections
from onchip.problem import Operands, Output, Problem


def forward(problem: Problem, operands: Operands) -> Output:
    device = operands.q.get_device()  # -1: the CPU, under the interpreter
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):  # a kernel runs on the current device
            return forward(problem, operands)
    if problem.dim_v == 0:  # lse depends on q and k all the same
        out, lse, rest = forward(*with_values(problem, operands))
        return Output(out[..., :0], lse, rest)
    launch = Launch(problem, operands)
    return _prepared(launch).run(launch)


def again(problem: Problem, operands: Operands) -> Callable[[Operands], Output | None] | None:
    """The forward pass of other plain dense calls of these facts, which tells where it must be run as any other."""
    if problem.dim_v == 0:
        return None
    launch = Launch(problem, operands)
    made = None if launch.key is None else _prepared(launch)
    return None if made is None or made.attend is None else made.again(launch)


def _prepared(launch: Launch) -> Forward:
    whole = None if launch.key is None else ("forward", *launch.key)
    return prepared(lambda: Forward(launch, "forward"), whole, launch.problem, launch.operands)


class Forward:
    """The forward pass of a problem but for its tensors."""

    def __init__(self, launch: Launch, name: str):
        problem, operands = launch.problem, launch.operands
        self.packed = problem.layout == "varlen"
        self.strides = tuple(four_strides(x) for x in (operands.q, operands.k, operands.v))
        self.attend = self.merge = None
        if operands.q.numel() == 0 or problem.seqlen_k == 0:
            return
        facts = device_facts(operands.q.device.index or 0)
        chosen, pack, tiles, splits = cut(problem, operands.mask, facts, name)
        self.chosen, self.splits, self.keeps_rest = chosen, splits, keeps_rest(problem)
        m_blocks = -(-problem.seqlen_q // tiles.tile_m)
        programs = m_blocks * problem.heads_q // pack * problem.batch
        tiles_of, width = lists.build(problem, operands, tiles, False)
        order = (
            lists.longest_first(problem, operands, tiles, tiles_of)
            if tiles_of and by_length(problem)
            else None
        )
        section = sections(problem, name, m_blocks, problem.heads_q // pack, facts)
        function, mask_args = launch.mask_function(tiles)
        scale = problem.scale
        self.attend = Step(
            forward_kernel, (programs, splits),
            (launch.drop, launch.band, launch.rows, tiles_of, order, mask_args, abs(scale) or 1.0, *launch.lengths,
             problem.heads_q, m_blocks, section, width, splits),
            GROUP=problem.group, PACK=pack, **launch.dims, TILE_M=chosen.tile_m, TILE_N=chosen.tile_n, FN=function,
            MOD=launch.mod, CLEAN=launch.cleans, **launch.loops(tiles, tiles_of, function),
            SIGN=(scale > 0) - (scale < 0), SPLIT=splits > 1, num_warps=chosen.num_warps,
            num_stages=chosen.num_stages)  # fmt: skip
        if splits > 1:
            rows = problem.batch * problem.seqlen_q * problem.heads_q
            self.merge = Step(
                combine_kernel, (rows,), (problem.batch, problem.seqlen_q, problem.heads_q, splits),
                DV=problem.dim_v, DIM_V=launch.dims["DIM_V"], num_warps=1)  # fmt: skip

        # Whether K and V are read by descriptors that stay the same but for addresses.
        self.bulk = (
            problem.layout == "dense"
            and launch.geometries((operands.k, operands.v), chosen.tile_n) is not None
        )

    def run(self, launch: Launch) -> Output:
        q = launch.operands.q
        out, lse = self._outputs(launch)
        if self.attend is None:
            sink = launch.operands.score.sink
            lse = lse.fill_(-torch.inf) if sink is None else lse.copy_(sink.unsqueeze(-1).expand_as(lse))
            return Output(out.zero_(), lse)
        if self.merge is None:
            rest = torch.zeros_like(lse) if self.keeps_rest else None
            self._attend(launch, view(out), lse, rest, lse.shape[-1])
            return Output(out, lse, rest)
        problem = launch.problem
        heads, dim_v, seqlen = problem.heads_q, problem.dim_v, problem.seqlen_q
        shapes = partial_shapes(problem, self.splits)
        partial, partial_lse = (torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes)
        target = View(partial, seqlen * heads * dim_v, heads * dim_v, dim_v, 1)
        self._attend(launch, target, partial_lse, None, seqlen)
        self.merge.run((view(out), lse, partial, partial_lse), launch.key is not None)
        return Output(out, lse)

    def again(self, first: Launch) -> Callable[[Operands], Output | None]:
        """`run` of plain dense calls of one launch: with all that is the same in them made once."""
        problem, step, splits = first.problem, self.attend, self.merge is not None
        given = first.place, first.new, first.scores, *first.seed
        of_q, of_k, of_v = self.strides
        of_out = _like_queries(problem, first.operands.q, "meta").stride()
        bulk = self.bulk
        assert step is not None

        def run(operands: Operands) -> Output | None:
            q, k, v = operands[:3]
            launched, device = step.again, q.get_device()
            if launched is None or (device >= 0 and device != torch.cuda.current_device()):
                return None
            if splits:
                return self.run(Launch(problem, operands))
            if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
                return None
            out, lse = _dense_outputs(problem, q)
            keys = (None, None, k, v) if bulk else (make_view((k, *of_k)), make_view((v, *of_v)), None, None)
            target = make_view((out, *of_out)), lse, None, problem.seqlen_q
            launched((make_view((q, *of_q)), *keys, *given, *target))
            return Output(out, lse)

        return run

    def _outputs(self, launch: Launch) -> tuple[Tensor, Tensor]:
        problem, q = launch.problem, launch.operands.q
        if not self.packed:
            return _dense_outputs(problem, q)
        out = _like_queries(problem, q)
        lse = torch.empty((problem.heads_q, q.shape[0]), dtype=torch.float32, device=q.device)
        if launch.operands.layout.used_q is not None:  # type: ignore[union-attr]
            out.zero_()  # rows past a sequence's used length are not written
            lse.fill_(-torch.inf)
        return out, lse

    def _attend(self, launch: Launch, out: View, lse: Tensor, rest: Tensor | None, lse_stride: int) -> None:
        """The forward kernel; out and lse may be the splits' partial results, (split, batch) for batch."""
        q, k, v, _, _, score, _ = launch.operands
        steady = launch.key is not None and aligned(q, k, v, score.sink, *launch.small_tensors)
        if steady and self.bulk and self.attend.again is not None:
            k_desc, v_desc = k, v
        else:
            k_desc, v_desc = launch.descriptors((k, v), self.chosen.tile_n)
        of_q, of_k, of_v = self.strides
        of_keys = None, None  # a kernel reads either descriptors or these
        if k_desc is None:
            of_keys = make_view((k, *of_k)), make_view((v, *of_v))
        self.attend.run(
            (make_view((q, *of_q)), *of_keys, k_desc, v_desc, launch.place, launch.new, launch.scores, *launch.seed,
             out, lse, rest, lse_stride), steady)  # fmt: skip


def _like_queries(problem: Problem, q: Tensor, device: str | None = None) -> Tensor:
    if problem.dim_v == problem.dim:
        return torch.empty_like(q, device=device)
    return torch.empty((*q.shape[:-1], problem.dim_v), dtype=q.dtype, device=device or q.device)


def _dense_outputs(problem: Problem, q: Tensor) -> tuple[Tensor, Tensor]:
    # Sizes one by one: with a tuple of them it takes a third longer.
    sizes = problem.batch, problem.heads_q, problem.seqlen_q
    return _like_queries(problem, q), torch.empty(*sizes, dtype=torch.float32, device=q.device)
