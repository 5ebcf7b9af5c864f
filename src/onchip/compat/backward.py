"""The private backward entry points: gradients from a given out and softmax_lse, as ring attention calls them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onchip import ops, problem as problems, select
from onchip.compat.translate import packed
from onchip.inputs import varlen_layout
from onchip.problem import Operands, Saved, check_types


@torch.no_grad()
def gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    targets: tuple[Tensor | None, Tensor | None, Tensor | None],
    *,
    mask: Any,
    score: Any,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    max_q: Any = None,
    max_k: Any = None,
    used_q: Tensor | None = None,
    used_k: Tensor | None = None,
    dlse: Tensor | None = None,
    seed: int | Tensor = 0,
    scale: float | None = None,
    dropout: float = 0.0,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, written to the targets that are given, and softmax_d, the row sums of dout * out.

    out and lse may be those of a larger set of keys, of which k and v are a part. No result requires a gradient.
    """
    shapes = [x.shape for x in (q, k, v)]
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(-1, -2)
    if cu_q is not None or cu_k is not None or used_q is not None or used_k is not None:
        if cu_q is None:
            (q, cu_q), (out, _), (dout, _) = packed(q), packed(out), packed(dout)
            lse = lse.transpose(0, 1).flatten(1)
            dlse = None if dlse is None else dlse.transpose(0, 1).flatten(1)
        if cu_k is None:
            (k, cu_k), (v, _) = packed(k), packed(v)
        lengths = (cu_q, cu_k, used_q, used_k)
    else:
        lengths = (None,) * 4
    rest = (mask, score, scale, dropout, seed, deterministic)
    lse = lse.contiguous()  # backends step through its rows as their own forward pass lays them out
    run: Any = ops.gradients if ops.traced() else _run
    found = run(dout, dlse, out, lse, q, k, v, lengths, (max_q, max_k), *rest, None)
    results = []
    for target, shape, grad in zip(targets, shapes, found, strict=True):
        grad = grad.view(shape)
        results.append(grad if target is None else target.copy_(grad))
    return (*results, delta)  # type: ignore[return-value]


def _run(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Any, ...],
    longest: tuple[Any, Any],
    mask: Any,
    score: Any,
    scale: float | None,
    dropout: float,
    seed: int | Tensor,
    deterministic: bool,
    backend: str | None,
) -> tuple[Tensor, ...]:
    """`ops.gradients` without the operator."""
    if lengths[0] is None:
        layout, kind = problems.dense_layout(q, k, v), "dense"
    else:
        cu_q, cu_k, used_q, used_k = lengths
        layout, kind = varlen_layout(q, k, v, cu_q, cu_k, longest[0], longest[1], used_q, used_k), "varlen"
    q, k, v, out, dout = map(problems.resolved, (q, k, v, out, dout))  # type: ignore[assignment]
    options = {"scale": scale, "dropout": dropout, "deterministic": deterministic}
    problem = problems.state(q, k, v, layout, kind, mask, score, **options)
    chosen = select.load(select.choose(problem, backend))
    operands = Operands(q, k, v, layout, *check_types(mask, score), problems.draw_seed(seed, dropout, q))
    saved = Saved(out, lse, torch.zeros_like(lse), frozenset("qkv"))
    found = select.backward_of(chosen).backward(problem, operands, saved, dout, dlse, chosen.tiles(problem))
    assert found.q is not None and found.k is not None and found.v is not None
    return found.q, found.k, found.v
