"""Masks and scores as kernel arguments."""

from __future__ import annotations

from typing import Any

from onchip.backends.compiled import emit
from onchip.backends.compiled.intervals import bounds
from onchip.backends.compiled.terms import Scores
from onchip.problem import Operands, Problem


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
