"""`onchip explain`: one HTML file, without a reference to any other, from which a person learns FlashAttention."""

from onchip.explain.build import page, unpack, write

__all__ = ["page", "unpack", "write"]
