"""The softmax weights themselves, N x N, for return_attn_probs; in a graph one operator, whatever the length."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, library as registry
from torch.utils._python_dispatch import _disable_current_modes

from onchip import ops, problem as problems, spec
from onchip.compat.translate import attend, longest, offsets, scoring


def draw_seed(q: Tensor) -> int | Tensor:
    """A key for dropout from torch's generator, so that torch.manual_seed repeats it; a tensor (1,) within a graph."""
    return ops.draw_seed(q) if ops.traced() else problems.draw_seed(None, 1.0, q)


def probabilities(
    q: Tensor, k: Tensor, options: dict[str, Any], dropout: float, seed: int | Tensor | None
) -> Tensor:
    """The softmax weights, (batch, heads_q, seqlen_q, seqlen_k), negative where dropout drops them.

    `options`: those of `attend`. A weight below the dtype's range is 0 whether it is dropped or not. Packed inputs: up
    to max_seqlen, 0 behind a sequence's end.
    """
    cu_q, cu_k = options.get("cu_q"), options.get("cu_k")
    rows = q.shape[1] if cu_q is None else longest(cu_q, options["max_q"])
    columns = k.shape[1] if cu_k is None else longest(cu_k, options["max_k"])
    with torch.no_grad():
        if not torch.compiler.is_compiling():
            return _weights(q, k, options, rows, columns, dropout, seed)
        score = options["score"]
        text, ints, _ = spec.write(options["mask"], None)
        softcap, alibi = (None, None) if score is None else (score.softcap, score.alibi)
        return torch.ops.onchip.softmax_weights(
            q, k, cu_q, cu_k, options.get("used_k"), rows, columns, text, ints, softcap, alibi, options["scale"],
            dropout if dropout > 0 else 0.0, None if dropout == 0 else seed,
        )  # fmt: skip


def _weights(
    q: Tensor,
    k: Tensor,
    options: dict[str, Any],
    rows: int,
    columns: int,
    dropout: float,
    seed: int | Tensor | None,
) -> Tensor:
    """They are attention's output for the values of a unit matrix, taken 128 columns at a time."""
    cu_q, cu_k = options.get("cu_q"), options.get("cu_k")
    position = (
        torch.arange(k.shape[1], device=k.device).expand(k.shape[:2]) if cu_k is None else offsets(cu_k, k)[1]
    )
    found = []
    for start in range(0, columns, 128):
        index = torch.arange(start, min(start + 128, columns), device=k.device)
        unit = (position[..., None, None] == index).to(q.dtype).expand(*k.shape[:-1], -1)
        part = attend(q, k, unit, **options)[0]
        if dropout > 0:
            kept = attend(q, k, unit, **options, dropout=dropout, seed=seed)[0]
            part = torch.where(kept == 0, -part, part)
        found.append(part)
    weights = torch.cat(found, -1) if found else q.new_zeros(*q.shape[:-1], 0)
    if cu_q is None:
        return weights.transpose(1, 2)
    batch, row = offsets(cu_q, q)
    padded = weights.new_zeros(cu_q.numel() - 1, rows, *weights.shape[1:])
    padded[batch, row] = weights
    return padded.transpose(1, 2)


@registry.custom_op("onchip::softmax_weights", mutates_args=())
def _softmax_weights(
    q: Tensor,
    k: Tensor,
    cu_q: Optional[Tensor],  # noqa: UP045 (the schema is read from these)
    cu_k: Optional[Tensor],  # noqa: UP045
    used_k: Optional[Tensor],  # noqa: UP045
    rows: int,
    columns: int,
    text: str,
    ints: list[int],
    softcap: Optional[float],  # noqa: UP045
    alibi: Optional[Tensor],  # noqa: UP045
    scale: Optional[float],  # noqa: UP045
    dropout: float,
    seed: Optional[Tensor],  # noqa: UP045
) -> Tensor:
    options: dict[str, Any] = {
        "mask": spec.read(text, ints, [])[0],
        "score": scoring(softcap, alibi),
        "scale": scale,
    }
    if cu_q is not None:
        options |= {"cu_q": cu_q, "cu_k": cu_k, "max_q": rows, "max_k": columns, "used_k": used_k}
    with _disable_current_modes():
        return _weights(q, k, options, rows, columns, dropout, seed).contiguous()


@_softmax_weights.register_fake
def _(q, k, cu_q, cu_k, used_k, rows, columns, *others):
    return q.new_empty(q.shape[0] if cu_q is None else cu_q.shape[0] - 1, q.shape[-2], rows, columns)
