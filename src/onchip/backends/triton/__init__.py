"""Triton backend: plain Triton kernels for every GPU that Triton serves, and for its interpreter on the CPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from functools import cache, lru_cache

import torch
from torch import Tensor

from onchip.backends.compiled import needing_triton
from onchip.inputs import Rotary
from onchip.layout import Cache
from onchip.problem import Grads, Operands, Output, Problem, Saved
from onchip.tiles import Tiles

_INTERPRETED = (
    os.environ.get("TRITON_INTERPRET") == "1"
)  # chosen once for a process, when kernels are defined


def refuse(problem: Problem) -> str | None:
    if not _installed():
        return "triton is not installed"
    if problem.device != "cuda" and not (_INTERPRETED and problem.device == "cpu"):
        return f"the tensors are on {problem.device}; it runs on cuda"
    if _INTERPRETED and problem.dtype is torch.bfloat16:
        return "bfloat16: Triton's interpreter computes its products wrongly"
    return refuse_on(problem)


def refuse_on(problem: Problem, device: str | None = None) -> str | None:
    """The reasons that do not depend on the machine: its kernels are for every GPU."""
    if problem.dtype is torch.float64:
        return "float64: its kernels compute in float32"
    if max(problem.dim, problem.dim_v) > 512:
        return f"head dim {max(problem.dim, problem.dim_v)}: its tiles hold at most 512"
    return None


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=4096)
def tiles(problem: Problem) -> Tiles:
    """Tiles of the forward pass."""
    from onchip.backends.triton.planning import device_facts
    from onchip.backends.triton.table import config

    chosen = config(problem, "forward", device_facts(0), problem.seqlen_q)
    return Tiles(chosen.tile_m, chosen.tile_n)


def extra_memory(
    problem: Problem, operands: Operands, step: str, needs: Iterable[str], device: str | None = None
) -> int:
    from onchip.backends.triton import planning

    facts = planning.known_facts(device)
    if step == "forward":
        return planning.forward_memory(problem, operands, facts)
    return planning.backward_memory(problem, operands, needs, facts)


def forward(problem: Problem, operands: Operands, tiles: Tiles) -> Output:
    return needing_triton("triton.forward_pass").forward(problem, operands)


def again(problem: Problem, operands: Operands) -> Callable[[Operands], Output | None] | None:
    return needing_triton("triton.forward_pass").again(problem, operands)


def append(
    layout: Cache,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary: Rotary | None,
) -> Tensor:
    return needing_triton("triton.append_pass").append(layout, q, k_cache, v_cache, k, v, rotary)


def backward(
    problem: Problem, operands: Operands, saved: Saved, dout: Tensor, dlse: Tensor | None, tiles: Tiles
) -> Grads:
    return needing_triton("triton.backward_pass").backward(problem, operands, saved, dout, dlse)
