"""Hopper backend: the forward pass in Gluon for compute capability 9.0, with its copy engine and warpgroup products.

It saves what the Triton backend's backward pass needs, out and lse, so that pass runs there (`BACKWARD`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import cache, lru_cache

import torch
from torch import Tensor

from onchip.backends.compiled import needing_triton
from onchip.problem import Grads, Operands, Output, Problem, Saved
from onchip.tiles import Tiles

BACKWARD = "triton"  # the backend of the backward pass


def refuse(problem: Problem) -> str | None:
    if problem.device != "cuda":
        return f"the tensors are on {problem.device}; it runs on cuda"
    return _machine() or refuse_shape(problem)


def refuse_on(problem: Problem, device: str) -> str | None:
    from onchip import devices

    if devices.device(device).capability != 9:
        return f"the {device} is no Hopper GPU (compute capability 9.0)"
    return refuse_shape(problem)


@cache
def _machine() -> str | None:
    """The reasons that depend on the machine alone."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.version.hip is not None or not torch.cuda.is_available():
        return "there is no CUDA GPU"
    if torch.cuda.get_device_capability() != (9, 0):
        return "the device is no Hopper GPU (compute capability 9.0)"
    return None


def yields(problem: Problem) -> str | None:
    """Why Triton should run it: host time decides where the kernel is shorter than that.

    A call takes 45 us here and 26 in Triton (an H200's host, 2026-12-02), whose kernels do 16 GFLOP in 45 us at
    350 TFLOP/s.
    """
    work = (
        2
        * (problem.dim + problem.dim_v)
        * problem.batch
        * problem.heads_q
        * problem.seqlen_q
        * problem.seqlen_k
    )
    return "under 16 GFLOP host time decides, and Triton's is shorter" if work < 1.6e10 else None


@lru_cache(maxsize=4096)
def refuse_shape(problem: Problem) -> str | None:
    """The reasons that do not depend on the machine."""
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"{problem.dtype}: its products take float16 and bfloat16"
    for name in ("dim", "dim_v"):
        size = getattr(problem, name)
        if size > 256 or size % 8 != 0:
            return f"{name} {size}: its tiles hold at most 256, in steps of 8 (16 bytes)"
    if problem.layout not in ("dense", "varlen"):
        return f"{problem.layout} layout: its copy engine reads dense and packed sequences"
    if problem.dropout > 0:
        return "dropout"
    if "bias" in problem.score_parts:
        return "an additive bias"
    if problem.num_splits > 1:
        return "num_splits: it does not split the keys"
    tiles_q = -(-problem.seqlen_q * problem.group // 128) * problem.heads_k * problem.batch
    if problem.layout == "dense" and problem.seqlen_k >= 2048 and tiles_q <= 32:
        return f"{tiles_q} tiles of queries for {problem.seqlen_k} keys: it does not split the keys"
    return None


@lru_cache(maxsize=4096)
def tiles(problem: Problem) -> Tiles:
    from onchip.backends.hopper.table import config
    from onchip.backends.hopper.variant import lead, packs

    chosen = config(problem)
    return Tiles(chosen.tile_m, chosen.tile_n, lead(problem, chosen, packs(problem, chosen.tile_m, False)))


def extra_memory(
    problem: Problem, operands: Operands, step: str, needs: Iterable[str], device: str | None = None
) -> int:
    """Of the forward pass: what a mask of more than a band becomes, and a copy of v where nobody sees some key."""
    if not set(problem.mask_parts) - {"band"}:
        return 0
    from onchip.backends.compiled import intervals, lists
    from onchip.backends.hopper.table import config
    from onchip.backends.hopper.unseen import hides
    from onchip.backends.hopper.variant import packs

    chosen = config(problem)
    pack = packs(problem, chosen.tile_m, operands.mask.dependence(problem)[1])
    own, v = Tiles(chosen.tile_m // pack, chosen.tile_n), operands.v
    copy = v[..., 0].numel() + v.numel() * v.element_size() if hides(problem, operands, own) else 0
    listed = lists.size(problem, operands, own, False, rows=True)
    return copy + listed + intervals.size(problem, operands)


def forward(problem: Problem, operands: Operands, tiles: Tiles) -> Output:
    return needing_triton("hopper.launch").forward(problem, operands)


def backward(
    problem: Problem, operands: Operands, saved: Saved, dout: Tensor, dlse: Tensor | None, tiles: Tiles
) -> Grads:
    raise NotImplementedError(f"the backward pass of a forward pass here runs in the backend {BACKWARD!r}")


def copies(tensor: Tensor) -> bool:
    """Whether a tensor of these strides is copied first: the copy engine steps by 16 bytes."""
    return _copies(tensor.shape, tensor.stride())


@lru_cache(maxsize=4096)  # three looks a call, of 2 us each where they are not kept
def _copies(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    *outer, last = strides
    steps = [s for s, n in zip(outer, shape[:-1], strict=True) if n > 1]
    return last != 1 or any(s % 8 or s <= 0 for s in steps)
