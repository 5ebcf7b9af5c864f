"""Triton backend: plain Triton kernels for every GPU that Triton serves, and for its interpreter on the CPU."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from onchip.problem import Grads, Operands, Output, Problem, Saved
from onchip.schedule import Tiles


def refuse(problem: Problem) -> str | None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if problem.device != "cuda" and not (interpreted and problem.device == "cpu"):
        return f"the tensors are on {problem.device}; it runs on cuda"
    if problem.dtype is torch.float64:
        return "float64: its kernels compute in float32"
    if interpreted and problem.dtype is torch.bfloat16:
        return "bfloat16: Triton's interpreter computes its products wrongly"
    if max(problem.dim, problem.dim_v) > 512:
        return f"head dim {max(problem.dim, problem.dim_v)}: its tiles hold at most 512"
    return None


def tiles(problem: Problem) -> Tiles:
    """Tiles of the forward pass."""
    from onchip.backends.triton.arguments import device_facts
    from onchip.backends.triton.table import config

    chosen = config(problem, "forward", device_facts(0)[0], problem.seqlen_q)
    return Tiles(chosen.tile_m, chosen.tile_n)


def extra_memory(problem: Problem, tiles: Tiles) -> int:
    """delta, in float32; partial results of split keys and tile lists come on top."""
    return 4 * problem.batch * problem.heads_q * problem.seqlen_q


def forward(problem: Problem, operands: Operands, tiles: Tiles) -> Output:
    from onchip.backends.triton import launch

    return launch.forward(problem, operands)


def backward(
    problem: Problem, operands: Operands, saved: Saved, dout: Tensor, dlse: Tensor | None, tiles: Tiles
) -> Grads:
    from onchip.backends.triton import launch

    return launch.backward(problem, operands, saved, dout, dlse)
