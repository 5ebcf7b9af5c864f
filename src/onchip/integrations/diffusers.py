"""onchip inside diffusers: after `register()`, `model.set_attention_backend("onchip")` selects it.

Models of diffusers that still call torch's attention themselves are routed by `onchip.replace_sdpa`.
"""

from __future__ import annotations

from typing import Any

from diffusers.models import attention_dispatch  # type: ignore[import-not-found]
from torch import Tensor

from onchip.integrations.sdpa import sdpa


def register(name: str = "onchip") -> None:
    """Make `name` an attention backend of diffusers, for `set_attention_backend` and `attention_backend`."""
    names = attention_dispatch.AttentionBackendName
    if name not in names._value2member_map_:
        # Backends are members of an enumeration that has no way to extend it.
        member = str.__new__(names, name)
        member._name_, member._value_ = name.upper(), name
        names._member_names_.append(name.upper())
        names._member_map_[name.upper()] = member
        names._value2member_map_[name] = member
    attention_dispatch._AttentionBackendRegistry.register(names(name))(attend)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """The attention function (diffusers fixes its signature).

    query (batch, seqlen_q, heads_q, dim), key and value (batch, seqlen_k, heads_k, dim) -> as query. attn_mask as in
    `sdpa`, or (batch, seqlen_k), bool or added to the scores. NotImplementedError for context parallelism.
    """
    if return_lse or _parallel_config is not None:
        raise NotImplementedError(
            "onchip: diffusers' context parallelism (_parallel_config, return_lse) is not supported"
        )
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)
