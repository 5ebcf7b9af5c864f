"""onchip.compat.flash_attn_interface under the name flash_attn_interface."""

from onchip.compat import alias

alias(__name__)
