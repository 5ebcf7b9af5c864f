"""The names of flash_attn 2, flash_attn_interface (3) and flash_attn.cute (4), computed by onchip.

>>> import onchip.compat.flash_attn as flash_attn
>>> out = flash_attn.flash_attn_func(q, k, v, causal=True)

`alias("flash_attn")` makes ``import flash_attn`` mean this package in the running process; the distributions in
``shims/`` do that for libraries that look flash-attn up by its name.
"""

import importlib
import sys

MODULES = {
    "flash_attn": (
        "",
        ".bert_padding",
        ".cute",
        ".cute.block_sparsity",
        ".cute.interface",
        ".flash_attn_interface",
        ".layers",
        ".layers.rotary",
        ".modules",
        ".modules.mha",
        ".ops",
        ".ops.triton",
        ".ops.triton.rotary",
    ),
    "flash_attn_interface": ("",),
}


def alias(name: str) -> None:
    """Make ``import name`` ("flash_attn" or "flash_attn_interface") find onchip's module of that name."""
    for part in MODULES[name]:
        sys.modules[name + part] = importlib.import_module(f"onchip.compat.{name}{part}")
