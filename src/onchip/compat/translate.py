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


def band(causal: bool, left: int | None, right: int | None, *, chunk: int = 0) -> onchip.Mask | None:
    """The mask of causal, window_size and attention_chunk; the same object again, which brings its schedules along."""
    return (_band if torch.compiler.is_compiling() else _kept_band)(causal, left, right, chunk)


def sides(window_size: Any) -> tuple[Any, Any]:
    """left and right of FlashAttention's window_size."""
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"window_size: got {window_size!r}, expected a pair (left, right)")
    return window_size[0], window_size[1]


def parts(name: str, x: Tensor, dim: int, count: int) -> tuple[Tensor, ...]:
    """q, k and v of a packed tensor: `count` of them, side by side in a dimension."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, expected a tensor")
    if x.dim() <= dim or x.shape[dim] != count:
        inner = "heads, dim" if count == 3 else "heads_k, dim"
        outer = "total" if dim == 1 else "batch, seqlen"
        raise ValueError(f"{name}: has shape {tuple(x.shape)}, expected ({outer}, {count}, {inner})")
    return x.unbind(dim)


def _band(causal: bool, left: int | None, right: int | None, chunk: int) -> onchip.Mask | None:
    left = None if left is None or left < 0 else number(left)
    right = 0 if causal else None if right is None or right < 0 else number(right)
    mask = None if left is None and right is None else onchip.window(left, right)
    if chunk:
        mask = onchip.chunked(number(chunk)) if mask is None else mask & onchip.chunked(number(chunk))
    return mask


_kept_band = lru_cache(maxsize=256)(_band)


def number(x: Any) -> Any:
    """A number of numpy as Python's own."""
    return x.item() if type(x).__module__ == "numpy" and getattr(x, "ndim", 1) == 0 else x


def scoring(
    softcap: float | None = None, alibi: Tensor | None = None, sink: Tensor | None = None, mod: Any = None
) -> onchip.Score | None:
    if not softcap and alibi is None and sink is None and mod is None:
        return None
    return onchip.Score(softcap=number(softcap) or None, alibi=alibi, sink=sink, mod=mod)


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
    options["scale"] = number(options.get("scale"))
    if cu_q is None and cu_k is None and used_q is None and used_k is None:
        return onchip.attention(q, k, v, return_lse=True, **options)  # type: ignore[return-value]
    dense = q.shape[:2] if cu_q is None else None
    if cu_q is None:
        q, cu_q = packed(q)
    if cu_k is None:
        (k, cu_k), (v, _) = packed(k), packed(v)
    out, lse = onchip.attention_varlen(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=number(max_q),
        max_seqlen_k=number(max_k), seqused_q=used_q, seqused_k=used_k, return_lse=True, **options,
    )  # fmt: skip
    if dense is not None:
        out, lse = out.unflatten(0, dense), lse.unflatten(1, dense).transpose(0, 1)
    return out, lse


def packed(x: Tensor) -> tuple[Tensor, Tensor]:
    """(batch, seqlen, heads, dim) as (total, heads, dim), and its cu_seqlens."""
    batch, seqlen = x.shape[:2]
    return x.flatten(0, 1), torch.arange(batch + 1, dtype=torch.int32, device=x.device) * seqlen


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
    if not isinstance(descale, Tensor):
        raise TypeError(f"descale: got {type(descale).__name__}, expected a tensor (batch, heads_k)")
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if descale.dim() != 2 or descale.shape[0] != batch or x.shape[-2] % max(descale.shape[1], 1):
        raise ValueError(
            f"descale: has shape {tuple(descale.shape)}, expected (batch, heads_k) for a batch of {batch} and "
            f"{x.shape[-2]} heads"
        )
    heads = descale.repeat_interleave(x.shape[-2] // descale.shape[1], 1)
    rows = heads[:, None] if cu_seqlens is None else heads[offsets(cu_seqlens, x)[0]]
    return (x * rows[..., None]).to(torch.bfloat16)


def widened(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> tuple[Tensor, Tensor]:
    """q and k whose product is q.k + qv.v: the two side by side."""
    if qv is None:
        return q, k
    return torch.cat([q, qv], -1), torch.cat([k, v], -1)
