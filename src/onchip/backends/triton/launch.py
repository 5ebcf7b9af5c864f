"""Launching a kernel, and launching it again at a fraction of the host time.

Triton examines every argument of every launch: 60 of them take longer than a short kernel runs. What a kernel is
compiled for does not change while shapes, strides, dtypes and mask stay the same: such calls go straight to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from onchip.backends.triton.arguments import Launch
from onchip.backends.triton.planning import INTERPRETED

T = TypeVar("T")
_KEEP = 1024
_kept: dict[tuple, Any] = {}


class Step:
    """A kernel on a grid. `rest`: its arguments after those that differ from call to call; meta: its constants."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], rest: tuple, **meta: Any):
        self.kernel, self.grid, self.rest, self.meta = kernel, grid, rest, meta
        self.again: tuple[Callable[..., None], tuple] | None = None

    def run(self, changing: tuple, steady: bool) -> None:
        """steady: nothing differs from other steady runs of this step but addresses, all multiples of 16 bytes."""
        if steady and self.again is not None:
            relaunch, rest = self.again
            relaunch(*changing, *rest)
            return
        compiled = self.kernel[self.grid](*changing, *self.rest, **self.meta)
        if steady and not INTERPRETED:
            constants = self.kernel.arg_names[len(changing) + len(self.rest) :]
            rest = (*self.rest, *(self.meta[name] for name in constants))
            self.again = compiled[(*self.grid, 1, 1)[:3]], rest


def prepared(make: Callable[..., T], launch: Launch, name: str, more: Any = None) -> T:
    """`make(launch, name)`, kept where the launch's key and `more` determine it."""
    key = launch.key
    if key is None:
        return make(launch, name)
    key = (name, key, more)
    found = _kept.get(key)
    if found is None:
        if len(_kept) >= _KEEP:  # whoever sees so many shapes gains nothing from the oldest of them
            _kept.clear()
        found = _kept[key] = make(launch, name)
    return found


def aligned(*tensors: Tensor | None) -> bool:
    """Whether all addresses are multiples of 16 bytes, for which kernels are compiled apart."""
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
    return bits % 16 == 0


def forget() -> None:
    """Let every kept launch be prepared anew, as after a change of the tile table."""
    _kept.clear()
