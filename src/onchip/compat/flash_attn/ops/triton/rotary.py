"""FlashAttention-2's `flash_attn.ops.triton.rotary`: rotary embedding without a gradient of its own."""

from __future__ import annotations

from torch import Tensor

from onchip.compat.missing import refuse
from onchip.compat.rotation import rotate

__getattr__ = refuse(__name__, "rotary_kernel")


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved=False,
    inplace=False,
    conjugate=False,
) -> Tensor:
    """x (batch, seqlen, heads, dim), or packed with cu_seqlens, turned by its positions plus seqlen_offsets.

    cos, sin (positions, rotary_dim / 2); conjugate turns back. In place where asked, and then x is returned.
    """
    turned = rotate(x, cos, -sin if conjugate else sin, interleaved, seqlen_offsets, cu_seqlens)
    return x.copy_(turned) if inplace else turned
