"""FlashAttention-3's `flash_attn_interface`: the same names and arguments, computed by onchip.

num_splits, pack_gqa, sm_margin and scheduler_metadata steer FlashAttention-3's kernels; they are taken and change no
result (num_splits reaches the cache kernels). Descales apply to float8 inputs, which are computed in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import onchip
from onchip.compat.backward import gradients
from onchip.compat.cache import attend_cache
from onchip.compat.flash_attn.flash_attn_interface import maybe_contiguous, round_multiple
from onchip.compat.missing import refuse
from onchip.compat.translate import attend, band, dequantized, parts, scoring, sides, widened

__getattr__ = refuse(
    __name__, "round_up_headdim", "setup_context", "_backward",
    "FlashAttnFunc", "FlashAttnQKVPackedFunc", "FlashAttnVarlenFunc",
)  # fmt: skip

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "maybe_contiguous",
    "round_multiple",
]


def _run(
    q,
    k,
    v,
    softmax_scale,
    causal,
    qv,
    descales,
    window_size,
    attention_chunk,
    softcap,
    deterministic,
    **lengths: Any,
) -> tuple[Tensor, Tensor]:
    cu_q, cu_k = lengths.get("cu_q"), lengths.get("cu_k")
    q, k, v = (
        dequantized(x, d, cu) for x, d, cu in zip((q, k, v), descales, (cu_q, cu_k, cu_k), strict=True)
    )
    q, k = widened(q, k, v, qv)
    mask = band(causal, *sides(window_size), chunk=attention_chunk)
    return attend(
        q,
        k,
        v,
        mask=mask,
        score=scoring(softcap),
        scale=softmax_scale,
        deterministic=deterministic,
        **lengths,
    )


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """Dense attention; with return_attn_probs (out, softmax_lse).

    qv (batch, seqlen_q, heads_q, dim_v) adds qv.v to the scores. float8 inputs with descales (batch, heads_k) give
    bfloat16. attention_chunk: a query sees the keys of its own chunk of so many positions.
    """
    descales = (q_descale, k_descale, v_descale)
    out, lse = _run(
        q, k, v, softmax_scale, causal, qv, descales, window_size, attention_chunk, softcap, deterministic
    )
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """flash_attn_func of qkv (batch, seqlen, 3, heads, dim), or (batch, seqlen, heads_q + 2 * heads_k, dim) with
    num_heads_q."""
    if qkv.dim() == 5:
        q, k, v = parts("qkv", qkv, 2, 3)
    else:
        if num_heads_q is None:
            raise ValueError(f"num_heads_q: is None, expected an int for qkv of shape {tuple(qkv.shape)}")
        if qkv.dim() != 4 or qkv.shape[2] <= num_heads_q or (qkv.shape[2] - num_heads_q) % 2:
            raise ValueError(
                f"qkv: has shape {tuple(qkv.shape)}, expected (batch, seqlen, {num_heads_q} + 2 * heads_k, dim)"
            )
        q, k, v = qkv.split([num_heads_q, *[(qkv.shape[2] - num_heads_q) // 2] * 2], 2)
    descales = (q_descale, k_descale, v_descale)
    out, lse = _run(
        q, k, v, softmax_scale, causal, None, descales, window_size, attention_chunk, softcap, deterministic
    )
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None,
    causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """Packed sequences; seqused (batch,): only so many rows of each count."""
    descales = (q_descale, k_descale, v_descale)
    out, lse = _run(
        q, k, v, softmax_scale, causal, qv, descales, window_size, attention_chunk, softcap, deterministic,
        cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, max_q=max_seqlen_q, max_k=max_seqlen_k, used_q=seqused_q,
        used_k=seqused_k,
    )  # fmt: skip
    return (out, lse) if return_attn_probs else out


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """(out, softmax_lse) of partial results over disjoint keys.

    out_partial (splits, batch, seqlen, heads, dim) or (splits, total, heads, dim), lse_partial the same without dim;
    out is filled where given, else of out_dtype (out_partial's by default). softmax_lse is shaped as one split's.
    """
    if out_partial.shape[:1] != lse_partial.shape[:1]:
        raise ValueError(
            f"lse_partial: has shape {tuple(lse_partial.shape)}, expected {len(out_partial)} splits first as "
            f"out_partial of shape {tuple(out_partial.shape)}"
        )
    wide = out_partial.to(torch.promote_types(out_partial.dtype, torch.float32))
    merged, lse = onchip.merge([(o, s.transpose(-1, -2)) for o, s in zip(wide, lse_partial, strict=True)])
    merged = merged.to(out_dtype or out_partial.dtype) if out is None else out.copy_(merged)
    return merged, lse.transpose(-1, -2)


@torch.no_grad()  # as there: code that decodes with gradients enabled runs
def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos: Any = None, rotary_sin: Any = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | None = None, rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    """Attention over a cache that k and v are first appended to, in place. The result requires no gradient.

    With cu_seqlens_q, q is packed (total_q, heads_q, dim). Rotary turns new keys to rotary_seqlens (cache_seqlens by
    default) and behind, q to the same where causal, a window or chunks are set, else all of q to the first of these.
    With return_softmax_lse: out, softmax_lse and two empty tensors, where FlashAttention-3 has its partial results.
    """
    if cu_seqlens_k_new is not None:
        raise NotImplementedError("cu_seqlens_k_new: appends of different lengths are not supported; pad k and v, or "
                                  "write them to the cache before the call")  # fmt: skip
    if k_cache.dtype.itemsize == 1:
        raise NotImplementedError("k_cache: a float8 cache is not supported")
    start = cache_seqlens if rotary_seqlens is None else rotary_seqlens
    out, lse = attend_cache(
        q, k_cache, v_cache, k=k, v=v, qv=qv, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad, page_table=page_table, cu_q=cu_seqlens_q, max_q=max_seqlen_q,
        num_splits=num_splits,
        rotary=None if rotary_cos is None else onchip.Rotary(rotary_cos, rotary_sin, rotary_interleaved),
        rotary_start=None if rotary_seqlens is None and cache_leftpad is None else start,  # type: ignore[arg-type]
        mask=band(causal, *sides(window_size), chunk=attention_chunk), score=scoring(softcap), scale=softmax_scale,
    )  # fmt: skip
    return (out, lse, out.new_empty(0), lse.new_empty(0)) if return_softmax_lse else out


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens: Tensor,
    qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, cache_leftpad: Tensor | None = None, page_size: int | None = None,
    max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0,
    pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """An empty int32 tensor: onchip's kernels plan in the call itself."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
    qv: Tensor | None = None, out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    page_table: Tensor | None = None, kv_batch_idx: Tensor | None = None, leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size_left: int = -1, window_size_right: int = -1,
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None, num_splits: int = 1, pack_gqa: bool | None = None, sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out, softmax_lse and two empty tensors, of any of the layouts above; no gradient. out_ is filled where given."""
    window = (window_size_left, window_size_right)
    cached = (k_new, cu_seqlens_k_new, page_table, kv_batch_idx, leftpad_k, rotary_cos)
    with torch.no_grad():
        if any(x is not None for x in cached):
            if seqused_q is not None:
                raise NotImplementedError("seqused_q: over a cache is not supported")
            out, lse = flash_attn_with_kvcache(
                q, k, v, k_new, v_new, qv, rotary_cos, rotary_sin, seqused_k, kv_batch_idx, leftpad_k, page_table,
                cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, seqlens_rotary, q_descale, k_descale, v_descale,
                softmax_scale, causal, window, attention_chunk, softcap, rotary_interleaved, None, num_splits,
                return_softmax_lse=True,
            )[:2]  # fmt: skip
        else:
            descales = (q_descale, k_descale, v_descale)
            out, lse = _run(
                q, k, v, softmax_scale, causal, qv, descales, window, attention_chunk, softcap, True,
                cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, max_q=max_seqlen_q, max_k=max_seqlen_k, used_q=seqused_q,
                used_k=seqused_k,
            )  # fmt: skip
        out = out if out_ is None else out_.copy_(out)
    return out, lse, out.new_empty(0), lse.new_empty(0)


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None, softmax_scale: float | None = None,
    is_causal: bool = False, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    """Writes dq, dk and dv; returns softmax_d (batch, heads_q, seqlen_q) or (heads_q, total_q)."""
    mask = band(is_causal, window_size_left, window_size_right)
    return gradients(
        dout, q, k, v, out, softmax_lse, (dq, dk, dv), mask=mask, score=scoring(softcap), scale=softmax_scale,
        deterministic=deterministic, cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, max_q=max_seqlen_q, max_k=max_seqlen_k,
        used_q=sequed_q, used_k=sequed_k,
    )[3]  # fmt: skip
