"""The intervals of keys that a mask's rows parts leave each query, as kernels read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.mask import Rows as RowsPart
from onchip.problem import Operands, Problem


class Rows(NamedTuple):
    """Keys [lo, hi) of each query, one of them may be absent; (batch, row) strides."""

    lo: Any = None
    hi: Any = None
    batch: Any = 0
    row: Any = 0


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


def size(problem: Problem, operands: Operands) -> int:
    """Bytes of the intervals that kernels are given, those of alternatives included."""
    unions = [*operands.mask.unions]
    found = [rows(problem, operands)] if operands.mask.rows else []
    while unions:
        for mask in unions.pop().masks:
            found += (bounds(problem, operands, part) for part in mask.rows)
            unions += mask.unions
    return sum(4 * x.numel() for each in found for x in (each.lo, each.hi) if x is not None)
