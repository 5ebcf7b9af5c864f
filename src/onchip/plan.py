"""What a call would do, without doing it: which backend and why, the tiles it visits, FLOPs and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip import problem as problems, schedule, select
from onchip.mask import Mask
from onchip.problem import Problem, check_types
from onchip.schedule import EMPTY, FULL, PARTIAL, Tiles
from onchip.score import Score

Shape = tuple[int, ...] | Tensor


@dataclass(frozen=True)
class Plan:
    """A problem's cost and its backend. Tiles and pairs are counted over every sequence and query head."""

    problem: Problem
    backend: str
    refusals: dict[str, str]  # backend -> reason
    tiles: Tiles
    empty: int
    partial: int
    full: int
    pairs: int  # visible (query, key) pairs
    flops: int  # of the forward pass: two matrix products over the visible pairs
    extra_memory: int  # bytes beyond inputs, outputs and gradients, forward and backward

    def __str__(self) -> str:
        p, total = self.problem, max(self.empty + self.partial + self.full, 1)
        lines = [
            f"attention  batch {p.batch}, seqlen {p.seqlen_q} x {p.seqlen_k}, heads {p.heads_q}/{p.heads_k}, "
            f"dim {p.dim}/{p.dim_v}, {str(p.dtype).removeprefix('torch.')} on {p.device}",
            f"backend    {self.backend}, tiles of {self.tiles.tile_m} x {self.tiles.tile_n}",
            *(
                f"           not {name}: {reason}"
                for name, reason in self.refusals.items()
                if name != self.backend
            ),
            f"tiles      {self.empty} empty (skipped), {self.partial} partial, {self.full} full: "
            f"{100 * (self.partial + self.full) / total:.1f} % visited",
            f"work       {self.pairs:,} visible pairs, {self.flops / 1e9:.3f} GFLOP forward",
            f"memory     {self.extra_memory / 2**20:.1f} MiB beyond inputs, outputs and gradients",
        ]
        return "\n".join(lines)


def plan(
    q: Shape,
    k: Shape,
    v: Shape,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    layout: str = "bshd",
    backend: str | None = None,
    deterministic: bool = True,
    seed: int | None = None,
    return_lse: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Plan:
    """The `Plan` of ``attention(q, k, v, ...)`` with the same keywords; nothing is computed.

    q, k, v: the tensors, or their shapes alone, then of this dtype on this device.

    >>> print(plan((1, 4096, 8, 64), (1, 4096, 8, 64), (1, 4096, 8, 64), mask=causal()))

    Raises what the call would raise, NotImplementedError where no backend serves the problem included.
    """
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout: got {layout!r}, expected 'bshd' or 'bhsd'")
    q_like, k_like, v_like = (_stand_in(name, x, dtype) for name, x in (("q", q), ("k", k), ("v", v)))
    where = q.device.type if isinstance(q, Tensor) else torch.device(device).type
    if layout == "bhsd":
        q_like, k_like, v_like = (x.transpose(1, 2) if x.dim() == 4 else x for x in (q_like, k_like, v_like))
    options: dict[str, Any] = {
        "scale": scale,
        "dropout": dropout,
        "deterministic": deterministic,
        "device": where,
    }
    place = problems.dense_layout(q_like, k_like, v_like)
    problem = problems.state(q_like, k_like, v_like, place, "dense", mask, score, **options)
    name = select.choose(problem, backend)
    module = select.load(name)
    tiles = module.tiles(problem)
    tile_map = schedule.build(problem, place, check_types(mask, score)[0], tiles)
    pairs = tile_map.pairs()
    return Plan(
        problem=problem,
        backend=name,
        refusals={n: reason for n, reason in select.refusals(problem).items() if n != name},
        tiles=tiles,
        empty=tile_map.count(EMPTY),
        partial=tile_map.count(PARTIAL),
        full=tile_map.count(FULL),
        pairs=pairs,
        flops=2 * pairs * (problem.dim + problem.dim_v),
        extra_memory=module.extra_memory(problem, tiles),
    )


def _stand_in(name: str, x: Any, dtype: torch.dtype) -> Tensor:
    """A tensor without storage of the same shape and dtype."""
    if isinstance(x, Tensor):
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    if not isinstance(x, tuple | list) or not all(type(n) is int and n >= 0 for n in x):
        raise TypeError(f"{name}: got {x!r}, expected a tensor or a shape (batch, seqlen, heads, dim)")
    return torch.empty(tuple(x), dtype=dtype, device="meta")
