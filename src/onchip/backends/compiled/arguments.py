"""Masks and scores as kernel arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onchip.backends.compiled import emit
from onchip.backends.compiled.terms import Rows, Scores
from onchip.mask import Rows as RowsPart
from onchip.problem import Operands, Problem


def as_rows(lo: Tensor | None, hi: Tensor | None) -> Rows:
    """Bounds (batch | 1, queries | 1) as int32 with their strides; either may be absent."""
    present = [x for x in (lo, hi) if x is not None]
    if not present:
        return Rows()
    shape = torch.broadcast_shapes(*(x.shape for x in present))
    lo, hi = (None if x is None else x.int().expand(shape).contiguous() for x in (lo, hi))
    return Rows(lo, hi, shape[1] if shape[0] > 1 else 0, 1 if shape[1] > 1 else 0)


def bounds(problem: Problem, operands: Operands, part: RowsPart) -> Rows:
    """The interval of every query under a rows part."""
    q = torch.arange(max(problem.seqlen_q, 1), device=problem.device).view(1, 1, -1, 1)
    q_len, k_len = operands.layout.device_lengths()
    value = part.value
    if isinstance(value, Tensor) and value.dim() == 1:
        value = value.view(-1, 1, 1, 1)
    found = part.interval(q, q_len, k_len, value)  # type: ignore[arg-type]
    lo, hi = (torch.full((), x, device=q.device) if isinstance(x, int) else x for x in found)
    return as_rows(
        *(x if x is None else x.reshape((1,) * (4 - x.dim()) + x.shape)[:, 0, :, 0] for x in (lo, hi))
    )


def rows(problem: Problem, operands: Operands) -> Rows:
    """The intersection of the mask's rows parts."""
    lo = hi = None
    for part in operands.mask.rows:
        own_lo, own_hi, *_ = bounds(problem, operands, part)
        lo = own_lo if lo is None else lo if own_lo is None else torch.maximum(lo, own_lo)
        hi = own_hi if hi is None else hi if own_hi is None else torch.minimum(hi, own_hi)
    return as_rows(lo, hi)


def bounds_size(problem: Problem, operands: Operands) -> int:
    """Bytes of the intervals that kernels are given, those of alternatives included."""
    unions = [*operands.mask.unions]
    found = [rows(problem, operands)] if operands.mask.rows else []
    while unions:
        for mask in unions.pop().masks:
            found += (bounds(problem, operands, part) for part in mask.rows)
            unions += mask.unions
    return sum(4 * x.numel() for each in found for x in (each.lo, each.hi) if x is not None)


def mask_function(problem: Problem, operands: Operands) -> tuple[Any, Any]:
    """What the mask asks beyond its band and rows, compiled, and its arguments; None where it asks nothing."""
    function, args = emit.mask_function(operands.mask, lambda part: bounds(problem, operands, part))
    return function, args or None


def scores(operands: Operands) -> Scores:
    score = operands.score
    args = None
    if score.mod is not None and score.mod.args:  # type: ignore[union-attr]
        args = tuple(emit.table(t) for t in score.mod.args)  # type: ignore[union-attr]
    sink = None if score.sink is None else score.sink.contiguous()  # kernels step through heads
    fields: dict[str, Any] = {"softcap": score.softcap, "sink": sink, "args": args}
    if score.alibi is not None:
        slopes = score.alibi.contiguous()
        fields |= {"alibi": slopes, "alibi_batch": slopes.shape[1] if slopes.dim() == 2 else 0}
    if score.bias is not None:
        four = score.bias.reshape((1,) * (4 - score.bias.dim()) + score.bias.shape)
        strides = (0 if n == 1 else s for n, s in zip(four.shape, four.stride(), strict=True))
        names = ("bias_batch", "bias_head", "bias_row", "bias_key")
        fields |= {"bias": four, **dict(zip(names, strides, strict=True))}
    return Scores(**fields)


def mod(operands: Operands) -> Any:
    """The modification of the score, compiled."""
    found = operands.score.mod
    return None if found is None else emit.mod_function(found.fn, found.args)  # type: ignore[union-attr]
