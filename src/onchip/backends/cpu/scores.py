"""One tile of scores: modification, mask, dropout, and the way back through them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from onchip import rules, stored
from onchip.backends.cpu.trace import load_pairs, store_pairs, tracing
from onchip.dropout import keep
from onchip.mask import Region
from onchip.problem import Operands, Problem
from onchip.score import Score

if TYPE_CHECKING:
    from onchip.backends.cpu.tiled import Piece

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


class Limit(NamedTuple):
    """A partial tile's mask, ready for use; each broadcasts to [g, heads, tile_m, tile_n]."""

    visible: Tensor
    ceiling: Tensor  # +inf where visible, -inf elsewhere: minimum() with it masks even an infinite score
    blind_queries: Tensor | None  # queries that see none of the tile's keys [g, heads, tile_m, 1]
    unseen_keys: Tensor | None  # keys that none of the tile's queries sees [g, heads, 1, tile_n]


class Steps(NamedTuple):
    """Scores before the modifications whose derivatives depend on them."""

    raw: Tensor | None  # before the softcap
    unmodified: Tensor | None  # before the mod


def _modified(
    score: Score, raw: Tensor, region: Region, group: int, keep_steps: bool
) -> tuple[Tensor, Steps]:
    """Scaled scores after softcap, ALiBi, bias and mod: [g, heads, tile_m, tile_n]."""
    slope = None if score.alibi is None else _slopes(score.alibi, region).to(raw.dtype)
    distance = None if slope is None else _distance(region).to(raw.dtype)
    bias = None
    if score.bias is not None:
        bias = region.cut(_four(score.bias)).to(raw.dtype)
        load_pairs("bias", score.bias, region, group)
    s = rules.modify(raw, torch.tanh, score.softcap, slope, distance, bias)
    if score.mod is None:
        return s, Steps(raw if keep_steps else None, None)
    return score.mod(s, region), Steps(raw, s)  # type: ignore[operator]


def _slopes(alibi: Tensor, region: Region) -> Tensor:
    slopes = alibi[None] if alibi.dim() == 1 else alibi[region.batch]
    return slopes[:, region.head0 : region.head1, None, None]


def _distance(region: Region) -> Tensor:
    return (region.q + (region.k_len - region.q_len) - region.k).abs()


def _four(x: Tensor) -> Tensor:
    return x.reshape((1,) * (4 - x.dim()) + x.shape)


@dataclass(frozen=True, eq=False)
class Grid:
    """A tile of scores at its place: [g, heads_q, tile_m, tile_n]."""

    problem: Problem
    operands: Operands
    region: Region
    full: bool
    limits: dict  # limits of band-only masks, which repeat along diagonals

    @cached_property
    def limit(self) -> Limit | None:
        if self.full:
            return None
        region = self.region
        if set(self.problem.mask_parts) != {"band"}:
            if tracing():
                for name, tensor in stored.looked_up(self.operands.mask):
                    load_pairs(name, tensor, region, self.problem.group)
            return self.make_limit()
        key = (region.q0 - region.k0, region.q1 - region.q0, region.k1 - region.k0)
        if key not in self.limits:
            self.limits[key] = self.make_limit()
        while len(self.limits) > 4:  # a window has two edges, each at one or two offsets to the tile grid
            self.limits.pop(next(iter(self.limits)))
        return self.limits[key]

    def make_limit(self) -> Limit:
        visible = self.operands.mask.allow(self.region)
        ceiling = torch.where(visible, torch.inf, -torch.inf).to(self.problem.accumulate)
        blind, unseen = ~visible.any(3, keepdim=True), ~visible.any(2, keepdim=True)
        return Limit(visible, ceiling, blind if blind.any() else None, unseen if unseen.any() else None)

    def clean_queries(self, piece: Piece, tile: Tensor) -> Tensor:
        """[size, group * tile_m, x] with the rows of blind queries zeroed: 0 * NaN would reach the keys' sums."""
        if self.limit is None or self.limit.blind_queries is None:
            return tile
        return torch.where(self.limit.blind_queries, 0.0, piece.unstack(tile)).view_as(tile)

    def clean_keys(self, piece: Piece, tile: Tensor) -> Tensor:
        """[size, tile_n, x] with the rows of unseen keys zeroed."""
        if self.limit is None or self.limit.unseen_keys is None:
            return tile
        unseen = self.limit.unseen_keys.mT  # [g | 1, heads_q | 1, tile_n, 1]
        if unseen.shape[1] > 1:  # a key is unseen when every query head of its key head is blind to it
            unseen = unseen.unflatten(1, (-1, self.problem.group)).all(2)
        by_sequence = tile.view(piece.batch.numel(), -1, *tile.shape[1:])
        return torch.where(unseen, 0.0, by_sequence).view_as(tile)

    def finish(self, s: Tensor, folds: bool, keep_steps: bool = False) -> tuple[Tensor, Steps]:
        """Scaled q.k to modified and masked scores, in log2 units where nothing modifies them; may overwrite s."""
        steps = Steps(None, None)
        if not folds:
            s, steps = _modified(self.operands.score, s, self.region, self.problem.group, keep_steps)
            s = s.contiguous()
        if self.limit is not None:
            s = torch.minimum(s, self.limit.ceiling, out=s)
            if (
                steps.unmodified is not None
            ):  # a mod may be NaN where nothing is visible, which minimum() keeps
                s = s.masked_fill_(~self.limit.visible, -torch.inf)
        return s, steps

    @cached_property
    def kept(self) -> Tensor | None:
        """1 / (1 - p) for the pairs that dropout keeps, 0 for the others; None without dropout."""
        p = self.problem.dropout
        if p == 0.0:
            return None
        kept = keep(self.region, self.problem.heads_q, p, self.operands.seed)
        return kept.to(self.problem.accumulate) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)

    def drop(self, tile: Tensor) -> None:
        """Apply dropout to a tile in place."""
        if self.kept is not None:
            tile *= self.kept


@dataclass(eq=False)
class ScoreGrads:
    """Sums of the gradients to bias, ALiBi slopes and sink, in the accumulation dtype."""

    bias: Tensor | None
    alibi: Tensor | None
    sink: Tensor | None

    @classmethod
    def zeros(cls, problem: Problem, score: Score, needs: frozenset[str]) -> ScoreGrads:
        def start(name: str) -> Tensor | None:
            tensor = getattr(score, name) if name in needs else None
            if tensor is None:
                return None
            tensor = _four(tensor) if name == "bias" else tensor
            return torch.zeros(tensor.shape, dtype=problem.accumulate, device=tensor.device)

        return cls(start("bias"), start("alibi"), start("sink"))

    def result(self, score: Score) -> dict[str, Tensor | None]:
        found = {name: getattr(self, name) for name in ("bias", "alibi", "sink")}
        return {
            name: None
            if grad is None
            else grad.reshape(getattr(score, name).shape).to(getattr(score, name).dtype)
            for name, grad in found.items()
        }

    @property
    def wanted(self) -> bool:
        return self.bias is not None or self.alibi is not None

    def add_sink(self, piece: Piece, row_lse: Tensor, delta: Tensor) -> None:
        """The sink takes part as a key without value: dP = 0, so dS = -P * delta."""
        if self.sink is None:
            return
        sink = piece.operands.score.sink
        assert sink is not None
        logit = sink[piece.heads_q].to(delta.dtype).view(1, -1, 1, 1)
        p = (logit - piece.unstack(row_lse)).exp()
        self.sink[piece.heads_q] -= (p * piece.unstack(delta)).sum((0, 2, 3))

    def unwind(self, piece: Piece, grid: Grid, ds: Tensor, steps: Steps) -> Tensor:
        """From d loss / d modified score to d loss / d scaled score, collecting bias and slopes on the way."""
        if piece.folds:
            return ds
        score, region = piece.operands.score, grid.region
        if score.mod is not None:
            assert steps.unmodified is not None
            ds = ds * score.mod.slope(steps.unmodified, region)  # type: ignore[union-attr]
            if grid.limit is not None:  # 0 * NaN where the derivative is NaN out of sight
                ds.masked_fill_(~grid.limit.visible, 0.0)
        if self.bias is not None:
            _add_broadcast(self.bias, ds, region)
            load_pairs("dbias", self.bias, region, piece.problem.group)
            store_pairs("dbias", self.bias, region, piece.problem.group)
        if self.alibi is not None:
            by_head = -(ds * _distance(region)).sum((2, 3))  # [g, heads]
            heads = slice(region.head0, region.head1)
            if self.alibi.dim() == 1:
                self.alibi[heads] += by_head.sum(0)
            else:
                self.alibi[region.batch, heads] += by_head
        if score.softcap is not None:
            assert steps.raw is not None
            ds = ds * rules.modify_grad(steps.raw, torch.tanh, score.softcap)
        return ds


def _add_broadcast(total: Tensor, ds: Tensor, region: Region) -> None:
    """Add a tile's gradient to a tensor that broadcasts to (batch, heads, seqlen_q, seqlen_k)."""
    spans = ((region.head0, region.head1), (region.q0, region.q1), (region.k0, region.k1))
    shared = [dim for dim in range(4) if total.shape[dim] == 1]
    if shared:
        ds = ds.sum(shared, keepdim=True)
    for dim, (start, stop) in enumerate(spans, 1):
        if total.shape[dim] > 1:
            total = total.narrow(dim, start, stop - start)
    if total.shape[0] > 1:
        total.index_add_(0, region.batch, ds)
    else:
        total += ds
