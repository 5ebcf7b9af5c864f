"""Looks at masks: which pairs are visible, some rows at a time, for kernels that are shown them as bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from onchip.mask import Mask, Region

# A look takes 17 us beside its arithmetic (Zen 4), so a region is looked at in no more than some 64, and int64
# temporaries take an eighth of the region's bytes each; in a small region a look is of 2^16 pairs, and they take
# 512 KiB.
_LOOKS, _PAIRS = 64, 1 << 16


def elements(mask: Mask) -> tuple:
    """The parts of a mask that the kernels do not compute themselves, and are shown pair by pair."""
    return (*mask.elements, *mask.blocks[1:], *mask.unions)


def shown_shape(region: Region) -> tuple[int, ...]:
    return len(region.batch), region.head1 - region.head0, region.q1 - region.q0, region.k1 - region.k0


def looked_at(mask: Mask, region: Region) -> Tensor:
    """What the mask says of a region's pairs: bool (sequences, heads, queries, keys)."""
    visible = torch.empty(shown_shape(region), dtype=torch.bool, device="cpu")
    region, rows = replace(region), _rows(region)  # the copy's indices go with it
    for q0 in range(region.q0, region.q1, rows):
        q1 = min(q0 + rows, region.q1)
        visible[:, :, q0 - region.q0 : q1 - region.q0] = _said(mask, region, q0, q1)
    return visible


def memory(mask: Mask, region: Region) -> int:
    """Most bytes that `looked_at` takes beside its result, counted in one look of it.

    What a `where` function allocates, only a run of it tells. Memory inside one torch operation is not seen.
    """
    if 0 in shown_shape(region):
        return 0
    with Counted() as counted:
        _said(mask, replace(region), region.q0, min(region.q0 + _rows(region), region.q1))
    return counted.most


def _rows(region: Region) -> int:
    """Queries of one look."""
    sequences, heads, queries, keys = shown_shape(region)
    row = sequences * heads * keys
    return max(max(row * queries // _LOOKS, _PAIRS) // row, 1)


def _said(mask: Mask, region: Region, q0: int, q1: int) -> Tensor:
    part = replace(region, q0=q0, q1=q1)
    # The region's own indices: to make them anew takes another 13 us.
    vars(part).update(b=region.b, h=region.h, q=region.q[:, :, q0 - region.q0 : q1 - region.q0], k=region.k)
    return reduce(torch.logical_and, [element.allow(part) for element in elements(mask)])


class Counted(TorchFunctionMode):
    """The most bytes, over the torch functions called inside, that tensors made here hold at once.

    Not a mode of dispatch: that would import torch._dynamo (a second), which needs sympy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most, self._made = 0, {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:  # no view, nor in place
                self._made[StorageWeakRef(x.untyped_storage())] = x.untyped_storage().nbytes()
        self._made = {ref: size for ref, size in self._made.items() if not ref.expired()}
        self.most = max(self.most, sum(self._made.values()))
        return out
