"""onchip: exact attention in O(N) memory, on any machine.

>>> import torch, onchip
>>> q = k = v = torch.randn(1, 1024, 8, 64)
>>> out = onchip.attention(q, k, v, mask=onchip.causal())
"""

from typing import TYPE_CHECKING, Any

from onchip import backends, nn, patterns, plain
from onchip.api import attention, attention_varlen, attention_with_cache
from onchip.backends import cpu as _cpu  # noqa: F401  (onchip.backends.cpu.trace is public)
from onchip.combine import merge
from onchip.inputs import Rotary
from onchip.integrations.sdpa import replace_sdpa, sdpa
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

if TYPE_CHECKING:
    from onchip import devices, online_softmax, traffic
    from onchip.intensity import Roofline, roofline
    from onchip.recording import record
    from onchip.watching import watch

__version__ = "0.1.0"

# Tools that a call does not need are imported when they are first named.
_LAZY = {
    "devices": "devices",
    "online_softmax": "online_softmax",
    "traffic": "traffic",
    "Roofline": "intensity",
    "roofline": "intensity",
    "record": "recording",
    "watch": "watching",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"onchip.{_LAZY[name]}")
    return module if _LAZY[name] == name else getattr(module, name)


__all__ = [
    "Mask",
    "Mod",
    "Plan",
    "Roofline",
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
    "devices",
    "documents",
    "mod",
    "merge",
    "nn",
    "online_softmax",
    "padding",
    "patterns",
    "plain",
    "plan",
    "prefix",
    "record",
    "replace_sdpa",
    "roofline",
    "sdpa",
    "sinks",
    "traffic",
    "watch",
    "where",
    "window",
]
