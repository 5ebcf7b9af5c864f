"""From a problem and its operands to kernel arguments and launches."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from onchip import dropout, rules
from onchip.backends.triton import backward_kernels as kernels
from onchip.backends.triton import emit, lists
from onchip.backends.triton.forward_kernels import combine_kernel, forward_kernel
from onchip.backends.triton.parts import Drop, Place, Rows, Scores, View
from onchip.backends.triton.table import Config, config
from onchip.layout import Cache, Varlen
from onchip.mask import Rows as RowsPart
from onchip.problem import Grads, Operands, Output, Problem, Saved
from onchip.schedule import Tiles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def view(tensor: Tensor) -> View:
    """(batch, row, head, dim) or packed (row, head, dim)."""
    strides = tensor.stride() if tensor.dim() == 4 else (0, *tensor.stride())
    return View(tensor, *strides)


def lse_view(lse: Tensor) -> View:
    """(batch, heads, rows), or packed (heads, rows)."""
    batch, head, row = lse.stride() if lse.dim() == 3 else (0, *lse.stride())
    return View(lse, batch, row, head, 1)


def power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@lru_cache(maxsize=16)
def _device(index: int) -> tuple[int, int]:
    """(compute capability major, multiprocessors); the interpreter counts as the newest."""
    if INTERPRETED:
        return 9, 4
    properties = torch.cuda.get_device_properties(index)
    major = properties.major if torch.version.hip is None else 0
    return major, properties.multi_processor_count


def descriptor(tensor: Tensor, rows: int, dim: int) -> TensorDescriptor | None:
    """A descriptor of [rows, dim] blocks for the bulk copy engine; None where the engine cannot address the tensor."""
    index = tensor.device.index or 0
    strides = tensor.stride()
    aligned = all(s * tensor.itemsize % 16 == 0 and s > 0 for s in strides[:-1]) and tensor.data_ptr() % 16 == 0
    if _device(index)[0] < 9 or not aligned or strides[-1] != 1 or dim > 256 or tensor.numel() == 0:
        return None
    four = tensor if tensor.dim() == 4 else tensor[None]
    batch, row, head, _ = four.stride()
    shape = [four.shape[0], four.shape[2], four.shape[1], four.shape[3]]
    if four.shape[0] == 1:
        batch = max(batch, row * four.shape[1], 16)
        batch += -batch % 16
    return TensorDescriptor(four, shape, [batch, head, row, 1], [1, 1, rows, dim])


@dataclass(frozen=True, eq=False)
class Launch:
    """The arguments that the passes share."""

    problem: Problem
    operands: Operands

    @cached_property
    def dims(self) -> dict[str, int]:
        dim, dim_v = self.problem.dim, self.problem.dim_v
        return {"D": dim, "DIM": max(power(dim), 16), "DV": dim_v, "DIM_V": max(power(dim_v), 16)}

    @cached_property
    def lengths(self) -> tuple[int, int]:
        return self.problem.seqlen_q, self.problem.seqlen_k

    @cached_property
    def place(self) -> Place:
        layout = self.operands.layout
        if isinstance(layout, Varlen):
            return Place(layout.cu_seqlens_q, layout.cu_seqlens_k, layout.used_q, layout.used_k)
        if isinstance(layout, Cache):
            pages = layout.page_table
            if pages is None:
                return Place(lengths=layout.lengths, leftpad=layout.leftpad, index=layout.index)
            return Place(
                lengths=layout.lengths, leftpad=layout.leftpad, page_table=pages, page_stride=pages.stride(0),
                page_size=layout.page_size,
            )  # fmt: skip
        return Place()

    @cached_property
    def band(self) -> rules.Band:
        return self.operands.mask.band or rules.Band()

    def _bounds(self, part: RowsPart) -> tuple[Any, ...]:
        """(lo | None, hi | None, batch stride, row stride) of a rows part, int32 on the device."""
        q = torch.arange(max(self.problem.seqlen_q, 1), device=self.operands.q.device).view(1, 1, -1, 1)
        q_len, k_len = self.operands.layout.device_lengths()
        value = part.value
        if isinstance(value, Tensor) and value.dim() == 1:
            value = value.view(-1, 1, 1, 1)
        bounds = [None if x is None else torch.as_tensor(x, device=q.device) for x in part.interval(q, q_len, k_len, value)]
        lo, hi = (None if x is None else x.reshape((1,) * (4 - x.dim()) + x.shape)[:, 0, :, 0].int() for x in bounds)
        present = [x for x in (lo, hi) if x is not None]
        shape = torch.broadcast_shapes(*(x.shape for x in present))
        lo, hi = (None if x is None else x.expand(shape).contiguous() for x in (lo, hi))
        return lo, hi, shape[1] if shape[0] > 1 else 0, 1 if shape[1] > 1 else 0

    @cached_property
    def rows(self) -> Rows:
        """The intersection of the mask's rows parts."""
        lo = hi = None
        for part in self.operands.mask.rows:
            own_lo, own_hi, *_ = self._bounds(part)
            lo = own_lo if lo is None else lo if own_lo is None else torch.maximum(lo, own_lo)
            hi = own_hi if hi is None else hi if own_hi is None else torch.minimum(hi, own_hi)
        present = [x for x in (lo, hi) if x is not None]
        if not present:
            return Rows()
        shape = torch.broadcast_shapes(*(x.shape for x in present))
        lo, hi = (None if x is None else x.expand(shape).contiguous() for x in (lo, hi))
        return Rows(lo, hi, shape[1] if shape[0] > 1 else 0, 1 if shape[1] > 1 else 0)

    @cached_property
    def mask_function(self) -> tuple[Any, Any]:
        function, args = emit.mask_function(self.operands.mask, self._bounds)
        return function, args or None

    @cached_property
    def scores(self) -> Scores:
        score = self.operands.score
        args = None
        if score.mod is not None and score.mod.args:  # type: ignore[union-attr]
            args = tuple(emit.table(t) for t in score.mod.args)  # type: ignore[union-attr]
        fields: dict[str, Any] = {"softcap": score.softcap, "sink": score.sink, "args": args}
        if score.alibi is not None:
            slopes = score.alibi.contiguous()
            fields |= {"alibi": slopes, "alibi_batch": slopes.shape[1] if slopes.dim() == 2 else 0}
        if score.bias is not None:
            four = score.bias.reshape((1,) * (4 - score.bias.dim()) + score.bias.shape)
            strides = (0 if n == 1 else s for n, s in zip(four.shape, four.stride(), strict=True))
            names = ("bias_batch", "bias_head", "bias_row", "bias_key")
            fields |= {"bias": four, **dict(zip(names, strides, strict=True))}
        return Scores(**fields)

    @cached_property
    def mod(self) -> Any:
        mod = self.operands.score.mod
        return None if mod is None else emit.mod_function(mod.fn, mod.args)  # type: ignore[union-attr]

    @cached_property
    def mod_grad(self) -> Any:
        mod = self.operands.score.mod
        return None if mod is None else emit.mod_function(mod.grad, mod.args)  # type: ignore[union-attr]

    @cached_property
    def drop(self) -> Drop | None:
        p = self.problem.dropout
        if p == 0.0:
            return None
        keep_scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
        seed = self.operands.seed
        return Drop(dropout.threshold(p), seed if seed < 2**63 else seed - 2**64, 0, keep_scale)

    def lists(self, chosen: Config, by_key: bool = False) -> tuple[Any, int]:
        return lists.build(self.problem, self.operands, Tiles(chosen.tile_m, chosen.tile_n), by_key)

    @cached_property
    def cleans(self) -> bool:
        """Whether a key or query may be out of sight, and so hold NaN, inside a tile that is visited.

        Not where the last query sees every key and every query sees one: no edge to the left, and no query before
        the first key. Tails past a dense tensor are read as 0; past a packed sequence stands its neighbour.
        """
        band, problem = self.band, self.problem
        others = set(problem.mask_parts) - {"band"}
        edges = band.left, band.top_left, band.top_right
        seen = not others and edges == (None, None, None) and (band.right is None or band.right >= 0)
        return not (seen and problem.layout == "dense" and problem.seqlen_q <= problem.seqlen_k)

    def loops(self, tiles_of: Any, by_key: bool = False) -> dict[str, int]:
        """Which of the loops (masked, unmasked, masked) a kernel needs: FIRST to LAST - 1.

        Without a left edge there is no first one; a list holds its partial tiles in the first; a function without
        a list masks every tile, there too.
        """
        band = rules.flip(self.band) if by_key else self.band
        function = self.mask_function[0]
        edges = (tiles_of, function, self.rows.lo, band.left, band.top_left)
        last = 2 if tiles_of is not None else 1 if function is not None else 3
        return {"FIRST": 0 if any(edge is not None for edge in edges) else 1, "LAST": last}

    def uses_descriptors(self) -> bool:
        return self.problem.layout in ("dense", "varlen")


def packs(problem: Problem, mask_by_head: bool) -> int:
    """Query heads of a key head stacked in one tile: all of them where they fit, so that K and V are read once."""
    rows = problem.seqlen_q * problem.group
    return problem.group if problem.group > 1 and rows <= 128 and not mask_by_head else 1


def choose_splits(problem: Problem, programs: int, key_tiles: int, multiprocessors: int) -> int:
    """Shares of the keys, so that few long sequences still fill the device; none under 4 tiles. Fixed by shape alone."""
    if problem.layout == "varlen" or programs >= multiprocessors or programs == 0:
        return 1
    return max(1, min(-(-2 * multiprocessors // programs), key_tiles // 4, 128))


def forward(problem: Problem, operands: Operands) -> Output:
    launch = Launch(problem, operands)
    q, k, v = operands.q, operands.k, operands.v
    packed = problem.layout == "varlen"
    fresh = torch.zeros if packed else torch.empty  # rows past a sequence's length are not written
    out = fresh(*q.shape[:-1], problem.dim_v, dtype=q.dtype, device=q.device)
    shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.full(shape, -torch.inf, device=q.device) if packed else torch.empty(shape, device=q.device)
    if out.numel() == 0 or problem.batch == 0:
        return Output(out, lse.fill_(-torch.inf))
    by_head = bool(problem.mask_parts and operands.mask.dependence(problem)[1]) if problem.group > 1 else False
    pack = packs(problem, by_head)
    chosen = config(problem, "forward", problem.seqlen_q * pack)
    m_blocks = -(-problem.seqlen_q // (chosen.tile_m // pack))
    tiles_of, width = lists.build(problem, operands, Tiles(chosen.tile_m // pack, chosen.tile_n), False)
    programs = m_blocks * problem.heads_q // pack * problem.batch
    key_tiles = -(-problem.seqlen_k // chosen.tile_n)
    splits = problem.num_splits or choose_splits(problem, programs, key_tiles, _device(q.device.index or 0)[1])
    splits = max(1, min(splits, key_tiles)) if not packed else 1
    target, target_lse = view(out), lse_view(lse)
    if splits > 1:
        rows = problem.batch * problem.seqlen_q * problem.heads_q
        partial = torch.empty(splits, rows, problem.dim_v, device=q.device)
        partial_lse = torch.empty(splits, rows, device=q.device)
        heads, dim_v, seqlen = problem.heads_q, problem.dim_v, problem.seqlen_q
        target = View(partial, seqlen * heads * dim_v, heads * dim_v, dim_v, 1)
        target_lse = View(partial_lse, seqlen * heads, heads, 1, 1)
    k_desc = v_desc = None
    if launch.uses_descriptors():
        k_desc = descriptor(k, chosen.tile_n, launch.dims["DIM"])
        v_desc = descriptor(v, chosen.tile_n, launch.dims["DIM_V"])
    function, mask_args = launch.mask_function
    scale = problem.scale
    forward_kernel[(programs, splits)](
        view(q), view(k), view(v), target, target_lse, k_desc, v_desc, launch.place, launch.band, launch.rows,
        tiles_of, mask_args, launch.scores, launch.drop, abs(scale) or 1.0, *launch.lengths, problem.heads_q, m_blocks,
        width, splits, GROUP=problem.group, PACK=pack, **launch.dims, TILE_M=chosen.tile_m, TILE_N=chosen.tile_n,
        FN=function, MOD=launch.mod, CLEAN=launch.cleans, **launch.loops(tiles_of), SIGN=(scale > 0) - (scale < 0), SPLIT=splits > 1, num_warps=chosen.num_warps,
        num_stages=chosen.num_stages)  # fmt: skip
    if splits > 1:
        combine_kernel[(rows,)](
            partial, partial_lse, view(out), lse_view(lse), rows, problem.seqlen_q, problem.heads_q, splits,
            DV=problem.dim_v, DIM_V=launch.dims["DIM_V"], num_warps=1)  # fmt: skip
    return Output(out, lse)


def backward(problem: Problem, operands: Operands, saved: Saved, dout: Tensor, dlse: Tensor | None) -> Grads:
    launch = Launch(problem, operands)
    needs, score = saved.needs, operands.score
    q, k, v = operands.q, operands.k, operands.v
    delta = torch.zeros_like(saved.lse)
    fresh = torch.zeros_like if problem.layout == "varlen" else torch.empty_like
    empty = saved.out.numel() == 0 or problem.seqlen_k == 0 or problem.batch == 0
    grads: dict[str, Any] = {
        name: (torch.zeros_like if empty else fresh)(x) for name, x in (("q", q), ("k", k), ("v", v)) if name in needs
    }
    if empty and "sink" not in needs:
        return Grads(**grads, **{n: torch.zeros_like(getattr(score, n)) for n in ("bias", "alibi") if n in needs})
    _delta(launch, saved, dout, dlse, delta)
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
    chosen = config(problem, "dkdv")
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
    chosen = config(problem, "dq")
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
    sums = torch.nn.functional.pad(rows.double().cumsum(1), (1, 0))  # differences of running sums: fp32 would cancel
    cu = layout.cu_seqlens_q.long()
    return (sums[:, cu[1:]] - sums[:, cu[:-1]]).t().to(rows.dtype)


def _bias_grad(launch: Launch, saved: Saved, dout: Tensor, delta: Tensor) -> Tensor:
    problem, operands = launch.problem, launch.operands
    bias = operands.score.bias
    assert bias is not None
    four = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)
    chosen = config(problem, "dq")
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
