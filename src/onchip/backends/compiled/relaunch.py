"""Launching a compiled kernel again, with nothing but other addresses.

A short kernel's launch takes the host longer than the kernel takes the GPU. Most of that is looking at arguments: what
is known of them from the first launch is not looked at again.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

# What Triton 3.6's launcher of a kernel with tensor descriptors consists of.
_AROUND = {"launcher", "tensordesc_indices", "tensordesc_meta"}
_MAPS = 256  # kept of each descriptor, by address: 400 bytes each


def fields_of(descriptor: Any) -> dict[str, Any]:
    """All that a tensor descriptor is but its tensor."""
    return {name: value for name, value in descriptor.__dict__.items() if name != "base"}


def described(kind: type, tensor: Tensor, fields: dict[str, Any]) -> Any:
    """A tensor descriptor whose `fields_of` are known: its own checks take longer than all else of a launch."""
    made = object.__new__(kind)
    made.__dict__ = fields.copy()
    made.base = tensor
    return made


class Descriptors:
    """The tensor descriptors among a kernel's arguments, for which later launches are given the tensors alone."""

    def __init__(self, first: tuple):
        """first: the arguments of the first launch."""
        self.made = {i: (type(x), fields_of(x)) for i, x in enumerate(first) if hasattr(x, "block_shape")}

    def of(self, i: int, tensor: Tensor) -> Any:
        kind, fields = self.made[i]
        return described(kind, tensor, fields)

    def filled(self, changing: tuple) -> tuple:
        """The arguments, with descriptors where tensors stand for them."""
        found = [*changing]
        for i in self.made:
            if isinstance(found[i], Tensor):
                found[i] = self.of(i, found[i])
        return tuple(found)


def relaunch(compiled: Any, grid: tuple[int, int, int], first: tuple, rest: tuple) -> Callable[[tuple], None]:
    """`compiled[grid](*changing, *rest)` without what it makes for hooks (of a profiler) where there are none.

    That is a quarter of its time in Python. torch's Inductor too calls `run` with these arguments, which are the same
    in Triton 3.6 and 3.9. A kernel is on one device for as long as it lives, and is launched while that is current.
    first: the changing arguments of the launch before.
    """
    from triton import knobs
    from triton.runtime import driver

    usual, function, packed, run = compiled[grid], compiled.function, compiled.packed_metadata, compiled.run
    device, stream_of = driver.active.get_current_device(), driver.active.get_current_stream
    descriptors = Descriptors(first)
    bare = _bare(run, (*grid, function, packed), descriptors, first, rest)

    def again(changing: tuple) -> None:
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        # A chain of hooks says which it has; whatever else stands here is left to Triton.
        if getattr(enter, "calls", True) or getattr(leave, "calls", True):
            usual(*descriptors.filled(changing), *rest)
        elif bare is not None:
            bare(stream_of(device), changing)
        else:
            made = descriptors.filled(changing)
            run(*grid, stream_of(device), function, packed, None, None, None, *made, *rest)

    return again


def _bare(
    run: Any, fixed: tuple, descriptors: Descriptors, first: tuple, rest: tuple
) -> Callable[[int, tuple], None] | None:
    """Triton 3.6's launcher of a kernel on NVIDIA GPUs without the way to it; None for what else there may be.

    On that way it asks each argument whether it is a tensor descriptor: with 41 arguments, a quarter of the launch
    (an H200's host, 2026-12-01: 6 of 21 us). It asks a tensor for its address, and the driver what that is an address
    of; a number is taken as it is (another host, 2026-12-02: 8.9 us for 14.4, with three tensors). And a descriptor
    takes 2 us to encode, though only its address differs.
    """
    found = _inner(run)
    if found is None:
        return None
    launch, described_at = found
    x, y, z, function, packed = fixed
    how = run.launch_cooperative_grid, run.launch_pdl, None, None, packed, None, None, None
    expanded = sys.modules[type(run).__module__].make_tensordesc_arg
    # The last first, as each takes the place of one argument by several.
    maps: list[tuple[int, Any, dict[int, list]]] = [(i, layout, {}) for i, layout in reversed(described_at)]
    tensors = [i for i, arg in enumerate(first) if isinstance(arg, Tensor) and i not in descriptors.made]
    fields = {
        i: [isinstance(x, Tensor) for x in arg] for i, arg in enumerate(first) if isinstance(arg, tuple)
    }
    views = [
        i for i, are in fields.items() if any(are) and not any(are[1:])
    ]  # most: a tensor and its strides
    others = [i for i, are in fields.items() if any(are[1:])]
    # Whoever launches keeps the tensors of these.
    rest = _addresses(tuple(_addresses(x) if isinstance(x, tuple) else x for x in rest))

    def bare(stream: int, changing: tuple) -> None:
        flat = [*changing, *rest]
        for i in views:
            tensor, *strides = flat[i]
            flat[i] = tensor.data_ptr(), *strides
        for i in others:
            flat[i] = _addresses(flat[i])
        for i in tensors:
            flat[i] = flat[i].data_ptr()
        for i, layout, known in maps:
            given = flat[i]
            if isinstance(given, Tensor):
                address = given.data_ptr()
                made = known.get(address)
                if made is None:
                    made = expanded(descriptors.of(i, given), layout)
                    if len(known) >= _MAPS:
                        known.clear()
                    if (
                        layout is not None
                    ):  # else it is made of the tensor itself, which nothing here may hold
                        known[address] = made
            else:
                made = expanded(given, layout)
            flat[i : i + 1] = made
        launch(x, y, z, stream, function, *how, *flat)

    return bare


def _inner(run: Any) -> tuple[Any, list[tuple[int, Any]]] | None:
    """The function that launches, inside of Triton 3.6's launcher, and where it takes descriptors, of which layouts."""
    import triton

    # Which wheels for other GPUs lack.
    if type(run).__module__ != "triton.backends.nvidia.driver" or not triton.__version__.startswith("3.6."):
        return None
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    if not inspect.isfunction(run.launch):
        return run.launch, []
    inside = inspect.getclosurevars(run.launch).nonlocals
    if inside.keys() != _AROUND:  # somebody's, around Triton's
        return None
    return inside["launcher"], list(
        zip(sorted(inside["tensordesc_indices"]), inside["tensordesc_meta"], strict=True)
    )


def _addresses(fields: tuple) -> tuple:
    """With tensors' addresses in place of them."""
    return tuple([x.data_ptr() if isinstance(x, Tensor) else x for x in fields])
