"""The semantics of record: dense attention in plain torch, in any floating dtype on any device.

It forms the whole score matrix of each sequence, so it is never chosen automatically. Its gradients are torch's own
differentiation of the forward lines below, independent of the formulas that the other backends use.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from onchip import rules
from onchip.dropout import keep
from onchip.mask import Region
from onchip.plain import on_tensors
from onchip.problem import Grads, Operands, Output, Problem, Saved
from onchip.tiles import Tiles


def refuse(problem: Problem) -> str | None:
    return None


def tiles(problem: Problem) -> Tiles:
    """One tile: the whole matrix."""
    return Tiles(max(problem.seqlen_q, 1), max(problem.seqlen_k, 1))


def extra_memory(
    problem: Problem, operands: Operands, step: str, needs: Iterable[str], device: str | None = None
) -> int:
    """An estimate: scores, weights and what stands between them, of one sequence; in the backward pass their gradients
    too, and what torch keeps of every sequence."""
    lengths = zip(operands.layout.q_lens, operands.layout.k_lens, strict=True)
    pairs = [problem.heads_q * q_len * k_len for q_len, k_len in lengths]
    most = max(pairs, default=0)
    found = 3 * most if step == "forward" else 4 * most + 2 * sum(pairs)
    return found * problem.accumulate.itemsize


def forward(problem: Problem, operands: Operands, tiles: Tiles) -> Output:
    with torch.no_grad():
        return _attention(problem, operands)


def backward(
    problem: Problem, operands: Operands, saved: Saved, dout: Tensor, dlse: Tensor | None, tiles: Tiles
) -> Grads:
    score = operands.score
    sources = {"q": operands.q, "k": operands.k, "v": operands.v}
    sources |= {name: getattr(score, name) for name in ("bias", "alibi", "sink")}
    leaves = {name: sources[name].detach().requires_grad_() for name in saved.needs}
    with torch.enable_grad():
        changed = {name: leaves.get(name, tensor) for name, tensor in sources.items()}
        parts = type(score)(score.softcap, changed["alibi"], changed["bias"], changed["sink"], score.mod)
        again = Operands(
            changed["q"], changed["k"], changed["v"], operands.layout, operands.mask, parts, operands.seed
        )
        result = _attention(problem, again)
        loss = (
            (result.out * dout).sum()
            if dlse is None
            else (result.out * dout).sum() + (result.lse * dlse).sum()
        )
        grads = (
            torch.autograd.grad(loss, list(leaves.values()), allow_unused=True) if loss.requires_grad else ()
        )
    found = dict(zip(leaves, grads or [None] * len(leaves), strict=True))
    return Grads(**{n: torch.zeros_like(leaves[n]) if g is None else g for n, g in found.items()})


def _attention(problem: Problem, operands: Operands) -> Output:
    """One sequence after the other; rows past a sequence's length keep out 0 and lse -inf."""
    q, layout = operands.q, operands.layout
    varlen = problem.layout == "varlen"
    out = q.new_zeros(*q.shape[:-1], problem.dim_v)
    shape = (q.shape[0], q.shape[1]) if varlen else (q.shape[0], q.shape[1], q.shape[2])
    lse = q.new_full(shape, -torch.inf, dtype=problem.accumulate).unsqueeze(-1)
    everything = slice(0, problem.heads_k)
    for b, (q_len, k_len) in enumerate(zip(layout.q_lens, layout.k_lens, strict=True)):
        if q_len == 0 or problem.heads_q == 0:
            continue
        batch = torch.tensor([b], device=q.device)
        region = Region(batch, 0, problem.heads_q, 0, q_len, 0, k_len, q_len, k_len)
        rows = (
            layout.read_q(q, batch, slice(0, problem.heads_q), q_len),
            layout.read_k(operands.k, batch, everything, k_len),
            layout.read_k(operands.v, batch, everything, k_len),
        )
        o, row_lse = _sequence(problem, operands, region, *rows)
        layout.write_q(out, batch, slice(0, problem.heads_q), o)
        layout.write_q(lse, batch, slice(0, problem.heads_q), row_lse)
    return Output(out, lse.squeeze(-1).transpose(-2, -1))


def _sequence(problem: Problem, operands: Operands, region: Region, *rows: Tensor) -> tuple[Tensor, Tensor]:
    """out [1, heads_q, q_len, dim_v] and lse [1, heads_q, q_len, 1] of one sequence."""
    q, k, v = (x.to(problem.accumulate) for x in rows)
    k, v = (x.repeat_interleave(problem.group, dim=1) for x in (k, v))
    visible = operands.mask.allow(region).expand(1, problem.heads_q, region.q_len, region.k_len)
    # Rows and keys that take no part hold anything, NaN too: they become 0 before they are multiplied.
    q = torch.where(visible.any(3, keepdim=True), q, 0.0)
    k, v = (torch.where(visible.any(2, keepdim=True).mT, x, 0.0) for x in (k, v))
    s = _modified(operands, problem.scale * (q @ k.mT), region)
    s = torch.where(visible, s, -torch.inf)
    if operands.score.sink is not None:
        sink = operands.score.sink.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        s = torch.cat([s, sink], dim=-1)
    if s.shape[-1] == 0:
        return q.new_zeros(*q.shape[:-1], problem.dim_v), q.new_full((*q.shape[:-1], 1), -torch.inf)
    top = s.detach().amax(-1, keepdim=True)
    weights = torch.exp(s - top.masked_fill(top == -torch.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    lse = torch.where(empty, -torch.inf, top + torch.where(empty, 1.0, total).log())
    p = (weights / torch.where(empty, 1.0, total))[..., : region.k_len]
    if problem.dropout > 0:
        kept = keep(region, problem.heads_q, problem.dropout, operands.seed)
        p = p * kept / (1.0 - problem.dropout) if problem.dropout < 1 else p * 0.0
    return torch.where(
        visible.any(3, keepdim=True), p @ v, 0.0
    ), lse  # no NaN from dout into a row without keys


def _modified(operands: Operands, s: Tensor, region: Region) -> Tensor:
    score = operands.score
    slope = bias = distance = None
    if score.alibi is not None:
        slopes = score.alibi[None] if score.alibi.dim() == 1 else score.alibi[region.batch]
        slope = slopes.to(s.dtype)[:, :, None, None]
        distance = (region.q + (region.k_len - region.q_len) - region.k).abs()
    if score.bias is not None:
        bias = region.cut(score.bias.reshape((1,) * (4 - score.bias.dim()) + score.bias.shape)).to(s.dtype)
    s = rules.modify(s, torch.tanh, score.softcap, slope, distance, bias)
    if score.mod is not None:
        s = on_tensors(score.mod.fn)(s, region.b, region.h, region.q, region.k, *score.mod.args)  # type: ignore
        q_dtype = torch.float64 if operands.q.dtype is torch.float64 else torch.float32
        s = torch.as_tensor(s, dtype=q_dtype, device=operands.q.device)
        s = s.expand(1, operands.q.shape[-2], region.q_len, region.k_len)
    return s
