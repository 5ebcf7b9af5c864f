"""From flash_attn's arguments to onchip's: masks, scores, layouts. No mathematics, and no check that onchip makes.

Their conventions: a window side that is -1 (or None) is unbounded, causal means no key to the right whatever the window
says, softcap 0 means none, and packed q, k, v come with cu_seqlens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import onchip


def band(causal: bool, left: int | None, right: int | None, chunk: int = 0) -> onchip.Mask | None:
    """The mask of causal, window_size and attention_chunk; the same object again, which brings its schedules along."""
    return (_band if torch.compiler.is_compiling() else _kept_band)(causal, left, right, chunk)


def _band(causal: bool, left: int | None, right: int | None, chunk: int) -> onchip.Mask | None:
    left = None if left is None or left < 0 else left
    right = 0 if causal else None if right is None or right < 0 else right
    mask = None if left is None and right is None else onchip.window(left, right)
    if chunk:
        mask = onchip.chunked(chunk) if mask is None else mask & onchip.chunked(chunk)
    return mask


_kept_band = lru_cache(maxsize=256)(_band)


def scoring(
    softcap: float | None = None, alibi: Tensor | None = None, sink: Tensor | None = None, mod: Any = None
) -> onchip.Score | None:
    if not softcap and alibi is None and sink is None and mod is None:
        return None
    return onchip.Score(softcap=softcap or None, alibi=alibi, sink=sink, mod=mod)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    max_q: Any = None,
    max_k: Any = None,
    used_q: Tensor | None = None,
    used_k: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of dense or packed tensors. A side without cu_seqlens is dense; seqused and mixtures run packed."""
    if cu_q is None and cu_k is None and used_q is None and used_k is None:
        return onchip.attention(q, k, v, return_lse=True, **options)  # type: ignore[return-value]
    dense = q.shape[:2] if cu_q is None else None
    if cu_q is None:
        q, cu_q = packed(q)
    if cu_k is None:
        (k, cu_k), (v, _) = packed(k), packed(v)
    out, lse = onchip.attention_varlen(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
        seqused_q=used_q, seqused_k=used_k, return_lse=True, **options,
    )  # fmt: skip
    if dense is not None:
        out, lse = out.unflatten(0, dense), lse.unflatten(1, dense).transpose(0, 1)
    return out, lse


def packed(x: Tensor) -> tuple[Tensor, Tensor]:
    """(batch, seqlen, heads, dim) as (total, heads, dim), and its cu_seqlens."""
    batch, seqlen = x.shape[:2]
    return x.flatten(0, 1), torch.arange(batch + 1, dtype=torch.int32, device=x.device) * seqlen


def draw_seed() -> int:
    """A key for dropout from torch's generator, so that torch.manual_seed repeats it."""
    return int(torch.randint(0, 2**62, ()))


def probabilities(q: Tensor, k: Tensor, out_options: dict[str, Any], dropout: float, seed: int) -> Tensor:
    """The softmax weights, (batch, heads_q, seqlen_q, seqlen_k), negative where dropout drops them.

    They are attention's output for the values of a unit matrix, taken 128 columns at a time. A weight below the dtype's
    range is 0 whether it is dropped or not. Packed inputs: up to max_seqlen, 0 behind a sequence's end.
    """
    cu_q, cu_k = out_options.get("cu_q"), out_options.get("cu_k")
    position = (
        torch.arange(k.shape[1], device=k.device).expand(k.shape[:2]) if cu_k is None else offsets(cu_k, k)[1]
    )
    seqlen_k = k.shape[1] if cu_k is None else longest(cu_k, out_options["max_k"])
    columns = []
    with torch.no_grad():
        for start in range(0, seqlen_k, 128):
            index = torch.arange(start, min(start + 128, seqlen_k), device=k.device)
            unit = (position[..., None, None] == index).to(q.dtype).expand(*k.shape[:-1], -1)
            part = attend(q, k, unit, **out_options)[0]
            if dropout > 0:
                kept = attend(q, k, unit, **out_options, dropout=dropout, seed=seed)[0]
                part = torch.where(kept == 0, -part, part)
            columns.append(part)
    weights = torch.cat(columns, -1) if columns else q.new_zeros(*q.shape[:-1], 0)
    if cu_q is None:
        return weights.transpose(1, 2)
    batch, row = offsets(cu_q, q)
    padded = weights.new_zeros(cu_q.numel() - 1, longest(cu_q, out_options["max_q"]), *weights.shape[1:])
    padded[batch, row] = weights
    return padded.transpose(1, 2)


def longest(cu_seqlens: Tensor, limit: int | Tensor | None = None) -> int:
    """The limit, where one is given, else the longest sequence."""
    if limit is not None:
        return int(limit)
    lengths = cu_seqlens.diff()
    return int(lengths.max()) if lengths.numel() else 0


def offsets(cu_seqlens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(sequence, position in it) of every row of a packed tensor."""
    row = torch.arange(x.shape[0], device=x.device)
    batch = torch.searchsorted(cu_seqlens.long(), row, right=True) - 1
    return batch, row - cu_seqlens[batch]


def dequantized(x: Tensor, descale: Tensor | None, cu_seqlens: Tensor | None = None) -> Tensor:
    """float8 as bfloat16, times descale (batch, heads_k). Other dtypes take no descale, as in flash_attn."""
    if not x.dtype.is_floating_point or x.dtype.itemsize > 1:
        return x
    x = x.to(torch.bfloat16)
    if descale is None:
        return x
    heads = descale.repeat_interleave(x.shape[-2] // descale.shape[1], 1)
    rows = heads[:, None] if cu_seqlens is None else heads[offsets(cu_seqlens, x)[0]]
    return (x * rows[..., None]).to(torch.bfloat16)


def widened(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> tuple[Tensor, Tensor]:
    """q and k whose product is q.k + qv.v: the two side by side."""
    if qv is None:
        return q, k
    return torch.cat([q, qv], -1), torch.cat([k, v], -1)
