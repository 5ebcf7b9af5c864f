"""FlashAttention-4's `flash_attn.cute.interface`: the same names and arguments, computed by onchip.

score_mod and mask_mod are plain functions: score_mod(score, batch, head, q, k, *aux_tensors) and mask_mod(batch, head,
q, k, *aux_tensors), as `onchip.mod` and `onchip.where` take them. score_mod_bwd, with score_mod's arguments, is its
derivative by the score; without one it is derived. Arguments that only steer their kernels are taken and ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import onchip
from onchip.compat import flash_attn_interface as fa3
from onchip.compat.backward import gradients
from onchip.compat.cache import attend_cache
from onchip.compat.flash_attn.cute.block_sparsity import BlockSparseTensorsTorch, block_mask
from onchip.compat.translate import attend, band, dequantized, scoring, widened

SchedulerMetadataTensorsTorch = Tensor  # empty: onchip's kernels plan in the call itself


def _mask(
    q: Tensor, k: Tensor, causal: bool, window: tuple, mask_mod: Any, aux_tensors: Any, blocks: Any
) -> onchip.Mask | None:
    mask = band(causal, *window)
    inside = None if mask_mod is None else onchip.where(mask_mod, *(aux_tensors or ()))
    if blocks is not None:
        inside = block_mask(blocks, q.shape[1], k.shape[1], inside)
    return inside if mask is None else mask if inside is None else mask & inside


def _score(softcap: float | None, sink: Tensor | None, score_mod: Any, score_mod_bwd: Any, aux_tensors: Any):
    mod = None if score_mod is None else onchip.mod(score_mod, *(aux_tensors or ()), grad=score_mod_bwd)
    return scoring(softcap, sink=sink, mod=mod)


def _refuse(gather_kv_indices: Any, aux_scalars: Any) -> None:
    if gather_kv_indices is not None:
        raise NotImplementedError("gather_kv_indices: is not supported; select the keys with a mask")
    if aux_scalars:
        raise NotImplementedError(
            "aux_scalars: are not supported; write the numbers into the function, or pass tensors"
        )


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None), learnable_sink: Tensor | None = None,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    score_mod: Callable | None = None, score_mod_bwd: Callable | None = None, mask_mod: Callable | None = None,
    aux_tensors: list | None = None, aux_scalars: tuple | None = None,
    block_sparse_tensors: BlockSparseTensorsTorch | None = None,
    block_sparse_tensors_bwd: BlockSparseTensorsTorch | None = None, return_lse: bool = False,
):  # fmt: skip
    """(out, lse): out (batch, seqlen_q, heads_q, dim_v), lse (batch, heads_q, seqlen_q), whatever return_lse says."""
    _refuse(gather_kv_indices, aux_scalars)
    return attend(
        *widened(q, k, v, qv), v, mask=_mask(q, k, causal, window_size, mask_mod, aux_tensors, block_sparse_tensors),
        score=_score(softcap, learnable_sink, score_mod, score_mod_bwd, aux_tensors), scale=softmax_scale,
        deterministic=deterministic,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None, page_table: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None, softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, score_mod: Callable | None = None, score_mod_bwd: Callable | None = None,
    mask_mod: Callable | None = None, block_sparse_tensors: BlockSparseTensorsTorch | None = None,
    aux_tensors: list | None = None, aux_scalars: tuple | None = None, return_lse: bool = False,
    scheduler_metadata: SchedulerMetadataTensorsTorch | None = None, seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
):  # fmt: skip
    """(out, lse) of packed sequences, lse (heads_q, total_q); a side without cu_seqlens is (batch, seqlen, ...).

    page_table (batch, pages): k and v are pages, of which sequence b uses seqused_k[b] keys; inference only.
    """
    _refuse(gather_kv_indices, aux_scalars)
    if block_sparse_tensors is not None:
        raise NotImplementedError("block_sparse_tensors: of packed sequences are not supported")
    mask = _mask(q, k, causal, window_size, mask_mod, aux_tensors, None)
    score = _score(softcap, learnable_sink, score_mod, score_mod_bwd, aux_tensors)
    return _lengths(
        q, k, v, qv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, page_table,
        mask=mask, score=score, scale=softmax_scale, deterministic=deterministic, num_splits=num_splits,
    )  # fmt: skip


def _lengths(
    q,
    k,
    v,
    qv,
    cu_q,
    cu_k,
    max_q,
    max_k,
    used_q,
    used_k,
    page_table,
    *,
    deterministic,
    num_splits,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    if page_table is None:
        q, k = widened(q, k, v, qv)
        return attend(
            q, k, v, cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=max_k, used_q=used_q, used_k=used_k,
            deterministic=deterministic, **options,
        )  # fmt: skip
    if used_q is not None:
        raise NotImplementedError("seqused_q: with page_table is not supported")
    return attend_cache(
        q, k, v, qv=qv, cu_q=cu_q, max_q=max_q, cache_seqlens=used_k, page_table=page_table,
        num_splits=num_splits if num_splits > 1 else 0, **options,
    )  # fmt: skip


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None, seqused: Tensor | None = None, virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(out, lse) of partial results (splits, batch, seqlen, heads, dim) or (splits, total, heads, dim)."""
    if seqused is not None or virtual_batch_idx is not None:
        raise NotImplementedError("seqused, virtual_batch_idx: are not supported; cut the rows off instead")
    merged, lse = fa3.flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    return merged, lse if return_lse else None


def get_scheduler_metadata(
    max_seqlen_q: int, max_seqlen_k: int, nheads: int, nheads_kv: int, headdim: int, num_splits: int,
    headdim_v: int | None = None, pack_gqa: int | None = None, causal: bool = False,
    window_size_left: int | None = None, window_size_right: int | None = None, seqlen_k_new: int = 0,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, leftpad_k: Tensor | None = None,
    seqlen_k_per_split: int | None = None, _arch: int | None = None,
) -> SchedulerMetadataTensorsTorch:  # fmt: skip
    """An empty int32 tensor: onchip's kernels plan in the call itself."""
    given = (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, leftpad_k)
    device = next((x.device for x in given if x is not None), None)
    return torch.empty(0, dtype=torch.int32, device=device)


def _flash_attn_fwd(
    q: Tensor | None, k: Tensor | None, v: Tensor, qv: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, min_seqlen_k: int | None = None,
    page_table: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    softcap: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
    learnable_sink: Tensor | None = None, tile_mn: tuple[int, int] | None = None, mma_pv_is_rs: bool | None = None,
    intra_wg_overlap: bool | None = None, num_threads: int = 384, num_splits: int = 1, pack_gqa: bool | None = None,
    _arch: int | None = None, score_mod: Callable | None = None, mask_mod: Callable | None = None,
    block_sparse_tensors: BlockSparseTensorsTorch | None = None, return_lse: bool = False, out: Tensor | None = None,
    lse: Tensor | None = None, aux_tensors: list[Tensor] | None = None, aux_scalars: tuple | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    gather_kv_indices: Tensor | None = None, scheduler_metadata: SchedulerMetadataTensorsTorch | None = None,
    seqlen_k_per_split: int | None = None, disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(out, lse, None, None) without a gradient; out and lse are filled where given."""
    _refuse(gather_kv_indices, aux_scalars)
    if q is None or k is None:
        raise NotImplementedError(
            "q, k: None (scores of qv and v alone) is not supported; pass qv as q and v as k"
        )
    given = ((q, q_descale, cu_seqlens_q), (k, k_descale, cu_seqlens_k), (v, v_descale, cu_seqlens_k))
    q, k, v = (dequantized(*part) for part in given)
    window = (window_size_left, window_size_right)
    with torch.no_grad():
        made, row_lse = _lengths(
            q, k, v, qv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, page_table,
            mask=_mask(q, k, causal, window, mask_mod, aux_tensors, block_sparse_tensors),
            score=_score(softcap, learnable_sink, score_mod, None, aux_tensors), scale=softmax_scale,
            deterministic=True, num_splits=num_splits,
        )  # fmt: skip
        made = made if out is None else out.copy_(made)
        return made, row_lse if lse is None else lse.copy_(row_lse), None, None


def _flash_attn_bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float | None = None,
    causal: bool = False, softcap: float = 0.0, window_size_left: int | None = None,
    window_size_right: int | None = None, m_block_size: int = 64, n_block_size: int = 128, num_threads: int = 256,
    pack_gqa: bool = False, num_stages_Q: int = 2, num_stages_dO: int = 2, SdP_swapAB: bool = False,
    dKV_swapAB: bool = False, dQ_swapAB: bool = False, AtomLayoutMSdP: int = 2, AtomLayoutNdKV: int = 2,
    AtomLayoutMdQ: int = 2, V_in_regs: bool = False, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, deterministic: bool = False,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None, score_mod: Callable | None = None,
    score_mod_bwd: Callable | None = None, mask_mod: Callable | None = None, aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple | None = None, block_sparse_tensors: BlockSparseTensorsTorch | None = None,
    dlse: Tensor | None = None, learnable_sink: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dq, dk, dv) from a given out and lse; written to dq, dk and dv where given.

    block_sparse_tensors lists the query blocks of each key block, as FlashAttention-4's backward takes them: refused;
    state the blocks by mask_mod.
    """
    _refuse(None, aux_scalars)
    if block_sparse_tensors is not None:
        raise NotImplementedError(
            "block_sparse_tensors: in the backward entry point are not supported; use mask_mod"
        )
    return gradients(
        dout, q, k, v, out, lse, (dq, dk, dv),
        mask=_mask(q, k, causal, (window_size_left, window_size_right), mask_mod, aux_tensors, None),
        score=_score(softcap, learnable_sink, score_mod, score_mod_bwd, aux_tensors), scale=softmax_scale,
        deterministic=deterministic, cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, max_q=max_seqlen_q, max_k=max_seqlen_k,
        used_q=seqused_q, used_k=seqused_k, dlse=dlse,
    )[:3]  # fmt: skip
