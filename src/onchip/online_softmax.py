"""Softmax in parts, as FlashAttention keeps it: each part of a row of scores is summed up by two numbers.

>>> a, b = summary([1.0, 3.0]), summary([2.0, 0.0])
>>> m, l = merge(a, b)  # the same as summary([1.0, 3.0, 2.0, 0.0])
>>> (float(m), round(float(l), 3))
(3.0, 1.553)

A score of +inf has no softmax: it makes m inf and l NaN, in any merge too, as it makes out and lse of attention NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Number = Tensor | float


class Summary(NamedTuple):
    """m: the greatest score; l: the sum of e^(score - m). The softmax of a score s is e^(s - m) / l."""

    m: Tensor
    l: Tensor  # noqa: E741 - the papers' name


def summary(scores: Tensor | Sequence[float]) -> Summary:
    """(m, l) over the last dimension of scores, a floating tensor (..., n) or a list of numbers.

    No scores, or none above -inf, give (-inf, 0), which changes nothing in a merge. Raises TypeError for other input.
    """
    if not isinstance(scores, Tensor):
        if isinstance(scores, str) or not isinstance(scores, Sequence):
            raise TypeError(f"scores: got {type(scores).__name__}, expected a tensor or a list of numbers")
        try:
            scores = torch.tensor(scores, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise TypeError(f"scores: got a list that is not of numbers ({error})") from None
    if not scores.is_floating_point() or scores.dim() == 0:
        raise TypeError(
            f"scores: got a {scores.dtype} tensor of {scores.dim()} dims, expected floating point of at least 1"
        )
    if scores.shape[-1] == 0:
        return Summary(scores.new_full(scores.shape[:-1], -torch.inf), scores.new_zeros(scores.shape[:-1]))
    m = scores.amax(-1)
    return Summary(m, torch.exp(scores - _finite(m).unsqueeze(-1)).sum(-1))


def merge(a: Summary | tuple[Number, Number], b: Summary | tuple[Number, Number]) -> Summary:
    """The summary of both parts' scores: m is the greater one, and either l is scaled by e^(its m - m).

    a and b: pairs (m, l) of floating tensors or of plain numbers, which become float64, or the dtype of the tensors
    beside them. Raises TypeError for other input.
    """
    (m_a, l_a), (m_b, l_b) = _pairs(a, b)
    m = torch.maximum(m_a, m_b)
    base = _finite(m)
    return Summary(m, l_a * torch.exp(m_a - base) + l_b * torch.exp(m_b - base))


def _pairs(a: object, b: object) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    for name, pair in (("a", a), ("b", b)):
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(map(_is_number, pair)):
            raise TypeError(
                f"{name}: got {pair!r}, expected a pair (m, l) of floating point tensors or of numbers"
            )
    numbers: tuple[Number, ...] = (*a, *b)  # type: ignore[misc]
    like = next(
        (x for x in numbers if isinstance(x, Tensor)), torch.empty((), dtype=torch.float64, device="cpu")
    )
    m_a, l_a, m_b, l_b = (
        x if isinstance(x, Tensor) else torch.tensor(x, dtype=like.dtype, device=like.device) for x in numbers
    )
    return (m_a, l_a), (m_b, l_b)


def _is_number(x: object) -> bool:
    if isinstance(x, Tensor):
        return x.is_floating_point()
    return isinstance(x, int | float) and not isinstance(x, bool)


def _finite(m: Tensor) -> Tensor:
    """-inf - -inf would be NaN; e^(-inf - 0) is the 0 that is meant."""
    return m.masked_fill(m == -torch.inf, 0.0)
