"""How far a backend may be from float64: twice torch's own error in the same dtype, and what rounding must cost.

Plain torch keeps P and its sums; an attention that never stores P cannot. Where torch's own error is small by luck
(one key, a near tie, sums that cancel), twice of it is no measure, so `rooms` adds the roundings that are there:

- lse is off by a rounding of the terms of s = scale * q.k, relative to their size: rho.
- P = exp(s - lse) is off by a rounding of lse and of the terms of s = scale * q.k, relative to their size: rho.
- dS = P * (dP - delta + dlse): each of the three is off by rho of its own size, however they cancel, and delta, taken
  from the stored out, by a rounding of out in its dtype.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from contract_scores import Scored
from oracle import longest, top


def relative_rounding(q: Tensor, k: Tensor, lse: Tensor, case, dtype: torch.dtype) -> float:
    """rho = eps * (1 + the larger of |lse| and scale * |q| * |k|)."""
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return eps * (1 + max(top(lse), scale_of(case) * longest(q) * longest(k)))


def scale_of(case) -> float:
    return abs(case.scale if case.scale is not None else case.dims[0] ** -0.5)


def rooms(
    truth: Callable,
    tensors: dict[str, Tensor],
    upstream: tuple,
    exact: dict,
    scored: Scored,
    case,
    dtype: torch.dtype,
) -> dict[str, float]:
    """What rounding may cost each output and gradient, at most; tensors are float64."""
    rho = relative_rounding(tensors["q"], tensors["k"], exact["lse"], case, dtype)
    kept = 1 / (1 - case.dropout) if case.dropout < 1 else 1.0
    values = top(tensors["v"]) * kept
    if upstream == (None, None):
        return {"out": rho * values, "lse": rho}
    weights = _weights(truth, tensors)  # of each sequence [1, heads_q, q_len, k_len]
    seen = max((top(p.sum(3)) for p in weights), default=0.0)
    of_key = max((top(p.sum(2).unflatten(1, (case.heads[1], -1)).sum(2)) for p in weights), default=0.0)
    dout, dlse = (torch.zeros(()) if x is None else x.double() for x in upstream)
    size, out_size = (x.norm(dim=-1) if x.dim() else x for x in (dout, exact["out"]))
    terms = size * (longest(tensors["v"]) * kept + out_size)
    terms = rho * (terms + (dlse.mT.abs() if dlse.dim() else dlse))
    slope = top(terms + torch.finfo(dtype).eps / 2 * size * out_size)
    found = {
        "out": rho * values,
        "lse": rho,
        "dq": slope * seen * scale_of(case) * top(tensors["k"]),
        "dk": slope * of_key * scale_of(case) * top(tensors["q"]),
        "dv": rho * kept * of_key * top(dout),
    }
    return found | {f"d{name}": slope * top(x) for name, x in scored.sums(weights).items()}


def _weights(truth: Callable, tensors: dict[str, Tensor]) -> list[Tensor]:
    """|d lse / d score| of each sequence: P, times the slope of a modification."""
    probes: list[Tensor] = []
    _, lse = truth(**tensors, probes=probes)
    if not probes or not lse.requires_grad:
        return [p.detach() for p in probes]
    return [
        p.abs() for p in torch.autograd.grad(lse.sum(), probes, allow_unused=True, materialize_grads=True)
    ]
