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
    want = "(batch, seqlen, heads, dim)" if cu_seqlens is None else "(total, heads, dim) with cu_seqlens"
    if x.dim() != want.count(",") + 1:
        raise ValueError(f"x: has shape {tuple(x.shape)}, expected {want}")
    if isinstance(seqlen_offsets, Tensor):
        seqlen_offsets = seqlen_offsets.expand(x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1)
    if cu_seqlens is None:
        start = seqlen_offsets[:, None] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        positions = (torch.arange(x.shape[1], device=x.device) + start).expand(x.shape[:2])
    else:
        batch, positions = offsets(cu_seqlens, x)
        start = seqlen_offsets[batch] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        x, positions = x[None], (positions + start)[None]
    last = None  # a graph, and the host beside a GPU, knows it only where positions are counted from a number
    if cu_seqlens is None and not isinstance(seqlen_offsets, Tensor):
        last = x.shape[1] - 1 + seqlen_offsets
    elif x.device.type == "cpu" and not torch.compiler.is_compiling() and positions.numel() > 0:
        last = int(positions.max())
    rotary.check(x.shape[-1], last)
    turned = rotary.rotate(x, positions)
    return turned if cu_seqlens is None else turned[0]
