"""FlashAttention-4's package `flash_attn.cute`, computed by onchip."""

from onchip.compat.flash_attn.cute.interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
)

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func"]
