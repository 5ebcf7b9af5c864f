"""Attention in float64, a few rows at a time: the truth that calls of any length are checked against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from onchip import rules
from onchip.dropout import keep
from onchip.mask import Region
from onchip.problem import Operands, Problem

_PAIRS = 1 << 22  # scores in flight at once: 32 MiB of float64


@dataclass(frozen=True)
class Place:
    """A query row of a head of a sequence."""

    batch: int
    head: int
    row: int


def sample(
    problem: Problem, operands: Operands, count: int, generator: torch.Generator | None = None
) -> list[Place]:
    """Random rows, of sequences that have queries; none where no sequence has."""
    lengths = operands.layout.q_lens
    full = [b for b, n in enumerate(lengths) if n]
    if not full or not problem.heads_q:
        return []

    def draw(n: int) -> int:
        return int(torch.randint(0, n, (), generator=generator, device="cpu"))

    places = []
    for _ in range(count):
        b = full[draw(len(full))]
        places.append(Place(b, draw(problem.heads_q), draw(lengths[b])))
    return places


def row(problem: Problem, operands: Operands, place: Place) -> tuple[Tensor, Tensor]:
    """out [dim_v] and lse [] of one row."""
    region = _region(problem, operands, place.batch, place.head, place.head + 1, place.row, place.row + 1)
    head_k = place.head // problem.group
    q, k, v = _rows(problem, operands, region, head_k)
    out, lse = attend(problem, operands, region, q, k, v)
    return out[0, 0], lse[0, 0]


def attend(
    problem: Problem, operands: Operands, region: Region, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """out [heads, rows, dim_v] and lse [heads, rows] by the definition: scores, mask, sink, softmax, dropout.

    q [heads, rows, dim], k [keys, dim] and v [keys, dim_v] in float64; the heads of the region share k and v.
    """
    score = operands.score
    visible = operands.mask.allow(region).expand(1, q.shape[0], q.shape[1], k.shape[0])[0]
    # What nobody sees may hold NaN: it becomes 0 before it is multiplied.
    q = torch.where(visible.any(2, keepdim=True), q, 0.0)
    seen = visible.flatten(0, 1).any(0)[:, None]
    k, v = torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)
    s = _modified(operands, problem.scale * (q @ k.mT)[None], region)[0]
    s = torch.where(visible, s, -torch.inf)
    if score.sink is not None:
        sink = score.sink[region.head0 : region.head1].double()[:, None, None]
        s = torch.cat([s, sink.expand(*s.shape[:2], 1)], dim=-1)
    if s.shape[-1] == 0:
        return q.new_zeros(*q.shape[:2], v.shape[1]), q.new_full(q.shape[:2], -torch.inf)
    top = s.detach().amax(-1, keepdim=True)
    weights = torch.exp(s - top.masked_fill(top == -torch.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    safe = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, top + safe.log()).squeeze(-1)
    p = (weights / safe)[..., : k.shape[0]]
    if problem.dropout > 0:
        kept = keep(region, problem.heads_q, problem.dropout, operands.seed)[0]
        p = p * kept / (1.0 - problem.dropout) if problem.dropout < 1 else p * 0.0
    return p @ v, lse


def whole(
    problem: Problem, operands: Operands, batch: int, head_k: int, dout: Tensor | None
) -> dict[str, Tensor]:
    """Every row of one key head's query heads: {"out", "lse"}, and "dq", "dk", "dv" for an upstream dout.

    out and dq [group, q_len, ...], dk and dv [k_len, ...]; dout as the call's out. In float64, chunk by chunk.
    """
    q_len, k_len = operands.layout.q_lens[batch], operands.layout.k_lens[batch]
    head0, head1 = head_k * problem.group, (head_k + 1) * problem.group
    step = max(_PAIRS // max(k_len * problem.group, 1), 1)
    parts: dict[str, list[Tensor]] = {"out": [], "lse": [], "dq": []}
    full = _region(problem, operands, batch, head0, head1, 0, q_len)
    q, k, v = _rows(problem, operands, full, head_k)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, q_len, step):
        stop = min(start + step, q_len)
        region = _region(problem, operands, batch, head0, head1, start, stop)
        leaves = [x.detach().requires_grad_(dout is not None) for x in (q[:, start:stop], k, v)]
        with torch.enable_grad():
            out, lse = attend(problem, operands, region, *leaves)
        parts["out"].append(out.detach())
        parts["lse"].append(lse.detach())
        if dout is not None:
            heads = slice(head0, head1)
            upstream = operands.layout.read_q(dout, region.batch, heads, q_len)[0, :, start:stop].double()
            dq, more_k, more_v = torch.autograd.grad(out, leaves, upstream)
            parts["dq"].append(dq)
            dk, dv = dk + more_k, dv + more_v
    found = {name: torch.cat(chunks, 1) for name, chunks in parts.items() if chunks}
    return found if dout is None else {**found, "dk": dk, "dv": dv}


def given(
    problem: Problem, operands: Operands, out: Tensor, lse: Tensor, place: Place
) -> tuple[Tensor, Tensor]:
    """The same row of a call's out, shaped as q, and lse: (batch, heads, seqlen_q), or packed (heads, total)."""
    batch = torch.tensor([place.batch], device=out.device)
    head, layout = slice(place.head, place.head + 1), operands.layout
    by_row = lse.transpose(-1, -2).unsqueeze(-1)
    row_out, row_lse = (
        layout.read_q(x, batch, head, place.row + 1)[0, 0, place.row].double() for x in (out, by_row)
    )
    return row_out, row_lse[0]


def part(problem: Problem, operands: Operands, tensor: Tensor, name: str, batch: int, head_k: int) -> Tensor:
    """One key head's part of a tensor, in float64, as `whole` has it: [group, q_len, ...], or [k_len, ...] of keys."""
    layout, index = operands.layout, torch.tensor([batch], device=tensor.device)
    if name in ("k", "v", "dk", "dv"):
        keys = slice(head_k, head_k + 1)
        return layout.read_k(tensor, index, keys, layout.k_lens[batch])[0, 0].double()
    heads = slice(head_k * problem.group, (head_k + 1) * problem.group)
    return layout.read_q(tensor, index, heads, layout.q_lens[batch])[0].double()


def first_bad(out: Tensor, starts: Tensor | None = None) -> tuple[int, int, int] | None:
    """(batch, head, row) of the first row that holds NaN or inf, in that order.

    out: (batch, seqlen, heads, dim), or packed (total, heads, dim) with the starts of its sequences.
    """
    bad = ~torch.isfinite(out).all(-1)
    if not bool(bad.any()):
        return None
    places = bad.transpose(-1, -2).nonzero()
    if starts is not None:  # of (head, token)
        starts = starts.to(places)
        batch = torch.searchsorted(starts, places[:, 1].contiguous(), right=True) - 1
        places = torch.stack([batch, places[:, 0], places[:, 1] - starts[batch]], 1)
        places = places[batch == batch.min()]  # their order in it is that of heads, then rows
    b, head, row = places[0].tolist()
    return b, head, row


def key_heads(problem: Problem, operands: Operands) -> Iterator[tuple[int, int]]:
    """(sequence, key head), of sequences that have queries."""
    for b, q_len in enumerate(operands.layout.q_lens):
        if q_len:
            yield from ((b, head) for head in range(problem.heads_k))


def _region(
    problem: Problem, operands: Operands, batch: int, head0: int, head1: int, q0: int, q1: int
) -> Region:
    q_len, k_len = operands.layout.q_lens[batch], operands.layout.k_lens[batch]
    index = torch.tensor([batch], device=operands.q.device)
    return Region(index, head0, head1, q0, q1, 0, k_len, q_len, k_len)


def _rows(problem: Problem, operands: Operands, region: Region, head_k: int) -> tuple[Tensor, Tensor, Tensor]:
    layout, heads = operands.layout, slice(region.head0, region.head1)
    q = layout.read_q(operands.q.detach(), region.batch, heads, region.q1)[0, :, region.q0 :]
    keys = slice(head_k, head_k + 1)
    k, v = (
        layout.read_k(x.detach(), region.batch, keys, region.k_len)[0, 0] for x in (operands.k, operands.v)
    )
    return q.double(), k.double(), v.double()


def _modified(operands: Operands, s: Tensor, region: Region) -> Tensor:
    """s [1, heads, rows, keys] after softcap, ALiBi, bias and mod."""
    score = operands.score
    slope = bias = None
    if score.alibi is not None:
        slopes = score.alibi[None] if score.alibi.dim() == 1 else score.alibi[region.batch]
        slope = slopes[:, region.head0 : region.head1].double()[:, :, None, None]
    if score.bias is not None:
        bias = region.cut(score.bias.reshape((1,) * (4 - score.bias.dim()) + score.bias.shape)).double()
    distance = (region.q + (region.k_len - region.q_len) - region.k).abs()
    s = rules.modify(s, torch.tanh, score.softcap, slope, distance, bias)
    return s if score.mod is None else score.mod(s, region)  # type: ignore[operator]


def roundings(found: Tensor, truth: Tensor, dtype: torch.dtype, scale: float | None = None) -> float:
    """The greatest error in units of the dtype's rounding of `scale`; NaN where found has one.

    scale: the truth's greatest number unless given. Gradients want that of all of them: one that is 0 by cancellation
    is off by the rounding of what cancels.
    """
    if not truth.numel():
        return 0.0
    finite = truth.isfinite()
    special, expected = found[~finite], truth[~finite]
    if not bool(((special == expected) | (special.isnan() & expected.isnan())).all()):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = greatest(truth) if scale is None else scale
    return float((found[finite] - truth[finite]).abs().max()) / max(scale, 1e-3) / torch.finfo(dtype).eps


def greatest(truth: Tensor) -> float:
    """The greatest finite magnitude, 0 where there is none."""
    finite = truth[truth.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def allowed(seqlen_k: int) -> float:
    """Roundings that exact attention stays below: a few for the weights and the output, more for sums of many keys."""
    return 16.0 * max(1.0, seqlen_k**0.5 / 16)
