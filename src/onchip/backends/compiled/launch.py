"""Launching a kernel, and launching it again at a fraction of the host time.

Triton examines every argument of every launch: 60 of them take longer than a short kernel runs. What a kernel is
compiled for does not change while shapes, strides, dtypes and mask stay the same: such calls go straight to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from onchip import capture, kept, schedule
from onchip.backends.compiled.relaunch import relaunch
from onchip.problem import Operands, Problem

T = TypeVar("T")
# Masks and scores that are a few numbers (and a sink): nothing of theirs needs a look at each call.
_FEW_PARTS = ((), ("band",))
FEW_SCORES = ((), ("softcap",), ("sink",), ("softcap", "sink"))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_KEEP = 1024
_kept: dict[tuple, Any] = {}
_tables = 0  # how often tables of tiles have changed: what masks keep is of one of them


class Step:
    """A kernel on a grid. `rest`: its arguments after those that differ from call to call; meta: its constants."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], rest: tuple, **meta: Any):
        # Triton 3.10 is to change what holds where nothing is said.
        self.kernel, self.grid, self.rest, self.meta = kernel, grid, rest, {"enable_fp_fusion": True, **meta}
        self.again: Callable[[tuple], None] | None = None

    def run(self, changing: tuple, steady: bool) -> None:
        """steady: nothing differs from other steady runs of this step but addresses, all multiples of 16 bytes; then,
        once there is an `again`, tensors do for the descriptors of them that the first of these runs was given.
        """
        if steady and self.again is not None:
            self.again(changing)
            return
        compiled = self.kernel[self.grid](*changing, *self.rest, **self.meta)
        if steady and not INTERPRETED:
            constants = self.kernel.arg_names[len(changing) + len(self.rest) :]
            rest = (*self.rest, *(self.meta[name] for name in constants))
            self.again = relaunch(compiled, (*self.grid, 1, 1)[:3], changing, rest)


def key(problem: Problem, operands: Operands, place: tuple[Any, ...] | None) -> tuple | None:
    """What determines, beside the mask, every argument but addresses, lengths and seeds; None: a call's own do.

    `place`: the tensors and numbers that say where sequences lie.
    """
    score = operands.score
    if problem.score_parts not in FEW_SCORES:
        return None
    if problem.mask_parts not in _FEW_PARTS and not _stays(problem):
        return None
    q, k, v = operands.q, operands.k, operands.v
    if q.numel() == 0 or k.numel() == 0:  # packed sequences without rows, whose strides are like others'
        return None
    if place is not None:
        place = tuple([x.dtype if isinstance(x, Tensor) else x for x in place])
    return (
        problem,
        q.stride(),
        k.stride(),
        v.stride(),
        operands.mask.band,
        score.softcap,
        None if score.sink is None else score.sink.dtype,
        place,
        q.device.index,
        isinstance(operands.seed, int),
    )


def _stays(problem: Problem) -> bool:
    """Whether what a mask becomes may be kept: not of a cache, whose lengths are on the device; nor of packed sequences
    under rows alone, as they would wait for their lengths, which lists of tiles have done for other masks.
    """
    rows = set(problem.mask_parts) <= {"band", "rows"}
    return problem.layout == "dense" or (problem.layout == "varlen" and not rows)


def prepared(make: Callable[[], T], whole: tuple | None, problem: Problem, operands: Operands) -> T:
    """`make()`, kept where `whole`, made of a `key`, determines it: with the mask, where that is more than numbers."""
    if whole is None:
        return make()
    if problem.mask_parts not in _FEW_PARTS:
        if capture.capturing(problem.device):  # which finds anew, in each replay, what the mask shows
            return make()
        return schedule.keep(problem, operands.layout, operands.mask, ("launch", _tables, *whole), make)
    found = _kept.get(whole)
    if found is None:
        if len(_kept) >= _KEEP:  # whoever sees so many shapes gains nothing from the oldest of them
            _kept.clear()
        found = _kept[whole] = make()
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
    global _tables
    _tables += 1
    _kept.clear()
    kept.forget()
