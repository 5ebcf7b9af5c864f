"""torch's FlopCounterMode counts attention by its visible pairs, whatever operations a backend is made of.

Under a dispatch mode a call is one operator of `ops.py`. Here are the operators' formulas: two products of the visible
pairs forward, five backward. Importing this module registers them; it is imported when a counter is on, since torch's
module of it imports triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import _FlopCounterMode, flop_registry, register_flop_formula

from onchip import ops, spec, traffic  # noqa: F401  (ops defines the operators)
from onchip.mask import Mask
from onchip.problem import Problem
from onchip.tiles import Tiles

_TILES = Tiles(256, 256)  # pairs are the same for any


@dataclass(frozen=True)
class _Lengths:
    """All that a schedule asks of a layout."""

    q_lens: list[int]
    k_lens: list[int]


def forward(stated: dict[str, Any]) -> int:
    q, v = stated["q"], stated["v"]
    return 2 * _pairs(stated) * (q.shape[-1] + v.shape[-1])


def backward(stated: dict[str, Any]) -> int:
    q, v = stated["q"], stated["v"]
    return 2 * _pairs(stated) * (3 * q.shape[-1] + 2 * v.shape[-1])


def with_cache(stated: dict[str, Any]) -> int:
    """The queries over the keys in the cache, new ones included."""
    q, k, v, new = stated["q"], stated["k_cache"], stated["v_cache"], stated.get("k")
    with _disable_current_modes():
        lengths = stated["cache_seqlens"] + (0 if new is None else new.shape[1])
        lengths = lengths if stated["leftpad"] is None else lengths - stated["leftpad"]
        place = _Lengths([q.shape[1]] * q.shape[0], lengths.tolist())
        pairs = _count(q, k, v, place, stated)
    return 2 * pairs * (q.shape[-1] + v.shape[-1])


def _pairs(stated: dict[str, Any]) -> int:
    q, k, v = (stated[name] for name in "qkv")
    with _disable_current_modes():
        if stated["cu_q"] is None:
            place = _Lengths([q.shape[1]] * q.shape[0], [k.shape[1]] * q.shape[0])
        else:
            sides = (("cu_q", "used_q"), ("cu_k", "used_k"))
            lengths = (stated[cu].diff() if stated[used] is None else stated[used] for cu, used in sides)
            place = _Lengths(*(x.tolist() for x in lengths))
        return _count(q, k, v, place, stated)


def _count(q: Tensor, k: Tensor, v: Tensor, place: _Lengths, stated: dict[str, Any]) -> int:
    mask = spec.read(stated["text"], stated["ints"], stated["tensors"])[0]
    mask = Mask() if mask is None else mask
    longest = max(place.q_lens, default=0), max(place.k_lens, default=0)
    device = mask.tensors()[0].device.type if mask.tensors() else "cpu"
    problem = Problem(
        "dense", len(place.q_lens), *longest, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], q.dtype, device, 1.0
    )  # fmt: skip
    return traffic.visible_pairs(problem, place, mask, _TILES)  # type: ignore[arg-type]


def _raw(operator: Any, formula: Callable[[dict[str, Any]], int]) -> Callable[..., int]:
    """The formula as torch calls it, with the operator's own arguments."""

    def raw(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        names = (argument.name for argument in operator.default._schema.arguments)
        return formula({**dict(zip(names, args, strict=False)), **kwargs})

    raw._get_raw = True  # type: ignore[attr-defined]
    return raw


FORMULAS = {
    operator: _raw(operator, formula)
    for operator, formula in (
        (torch.ops.onchip.attention, forward),
        (torch.ops.onchip.attention_backward, backward),
        (torch.ops.onchip.attention_over_cache, with_cache),
        (torch.ops.onchip.attention_with_cache, with_cache),
    )
}
for _operator, _formula in FORMULAS.items():
    if _operator not in flop_registry:
        register_flop_formula(_operator, get_raw=True)(_formula)


def join() -> None:
    """Give the formulas to counters that are on and were made before this module was imported."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, _FlopCounterMode):
            mode.counter.flop_registry.update(FORMULAS)
