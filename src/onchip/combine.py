"""Merging partial attention results: (out, lse) + (out, lse), for split keys, rings and cascades."""

from collections.abc import Iterable

import torch
from torch import Tensor

Partial = tuple[Tensor, Tensor]


def merge(
    out: Tensor | Iterable[Partial],
    lse: Tensor | None = None,
    out2: Tensor | None = None,
    lse2: Tensor | None = None,
) -> Partial:
    """Attention over the union of disjoint key sets, from the results over each.

    ``merge(out, lse, out2, lse2)`` or ``merge([(out, lse), ...])``. Shapes: out (batch, seqlen, heads, dim_v) with
    lse (batch, heads, seqlen), or packed (total, heads, dim_v) with (heads, total). lse is the natural log.
    ``(0, -inf)`` is the identity. Differentiable in every input. The result keeps out's dtype: keep partial
    results in float32 where the error must not grow with their number.

    Raises ValueError for shapes that do not belong together, TypeError for anything but floating tensors.
    """
    if isinstance(out, Tensor):
        partials = [(out, lse), (out2, lse2)]
    else:
        if lse is not None or out2 is not None or lse2 is not None:
            raise TypeError(
                "merge: got a list of partial results and further arguments; expected one or the other"
            )
        if not isinstance(out, Iterable):
            raise TypeError(f"merge: got {type(out).__name__}, expected tensors or a list of (out, lse)")
        partials = list(out)
    outs, lses = _check(partials)
    weights_dtype = torch.promote_types(lses[0].dtype, torch.float32)
    all_lse = torch.stack([x.to(weights_dtype) for x in lses])
    # Rows that no part has seen: exp(-inf - 0) = 0 and log(1), where -inf - -inf and log(0) would give NaN gradients.
    top = all_lse.detach().amax(0)
    weights = torch.exp(all_lse - top.masked_fill(top == -torch.inf, 0.0))
    row_sum = weights.sum(0)
    total = top + torch.where(row_sum == 0, 1.0, row_sum).log()
    weights = weights / torch.where(row_sum == 0, 1.0, row_sum)
    merged = sum(
        o.to(weights_dtype) * w.transpose(-1, -2).unsqueeze(-1) for o, w in zip(outs, weights, strict=True)
    )
    assert isinstance(merged, Tensor)
    return merged.to(outs[0].dtype), total


def _check(partials: list) -> tuple[list[Tensor], list[Tensor]]:
    if not partials:
        raise ValueError("merge: got no partial results, expected at least one (out, lse)")
    for i, pair in enumerate(partials):
        if (
            not isinstance(pair, tuple | list)
            or len(pair) != 2
            or not all(isinstance(x, Tensor) for x in pair)
        ):
            raise TypeError(
                f"merge: part {i} is {type(pair).__name__}, expected a pair of tensors (out, lse)"
            )
        o, lse = pair
        if not o.is_floating_point() or not lse.is_floating_point():
            raise TypeError(f"merge: part {i} has dtypes {o.dtype}, {lse.dtype}, expected floating point")
        if o.dim() not in (3, 4) or lse.shape != (*o.shape[:-3], o.shape[-2], o.shape[-3]):
            raise ValueError(
                f"merge: part {i} has out {tuple(o.shape)} and lse {tuple(lse.shape)}, expected out (batch, seqlen, "
                "heads, dim) with lse (batch, heads, seqlen), or (total, heads, dim) with (heads, total)"
            )
        if o.dtype is not partials[0][0].dtype:
            raise TypeError(
                f"merge: part {i} has out of {o.dtype}, expected {partials[0][0].dtype} as in part 0"
            )
        for x in (o, lse):
            if x.device != partials[0][0].device:
                raise ValueError(
                    f"merge: part {i} is on {x.device}, expected {partials[0][0].device} as in part 0"
                )
        if o.shape != partials[0][0].shape:
            raise ValueError(
                f"merge: part {i} has out {tuple(o.shape)}, expected {tuple(partials[0][0].shape)} as in part 0"
            )
    return [o for o, _ in partials], [lse for _, lse in partials]
