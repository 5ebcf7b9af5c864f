"""onchip.compat.flash_attn under the name flash_attn."""

from onchip.compat import alias

alias(__name__)
