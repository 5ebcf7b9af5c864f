"""Modules: `MultiheadAttention` with torch's interface; `SelfAttention` with rotary embedding and a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from onchip.api import attention, attention_varlen, attention_with_cache
from onchip.inputs import Rotary
from onchip.mask import Mask
from onchip.masks import causal, dense, window
from onchip.score import Score

__all__ = ["Cache", "MultiheadAttention", "SelfAttention"]


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention, its arguments and state_dict, computed by onchip in O(N) memory.

    need_weights is False by default: the weights are N x N. add_bias_kv and add_zero_attn are not implemented.
    """

    def __init__(
        self, embed_dim, num_heads, dropout=0.0, bias=True, add_bias_kv=False, add_zero_attn=False, kdim=None,
        vdim=None, batch_first=False, device=None, dtype=None,
    ):  # fmt: skip
        if add_bias_kv or add_zero_attn:
            raise NotImplementedError("add_bias_kv, add_zero_attn: are not implemented")
        super().__init__(
            embed_dim, num_heads, dropout, bias, kdim=kdim, vdim=vdim, batch_first=batch_first, device=device,
            dtype=dtype,
        )  # fmt: skip

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """query (seqlen_q, batch, embed_dim), key and value (seqlen_k, batch, kdim | vdim); batch first where so built,
        or without batch.

        key_padding_mask (batch, seqlen_k) and attn_mask (seqlen_q, seqlen_k) or (batch * heads, seqlen_q, seqlen_k):
        bool, True = hidden (as in torch), or floating, added to the scores. is_causal: attn_mask, if given, is the
        causal mask, and need not be read. Returns out, shaped as query, and the weights (batch, seqlen_q, seqlen_k),
        per head (batch, heads, ...) with average_attn_weights=False, or None. Raises ValueError or TypeError for masks
        of other shapes or dtypes.
        """
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dim() != query.dim() or x.dim() not in (2, 3):
                raise ValueError(
                    f"{name}: has shape {tuple(x.shape)}, expected 3 dims, or 2 without batch, of all"
                )
        if query.dim() == 2:
            padding = None if key_padding_mask is None else key_padding_mask[None]
            parts = self._attend(
                query[None], key[None], value[None], padding, attn_mask, is_causal, need_weights
            )
            out, weights = parts[0][0], None if parts[1] is None else parts[1][0]
        else:
            q, k, v = (x if self.batch_first else x.transpose(0, 1) for x in (query, key, value))
            out, weights = self._attend(q, k, v, key_padding_mask, attn_mask, is_causal, need_weights)
            out = out if self.batch_first else out.transpose(0, 1)
        return out, weights.mean(-3) if weights is not None and average_attn_weights else weights

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Any,
        attn_mask: Any,
        is_causal: bool,
        weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)) for x in self._project(query, key, value))
        mask, bias = causal(align="top_left") if is_causal else None, None
        if is_causal:
            attn_mask = None
        batch, seqlen_q, seqlen_k = query.shape[0], query.shape[1], key.shape[1]
        if padding is not None:
            _check_mask("key_padding_mask", padding, (batch, seqlen_k))
            padding = padding[:, None, None]
        if attn_mask is not None:
            each = (batch * self.num_heads, seqlen_q, seqlen_k)
            _check_mask("attn_mask", attn_mask, (seqlen_q, seqlen_k), each)
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.unflatten(0, (batch, self.num_heads))
        for given in (padding, attn_mask):
            if given is None:
                continue
            if given.dtype is torch.bool:
                mask = dense(~given) if mask is None else mask & dense(~given)
            else:
                bias = given if bias is None else bias + given
        score = None if bias is None else Score(bias=bias)
        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, mask=mask, score=score, dropout=dropout)
        assert isinstance(out, Tensor)
        found = _weights(q, k, mask, score) if weights else None
        return self.out_proj(out.flatten(2)), found

    def _project(self, *inputs: Tensor) -> list[Tensor]:
        if self._qkv_same_embed_dim:
            matrices = self.in_proj_weight.chunk(3)
        else:
            matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [linear(x, w, b) for x, w, b in zip(inputs, matrices, biases, strict=True)]


def _check_mask(name: str, given: Any, *shapes: tuple[int, ...]) -> None:
    """Here, since what attention is given has other names and dimensions."""
    if not isinstance(given, Tensor) or not (given.dtype is torch.bool or given.is_floating_point()):
        found = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(f"{name}: got {found}, expected a tensor of bool or a floating dtype")
    if not any(tuple(given.shape) == shape for shape in shapes):
        want = " or ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{name}: has shape {tuple(given.shape)}, expected {want}")


def _weights(q: Tensor, k: Tensor, mask: Mask | None, score: Score | None) -> Tensor:
    """The weights (batch, heads, seqlen_q, seqlen_k) are what attention makes of a unit matrix.

    Of 512 columns at most at a time: kernels hold no wider values.
    """
    unit = torch.eye(k.shape[1], dtype=q.dtype, device=q.device)[None, :, None].expand(*k.shape[:3], -1)
    found = [attention(q, k, part, mask=mask, score=score) for part in unit.split(512, -1)]
    return torch.cat(found, -1).transpose(1, 2)  # type: ignore[arg-type]


class Cache:
    """Keys and values of a batch of sequences while they are decoded: (batch, capacity, heads_k, dim) each."""

    def __init__(
        self, batch: int, capacity: int, heads_k: int, dim: int, dtype: Any = None, device: Any = None
    ):
        self.k = torch.zeros(batch, capacity, heads_k, dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)


class SelfAttention(nn.Module):
    """Projections, rotary embedding, attention, projection: x (batch, seqlen, dim) -> the same shape.

    >>> layer = SelfAttention(dim=256, heads=8, heads_k=2)
    >>> y = layer(torch.randn(2, 100, 256))
    >>> cache = layer.cache(batch=2, capacity=512)
    >>> y = layer(prompt, cache=cache)  # then one token at a time, under torch.no_grad()

    heads_k: fewer key than query heads (grouped). is_causal, window (left, right): who sees whom; window=(1023, 0) is
    a sliding window of 1024 tokens. rotary_base: None for no rotary embedding. dropout: on the softmax weights, in
    training.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        heads_k: int | None = None,
        *,
        is_causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        rotary_base: float | None = 10000.0,
        dropout: float = 0.0,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        heads_k = heads if heads_k is None else heads_k
        for name, count in (("heads", heads), ("heads_k", heads_k)):
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{name}: got {count!r}, expected an int of at least 1")
        if dim % heads:
            raise ValueError(f"dim: got {dim}, expected a multiple of heads = {heads}")
        if heads % heads_k:
            raise ValueError(f"heads_k: got {heads_k}, expected a divisor of heads = {heads}")
        self.heads, self.heads_k, self.head_dim = heads, heads_k, dim // heads
        if rotary_base is not None and self.head_dim % 2:
            raise ValueError(
                f"dim: gives heads of {self.head_dim}, expected an even number for rotary embedding"
            )
        self.rotary_base, self.dropout = rotary_base, dropout
        self.mask = _mask(is_causal, window)
        width = (heads + 2 * heads_k) * self.head_dim
        self.qkv = nn.Linear(dim, width, bias=bias, device=device, dtype=dtype)
        self.out = nn.Linear(dim, dim, bias=bias, device=device, dtype=dtype)
        self._rotary: Rotary | None = None

    def cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for `batch` sequences of up to `capacity` tokens."""
        weight = self.qkv.weight
        return Cache(batch, capacity, self.heads_k, self.head_dim, weight.dtype, weight.device)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """x (batch, seqlen, dim); with cu_seqlens, packed sequences (total, dim).

        With a cache (inference only) x holds the next tokens of each sequence, whose keys and values are appended.
        """
        if cu_seqlens is not None and cache is not None:
            raise NotImplementedError("cu_seqlens: packed sequences with a cache are not implemented")
        if x.dim() != (3 if cu_seqlens is None else 2):
            want = "(batch, seqlen, dim)" if cu_seqlens is None else "(total, dim) with cu_seqlens"
            raise ValueError(f"x: has shape {tuple(x.shape)}, expected {want}")
        sizes = (self.heads, self.heads_k, self.heads_k)
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(sizes, dim=-2)
        if cache is not None:
            rotary = self._tables(cache.k.shape[1], x.device)
            out = attention_with_cache(
                q, cache.k, cache.v, k=k, v=v, cache_seqlens=cache.lengths, rotary=rotary, mask=self.mask
            )
            cache.lengths += x.shape[1]
            return self.out(out.flatten(-2))  # type: ignore[union-attr]
        q, k = self._turn(cu_seqlens, q, k)
        dropout = self.dropout if self.training else 0.0
        if cu_seqlens is None:
            out = attention(q, k, v, mask=self.mask, dropout=dropout)
        else:
            out = attention_varlen(
                q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, mask=self.mask, dropout=dropout
            )
        return self.out(out.flatten(-2))  # type: ignore[union-attr]

    def _turn(self, cu_seqlens: Tensor | None, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k turned to their positions, counted from the start of each sequence."""
        if self.rotary_base is None:
            return q, k
        rotary = self._tables(q.shape[-3], q.device)
        assert rotary is not None
        positions = torch.arange(q.shape[-3], device=q.device)
        if cu_seqlens is None:
            positions = positions.expand(q.shape[:2])
            return rotary.rotate(q, positions), rotary.rotate(k, positions)
        sequence = torch.searchsorted(cu_seqlens.long(), positions, right=True) - 1
        positions = (positions - cu_seqlens[sequence])[None]
        return rotary.rotate(q[None], positions)[0], rotary.rotate(k[None], positions)[0]

    def _tables(self, positions: int, device: torch.device) -> Rotary | None:
        if self.rotary_base is None:
            return None
        if torch.compiler.is_compiling():  # tables that are kept would tie the graph to their length
            return _rotary(positions, self.head_dim, self.rotary_base, device)
        found = self._rotary
        if found is None or found.cos.shape[0] < positions or found.cos.device != device:
            found = self._rotary = _rotary(positions, self.head_dim, self.rotary_base, device)
        return found


def _rotary(positions: int, dim: int, base: float, device: torch.device) -> Rotary:
    power = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
    angle = torch.arange(positions, device=device)[:, None] * base**-power
    return Rotary(angle.cos(), angle.sin())


def _mask(is_causal: bool, sides: tuple[int | None, int | None] | None) -> Mask | None:
    if sides is None:
        return causal() if is_causal else None
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        raise TypeError(f"window: got {sides!r}, expected (left, right)")
    return window(sides[0], 0 if is_causal else sides[1])
