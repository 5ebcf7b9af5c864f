"""flash_attn_with_kvcache of every version, and packed queries over pages, as onchip.attention_with_cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import onchip
from onchip.compat.translate import longest, number, offsets, widened


def attend_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: int | Tensor | None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    cu_q: Tensor | None = None,
    max_q: Any = None,
    page_table: Tensor | None = None,
    rotary: onchip.Rotary | None = None,
    rotary_start: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) over a cache. rotary_start: the position of the first new key and query, where it is not
    cache_seqlens. Under a mask (causal, local, chunks) queries stand behind one another, else all at the first
    position, as in flash_attn."""
    options["scale"] = number(options.get("scale"))
    capacity = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    if cache_seqlens is None:
        cache_seqlens = capacity
    if qv is not None and k is not None:
        raise NotImplementedError(
            "qv: with k to append is not supported; append first, then call without k and v"
        )
    if qv is not None and cu_q is None:
        q, k_cache = widened(q, k_cache, v_cache, qv)
    if cu_q is not None:
        if rotary is not None or qv is not None:
            raise NotImplementedError(
                "cu_seqlens_q: with rotary_cos or qv is not supported; rotate q before the call"
            )
        return _ragged(q, k_cache, v_cache, cu_q, max_q, cache_seqlens=cache_seqlens, k=k, v=v, page_table=page_table,
                       **options)  # fmt: skip
    spread = options.get("mask") is not None
    if rotary is not None and k is None:
        raise NotImplementedError("rotary_cos: without k and v to append is not supported, as in flash_attn")
    if (
        rotary is not None
        and k is not None
        and (rotary_start is not None or not spread or q.shape[1] != k.shape[1])
    ):
        used = torch.as_tensor(cache_seqlens, device=q.device)
        start = used if rotary_start is None else torch.as_tensor(rotary_start, device=q.device)
        start = start.expand(q.shape[0])[:, None]
        last = None  # a graph, and the host beside a GPU, does not know it
        if q.device.type == "cpu" and not torch.compiler.is_compiling() and q.shape[0]:
            if int(used.max()) + k.shape[1] <= capacity:  # else onchip's own error says so
                last = int(start.max()) + max(k.shape[1], q.shape[1] if spread else 1) - 1
        rotary.check(q.shape[-1], last)
        q = rotary.rotate(q, start + torch.arange(q.shape[1] if spread else 1, device=q.device))
        k = rotary.rotate(k, start + torch.arange(k.shape[1], device=q.device))
        rotary = None
    return onchip.attention_with_cache(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, k=k, v=v, page_table=page_table, rotary=rotary,
        return_lse=True, **options,
    )  # type: ignore[return-value]  # fmt: skip


def _ragged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_q: Tensor, max_q: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Packed queries, each sequence at the end of its row of a padded batch: the last query stands at the last key."""
    width = longest(cu_q) if max_q is None else int(max_q)
    if q.device.type == "cpu" and not torch.compiler.is_compiling() and width < longest(cu_q):
        raise ValueError(
            f"max_seqlen_q: got {width}, expected at least the longest sequence, {longest(cu_q)}"
        )
    batch, position = offsets(cu_q, q)
    column = position + width - cu_q.diff()[batch]
    rows = q.new_zeros(cu_q.numel() - 1, width, *q.shape[1:])
    rows[batch, column] = q
    out, lse = onchip.attention_with_cache(rows, k_cache, v_cache, return_lse=True, **options)
    return out[batch, column], lse[batch, :, column].transpose(0, 1)
