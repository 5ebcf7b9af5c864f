"""Softmax in parts, as FlashAttention keeps it: each part of a row of scores is summed up by two numbers.

>>> a, b = summary([1.0, 3.0]), summary([2.0, 0.0])
>>> m, l = merge(a, b)  # the same as summary([1.0, 3.0, 2.0, 0.0])
>>> (float(m), round(float(l), 3))
(3.0, 1.553)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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
        scores = torch.tensor(scores, dtype=torch.float64)
    if not scores.is_floating_point() or scores.dim() == 0:
        raise TypeError(
            f"scores: got a {scores.dtype} tensor of {scores.dim()} dims, expected floating point of at least 1"
        )
    if scores.shape[-1] == 0:
        return Summary(scores.new_full(scores.shape[:-1], -torch.inf), scores.new_zeros(scores.shape[:-1]))
    m = scores.amax(-1)
    return Summary(m, torch.exp(scores - _finite(m).unsqueeze(-1)).sum(-1))


def merge(a: Summary | tuple[Tensor, Tensor], b: Summary | tuple[Tensor, Tensor]) -> Summary:
    """The summary of both parts' scores: m is the greater one, and either l is scaled by e^(its m - m)."""
    for name, pair in (("a", a), ("b", b)):
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(x, Tensor) for x in pair):
            raise TypeError(f"{name}: got {type(pair).__name__}, expected a pair of tensors (m, l)")
    m = torch.maximum(a[0], b[0])
    base = _finite(m)
    return Summary(m, a[1] * torch.exp(a[0] - base) + b[1] * torch.exp(b[0] - base))


def _finite(m: Tensor) -> Tensor:
    """-inf - -inf would be NaN; e^(-inf - 0) is the 0 that is meant."""
    return m.masked_fill(m == -torch.inf, 0.0)
