"""The tiled loop in torch operations: online softmax over the schedule's tiles, recomputing backward.

Work is cut into pieces: some sequences and key heads with equal tiles, run together as one batch of matrix products
[pieces, rows, keys]. The query heads of a key head are stacked as further rows, so K and V are never expanded.
Scores are kept in units of log2: exp2 takes a quarter of exp's time here (38 against 170 us for 2^18 elements,
torch 2.13, 2 cores of Zen 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from onchip import schedule
from onchip.backends.cpu import room
from onchip.backends.cpu.scores import LN2, LOG2E, Grid, ScoreGrads
from onchip.backends.cpu.trace import load, store
from onchip.problem import Grads, Operands, Output, Problem, Saved
from onchip.schedule import Group
from onchip.tiles import Tiles

# Scores in flight at once: 2^19 fp32 are 2 MiB, which stays in a core's L2 with its operands.
_SCORES = 1 << 19
# Numbers of K and V that a piece may hold as a converted or gathered copy (32 MiB of fp32).
_COPY = 1 << 23


def refuse(problem: Problem) -> str | None:
    if problem.device != "cpu":
        return f"the tensors are on {problem.device}; it runs on cpu"
    return None


def tiles(problem: Problem) -> Tiles:
    """512 x 512, or 256 x 256 where a band's edge tiles are half empty.

    Causal forward, (1, 1024, 16, 64) fp32, 2 cores, 2026-11-29: 19.5 ms in 256 x 256, 27.9 in 512 x 512; full: 29.9
    and 28.9.

    Fewer query rows (decoding, or many query heads a key head) take more keys at once, since each torch call costs
    microseconds. A block-sparse mask's own blocks are kept where they are not tiny, so that none is visited in vain.
    """
    side = 256 if "band" in problem.mask_parts else 512
    tile_m = min(_power(problem.seqlen_q), max(side // _power(problem.group), 16))
    rows = max(tile_m * problem.group, 1)
    tile_n = min(max(side * side // rows, side), 4096)
    if problem.blocks is not None:
        tile_m, tile_n = (
            _multiple(block, size) for block, size in zip(problem.blocks, (tile_m, tile_n), strict=True)
        )
    return Tiles(tile_m, min(tile_n, _power(problem.seqlen_k)) if problem.blocks is None else tile_n)


def _power(n: int) -> int:
    """The power of two at or above n."""
    return 1 << max(n - 1, 0).bit_length()


def _multiple(block: int, limit: int) -> int:
    """The block itself, or so many of them that a tile has at least 64 rows, within the limit where it can be."""
    if block <= limit:
        return block * max(min(64, limit) // block, 1)
    # A larger block is cut, so that a tile stays within the memory it may take: evenly where that is possible.
    return next((size for size in range(limit, 63, -1) if block % size == 0), limit)


def extra_memory(
    problem: Problem, operands: Operands, step: str, needs: Iterable[str], device: str | None = None
) -> int:
    """`rest`, the sums of a score's gradients, and what a piece holds: an estimate of torch's temporaries."""
    score, size = operands.score, problem.accumulate.itemsize
    rest = operands.q[..., 0].numel() * size
    sums = (
        (getattr(score, name) for name in needs if name in ("bias", "alibi", "sink"))
        if step == "backward"
        else ()
    )
    wide = sum(x.numel() * size for x in sums if x.element_size() < size)
    pieces = _pieces(problem, operands, tiles(problem))
    return rest + wide + max((room.of_piece(piece, step, needs) for piece in pieces), default=0)


def _piece_limit(problem: Problem, tiles: Tiles, q_len: int, k_len: int) -> int:
    """Key heads (over sequences) that one piece holds."""
    scores = problem.group * min(tiles.tile_m, q_len) * min(tiles.tile_n, k_len)
    numbers = max(problem.group * q_len, k_len) * (problem.dim + problem.dim_v)
    return max(min(_SCORES // max(scores, 1), _COPY // max(numbers, 1)), 1)


def forward(problem: Problem, operands: Operands, tiles: Tiles) -> Output:
    q = operands.q
    out = q.new_zeros(*q.shape[:-1], problem.dim_v)
    lse_shape = (
        (q.shape[1], q.shape[0]) if problem.layout == "varlen" else (q.shape[0], q.shape[2], q.shape[1])
    )
    lse = q.new_full(lse_shape, -torch.inf, dtype=problem.accumulate)
    rest = torch.zeros_like(lse)
    for piece in _pieces(problem, operands, tiles):
        _forward(piece, out, as_rows(lse), as_rows(rest))
    return Output(out, lse, rest)


def as_rows(lse: Tensor) -> Tensor:
    """(batch, heads, seqlen) or packed (heads, total) as rows of dim 1 in q's order, a view."""
    return lse.transpose(-1, -2).unsqueeze(-1)


def backward(
    problem: Problem, operands: Operands, saved: Saved, dout: Tensor, dlse: Tensor | None, tiles: Tiles
) -> Grads:
    needs = saved.needs
    tensors = {"q": operands.q, "k": operands.k, "v": operands.v}
    grads = {name: torch.zeros_like(tensors[name]) for name in "qkv" if name in needs}
    score_grads = ScoreGrads.zeros(problem, operands.score, needs)
    assert saved.rest is not None
    rows = as_rows(saved.lse), as_rows(saved.rest), None if dlse is None else as_rows(dlse)
    for piece in _pieces(problem, operands, tiles):
        _backward(piece, saved.out, dout, rows, grads, score_grads)
    return Grads(**grads, **score_grads.result(operands.score))


@dataclass(frozen=True, eq=False)
class Piece:
    """Some sequences and key heads of a group, with their rows read and ready."""

    problem: Problem
    operands: Operands
    tiles: Tiles
    group: Group
    batch: Tensor  # [g]
    heads_k: slice
    limits: dict = field(default_factory=dict)
    buffers: dict = field(default_factory=dict)

    @cached_property
    def heads_q(self) -> slice:
        return slice(self.heads_k.start * self.problem.group, self.heads_k.stop * self.problem.group)

    @property
    def heads(self) -> int:
        return self.batch.numel() * (self.heads_q.stop - self.heads_q.start)

    @property
    def size(self) -> int:
        return self.batch.numel() * (self.heads_k.stop - self.heads_k.start)

    @cached_property
    def k(self) -> Tensor:  # [size, seqlen_k, dim]
        return self._keys(self.operands.k)

    @cached_property
    def v(self) -> Tensor:  # [size, seqlen_k, dim_v]
        return self._keys(self.operands.v)

    def _keys(self, tensor: Tensor) -> Tensor:
        rows = self.operands.layout.read_k(tensor, self.batch, self.heads_k, self.group.k_len)
        return rows.to(self.problem.accumulate).reshape(self.size, self.group.k_len, rows.shape[-1])

    def read_q(self, tensor: Tensor) -> Tensor:  # [g, heads_q, seqlen_q, dim], in the tensor's dtype
        return self.operands.layout.read_q(tensor, self.batch, self.heads_q, self.group.q_len)

    def stack(self, tile: Tensor) -> Tensor:
        """[g, heads_q, tile_m, dim] -> [size, group * tile_m, dim] in the accumulation dtype."""
        tile = tile.to(self.problem.accumulate)
        return tile.reshape(self.size, self.problem.group * tile.shape[2], tile.shape[3])

    def unstack(self, tile: Tensor) -> Tensor:
        """[size, group * tile_m, x] -> [g, heads_q, tile_m, x], a view."""
        heads = self.heads_q.stop - self.heads_q.start
        return tile.view(self.batch.numel(), heads, tile.shape[1] // self.problem.group, tile.shape[-1])

    def matmul(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """a @ b in a buffer of this name: a fresh tile of 2 MiB for each product costs more in page faults than it."""
        need = a.shape[0] * a.shape[1] * b.shape[2]
        if name not in self.buffers or self.buffers[name].numel() < need:
            self.buffers[name] = a.new_empty(need)
        return torch.bmm(a, b, out=self.buffers[name][:need].view(a.shape[0], a.shape[1], b.shape[2]))

    @cached_property
    def folds(self) -> bool:
        """Whether nothing stands between q.k and the softmax, so that the change to log2 goes into q."""
        return not set(self.problem.score_parts) - {"sink"}

    @property
    def factor(self) -> float:
        """What q is multiplied by."""
        return self.problem.scale * (LOG2E if self.folds else 1.0)

    @property
    def unit(self) -> float:
        """log2(e) over the unit of the scores: 1 where they are in log2, so that exp2(unit * s) = e^(natural s)."""
        return 1.0 if self.folds else LOG2E

    def weights(self, s: Tensor, base: Tensor) -> Tensor:
        """e^(s - base) in place. The difference comes first: a score of -3e38 must not overflow by the unit."""
        s.sub_(base)
        return (s if self.folds else s.mul_(LOG2E)).exp2_()

    def rows(self) -> Iterator[tuple[int, int, Iterator[Grid]]]:
        """Query tiles [q0, q1), each with the score tiles to visit, one at a time: each holds its mask."""
        for m_block, visits in self.group.rows():
            q0 = m_block * self.tiles.tile_m
            q1 = min(q0 + self.tiles.tile_m, self.group.q_len)
            yield q0, q1, (self.grid(q0, q1, n_block, full) for n_block, full in visits)

    def grid(self, q0: int, q1: int, n_block: int, full: bool) -> Grid:
        k0 = n_block * self.tiles.tile_n
        k1 = min(k0 + self.tiles.tile_n, self.group.k_len)
        heads, group = self.heads_q, self.group
        region = schedule.Region(
            self.batch, heads.start, heads.stop, q0, q1, k0, k1, group.q_len, group.k_len
        )
        return Grid(self.problem, self.operands, region, full, self.limits)


def _pieces(problem: Problem, operands: Operands, tiles: Tiles) -> Iterator[Piece]:
    for group in schedule.build(problem, operands.layout, operands.mask, tiles).groups:
        if group.q_len == 0:
            continue
        limit = _piece_limit(problem, tiles, group.q_len, group.k_len)
        head0, head1 = group.head0 // problem.group, group.head1 // problem.group
        sequences = max(limit // max(head1 - head0, 1), 1)
        step = max(min(limit, head1 - head0), 1)
        for batch in group.batch.split(sequences):
            for head in range(head0, head1, step):
                yield Piece(problem, operands, tiles, group, batch, slice(head, min(head + step, head1)))


def _forward(piece: Piece, out: Tensor, lse: Tensor, rest: Tensor) -> None:
    layout, dtype = piece.operands.layout, piece.problem.accumulate
    q = piece.read_q(piece.operands.q)
    out_rows = q.new_empty(*q.shape[:-1], piece.problem.dim_v, dtype=dtype)
    lse_rows, rest_rows = (q.new_empty(*q.shape[:-1], 1, dtype=dtype) for _ in range(2))
    for q0, q1, grids in piece.rows():
        q_tile = piece.stack(q[:, :, q0:q1]) * piece.factor  # [size, group * tile_m, dim]
        load("q", q_tile, piece.heads)
        row_max, row_sum = _start(piece, q1 - q0)  # [size, group * tile_m, 1]
        acc = q_tile.new_zeros(*q_tile.shape[:2], piece.problem.dim_v)
        for grid in grids:
            k_tile, v_tile = _key_tiles(piece, grid)
            s = piece.matmul(
                "s", grid.clean_queries(piece, q_tile), k_tile.mT
            )  # [size, group * tile_m, tile_n]
            s = grid.finish(piece.unstack(s), piece.folds)[0].view_as(s)
            new_max = torch.maximum(row_max, s.amax(-1, keepdim=True))
            # A row without a key so far has maximum -inf; subtracting 0 from its -inf scores gives weight 0, not NaN.
            base = new_max.masked_fill(new_max == -torch.inf, 0.0)
            p = piece.weights(s, base)
            alpha = piece.weights(row_max, base)
            row_sum = row_sum * alpha + p.sum(-1, keepdim=True)
            row_max = new_max
            grid.drop(piece.unstack(p))
            acc.mul_(alpha).baddbmm_(p, v_tile)
        acc /= row_sum.masked_fill(row_sum == 0, 1.0)
        base = row_max.masked_fill(row_max == -torch.inf, 0.0)
        out_rows[:, :, q0:q1] = piece.unstack(acc)
        tail = row_sum.log()  # lse = base + tail, kept as its rounded sum and what that lost
        base *= LN2 * piece.unit
        row_lse = base + tail
        lse_rows[:, :, q0:q1] = piece.unstack(row_lse)
        rest_rows[:, :, q0:q1] = piece.unstack((base - row_lse + tail).nan_to_num_(nan=0.0))
        store("out", acc, piece.heads)
        store("lse", row_sum, piece.heads)
    layout.write_q(out, piece.batch, piece.heads_q, out_rows)
    layout.write_q(lse, piece.batch, piece.heads_q, lse_rows)
    layout.write_q(rest, piece.batch, piece.heads_q, rest_rows)


def _start(piece: Piece, tile_m: int) -> tuple[Tensor, Tensor]:
    """row_max and row_sum before the first key: nothing, or the sink's logit with weight 1."""
    shape = (piece.batch.numel(), piece.heads_q.stop - piece.heads_q.start, tile_m, 1)
    sink = piece.operands.score.sink
    if sink is None:
        row_max = torch.full(shape, -torch.inf, dtype=piece.problem.accumulate, device=piece.batch.device)
    else:
        logit = sink[piece.heads_q].to(piece.problem.accumulate) * (LOG2E / piece.unit)
        row_max = logit.view(1, -1, 1, 1).expand(shape)
    row_max = row_max.reshape(piece.size, -1, 1).contiguous()
    return row_max, (row_max > -torch.inf).to(row_max.dtype)


def _key_tiles(piece: Piece, grid: Grid) -> tuple[Tensor, Tensor]:
    """K and V of a score tile; keys that none of its queries may see are zeroed, whatever they hold."""
    keys = slice(grid.region.k0, grid.region.k1)
    k_tile, v_tile = piece.k[:, keys], piece.v[:, keys]
    load("k", k_tile, piece.size)
    load("v", v_tile, piece.size)
    return grid.clean_keys(piece, k_tile), grid.clean_keys(piece, v_tile)


def _backward(
    piece: Piece,
    out: Tensor,
    dout: Tensor,
    statistics: tuple[Tensor, Tensor, Tensor | None],
    grads: dict,
    score_grads: ScoreGrads,
) -> None:
    """`statistics`: lse, what it lost to rounding, and its upstream gradient, as rows."""
    layout = piece.operands.layout
    q, o, do = (piece.read_q(x) for x in (piece.operands.q, out, dout))
    lse, rest, dlse = (None if x is None else piece.read_q(x) for x in statistics)
    assert lse is not None and rest is not None
    dq = q.new_empty(q.shape, dtype=piece.problem.accumulate) if "q" in grads else None
    dk = torch.zeros_like(piece.k, memory_format=torch.contiguous_format) if "k" in grads else None
    dv = torch.zeros_like(piece.v, memory_format=torch.contiguous_format) if "v" in grads else None
    for q0, q1, grids in piece.rows():
        rows = slice(q0, q1)
        q_tile, do_tile = piece.stack(q[:, :, rows]) * piece.factor, piece.stack(do[:, :, rows])
        # e^(s - inf) = 0: rows without a key get no weight, whatever their upstream gradient holds.
        row_lse = piece.stack(lse[:, :, rows])
        row_lse = row_lse.masked_fill(row_lse == -torch.inf, torch.inf)
        delta = (do_tile * piece.stack(o[:, :, rows])).sum(-1, keepdim=True)
        if dlse is not None:
            delta -= piece.stack(dlse[:, :, rows])
        delta.masked_fill_(row_lse == torch.inf, 0.0)
        row = (row_lse, piece.stack(rest[:, :, rows]), delta)
        for name, tile in (("q", q_tile), ("out", do_tile), ("dout", do_tile), ("lse", delta)):
            load(name, tile, piece.heads)
        score_grads.add_sink(piece, row_lse, delta)
        dq_tile = None if dq is None else torch.zeros_like(q_tile)
        for grid in grids:
            _backward_tile(piece, grid, q_tile, do_tile, row, (dq_tile, dk, dv), score_grads)
        if dq is not None and dq_tile is not None:
            dq[:, :, rows] = piece.unstack(dq_tile)
            store("dq", q_tile, piece.heads)
    if dq is not None:
        layout.write_q(grads["q"], piece.batch, piece.heads_q, dq.mul_(piece.problem.scale))
    if dk is not None:
        dk *= 1.0 / LOG2E if piece.folds else 1.0  # q_tile holds scale * log2(e) * q
        layout.write_k(grads["k"], piece.batch, piece.heads_k, _by_sequence(piece, dk))
    if dv is not None:
        layout.write_k(grads["v"], piece.batch, piece.heads_k, _by_sequence(piece, dv))


def _by_sequence(piece: Piece, rows: Tensor) -> Tensor:
    sequences = piece.batch.numel()
    return rows.view(sequences, rows.shape[0] // sequences, *rows.shape[1:])


def _backward_tile(
    piece: Piece,
    grid: Grid,
    q_tile: Tensor,
    do_tile: Tensor,
    row: tuple[Tensor, Tensor, Tensor],
    sums: tuple[Tensor | None, Tensor | None, Tensor | None],
    score_grads: ScoreGrads,
) -> None:
    row_lse, row_rest, delta = row
    dq, dk, dv = sums
    keys = slice(grid.region.k0, grid.region.k1)
    k_tile, v_tile = _key_tiles(piece, grid)
    q_tile, do_tile = grid.clean_queries(piece, q_tile), grid.clean_queries(piece, do_tile)
    s = piece.matmul("s", q_tile, k_tile.mT)  # [size, group * tile_m, tile_n]
    s4, steps = grid.finish(piece.unstack(s), piece.folds, keep_steps=True)
    # s - lse first: near one another, their difference is exact, and what lse lost to rounding counts in full.
    p = piece.weights(s4.view_as(s).sub_(row_lse * (LOG2E / piece.unit)), row_rest * (LOG2E / piece.unit))
    if dv is not None:
        dropped = p if grid.kept is None else p.clone()
        grid.drop(piece.unstack(dropped))
        dv[:, keys].baddbmm_(dropped.mT, do_tile)
        load("dv", v_tile, piece.size)
        store("dv", v_tile, piece.size)
    if dq is None and dk is None and not score_grads.wanted:
        return
    dp = piece.matmul("dp", do_tile, v_tile.mT)
    grid.drop(piece.unstack(dp))
    ds = dp.sub_(delta).mul_(p)  # d loss / d (score after every modification)
    ds = score_grads.unwind(piece, grid, piece.unstack(ds), steps).view_as(ds)
    if dq is not None:
        dq.baddbmm_(ds, k_tile)
    if dk is not None:
        dk[:, keys].baddbmm_(ds.mT, q_tile)
        load("dk", k_tile, piece.size)
        store("dk", k_tile, piece.size)


assert math.isclose(LN2 * LOG2E, 1.0)
