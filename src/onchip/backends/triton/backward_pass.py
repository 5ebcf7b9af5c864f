"""The backward pass: which kernels run, on which grids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onchip import rules
from onchip.backends.compiled import lists
from onchip.backends.compiled.launch import Step, aligned, prepared
from onchip.backends.triton import backward_kernels as kernels
from onchip.backends.triton.arguments import Launch, view, with_values
from onchip.backends.triton.bias_kernel import dbias_kernel
from onchip.backends.triton.parts import Statistics
from onchip.backends.triton.planning import (
    by_length,
    delta_tile,
    device_facts,
    key_passes,
    modifies,
    sections,
    statistics_shape,
)
from onchip.backends.triton.table import Config, Facts, config
from onchip.layout import Varlen
from onchip.problem import Grads, Operands, Problem, Saved
from onchip.tiles import Tiles


def backward(problem: Problem, operands: Operands, saved: Saved, dout: Tensor, dlse: Tensor | None) -> Grads:
    device = operands.q.get_device()  # -1: the CPU, under the interpreter
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):  # a kernel runs on the current device
            return backward(problem, operands, saved, dout, dlse)
    if problem.dim_v == 0:  # lse depends on q and k all the same
        problem, operands = with_values(problem, operands)
        zeros = operands.v.new_zeros((*operands.q.shape[:-1], 1))
        grads = backward(problem, operands, saved._replace(out=zeros), zeros, dlse)
        return grads if grads.v is None else grads._replace(v=grads.v[..., :0])
    saved = saved._replace(lse=saved.lse.contiguous())
    run = _Run(Launch(problem, operands), saved, dout, None if dlse is None else dlse.contiguous())
    return run.empty() if saved.out.numel() == 0 or problem.seqlen_k == 0 else run.grads()


class _Run:
    """One backward pass."""

    def __init__(self, launch: Launch, saved: Saved, dout: Tensor, dlse: Tensor | None):
        self.launch, self.saved, self.dout, self.dlse = launch, saved, dout, dlse
        # Rows of a packed tensor past a sequence's used length are not written.
        layout = launch.operands.layout
        # Only modified scores can be so large that lse loses digits that count.
        self.rest = None if saved.rest is None or not modifies(launch.problem) else saved.rest.contiguous()
        self.packed = isinstance(layout, Varlen)
        used = (layout.used_q, layout.used_k) if isinstance(layout, Varlen) else (None, None)
        self.unwritten = {"q": used[0] is not None, "k": used[1] is not None, "v": used[1] is not None}
        shape = statistics_shape(launch.problem, saved.lse.shape[-1])
        self.stats = torch.empty(shape, dtype=torch.float32, device=saved.lse.device)
        if self.unwritten["q"]:
            self.stats.zero_()
        operands = launch.operands
        self.steady = launch.key is not None and aligned(
            operands.q, operands.k, operands.v, dout, saved.out, saved.lse, self.rest, self.dlse, operands.score.sink,
            *launch.small_tensors)  # fmt: skip

    def fresh(self, name: str) -> Tensor:
        """A gradient to be written, shaped as q, k or v."""
        like = getattr(self.launch.operands, name)
        return torch.zeros_like(like) if self.unwritten[name] else torch.empty_like(like)

    def empty(self) -> Grads:
        """Where no pair exists: only a sink can have taken part."""
        operands, needs = self.launch.operands, self.saved.needs
        grads = {name: torch.zeros_like(getattr(operands, name)) for name in ("q", "k", "v") if name in needs}
        score = operands.score
        grads |= {n: torch.zeros_like(getattr(score, n)) for n in ("bias", "alibi") if n in needs}
        if "sink" in needs:
            if self.saved.out.numel():
                self._delta()
            else:
                self.stats.zero_()
            grads["sink"] = self._sink_grad()
        return Grads(**grads)

    def grads(self) -> Grads:
        needs, grads = self.saved.needs, {}
        self._delta()
        if {"k", "v"} & needs:
            grads |= self._key_grads()
        if {"q", "alibi"} & needs:
            grads |= self._query_grads()
        if "bias" in needs:
            grads["bias"] = self._bias_grad()
        if "sink" in needs:
            grads["sink"] = self._sink_grad()
        return Grads(**{name: grad for name, grad in grads.items() if name in needs})

    def _step(self, make: Callable[..., Any], name: str) -> Any:
        """The kept step of a pass. What its kernel is compiled for depends besides the launch on these."""
        launch, saved = self.launch, self.saved
        whole = None
        if launch.key is not None:
            absent = self.dlse is None, self.rest is None
            whole = (name, *launch.key, self.dout.stride(), saved.out.stride(), *absent, saved.needs)
        return prepared(lambda: make(launch, name), whole, launch.problem, launch.operands)

    def _common(self) -> tuple[Any, ...]:
        """What every kernel over tiles takes after its tensors."""
        launch = self.launch
        return self._statistics(), launch.place, launch.scores, *launch.seed

    def _statistics(self) -> Statistics:
        return Statistics(self.stats, self.stats.stride(0), self.stats.shape[-1])

    def _views(self, *described: str) -> tuple[Any, ...]:
        """q, k, v and dout, but for those that descriptors stand for."""
        q, k, v = self.launch.operands[:3]
        tensors = {"q": q, "k": k, "v": v, "dout": self.dout}
        return tuple(None if name in described else view(x) for name, x in tensors.items())

    def _delta(self) -> None:
        out, lse = view(self.saved.out), self.saved.lse
        args = (
            out,
            view(self.dout),
            lse,
            self.dlse,
            self.rest,
            self._statistics(),
            self.launch.place,
            lse.shape[-1],
        )
        self._step(_delta_step, "delta").run(args, self.steady)

    def _key_grads(self) -> dict[str, Tensor]:
        """dK and dV, each where wanted."""
        grads = {name: self.fresh(name) for name in ("k", "v") if name in self.saved.needs}
        views = {name: view(grad) for name, grad in grads.items()}
        for name, outputs in key_passes(self.launch.problem, self.saved.needs).items():
            step, chosen = self._step(_key_step, name)
            again = self.steady and step.again is not None
            descriptors = self.launch.descriptors((self.launch.operands.q, self.dout), chosen.tile_m, again)
            targets = (views.get(output) if output in outputs else None for output in ("k", "v"))
            read = self._views(*(() if descriptors[0] is None else ("q", "dout")))
            step.run((*read, *descriptors, *self._common(), *targets), self.steady)
        return grads

    def _query_grads(self) -> dict[str, Tensor]:
        step, chosen = self._step(_query_step, "dq")
        operands, saved = self.launch.operands, self.saved
        dq = self.fresh("q")
        dslope = torch.zeros_like(self.stats[0]) if "alibi" in saved.needs else None
        steady = self.steady and dslope is None
        again = steady and step.again is not None
        descriptors = self.launch.descriptors((operands.k, operands.v), chosen.tile_n, again)
        read = self._views(*(() if descriptors[0] is None else ("k", "v")))
        step.run((*read, *descriptors, *self._common(), view(dq), dslope), steady)
        if dslope is None:
            return {"q": dq}
        slopes = operands.score.alibi
        assert slopes is not None
        by_sequence = _sum_rows(dslope, operands, self.packed)  # [batch, heads]
        total = by_sequence if slopes.dim() == 2 else by_sequence.sum(0)
        return {"q": dq, "alibi": total.to(slopes.dtype)}

    def _bias_grad(self) -> Tensor:
        bias = self.launch.operands.score.bias
        assert bias is not None
        four = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)
        dbias = torch.zeros(four.shape, device=bias.device)
        step = _bias_step(self.launch, four.shape)
        step.run((*self._views(), *self._common(), dbias, *dbias.stride()), False)
        return dbias.reshape(bias.shape).to(bias.dtype)

    def _sink_grad(self) -> Tensor:
        """The sink takes part as a key without value: dP = 0, so dS = -P * delta."""
        sink, lse = self.launch.operands.score.sink, self.saved.lse
        assert sink is not None
        delta = self.stats[1][..., : lse.shape[-1]]
        heads_first = (lse, delta) if self.packed else (lse.transpose(0, 1), delta.transpose(0, 1))
        lse, d = (x.flatten(1) for x in heads_first)  # [heads, rows]
        p = torch.exp(sink.to(lse.dtype)[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
        return -(p * d).sum(1).to(sink.dtype)


def _facts(launch: Launch) -> Facts:
    return device_facts(launch.operands.q.device.index or 0)


def _config(launch: Launch, step: str) -> Config:
    return config(launch.problem, step, _facts(launch))


def _meta(launch: Launch, chosen: Config, function: Any) -> dict[str, Any]:
    return {
        "GROUP": launch.problem.group, **launch.dims, "TILE_M": chosen.tile_m, "TILE_N": chosen.tile_n,
        "FN": function, "MOD": launch.mod, "MOD_GRAD": launch.mod_grad,
    }  # fmt: skip


def _delta_step(launch: Launch, name: str) -> Step:
    problem = launch.problem
    tile = delta_tile(problem)
    rows = statistics_shape(problem, problem.seqlen_q)[-1]  # up to the end of any tile
    m_blocks = -(-rows // tile)
    # A product fused with the first addition across lanes is rounded differently in each of them, and it is left open
    # whose sum of a row is stored: without fusion all have the same bits. One warp: 36.7 us for 38.4 of four (H200).
    return Step(
        kernels.delta_kernel, (m_blocks * problem.heads_q * problem.batch,),
        (*launch.lengths, problem.heads_q, m_blocks),
        DV=problem.dim_v, DIM_V=launch.dims["DIM_V"], TILE_M=tile, MODIFIED=modifies(problem), num_warps=1,
        enable_fp_fusion=False)  # fmt: skip


def _key_step(launch: Launch, name: str) -> tuple[Step, Config]:
    problem, chosen = launch.problem, _config(launch, name)
    n_blocks = -(-problem.seqlen_k // chosen.tile_n)
    tiles = Tiles(chosen.tile_m, chosen.tile_n)
    tiles_of, width = lists.build(problem, launch.operands, tiles, True)
    order = None
    if tiles_of and by_length(problem):
        order = lists.longest_first(problem, launch.operands, tiles, tiles_of, by_key=True)
    section = sections(problem, name, n_blocks, problem.heads_k, _facts(launch))
    function, mask_args = launch.mask_function(tiles)
    step = Step(
        kernels.dkdv_kernel, (n_blocks * problem.heads_k * problem.batch,),
        (launch.drop, launch.band, rules.flip(launch.band), launch.rows, tiles_of, order, mask_args,
         problem.scale, *launch.lengths, problem.heads_q, n_blocks, section, width),
        **_meta(launch, chosen, function), CLEAN=launch.cleans, **launch.loops(tiles, tiles_of, function, by_key=True),
        num_warps=chosen.num_warps, num_stages=chosen.num_stages)  # fmt: skip
    return step, chosen


def _query_step(launch: Launch, name: str) -> tuple[Step, Config]:
    problem, chosen = launch.problem, _config(launch, name)
    m_blocks = -(-problem.seqlen_q // chosen.tile_m)
    tiles = Tiles(chosen.tile_m, chosen.tile_n)
    tiles_of, width = lists.build(problem, launch.operands, tiles, False)
    order = None
    if tiles_of and by_length(problem):
        order = lists.longest_first(problem, launch.operands, tiles, tiles_of, by_key=False)
    section = sections(problem, name, m_blocks, problem.heads_q, _facts(launch))
    function, mask_args = launch.mask_function(tiles)
    step = Step(
        kernels.dq_kernel, (m_blocks * problem.heads_q * problem.batch,),
        (launch.drop, launch.band, launch.rows, tiles_of, order, mask_args, problem.scale, *launch.lengths,
         problem.heads_q, m_blocks, section, width),
        **_meta(launch, chosen, function), CLEAN=launch.cleans, **launch.loops(tiles, tiles_of, function),
        num_warps=chosen.num_warps, num_stages=chosen.num_stages)  # fmt: skip
    return step, chosen


def _bias_step(launch: Launch, shape: torch.Size) -> Step:
    """shape: of the bias, in four dims; an axis in which it is broadcast is summed over by each program."""
    problem, chosen = launch.problem, _config(launch, "dq")
    m_blocks, n_blocks = -(-problem.seqlen_q // chosen.tile_m), -(-problem.seqlen_k // chosen.tile_n)
    function, mask_args = launch.mask_function(None)
    by = [size > 1 for size in shape]
    programs = 1
    for wanted, count in zip(by, (problem.batch, problem.heads_q, m_blocks, n_blocks), strict=True):
        programs *= count if wanted else 1
    return Step(
        dbias_kernel, (programs,),
        (launch.drop, launch.band, launch.rows, mask_args, problem.scale, *launch.lengths,
         problem.batch, problem.heads_q, m_blocks, n_blocks),
        **_meta(launch, chosen, function), BY_BATCH=by[0], BY_HEAD=by[1], BY_ROW=by[2], BY_KEY=by[3],
        num_warps=chosen.num_warps, num_stages=1)  # fmt: skip


def _sum_rows(rows: Tensor, operands: Operands, packed: bool) -> Tensor:
    """(batch, heads, seqlen_q), or packed (heads, total_q), summed over the queries of each sequence."""
    if not packed:
        return rows.sum(2)
    layout = operands.layout
    assert isinstance(layout, Varlen)
    # Differences of running sums: fp32 would cancel.
    sums = torch.nn.functional.pad(rows.double().cumsum(1), (1, 0))
    cu = layout.cu_seqlens_q.long()
    return (sums[:, cu[1:]] - sums[:, cu[:-1]]).t().to(rows.dtype)
