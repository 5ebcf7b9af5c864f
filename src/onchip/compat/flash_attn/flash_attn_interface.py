"""FlashAttention-2's `flash_attn.flash_attn_interface`: the same names and arguments, computed by onchip.

Shapes: q (batch, seqlen_q, heads_q, dim), k and v (batch, seqlen_k, heads_k, dim), packed: (total, heads, dim) with
cu_seqlens int32 (batch + 1,). return_attn_probs: out, softmax_lse (batch, heads_q, seqlen_q) or (heads_q, total_q),
and S_dmask (batch, heads_q, seqlen_q, seqlen_k), the softmax weights, negative where dropout drops them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import onchip
from onchip.compat.backward import gradients
from onchip.compat.cache import attend_cache
from onchip.compat.missing import refuse
from onchip.compat.translate import attend, band, parts, scoring, sides
from onchip.compat.weights import draw_seed, probabilities

__getattr__ = refuse(
    __name__,
    "_get_block_size_n",
    "FlashAttnFunc",
    "FlashAttnKVPackedFunc",
    "FlashAttnQKVPackedFunc",
    "FlashAttnVarlenFunc",
    "FlashAttnVarlenKVPackedFunc",
    "FlashAttnVarlenQKVPackedFunc",
)


def maybe_contiguous(x):
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x, m):
    return -(-x // m) * m


def _run(
    q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    **lengths: Any,
):  # fmt: skip
    common = {
        "mask": band(causal, *sides(window_size)),
        "score": scoring(softcap, alibi_slopes),
        "scale": softmax_scale,
        **lengths,
    }
    seed = draw_seed(q) if dropout_p > 0 and return_attn_probs else None
    out, lse = attend(q, k, v, dropout=dropout_p, seed=seed, deterministic=deterministic, **common)
    if not return_attn_probs:
        return out
    return out, lse, probabilities(q, k, common, dropout_p, seed)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """Dense attention; out (batch, seqlen_q, heads_q, dim)."""
    return _run(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """flash_attn_func of kv (batch, seqlen_k, 2, heads_k, dim)."""
    k, v = parts("kv", kv, 2, 2)
    return _run(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """flash_attn_func of qkv (batch, seqlen, 3, heads, dim)."""
    q, k, v = parts("qkv", qkv, 2, 3)
    return _run(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """Packed sequences. block_table (batch, pages): k, v are pages (num_pages, page_size, heads_k, dim); inference."""
    if block_table is not None:
        if dropout_p or return_attn_probs:
            raise NotImplementedError("block_table: with dropout_p or return_attn_probs is not supported")
        out, _ = attend_cache(
            q, k, v, cache_seqlens=cu_seqlens_k.diff(), cu_q=cu_seqlens_q, max_q=max_seqlen_q, page_table=block_table,
            mask=band(causal, *sides(window_size)), score=scoring(softcap, alibi_slopes), scale=softmax_scale,
        )  # fmt: skip
        return out
    return _run(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, max_q=max_seqlen_q, max_k=max_seqlen_k,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """flash_attn_varlen_func of kv (total_k, 2, heads_k, dim)."""
    k, v = parts("kv", kv, 1, 2)
    return _run(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, max_q=max_seqlen_q, max_k=max_seqlen_k,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """flash_attn_varlen_func of qkv (total, 3, heads, dim)."""
    q, k, v = parts("qkv", qkv, 1, 3)
    return _run(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        cu_q=cu_seqlens, cu_k=cu_seqlens, max_q=max_seqlen, max_k=max_seqlen,
    )  # fmt: skip


@torch.no_grad()  # as there: code that decodes with gradients enabled runs
def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """Attention over a cache that k and v are first appended to, in place. The result requires no gradient.

    Rotary turns k to its positions, counted from cache_leftpad; q to the same where causal or a window is set, else
    all of q to the position of the first new key.
    """
    start = None
    if cache_leftpad is not None and rotary_cos is not None and cache_seqlens is not None:
        start = cache_seqlens - cache_leftpad
    out, lse = attend_cache(
        q, k_cache, v_cache, k=k, v=v, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad, page_table=block_table, num_splits=num_splits,
        rotary=None if rotary_cos is None else onchip.Rotary(rotary_cos, rotary_sin, rotary_interleaved),
        rotary_start=start, mask=band(causal, *sides(window_size)), score=scoring(softcap, alibi_slopes),
        scale=softmax_scale,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


# Entry points that other libraries import. rng_state: int64 (2,), the dropout key and 0.


def _forward(
    q, k, v, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, return_softmax, **lengths: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    seed = draw_seed(q) if dropout_p > 0 else 0
    common = {
        "mask": band(causal, *window),
        "score": scoring(softcap, alibi_slopes),
        "scale": softmax_scale,
        **lengths,
    }
    with torch.no_grad():
        out, lse = attend(q, k, v, dropout=dropout_p, seed=seed, **common)
        weights = probabilities(q, k, common, dropout_p, seed) if return_softmax else q.new_empty(0)
    key = seed.reshape(1) if isinstance(seed, Tensor) else torch.tensor([seed], device="cpu")
    return out, lse, weights, torch.cat([key, torch.zeros_like(key)])


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, softmax_lse, S_dmask (empty unless asked for) and rng_state; no gradient."""
    window = (window_size_left, window_size_right)
    return _forward(q, k, v, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, return_softmax)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_flash_attn_forward` of packed sequences, or over pages (block_table)."""
    window = (window_size_left, window_size_right)
    if block_table is not None:
        if dropout_p or return_softmax:
            raise NotImplementedError("block_table: with dropout_p or return_softmax is not supported")
        with torch.no_grad():
            out, lse = attend_cache(
                q, k, v, cache_seqlens=cu_seqlens_k.diff() if seqused_k is None else seqused_k, cu_q=cu_seqlens_q,
                max_q=max_seqlen_q, page_table=block_table, cache_leftpad=leftpad_k, num_splits=num_splits,
                mask=band(causal, *window), score=scoring(softcap, alibi_slopes), scale=softmax_scale,
            )  # fmt: skip
        return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64, device="cpu")
    if leftpad_k is not None:
        raise NotImplementedError(
            "leftpad_k: without block_table is not supported; cut the padding off instead"
        )
    return _forward(
        q, k, v, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, return_softmax,
        cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, max_q=max_seqlen_q, max_k=max_seqlen_k, used_k=seqused_k,
    )  # fmt: skip


def _backward(
    tensors: Any,
    targets: Any,
    dropout_p,
    softmax_scale,
    causal,
    window,
    softcap,
    slopes,
    deterministic,
    rng_state,
    **lengths,
):
    if dropout_p > 0 and rng_state is None:
        raise ValueError("rng_state: got None with dropout_p > 0, expected what the forward call returned")
    seed = 0 if rng_state is None else rng_state[:1]
    dout, q, k, v, out, lse = tensors
    return gradients(
        dout, q, k, v, out, lse, targets, mask=band(causal, *window), score=scoring(softcap, slopes),
        scale=softmax_scale, dropout=dropout_p, deterministic=deterministic, seed=seed, **lengths,
    )[3]  # fmt: skip


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes dq, dk and dv; returns softmax_d (batch, heads_q, seqlen_q), the row sums of dout * out."""
    window = (window_size_left, window_size_right)
    tensors, targets = (dout, q, k, v, out, softmax_lse), (dq, dk, dv)
    return _backward(
        tensors,
        targets,
        dropout_p,
        softmax_scale,
        causal,
        window,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state,
    )


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """`_flash_attn_backward` of packed sequences; softmax_d (heads_q, total_q)."""
    window = (window_size_left, window_size_right)
    tensors, targets = (dout, q, k, v, out, softmax_lse), (dq, dk, dv)
    return _backward(
        tensors, targets, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic, rng_state,
        cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, max_q=max_seqlen_q, max_k=max_seqlen_k,
    )  # fmt: skip


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
