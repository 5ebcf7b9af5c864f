"""Operators of torch: attention as one node of a graph, for torch.compile, torch.export and dispatch modes.

Eager calls go to `autograd` without them, at a fraction of the host time. `traced` says when a call needs them:
while a graph is made, and under a dispatch mode (fake tensors, selective checkpointing, counting of FLOPs).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import Tensor, library as registry
from torch.utils._python_dispatch import _disable_current_modes

from onchip import problem as problems, select, spec
from onchip.autograd import Call
from onchip.inputs import Rotary, varlen_layout
from onchip.mask import Mask
from onchip.problem import Saved, check_types
from onchip.score import Score

custom_op = registry.custom_op
GRADIENTS = ("q", "k", "v", "bias", "alibi", "sink")


def traced() -> bool:
    """Whether a call belongs to a graph that is being made, or to a dispatch mode."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and not torch._C._are_functorch_transforms_active()


def _count_flops() -> None:
    """Tell torch's FlopCounterMode what the operators cost, once it is in use: its module imports triton."""
    if not torch.compiler.is_compiling() and "torch.utils.flop_counter" in sys.modules:
        from onchip import flops

        flops.join()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Tensor | None, ...],
    longest: tuple[Any, Any],
    mask: Mask | None,
    score: Score | None,
    scale: float | None,
    dropout: float,
    seed: int | Tensor | None,
    deterministic: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a dense call, or of a packed one: lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k).

    seed: a tensor (1,) too, as `draw_seed` makes.
    """
    _count_flops()
    stated = _stated(q, lengths, longest, mask, score, scale, dropout, seed, deterministic, backend)
    out, lse, _ = torch.ops.onchip.attention(q, k, v, *stated)
    return out, lse


def gradients(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *stated: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv from a given out and lse; `stated` as in `attention`, from lengths on."""
    _count_flops()
    rest = torch.zeros_like(lse)
    found = torch.ops.onchip.attention_backward(
        "q k v", dout, dlse, out, lse, rest, q, k, v, *_stated(q, *stated)
    )
    return tuple(found[:3])  # type: ignore[return-value]


def _stated(
    q: Tensor, lengths: Any, longest: Any, mask: Any, score: Any, scale: Any, dropout: Any, seed: Any,
    *others: Any,
) -> tuple:  # fmt: skip
    """An operator's arguments behind q, k and v."""
    mask, score = check_types(mask, score)
    text, ints, tensors = spec.write(mask, score.mod)  # type: ignore[arg-type]
    # A limit that is a tensor is left out: it only bounds what the boundaries say, and reading it would end the graph.
    limits = [None if isinstance(x, Tensor) else x for x in longest]
    dropout = dropout if dropout != 0 else 0.0  # a literal: a default argument would be a symbol of the graph
    return (
        score.bias, score.alibi, score.sink, *lengths, *limits, tensors, text, ints, score.softcap, scale, dropout,
        _seed(seed, dropout, q), *others,
    )  # fmt: skip


def _seed(seed: int | Tensor | None, dropout: float, q: Tensor) -> Tensor | None:
    """The dropout key as a tensor."""
    if dropout == 0:
        return None
    if seed is None:
        return draw_seed(q)
    if isinstance(seed, Tensor):
        return seed
    key: Any = problems.draw_seed(seed, dropout, q)  # its checks
    return torch.full((1,), key if key < 2**63 else key - 2**64, dtype=torch.int64, device=_home(q))


def draw_seed(q: Tensor) -> Tensor:
    """A dropout key that is drawn in the graph, so that each run of it draws anew."""
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=_home(q))


def _home(q: Tensor) -> torch.device | None:
    """Where a key lies: beside q on a GPU, since a tensor of the CPU would keep torch from making a CUDA graph."""
    return q.device if q.device.type == "cuda" else None


@custom_op("onchip::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Optional[Tensor],  # noqa: UP045 (the schema is read from these)
    alibi: Optional[Tensor],  # noqa: UP045
    sink: Optional[Tensor],  # noqa: UP045
    cu_q: Optional[Tensor],  # noqa: UP045
    cu_k: Optional[Tensor],  # noqa: UP045
    used_q: Optional[Tensor],  # noqa: UP045
    used_k: Optional[Tensor],  # noqa: UP045
    max_q: Optional[int],  # noqa: UP045
    max_k: Optional[int],  # noqa: UP045
    tensors: list[Tensor],
    text: str,
    ints: list[int],
    softcap: Optional[float],  # noqa: UP045
    scale: Optional[float],  # noqa: UP045
    dropout: float,
    seed: Optional[Tensor],  # noqa: UP045
    deterministic: bool,
    backend: Optional[str],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor]:
    call = _call(
        q, k, v, bias, alibi, sink, cu_q, cu_k, used_q, used_k, max_q, max_k, tensors, text, ints, softcap, scale,
        dropout, seed, deterministic, backend,
    )  # fmt: skip
    # In a graph no tensor says that a gradient follows, by which CPU kernels choose the order of few rows' sums.
    operands = call.operands._replace(q=q.detach().requires_grad_())
    with _own_autograd():
        out, lse, rest = call.backend.forward(call.problem, operands, call.tiles)
    return out.contiguous(), lse.contiguous(), torch.zeros_like(lse) if rest is None else rest.contiguous()


@contextmanager
def _own_autograd() -> Iterator[None]:
    """As in an autograd.Function: no graph is recorded, but code may differentiate something of its own. Without it an
    operator's body runs below autograd, and the derivative that torch takes of a user's function would be 0."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.ADInplaceOrView):  # type: ignore[attr-defined]
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch.no_grad(), torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


def _call(
    q, k, v, bias, alibi, sink, cu_q, cu_k, used_q, used_k, max_q, max_k, tensors, text, ints, softcap, scale, dropout,
    seed, deterministic, backend,
) -> Call:  # fmt: skip
    """The call that the operator's arguments state, after every check of it."""
    from onchip import api

    mask, mod = spec.read(text, ints, tensors)
    plain = (softcap, alibi, bias, sink, mod) == (None,) * 5
    score = None if plain else Score(softcap, alibi, bias, sink, mod)
    options = {"scale": scale, "dropout": dropout, "deterministic": deterministic}
    if cu_q is None:
        place, problem = problems.dense(q, k, v, mask, score, **options)
    else:
        place = varlen_layout(q, k, v, cu_q, cu_k, max_q, max_k, used_q, used_k)
        problem = problems.state(q, k, v, place, "varlen", mask, score, **options)
    return api._call(problem, q, k, v, place, mask, score, backend, seed)


@_attention.register_fake
def _(q, k, v, bias, alibi, sink, cu_q, *others):
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    lse = q.new_empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=dtype)
    return out, lse, torch.empty_like(lse)


@custom_op("onchip::attention_backward", mutates_args=())
def _attention_backward(
    needs: str,
    dout: Tensor,
    dlse: Optional[Tensor],  # noqa: UP045
    out: Tensor,
    lse: Tensor,
    rest: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Optional[Tensor],  # noqa: UP045
    alibi: Optional[Tensor],  # noqa: UP045
    sink: Optional[Tensor],  # noqa: UP045
    cu_q: Optional[Tensor],  # noqa: UP045
    cu_k: Optional[Tensor],  # noqa: UP045
    used_q: Optional[Tensor],  # noqa: UP045
    used_k: Optional[Tensor],  # noqa: UP045
    max_q: Optional[int],  # noqa: UP045
    max_k: Optional[int],  # noqa: UP045
    tensors: list[Tensor],
    text: str,
    ints: list[int],
    softcap: Optional[float],  # noqa: UP045
    scale: Optional[float],  # noqa: UP045
    dropout: float,
    seed: Optional[Tensor],  # noqa: UP045
    deterministic: bool,
    backend: Optional[str],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients that `needs` names, and empty tensors for the others."""
    call = _call(
        q, k, v, bias, alibi, sink, cu_q, cu_k, used_q, used_k, max_q, max_k, tensors, text, ints, softcap, scale,
        dropout, seed, deterministic, backend,
    )  # fmt: skip
    saved = Saved(out, lse, rest, frozenset(needs.split()))
    with _own_autograd():
        grads = select.backward_of(call.backend).backward(
            call.problem, call.operands, saved, dout, dlse, call.tiles
        )
    inputs = (q, k, v, bias, alibi, sink)
    results = (_laid_out(getattr(grads, name), x, q) for name, x in zip(GRADIENTS, inputs, strict=True))
    return tuple(results)  # type: ignore[return-value]


def _laid_out(grad: Tensor | None, like: Tensor | None, q: Tensor) -> Tensor:
    """A gradient with the strides that the fake kernel foretells, those of empty_like."""
    if grad is None or like is None:
        return q.new_empty(0)
    if grad.stride() == torch.empty_like(like, device="meta").stride() and grad.dtype is like.dtype:
        return grad
    return torch.empty_like(like).copy_(grad)


@_attention_backward.register_fake
def _(needs, dout, dlse, out, lse, rest, q, k, v, bias, alibi, sink, *others):
    wanted = needs.split()
    inputs = (q, k, v, bias, alibi, sink)
    pairs = zip(GRADIENTS, inputs, strict=True)
    return tuple(torch.empty_like(x) if name in wanted else q.new_empty(0) for name, x in pairs)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, max_q, max_k, listed, text, ints, softcap, scale, dropout, seed, deterministic, backend = inputs
    ctx.save_for_backward(*tensors, *output, seed, *listed)
    ctx.numbers = (max_q, max_k), (text, ints, softcap, scale, dropout), (deterministic, backend)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple:
    saved = ctx.saved_tensors
    tensors, (out, lse, rest, seed), listed = saved[:10], saved[10:14], saved[14:]
    longest, middle, last = ctx.numbers
    # An empty list is a list of tensors to torch, one of integers is one value.
    none = (None,) * 6 + ([None] * len(listed), None, None if middle[1] else []) + (None,) * 6
    needs = [n for n, need in zip(GRADIENTS, ctx.needs_input_grad[: len(GRADIENTS)], strict=True) if need]
    if not needs or (dout is None and dlse is None):
        return (None,) * 6 + none
    dout = torch.zeros_like(out) if dout is None else dout
    grads = torch.ops.onchip.attention_backward(
        " ".join(needs), dout, dlse, out, lse, rest, *tensors, *longest, list(listed), *middle, seed, *last
    )
    return (*(g if n in needs else None for n, g in zip(GRADIENTS, grads, strict=True)), *none)


_attention.register_autograd(_gradients, setup_context=_setup)


def attention_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: int | Tensor,
    places: tuple[Tensor | None, Tensor | None, Tensor | None],
    rotary: Rotary | None,
    num_splits: int,
    mask: Mask | None,
    score: Score | None,
    scale: float | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse); places: page_table, cache_batch_idx, cache_leftpad. What is appended changes the caches in place."""
    _count_flops()
    mask, score = check_types(mask, score)
    text, ints, tensors = spec.write(mask, score.mod)  # type: ignore[arg-type]
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int64, device=q.device)
    tables = (None, None, False) if rotary is None else (rotary.cos, rotary.sin, rotary.interleaved)
    common = (
        cache_seqlens, *places, *tables, num_splits, score.bias, score.alibi, score.sink, tensors, text, ints,
        score.softcap, scale, backend,
    )  # fmt: skip
    if k is None or v is None:
        return torch.ops.onchip.attention_over_cache(q, k_cache, v_cache, *common)
    return torch.ops.onchip.attention_with_cache(q, k_cache, v_cache, k, v, *common)


def _run_cache(
    q, k_cache, v_cache, k, v, cache_seqlens, page_table, batch_idx, leftpad, cos, sin, interleaved, num_splits, bias,
    alibi, sink, tensors, text, ints, softcap, scale, backend,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from onchip import api

    mask, mod = spec.read(text, ints, tensors)
    with _disable_current_modes(), _own_autograd():
        out, lse = api.attention_with_cache(
            q, k_cache, v_cache, cache_seqlens=cache_seqlens, k=k, v=v, page_table=page_table,
            cache_batch_idx=batch_idx, cache_leftpad=leftpad,
            rotary=None if cos is None else Rotary(cos, sin, interleaved), num_splits=num_splits, mask=mask,
            score=Score(softcap, alibi, bias, sink, mod), scale=scale, return_lse=True, backend=backend,
        )  # fmt: skip
    return out.contiguous(), lse.contiguous()


@custom_op("onchip::attention_with_cache", mutates_args=("k_cache", "v_cache"))
def _with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    page_table: Optional[Tensor],  # noqa: UP045
    batch_idx: Optional[Tensor],  # noqa: UP045
    leftpad: Optional[Tensor],  # noqa: UP045
    cos: Optional[Tensor],  # noqa: UP045
    sin: Optional[Tensor],  # noqa: UP045
    interleaved: bool,
    num_splits: int,
    bias: Optional[Tensor],  # noqa: UP045
    alibi: Optional[Tensor],  # noqa: UP045
    sink: Optional[Tensor],  # noqa: UP045
    tensors: list[Tensor],
    text: str,
    ints: list[int],
    softcap: Optional[float],  # noqa: UP045
    scale: Optional[float],  # noqa: UP045
    backend: Optional[str],  # noqa: UP045
) -> tuple[Tensor, Tensor]:
    return _run_cache(
        q, k_cache, v_cache, k, v, cache_seqlens, page_table, batch_idx, leftpad, cos, sin, interleaved, num_splits,
        bias, alibi, sink, tensors, text, ints, softcap, scale, backend,
    )  # fmt: skip


@custom_op("onchip::attention_over_cache", mutates_args=())
def _over_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    page_table: Optional[Tensor],  # noqa: UP045
    batch_idx: Optional[Tensor],  # noqa: UP045
    leftpad: Optional[Tensor],  # noqa: UP045
    cos: Optional[Tensor],  # noqa: UP045
    sin: Optional[Tensor],  # noqa: UP045
    interleaved: bool,
    num_splits: int,
    bias: Optional[Tensor],  # noqa: UP045
    alibi: Optional[Tensor],  # noqa: UP045
    sink: Optional[Tensor],  # noqa: UP045
    tensors: list[Tensor],
    text: str,
    ints: list[int],
    softcap: Optional[float],  # noqa: UP045
    scale: Optional[float],  # noqa: UP045
    backend: Optional[str],  # noqa: UP045
) -> tuple[Tensor, Tensor]:
    return _run_cache(
        q, k_cache, v_cache, None, None, cache_seqlens, page_table, batch_idx, leftpad, cos, sin, interleaved,
        num_splits, bias, alibi, sink, tensors, text, ints, softcap, scale, backend,
    )  # fmt: skip


def _fake_cache(q, k_cache, v_cache, *others):
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty(*q.shape[:-1], v_cache.shape[-1]), q.new_empty(
        q.shape[0], q.shape[2], q.shape[1], dtype=dtype
    )


_with_cache.register_fake(_fake_cache)
_over_cache.register_fake(_fake_cache)
