"""Checking one workload in full against float64: every row of out and lse, every gradient, and where it is worst."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from onchip import devices, exact
from onchip.autograd import Call
from onchip.bench import peers
from onchip.bench.cases import Case
from onchip.observe import observing
from onchip.units import size


@dataclass(frozen=True)
class Worst:
    """A tensor's greatest error against float64. at: its (sequence, head, row, column)."""

    name: str
    error: float
    roundings: float  # in units of the dtype's rounding of `greatest`
    greatest: float  # magnitude in the truth: of the tensor, or of all gradients
    at: tuple[int, ...]
    found: float
    truth: float
    ok: bool


def verify(
    case: Case,
    device: str = "cpu",
    backend: str | None = None,
    tick: Callable[[int, int], None] | None = None,
) -> list[Worst]:
    """The worst element of out, lse, and where the case has a backward pass dq, dk and dv, on fresh normal inputs.

    Everything is compared, in chunks of rows: time is that of float64 attention. tick(done, total) counts key heads.
    Raises what the call raises, NotImplementedError where the backend refuses included, and ValueError where the
    memory that is free does not do.
    """
    _check_memory(case, device, backend)
    given = peers.inputs(case, device)
    seen = _Seen()
    leaves = [x.requires_grad_(case.what != "forward") for x in (given.q, given.k, given.v)]
    call = peers.peer("onchip" if backend is None else f"onchip-{backend}").forward(given)
    with observing(seen):
        out = call(*leaves)
    assert seen.call is not None and seen.lse is not None
    grads: dict[str, Tensor] = {}
    if case.what != "forward":
        grads = dict(zip("qkv", torch.autograd.grad(out, leaves, given.dout), strict=True))
    problem, operands = seen.call.problem, seen.call.operands
    pieces = list(exact.key_heads(problem, operands))
    worst: dict[str, Worst] = {}
    greatest: dict[str, float] = {}
    for i, (b, head_k) in enumerate(pieces):
        truth = exact.whole(problem, operands, b, head_k, given.dout if grads else None)
        whole = {"out": out.detach(), "lse": seen.lse.transpose(-1, -2).unsqueeze(-1)}
        whole |= {f"d{name}": grad for name, grad in grads.items()}
        found = {name: exact.part(problem, operands, x, name, b, head_k) for name, x in whole.items()}
        found["lse"] = found["lse"].squeeze(-1)
        for name, value in found.items():
            here = _compare(name, value, truth[name], (b, head_k, problem.group))
            kind = "gradient" if name.startswith("d") else name
            greatest[kind] = max(greatest.get(kind, 0.0), exact.greatest(truth[name]))
            if name not in worst or not here.error <= worst[name].error:  # NaN is worse than any
                worst[name] = here
        if tick is not None:
            tick(i + 1, len(pieces))
    return [
        _judged(
            w, greatest["gradient" if w.name.startswith("d") else w.name], problem.dtype, problem.seqlen_k
        )
        for w in worst.values()
    ]


def _check_memory(case: Case, device: str, backend: str | None) -> None:
    """Raise before anything is made: a system that promises more than it has would end the process on the way."""
    needed, free = _least_memory(case, backend), devices.available(device)
    if needed > free:
        raise ValueError(
            f"memory: {case.label} takes at least {size(needed)} with its float64 truth, expected at most the "
            f"{size(free)} that are free on {device}; take fewer queries, keys, heads or sequences"
        )


def _least_memory(case: Case, backend: str | None) -> int:
    """Bytes of q, k, v, out and lse and their gradients, and in float64 of the longest key head's rows and scores."""
    times = 1 if case.what == "forward" else 2
    q_shape, k_shape, v_shape = case.shapes
    rows, itemsize = prod(q_shape[:-1]), case.torch_dtype.itemsize
    numbers = prod(q_shape) + prod(k_shape) + prod(v_shape) + rows * case.value_dim
    lengths = ((case.seqlen_q, case.k_len),)
    if case.lengths:
        lengths = tuple(zip(case.lengths, case.keys, strict=True))
    group = max(case.heads_q // max(case.kv_heads, 1), 1)
    width = case.dim + case.value_dim
    truth = max(times * (group * m + n) * width + group * n for m, n in lengths)
    found = times * numbers * itemsize + 4 * rows + 8 * truth
    if backend == "reference":  # a sequence's scores and weights
        found += 3 * itemsize * case.heads_q * max(m * n for m, n in lengths)
    return found


class _Seen:
    call: Call | None = None
    lse: Tensor | None = None

    def called(self, call: Call, out: Tensor, lse: Tensor, seconds: float) -> None:
        self.call, self.lse = call, lse.detach()


def _compare(name: str, found: Tensor, truth: Tensor, place: tuple[int, int, int]) -> Worst:
    same = (found == truth) | (found.isnan() & truth.isnan())
    error = torch.where(same, 0.0, (found - truth).abs()).nan_to_num(nan=torch.inf)
    if not error.numel():
        return Worst(name, 0.0, 0.0, 0.0, (), 0.0, 0.0, True)
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    b, head_k, group = place
    if name in ("dk", "dv"):
        where = (b, head_k, *at)
    else:
        where = (b, head_k * group + at[0], *at[1:])
    return Worst(name, float(error[at]), 0.0, 0.0, where, float(found[at]), float(truth[at]), True)


def _judged(worst: Worst, greatest: float, dtype: torch.dtype, seqlen_k: int) -> Worst:
    # lse is float32 (float64 for float64) whatever the inputs, but its scores carry their rounding.
    units = worst.error / max(greatest, 1e-3) / torch.finfo(dtype).eps
    at = (worst.at, worst.found, worst.truth)
    return Worst(worst.name, worst.error, units, greatest, *at, units <= exact.allowed(seqlen_k))
