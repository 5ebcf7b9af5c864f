"""Dense calls that repeat: what all checks and choices came to, by the facts on which they depend.

A short call takes the host longer than the GPU. The second of its kind does not state its problem again, nor ask which
backend serves it, nor look for its launch. Only plain calls are kept: no tensors but q, k and v, at most a band.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onchip.autograd import Call
from onchip.mask import Mask
from onchip.problem import Operands

_PLAIN = {Tensor, torch.nn.Parameter}
_KEEP = 1024
_calls: dict[tuple, Call] = {}


def facts(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    score: Any,
    scale: Any,
    dropout: Any,
    seed: Any,
    deterministic: Any,
    backend: Any,
) -> tuple | None:
    """All that such a call depends on but its addresses; None of any other call, and of what may be an error.

    Types are looked at where values of several are equal: True is no scale, though it equals 1.
    """
    if type(q) not in _PLAIN or type(k) not in _PLAIN or type(v) not in _PLAIN:
        return None
    # On a CPU no call is kept but those of Triton's interpreter: what runs there depends on more, on traces say.
    if not q.is_cuda and backend != "triton":
        return None
    if score is not None or seed is not None or type(dropout) is not float or dropout != 0.0:
        return None
    if (scale is not None and type(scale) is not float) or (backend is not None and type(backend) is not str):
        return None
    band = None
    if mask is not None:
        if type(mask) is not Mask or mask.names != ("band",):
            return None
        band = mask.band
    try:
        return (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device, band, scale, bool(deterministic), backend,
        )  # fmt: skip
    except RuntimeError:  # nested and sparse tensors have no shape, or no strides
        return None


def recall(whole: tuple | None, q: Tensor, k: Tensor, v: Tensor) -> Call | None:
    """The call of these facts with its tensors; None where none is kept."""
    found = None if whole is None else _calls.get(whole)
    if found is None:
        return None
    _, _, _, layout, mask, score, seed = found.operands
    operands = Operands(q, k, v, layout, mask, score, seed)
    return Call(found.problem, operands, found.backend, found.tiles, found.run, found)


def keep(whole: tuple | None, call: Call) -> None:
    """Keep a call that has run, where its backend can run it again with less."""
    again = getattr(call.backend, "again", None)
    if whole is None or again is None or torch._C._are_functorch_transforms_active():
        return
    run = again(call.problem, call.operands)
    if run is None:
        return
    if len(_calls) >= _KEEP:  # whoever sees so many kinds of calls gains nothing from the oldest of them
        _calls.clear()
    _calls[whole] = replace(call.unbound(), run=run)


def forget() -> None:
    _calls.clear()
