"""The passes: which kernels run, on which grids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onchip import rules
from onchip.backends.triton import backward_kernels as kernels, lists
from onchip.backends.triton.arguments import Launch, descriptor, device_facts, lse_view, view
from onchip.backends.triton.forward_kernels import combine_kernel, forward_kernel
from onchip.backends.triton.parts import View
from onchip.backends.triton.table import Config, config
from onchip.layout import Varlen
from onchip.problem import Grads, Operands, Output, Problem, Saved
from onchip.schedule import Tiles


def packs(problem: Problem, mask_by_head: bool) -> int:
    """Query heads of a key head stacked in one tile: all of them where they fit, so that K and V are read once."""
    rows = problem.seqlen_q * problem.group
    return problem.group if problem.group > 1 and rows <= 128 and not mask_by_head else 1


def choose_splits(problem: Problem, programs: int, key_tiles: int, multiprocessors: int) -> int:
    """Shares of the keys, so that few long sequences still fill the device; none under 4 tiles. From shapes alone."""
    if problem.layout == "varlen" or programs >= multiprocessors or programs == 0:
        return 1
    return max(1, min(-(-2 * multiprocessors // programs), key_tiles // 4, 128))


def forward(problem: Problem, operands: Operands) -> Output:
    q, packed = operands.q, problem.layout == "varlen"
    fresh = torch.zeros if packed else torch.empty  # rows past a sequence's length are not written
    out = fresh(*q.shape[:-1], problem.dim_v, dtype=q.dtype, device=q.device)
    shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.full(shape, -torch.inf, device=q.device) if packed else torch.empty(shape, device=q.device)
    if out.numel() == 0 or problem.seqlen_k == 0:
        sink = operands.score.sink
        rows = -torch.inf if sink is None else sink.to(lse.dtype).unsqueeze(-1)
        return Output(out.zero_(), lse.copy_(torch.as_tensor(rows).expand_as(lse)))
    by_head = problem.group > 1 and bool(problem.mask_parts) and operands.mask.dependence(problem)[1]
    pack = packs(problem, by_head)
    major, multiprocessors = device_facts(q.device.index or 0)
    chosen = config(problem, "forward", major, problem.seqlen_q * pack)
    m_blocks = -(-problem.seqlen_q // (chosen.tile_m // pack))
    programs = m_blocks * problem.heads_q // pack * problem.batch
    key_tiles = max(-(-problem.seqlen_k // chosen.tile_n), 1)
    splits = problem.num_splits or choose_splits(problem, programs, key_tiles, multiprocessors)
    splits = 1 if packed else min(splits, key_tiles)
    launch = Launch(problem, operands)
    if splits == 1:
        _attend(launch, chosen, pack, (programs, 1), view(out), lse_view(lse))
        return Output(out, lse)
    heads, dim_v, seqlen = problem.heads_q, problem.dim_v, problem.seqlen_q
    rows = problem.batch * seqlen * heads
    partial, partial_lse = (torch.empty(splits * rows * size, device=q.device) for size in (dim_v, 1))
    target = View(partial, seqlen * heads * dim_v, heads * dim_v, dim_v, 1)
    _attend(launch, chosen, pack, (programs, splits), target, View(partial_lse, seqlen * heads, heads, 1, 1))
    combine_kernel[(rows,)](
        partial, partial_lse, view(out), lse_view(lse), rows, seqlen, heads, splits, DV=dim_v,
        DIM_V=launch.dims["DIM_V"], num_warps=1)  # fmt: skip
    return Output(out, lse)


def _attend(launch: Launch, chosen: Config, pack: int, grid: tuple[int, int], out: View, lse: View) -> None:
    """The forward kernel on a grid of (tiles, splits); out and lse may be the splits' partial results."""
    problem, operands = launch.problem, launch.operands
    tile_q = chosen.tile_m // pack
    m_blocks = -(-problem.seqlen_q // tile_q)
    tiles_of, width = lists.build(problem, operands, Tiles(tile_q, chosen.tile_n), False)
    k_desc = v_desc = None
    if launch.uses_descriptors():
        k_desc = descriptor(operands.k, chosen.tile_n, launch.dims["DIM"])
        v_desc = descriptor(operands.v, chosen.tile_n, launch.dims["DIM_V"])
    function, mask_args = launch.mask_function
    scale = problem.scale
    forward_kernel[grid](
        view(operands.q), view(operands.k), view(operands.v), out, lse, k_desc, v_desc, launch.place, launch.band,
        launch.rows, tiles_of, mask_args, launch.scores, launch.drop, abs(scale) or 1.0, *launch.lengths,
        problem.heads_q, m_blocks, width, grid[1], GROUP=problem.group, PACK=pack, **launch.dims,
        TILE_M=chosen.tile_m, TILE_N=chosen.tile_n, FN=function, MOD=launch.mod, CLEAN=launch.cleans,
        **launch.loops(tiles_of), SIGN=(scale > 0) - (scale < 0), SPLIT=grid[1] > 1, num_warps=chosen.num_warps,
        num_stages=chosen.num_stages)  # fmt: skip


def backward(problem: Problem, operands: Operands, saved: Saved, dout: Tensor, dlse: Tensor | None) -> Grads:
    launch = Launch(problem, operands)
    needs, score = saved.needs, operands.score
    q, k, v = operands.q, operands.k, operands.v
    delta = torch.zeros_like(saved.lse)
    fresh = torch.zeros_like if problem.layout == "varlen" else torch.empty_like
    empty = saved.out.numel() == 0 or problem.seqlen_k == 0 or problem.batch == 0
    grads: dict[str, Any] = {
        name: (torch.zeros_like if empty else fresh)(x)
        for name, x in (("q", q), ("k", k), ("v", v))
        if name in needs
    }
    _delta(launch, saved, dout, dlse, delta)
    if empty:  # no pair exists; only a sink can have taken part
        grads |= {name: torch.zeros_like(getattr(score, name)) for name in ("bias", "alibi") if name in needs}
        needs = needs & {"sink"}
    if {"k", "v"} & needs:
        _key_grads(launch, saved, dout, delta, grads)
    if {"q", "alibi"} & needs:
        grads |= _query_grads(launch, saved, dout, delta, grads)
    if "bias" in needs:
        grads["bias"] = _bias_grad(launch, saved, dout, delta)
    if "sink" in needs:
        grads["sink"] = _sink_grad(saved, score.sink, delta, problem.layout == "varlen")  # type: ignore[arg-type]
    return Grads(**grads)


def _delta(launch: Launch, saved: Saved, dout: Tensor, dlse: Tensor | None, delta: Tensor) -> None:
    problem = launch.problem
    if saved.out.numel() == 0:
        return
    tile = 64 if problem.dim_v <= 128 else 16
    m_blocks = -(-problem.seqlen_q // tile)
    kernels.delta_kernel[(m_blocks * problem.heads_q * problem.batch,)](
        view(saved.out), view(dout), lse_view(saved.lse), None if dlse is None else lse_view(dlse), delta,
        launch.place, *launch.lengths, problem.heads_q, m_blocks, DV=problem.dim_v, DIM_V=launch.dims["DIM_V"],
        TILE_M=tile, num_warps=4)  # fmt: skip


def _shared(launch: Launch) -> tuple[Any, ...]:
    function, mask_args = launch.mask_function
    return mask_args, {**launch.dims, "GROUP": launch.problem.group, "FN": function, "MOD": launch.mod,
                       "MOD_GRAD": launch.mod_grad}  # fmt: skip


def _key_grads(launch: Launch, saved: Saved, dout: Tensor, delta: Tensor, grads: dict[str, Any]) -> None:
    """dK and dV in one pass; one that is not wanted goes to a scrap tensor."""
    problem, operands = launch.problem, launch.operands
    chosen = config(problem, "dkdv", device_facts(operands.q.device.index or 0)[0])
    dk = grads.get("k") if "k" in grads else torch.empty_like(operands.k)
    dv = grads.get("v") if "v" in grads else torch.empty_like(operands.v)
    n_blocks = -(-problem.seqlen_k // chosen.tile_n)
    tiles_of, width = launch.lists(chosen, by_key=True)
    mask_args, meta = _shared(launch)
    q_desc = do_desc = None
    if launch.uses_descriptors():
        q_desc = descriptor(operands.q, chosen.tile_m, launch.dims["DIM"])
        do_desc = descriptor(dout, chosen.tile_m, launch.dims["DIM_V"])
    if q_desc is None or do_desc is None:
        q_desc = do_desc = None
    kernels.dkdv_kernel[(n_blocks * problem.heads_k * problem.batch,)](
        view(operands.q), view(operands.k), view(operands.v), view(dout), view(dk), view(dv), q_desc, do_desc,  # type: ignore[arg-type]
        lse_view(saved.lse), delta, launch.place, launch.band, rules.flip(launch.band), launch.rows, tiles_of,
        mask_args, launch.scores, launch.drop, problem.scale, *launch.lengths, problem.heads_q, n_blocks, width,
        TILE_M=chosen.tile_m, TILE_N=chosen.tile_n, **meta, CLEAN=launch.cleans, **launch.loops(tiles_of, by_key=True),
        num_warps=chosen.num_warps, num_stages=chosen.num_stages)  # fmt: skip


def _query_grads(
    launch: Launch, saved: Saved, dout: Tensor, delta: Tensor, grads: dict[str, Any]
) -> dict[str, Tensor]:
    problem, operands = launch.problem, launch.operands
    chosen = config(problem, "dq", device_facts(operands.q.device.index or 0)[0])
    dq = grads.get("q") if "q" in grads else torch.empty_like(operands.q)
    dslope = torch.zeros_like(saved.lse) if "alibi" in saved.needs else None
    m_blocks = -(-problem.seqlen_q // chosen.tile_m)
    tiles_of, width = launch.lists(chosen)
    mask_args, meta = _shared(launch)
    k_desc = v_desc = None
    if launch.uses_descriptors():
        k_desc = descriptor(operands.k, chosen.tile_n, launch.dims["DIM"])
        v_desc = descriptor(operands.v, chosen.tile_n, launch.dims["DIM_V"])
    if k_desc is None or v_desc is None:
        k_desc = v_desc = None
    kernels.dq_kernel[(m_blocks * problem.heads_q * problem.batch,)](
        view(operands.q), view(operands.k), view(operands.v), view(dout), view(dq), k_desc, v_desc,  # type: ignore[arg-type]
        lse_view(saved.lse), delta, dslope, launch.place, launch.band, launch.rows, tiles_of, mask_args,
        launch.scores, launch.drop, problem.scale, *launch.lengths, problem.heads_q, m_blocks, width,
        TILE_M=chosen.tile_m, TILE_N=chosen.tile_n, **meta, CLEAN=launch.cleans, **launch.loops(tiles_of),
        num_warps=chosen.num_warps, num_stages=chosen.num_stages)  # fmt: skip
    if dslope is None:
        return {}
    slopes = operands.score.alibi
    assert slopes is not None
    by_sequence = _sum_rows(dslope, operands, problem.layout == "varlen")  # [batch, heads]
    total = by_sequence if slopes.dim() == 2 else by_sequence.sum(0)
    return {"alibi": total.to(slopes.dtype)}


def _sum_rows(rows: Tensor, operands: Operands, packed: bool) -> Tensor:
    """(batch, heads, seqlen_q), or packed (heads, total_q), summed over the queries of each sequence."""
    if not packed:
        return rows.sum(2)
    layout = operands.layout
    assert isinstance(layout, Varlen)
    sums = torch.nn.functional.pad(
        rows.double().cumsum(1), (1, 0)
    )  # differences of running sums: fp32 would cancel
    cu = layout.cu_seqlens_q.long()
    return (sums[:, cu[1:]] - sums[:, cu[:-1]]).t().to(rows.dtype)


def _bias_grad(launch: Launch, saved: Saved, dout: Tensor, delta: Tensor) -> Tensor:
    problem, operands = launch.problem, launch.operands
    bias = operands.score.bias
    assert bias is not None
    four = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)
    chosen = config(problem, "dq", device_facts(operands.q.device.index or 0)[0])
    dbias = torch.zeros(four.shape, device=bias.device)
    m_blocks, n_blocks = -(-problem.seqlen_q // chosen.tile_m), -(-problem.seqlen_k // chosen.tile_n)
    by = [size > 1 for size in four.shape]
    counts = (problem.batch, problem.heads_q, m_blocks, n_blocks)
    programs = 1
    for wanted, count in zip(by, counts, strict=True):
        programs *= count if wanted else 1
    mask_args, meta = _shared(launch)
    kernels.dbias_kernel[(programs,)](
        view(operands.q), view(operands.k), view(operands.v), view(dout), dbias, *dbias.stride(),
        lse_view(saved.lse), delta, launch.place, launch.band, launch.rows, mask_args, launch.scores, launch.drop,
        problem.scale, *launch.lengths, problem.batch, problem.heads_q, m_blocks, n_blocks, TILE_M=chosen.tile_m,
        TILE_N=chosen.tile_n, **meta, BY_BATCH=by[0], BY_HEAD=by[1], BY_ROW=by[2], BY_KEY=by[3],
        num_warps=chosen.num_warps, num_stages=1)  # fmt: skip
    return dbias.reshape(bias.shape).to(bias.dtype)


def _sink_grad(saved: Saved, sink: Tensor, delta: Tensor, packed: bool) -> Tensor:
    """The sink takes part as a key without value: dP = 0, so dS = -P * delta."""
    heads_first = (saved.lse, delta) if packed else (saved.lse.transpose(0, 1), delta.transpose(0, 1))
    lse, d = (x.flatten(1) for x in heads_first)  # [heads, rows]
    p = torch.exp(sink.to(lse.dtype)[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
    return -(p * d).sum(1).to(sink.dtype)
