"""`sdpa`: torch's scaled_dot_product_attention with all of its arguments, and `replace_sdpa` to route models to it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from onchip.api import attention
from onchip.mask import Mask
from onchip.masks import causal, dense
from onchip.score import Score

_CAUSAL = {align: causal(align=align) for align in ("top_left", "bottom_right")}  # kept: their schedules are


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, computed by onchip.

    query (..., heads_q, seqlen_q, dim), key and value (..., heads_k, seqlen_k, dim | dim_v) with any leading
    dimensions that broadcast, none included; returns (..., heads_q, seqlen_q, dim_v). attn_mask broadcasts to (...,
    heads_q, seqlen_q, seqlen_k): bool, True = visible, floating, added to the scores (and gets a gradient), or one of
    torch.nn.attention.bias. is_causal aligns the first query with the first key; beside an attn_mask both hold, as in
    torch's fused CPU kernel. dropout_p holds whatever the mode. enable_gqa: heads_q may be a multiple of the heads of
    key and of value, which may differ.

    A query that sees no key gets 0. Raises ValueError or TypeError for what does not fit; NotImplementedError for
    nested tensors.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, expected a tensor (..., heads, seqlen, dim)")
    if query.is_nested or key.is_nested or value.is_nested:
        raise NotImplementedError(
            "query, key, value: nested tensors are not supported; use onchip.attention_varlen"
        )
    if isinstance(scale, Tensor) and scale.dim() == 0 and not scale.requires_grad:
        scale = float(scale)
    mask, bias = (None, None) if attn_mask is None else _read_mask(attn_mask)
    if query.dim() != 4 or query.shape[:-2] != key.shape[:-2] or key.shape[:-2] != value.shape[:-2]:
        return _broadcast(query, key, value, mask, bias, is_causal, dropout_p, scale, enable_gqa)
    score = None if bias is None else Score(bias=bias)
    mask = _both(mask, is_causal)
    return attention(query, key, value, mask=mask, score=score, scale=scale, dropout=dropout_p, layout="bhsd")  # type: ignore


def _both(mask: Mask | Tensor | None, is_causal: bool) -> Mask | None:
    mask = dense(mask) if isinstance(mask, Tensor) else mask
    if is_causal:
        return _CAUSAL["top_left"] if mask is None else mask & _CAUSAL["top_left"]
    return mask


def _read_mask(attn_mask: Tensor) -> tuple[Mask | Tensor | None, Tensor | None]:
    """(mask, bias): a bool tensor stays one, to be broadcast first."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if isinstance(attn_mask, CausalBias):
        upper = attn_mask.variant is CausalVariant.UPPER_LEFT
        return _CAUSAL["top_left" if upper else "bottom_right"], None
    if attn_mask.dtype is torch.bool:
        return attn_mask, None
    if not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask: has dtype {attn_mask.dtype}, expected bool or a floating dtype")
    return None, attn_mask


def _broadcast(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    bias: Tensor | None,
    is_causal: bool,
    dropout: float,
    scale: float | None,
    gqa: bool,
) -> Tensor:
    """Inputs with other than 4 dimensions, or with leading dimensions that differ, as (batch, heads, seqlen, dim)."""
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.dim() < 2:
            raise ValueError(f"{name}: has shape {tuple(x.shape)}, expected at least 2 dimensions")
    shapes = [x.shape[:-2] for x in (q, k, v)]
    if gqa:
        if not all(shapes):
            raise ValueError("enable_gqa: is True for tensors without a dimension of heads")
        lead = _common(*(s[:-1] for s in shapes))
        heads_q, *heads = (s[-1] for s in shapes)
        if heads[0] != heads[1] and all(n and heads_q % n == 0 for n in heads):
            # A common multiple, told without math.lcm, which takes no symbols of a graph.
            most = max(heads) if max(heads) % min(heads) == 0 else heads_q
            k, v = (x.repeat_interleave(most // n, -3) for x, n in zip((k, v), heads, strict=True))
            heads = [most, most]
        leads = [(*lead, n) for n in (heads_q, *heads)]
    else:
        leads = [_common(*shapes)] * 3
    out_lead = leads[0]

    def four(x: Tensor, lead: tuple[int, ...]) -> Tensor:
        # A single leading dimension is the heads where they are grouped, else the batch.
        split = len(lead) - 1 if gqa or len(lead) > 1 else len(lead)
        batch, heads = math.prod(lead[:split]), math.prod(lead[split:])
        return x.expand(*lead, *x.shape[-2:]).reshape(batch, heads, *x.shape[-2:])

    def pairs(x: Tensor) -> Tensor:
        """A mask, or bias, that still broadcasts wherever it did."""
        if x.dim() <= 2 or len(out_lead) == 2:
            return x
        if len(out_lead) == 1:
            return x.unsqueeze(0 if gqa else 1)
        return four(x, out_lead)

    mask = _both(pairs(mask) if isinstance(mask, Tensor) else mask, is_causal)
    score = None if bias is None else Score(bias=pairs(bias))
    tensors = (four(x, lead) for x, lead in zip((q, k, v), leads, strict=True))
    out = attention(*tensors, mask=mask, score=score, scale=scale, dropout=dropout, layout="bhsd")
    assert isinstance(out, Tensor)
    return out.reshape(*out_lead, *out.shape[-2:])


def _common(*shapes: torch.Size) -> torch.Size:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise ValueError(
            f"query, key, value: have leading dimensions {', '.join(str(tuple(s)) for s in shapes)}, which should "
            "broadcast; fewer key heads need enable_gqa=True"
        ) from None


@wraps(sdpa)
def _stand_in(*args: Any, **kwargs: Any) -> Tensor:
    """`sdpa` where it stands for torch's function: what the end of `replace_sdpa` must find is not the user's own."""
    return sdpa(*args, **kwargs)


def _named(function: Callable) -> list[tuple[ModuleType, str]]:
    """(module, name) of every module's global that is this function."""
    return [
        (module, name)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and not module.__name__.startswith(("torch._C", __name__))
        for name, value in list(module.__dict__.items())
        if value is function
    ]


@contextmanager
def replace_sdpa() -> Iterator[None]:
    """Route every call of F.scaled_dot_product_attention to `sdpa`, in all threads, until the context ends.

    Every module's name for torch's function is rebound, and at the end those of modules imported meanwhile, too.
    torch.nn.MultiheadAttention's fused path, which does not call it, is switched off. Names of other kinds (attributes
    of classes, default arguments) stay bound as they are.
    """
    original = torch.nn.functional.scaled_dot_product_attention
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for module, name in _named(original):
            setattr(module, name, _stand_in)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, name in _named(_stand_in):
            setattr(module, name, original)
