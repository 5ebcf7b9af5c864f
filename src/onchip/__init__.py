"""onchip: exact attention in O(N) memory, on any machine.

>>> import torch, onchip
>>> q = k = v = torch.randn(1, 1024, 8, 64)
>>> out = onchip.attention(q, k, v, mask=onchip.causal())
"""

from onchip import backends, patterns, plain
from onchip.api import attention, attention_varlen, attention_with_cache
from onchip.backends import cpu as _cpu  # noqa: F401  (onchip.backends.cpu.trace is public)
from onchip.combine import merge
from onchip.inputs import Rotary
from onchip.mask import Mask
from onchip.masks import (
    block_sparse,
    causal,
    chunked,
    dense,
    documents,
    padding,
    prefix,
    sinks,
    where,
    window,
)
from onchip.plan import Plan, plan
from onchip.score import Mod, Score, mod

__version__ = "0.1.0"

__all__ = [
    "Mask",
    "Mod",
    "Plan",
    "Rotary",
    "Score",
    "attention",
    "attention_varlen",
    "attention_with_cache",
    "backends",
    "block_sparse",
    "causal",
    "chunked",
    "dense",
    "documents",
    "mod",
    "merge",
    "padding",
    "patterns",
    "plain",
    "plan",
    "prefix",
    "sinks",
    "where",
    "window",
]
