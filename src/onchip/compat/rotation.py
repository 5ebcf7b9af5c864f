"""Rotary embedding of dense and packed tensors with an offset per sequence, through onchip.Rotary."""

from __future__ import annotations

import torch
from torch import Tensor

import onchip
from onchip.compat.translate import offsets


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """x (batch, seqlen, heads, dim), or (total, heads, dim) with cu_seqlens, turned to its positions."""
    rotary = onchip.Rotary(cos, sin, interleaved)
    if cu_seqlens is None:
        start = seqlen_offsets[:, None] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        positions = (torch.arange(x.shape[1], device=x.device) + start).expand(x.shape[:2])
    else:
        batch, positions = offsets(cu_seqlens, x)
        start = seqlen_offsets[batch] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        x, positions = x[None], (positions + start)[None]
    known = x.device.type == "cpu" and positions.numel() > 0
    rotary.check(x.shape[-1], int(positions.max()) if known else None)
    turned = rotary.rotate(x, positions)
    return turned if cu_seqlens is None else turned[0]
