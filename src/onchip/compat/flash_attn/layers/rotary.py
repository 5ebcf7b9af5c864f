"""FlashAttention-2's `flash_attn.layers.rotary`: rotary position embedding, with gradients.

cos, sin (positions, rotary_dim / 2); seqlen_offsets: an int or (batch,), added to each sequence's positions. The
``_`` forms and inplace=True write to their argument and return it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onchip.compat.missing import refuse
from onchip.compat.rotation import rotate

__getattr__ = refuse(
    __name__, "ApplyRotaryEmb", "ApplyRotaryEmbQKV_", "ApplyRotaryEmbKV_", "_apply_rotary_emb_qkv"
)


def rotate_half(x, interleaved=False):
    """(a, b) -> (-b, a) of the pairs of the last dimension: its halves, or its neighbours where interleaved."""
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.stack((-b, a), -1).flatten(-2) if interleaved else torch.cat((-b, a), -1)


def apply_rotary_emb_torch(x, cos, sin, interleaved=False):
    """x (batch, seqlen, heads, dim) turned; cos and sin of its positions, (seqlen, ...) or (batch, seqlen, ...)."""
    if cos.dim() == 2:
        return rotate(x, cos, sin, interleaved)
    rows = [rotate(x[b : b + 1], cos[b], sin[b], interleaved) for b in range(x.shape[0])]
    return torch.cat(rows) if rows else x


def apply_rotary_emb(
    x, cos, sin, interleaved=False, inplace=False, seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
):  # fmt: skip
    """x (batch, seqlen, heads, dim), or (total, heads, dim) with cu_seqlens, its first rotary_dim turned."""
    turned = rotate(x, cos, sin, interleaved, seqlen_offsets, cu_seqlens)
    return x.copy_(turned) if inplace else turned


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
):  # fmt: skip
    """q and k of qkv (batch, seqlen, 3, heads, dim), or (batch, seqlen, heads_q + 2 * heads_k, dim) with num_heads_q,
    turned in place; cos_k, sin_k: other tables for k."""
    if qkv.dim() == 5:
        parts = qkv[:, :, 0], qkv[:, :, 1]
    else:
        if num_heads_q is None:
            raise ValueError(f"num_heads_q: is None, expected an int for qkv of shape {tuple(qkv.shape)}")
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        parts = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_k]
    tables = (cos, sin), (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
    turned = [rotate(x.clone(), *t, interleaved, seqlen_offsets) for x, t in zip(parts, tables, strict=True)]
    for part, new in zip(parts, turned, strict=True):
        part.copy_(new)
    return qkv


def apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets: int | Tensor = 0):
    """k of kv (batch, seqlen, 2, heads, dim) turned in place."""
    kv[:, :, 0].copy_(rotate(kv[:, :, 0].clone(), cos, sin, interleaved, seqlen_offsets))
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding of qkv, or of q and kv, that keeps its tables; with scale_base, XPos (arXiv 2212.10554)."""

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(self, dim: int, base=10000.0, interleaved=False, scale_base=None, device=None):
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None if scale_base is None else self._compute_scale(device)
        self.register_buffer("scale", scale, persistent=False)
        # By flash_attn's names, which subclasses read.
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _even(self, device: torch.device | str | None) -> Tensor:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _compute_inv_freq(self, device=None) -> Tensor:
        return self.base ** -(self._even(device) / self.dim)

    def _compute_scale(self, device=None) -> Tensor:
        return (self._even(device) / self.dim + 0.4) / 1.4

    def _update_cos_sin_cache(self, seqlen: int, device=None, dtype=None):
        """Tables of seqlen positions, computed in float32 whatever the module was cast to."""
        graph = torch.compiler.is_compiling()  # tables that are kept would tie a graph to their length
        cos, sin = (None, None) if graph else (self._cos_cached, self._sin_cached)
        if (
            cos is not None
            and sin is not None
            and self._seq_len_cached >= seqlen
            and (cos.device, cos.dtype) == (device, dtype)
            and not (self.training and cos.is_inference())
        ):
            return cos, sin, self._cos_k_cached, self._sin_k_cached
        position = torch.arange(seqlen, device=device, dtype=torch.float32)
        angle = position[:, None] * self._compute_inv_freq(device)
        cos, sin = angle.cos(), angle.sin()
        made: tuple[Tensor, Tensor, Tensor | None, Tensor | None] = (cos.to(dtype), sin.to(dtype), None, None)
        if self.scale_base is not None:
            power = (position - seqlen // 2) / self.scale_base
            scale = self._compute_scale(device) ** power[:, None]
            made = tuple(x.to(dtype) for x in (cos * scale, sin * scale, cos / scale, sin / scale))  # type: ignore
        if not graph:
            self._seq_len_cached = seqlen
            self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached = made
        return made

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ):
        """qkv turned in place; or, with kv (batch, seqlen, 2, heads, dim), q turned (a new tensor) and kv in place.

        seqlen_offset: the first position, an int or (batch,), where max_seqlen bounds the last position.
        """
        length = qkv.shape[1] if max_seqlen is None else max_seqlen
        if max_seqlen is None:
            length += int(seqlen_offset.max()) if isinstance(seqlen_offset, Tensor) else seqlen_offset
        cos, sin, cos_k, sin_k = self._update_cos_sin_cache(length, qkv.device, qkv.dtype)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, seqlen_offsets=seqlen_offset)
        tables = (cos, sin) if cos_k is None else (cos_k, sin_k)
        return q, apply_rotary_emb_kv_(kv, *tables, self.interleaved, seqlen_offset)
