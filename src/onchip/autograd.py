"""Attention as a function with gradients: every public call goes through `apply`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (  # type: ignore[import-not-found]
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    unwrap_if_dead,
)
from torch.autograd import forward_ad

from onchip import select
from onchip.backends import Backend
from onchip.problem import Operands, Output, Problem, Saved, resolved
from onchip.tiles import Tiles

INPUTS = ("q", "k", "v", "bias", "alibi", "sink")


@dataclass(eq=False, slots=True)
class Call:
    """A problem bound to its backend.

    Not a named tuple: functorch would take that apart.
    """

    problem: Problem
    operands: Operands
    backend: Backend
    tiles: Tiles
    run: Callable[[Operands], Output | None] | None = None  # the backend's `again`, of a call that repeats
    kept: Call | None = None  # the one that it repeats, without tensors

    def forward(self) -> Output:
        found = None if self.run is None else self.run(self.operands)
        return self.backend.forward(self.problem, self.operands, self.tiles) if found is None else found

    def unbound(self) -> Call:
        """Without the tensors that may get a gradient: who saves those decides how long they live."""
        if self.kept is not None:
            return self.kept
        _, _, _, layout, mask, score, seed = self.operands
        if (score.bias, score.alibi, score.sink) != (None, None, None):
            score = replace(score, bias=None, alibi=None, sink=None)
        operands = Operands(None, None, None, layout, mask, score, seed)  # type: ignore[arg-type]
        return Call(self.problem, operands, self.backend, self.tiles)

    def bind(self, inputs: tuple[Tensor | None, ...]) -> Operands:
        """The operands with these for their q, k, v, bias, alibi and sink."""
        q, k, v, bias, alibi, sink = map(resolved, inputs)
        _, _, _, layout, mask, score, seed = self.operands
        if (bias, alibi, sink) != (None, None, None):
            score = replace(score, bias=bias, alibi=alibi, sink=sink)
        return Operands(q, k, v, layout, mask, score, seed)  # type: ignore[arg-type]


def apply(call: Call) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable in q, k, v, bias, alibi and sink."""
    operands, score = call.operands, call.operands.score
    tensors = (operands.q, operands.k, operands.v, score.bias, score.alibi, score.sink)
    if torch._C._are_functorch_transforms_active():
        if any(is_batchedtensor(t) for t in _constants(operands)):
            raise NotImplementedError(
                "mask: under vmap its tensors (and a mod's) must be the same for every slice"
            )
    elif forward_ad._current_level < 0:
        needed = pending = False
        for t in tensors:
            if t is not None:
                needed |= t.requires_grad
                pending |= t.is_neg() or is_functorch_wrapped_tensor(t)
        if pending:  # kernels read memory, which these have none of, or with the other sign
            tensors = tuple([t if t is None else _alive(t) for t in tensors])
            call = Call(call.problem, call.bind(tensors), call.backend, call.tiles)
            needed = any(t is not None and t.requires_grad for t in tensors)
        if needed and torch.is_grad_enabled():
            return _with_gradients(call, *tensors)[:2]
        return call.forward()[:2]
    return _Transformed.apply(call, *tensors)[:2]  # type: ignore[misc]


def _alive(t: Tensor) -> Tensor:
    """What a tensor wraps that outlived its functorch transforms: it has no memory of its own."""
    while (inner := unwrap_if_dead(t)) is not t:
        t = inner
    return t


def _constants(operands: Operands) -> list[Tensor]:
    """The tensors of a call that get no gradient: of its mask, mod and layout, and its seed."""
    mod, seed = operands.score.mod, operands.seed
    found = [*operands.mask.tensors(), *operands.layout.tensors()]
    if mod is not None:
        found += mod.args  # type: ignore[union-attr]
    if not isinstance(seed, int):
        found.append(seed)
    return found


def _remember(ctx: Any, inputs: tuple, output: tuple) -> None:
    """What the backward pass needs; saved tensors raise when they were changed before it."""
    call, *tensors = inputs
    ctx.call = call.unbound()
    constants = () if call.kept is not None else _constants(call.operands)
    others = [t for t in constants if not t.is_inference()]  # which cannot be saved
    ctx.save_for_backward(*tensors, *output, *others)
    if output[2] is not None:
        ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _forward(call: Call, *inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    return tuple(call.backend.forward(call.problem, call.bind(inputs), call.tiles))  # type: ignore[return-value]


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple:
    tensors = ctx.saved_tensors
    inputs, (out, lse, rest) = tensors[: len(INPUTS)], tensors[len(INPUTS) : len(INPUTS) + 3]
    needs = frozenset(name for name, need in zip(INPUTS, ctx.needs_input_grad[1:], strict=True) if need)
    if dout is None and dlse is None:
        return (None,) * 7
    if dout is None:
        dout = torch.zeros_like(out)
    # Only a graph of the gradient itself, or a transform, needs a function with rules of its own.
    nested = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
    gradient = _AttentionGrad.apply if nested else _AttentionGrad.forward
    return None, *gradient(ctx.call, needs, dout, dlse, out, lse, rest, *inputs)  # type: ignore[misc]


class _Attention(torch.autograd.Function):
    """For a call outside of functorch."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> tuple[Tensor, Tensor, Tensor | None]:  # type: ignore[override]
        output = tuple(call.forward())
        _remember(ctx, (call, *tensors), output)
        return output  # type: ignore[return-value]

    backward = staticmethod(_backward)  # type: ignore[assignment]


# `_Attention.apply` without functorch's part: a seventh of a small call's host time, with nothing to do here.
_with_gradients = super(torch.autograd.Function, _Attention).apply  # type: ignore[misc]


class _Transformed(torch.autograd.Function):
    """The same under functorch's transforms and forward-mode differentiation, with their rules."""

    forward = staticmethod(_forward)  # type: ignore[assignment]
    setup_context = staticmethod(_remember)  # type: ignore[assignment]
    backward = staticmethod(_backward)  # type: ignore[assignment]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any):
        raise NotImplementedError("onchip: forward-mode differentiation (jvp, hessian) is not implemented")

    @staticmethod
    def vmap(info: Any, in_dims: tuple, call: Call, *inputs: Tensor | None):
        return _one_by_one(info, in_dims, _Transformed.apply, call, *inputs)


class _AttentionGrad(torch.autograd.Function):
    """The backward pass as a function of its own, so that differentiating it is refused in words."""

    @staticmethod
    def forward(
        call: Call, needs: frozenset[str], dout: Tensor, dlse: Tensor | None, out, lse, rest, *inputs
    ):
        saved = Saved(out, lse, rest, needs)
        backend = select.backward_of(call.backend)
        dout, dlse = resolved(dout), resolved(dlse)  # type: ignore[assignment]
        grads = backend.backward(call.problem, call.bind(inputs), saved, dout, dlse, call.tiles)
        return tuple(getattr(grads, name) for name in INPUTS)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any):
        raise NotImplementedError(
            "onchip: double backward is not implemented (a gradient of attention's gradient)"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple, call: Call, needs: frozenset[str], *tensors: Tensor | None):
        return _one_by_one(info, in_dims, _AttentionGrad.apply, call, needs, *tensors)


def _one_by_one(info: Any, in_dims: tuple, function: Callable[..., Any], *args: Any):
    """vmap's rule: the function on every slice, stacked. A slice is a whole problem, so nothing is lost to it."""
    if info.batch_size == 0:
        raise NotImplementedError("onchip: vmap over an axis of size 0 is not implemented")
    results = []
    for i in range(info.batch_size):
        own = (x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True))
        results.append(function(*own))
    columns = list(zip(*results, strict=True))
    outputs = tuple(None if column[0] is None else torch.stack(column) for column in columns)
    return outputs, tuple(None if output is None else 0 for output in outputs)
