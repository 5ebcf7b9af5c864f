"""Gradients of a score's tensors: room for what the native kernels sum, and the last steps in torch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import prod

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

    def rooms(self, call: arguments.Call) -> dict[str, tuple[int, ...]]:
        """Shapes of the sums. States besides which sequences and heads one worker takes in turn, for they share one."""
        problem, needs = self.problem, self.saved.needs
        found: dict[str, tuple[int, ...]] = {}
        if "bias" in needs:
            assert self.score.bias is not None
            found["bias"] = self._bias_room(call, _four(self.score.bias.shape))
        if "alibi" in needs:
            found["alibi"] = chunks(call), problem.batch, problem.heads_q
        if "sink" in needs:
            found["delta"] = tuple(self.saved.lse.shape)
        return found

    def _bias_room(self, call: arguments.Call, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A (batch, heads, seqlen_k, seqlen_q) sum of what its shape keeps: a row of queries is contiguous.

        Where it keeps queries and keys, sequences and heads that share it are summed by one worker; else each has a sum
        of its own, small, and each chunk of the keys where the keys are summed over.
        """
        problem = self.problem
        if 0 in shape or (shape[2] > 1 and shape[3] > 1):
            call.join_batch, call.join_heads = int(shape[0] == 1), int(shape[1] == 1)
            return 1, *shape[:2], shape[3], shape[2]
        if shape[2] > 1:
            return chunks(call), problem.batch, problem.heads_q, 1, shape[2]
        return 1, problem.batch, problem.heads_q, problem.seqlen_k, 1

    def start(self, call: arguments.Call) -> None:
        """Make room for the sums, and state it. Contiguous, as the kernels step through it."""
        for name, shape in self.rooms(call).items():
            setattr(self, name, torch.zeros(shape, device="cpu"))
        if self.alibi is not None:
            call.dalibi = self.alibi.data_ptr()
        if self.delta is not None:
            call.delta = self.delta.data_ptr()
        if self.bias is None or self.bias.numel() == 0:  # nothing to sum
            return
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

    def last_steps(self, rooms: dict[str, tuple[int, ...]]) -> int:
        """Bytes that `finish` takes at once, its results not counted."""
        left = most = 0
        if "bias" in rooms:
            assert self.score.bias is not None
            bias, (_, *summed) = self.score.bias, rooms["bias"]
            narrow = bias.dtype is not torch.float32
            if [*summed[:2], summed[3], summed[2]] != [
                *_four(bias.shape)
            ]:  # what is summed further is a step of its own
                left = bias.numel() if narrow else 0
                most = prod(summed) + left
            else:
                most = left = prod(summed) if narrow else 0
        sink = 2 * prod(rooms["delta"]) if "delta" in rooms else 0
        return 4 * max(most, left + sink)


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
