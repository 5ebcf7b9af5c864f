"""Gradients of a score's tensors: room for what the native kernels sum, and the last steps in torch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onchip.backends.cpu import arguments, isa as isas
from onchip.problem import Problem, Saved
from onchip.score import Score


@dataclass(eq=False)
class ScoreGrads:
    problem: Problem
    score: Score
    saved: Saved
    keep: list
    bias: Tensor | None = None
    alibi: Tensor | None = None
    delta: Tensor | None = None
    sums: list[int] = field(default_factory=list)

    def start(self, call: arguments.Call) -> None:
        """State the room for the sums."""
        problem, needs = self.problem, self.saved.needs
        size = problem.batch, problem.heads_q
        if "bias" in needs:
            assert self.score.bias is not None
            self._start_bias(call, (1,) * (4 - self.score.bias.dim()) + tuple(self.score.bias.shape))
        if "alibi" in needs:
            self.alibi = torch.zeros(chunks(call), *size, device="cpu")
            call.dalibi = self.alibi.data_ptr()
        if "sink" in needs:
            # Contiguous, as the kernels read rows.
            self.delta = torch.zeros(self.saved.lse.shape, device="cpu")
            call.delta = self.delta.data_ptr()

    def _start_bias(self, call: arguments.Call, shape: tuple[int, ...]) -> None:
        """A (batch, heads, seqlen_k, seqlen_q) sum of what its shape keeps: a row of queries is contiguous.

        Where it keeps queries and keys, sequences and heads that share it are summed by one worker; else each has a sum
        of its own, small, and each chunk of the keys where the keys are summed over.
        """
        problem = self.problem
        if 0 in shape:  # nothing to sum, and no room that says so
            self.bias = torch.zeros(1, *shape[:2], shape[3], shape[2], device="cpu")
            return
        if shape[2] > 1 and shape[3] > 1:
            call.join_batch, call.join_heads = int(shape[0] == 1), int(shape[1] == 1)
            self.bias = torch.zeros(1, *shape[:2], shape[3], shape[2], device="cpu")
        elif shape[2] > 1:
            self.bias = torch.zeros(chunks(call), problem.batch, problem.heads_q, 1, shape[2], device="cpu")
        else:
            self.bias = torch.zeros(1, problem.batch, problem.heads_q, problem.seqlen_k, 1, device="cpu")
        call.dbias = self.bias.data_ptr()
        names = ("dbias_chunk", "dbias_batch", "dbias_head", "dbias_k", "dbias_q")
        for axis, name in enumerate(names):
            setattr(call, name, self.bias.stride(axis) if self.bias.shape[axis] > 1 else 0)

    def finish(self) -> dict[str, Tensor]:
        """The gradients by name, in the shapes and dtypes of their tensors."""
        found = {}
        if self.bias is not None:
            bias = self.score.bias
            assert bias is not None
            found["bias"] = self.bias.sum(0).transpose(-1, -2).sum_to_size(_four(bias.shape))
        if self.alibi is not None:
            assert self.score.alibi is not None
            found["alibi"] = self.alibi.sum(0).sum_to_size(self.score.alibi.shape)
        if self.delta is not None:
            assert self.score.sink is not None
            found["sink"] = _sink(self.score.sink, self.saved, self.delta)
        return {
            name: grad.reshape(getattr(self.score, name).shape).to(getattr(self.score, name).dtype)
            for name, grad in found.items()
        }


def _four(shape: torch.Size) -> tuple[int, ...]:
    return (1,) * (4 - len(shape)) + tuple(shape)


def _sink(sink: Tensor, saved: Saved, delta: Tensor) -> Tensor:
    """The sink takes part as a key without value: dP = 0, so dS = -P * delta."""
    p = (sink.float()[:, None] - saved.lse).exp()  # a row without keys and sinks has lse -inf, and delta 0
    own = (p * delta).nan_to_num_(nan=0.0, posinf=0.0).sum(-1)
    return -(own.sum(0) if own.dim() == 2 else own)


def chunks(call: arguments.Call) -> int:
    """Chunks of the keys that the kernels will make of this call."""
    found = (ctypes.c_int64 * 2)()
    isas.load().backward_sizes(ctypes.byref(call), found)
    return found[0]
