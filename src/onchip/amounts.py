"""What a sweep visits and moves: rows, keys, pairs, and what it reads of a mask's and a score's tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from onchip import schedule
from onchip.layout import Layout
from onchip.mask import Mask
from onchip.orders import TENSORS, Sweep
from onchip.problem import Problem
from onchip.schedule import EMPTY, FULL, Group, Schedule
from onchip.stored import Stored
from onchip.tiles import Tiles

Held = dict[str, tuple[Stored, ...]]  # of `stored.tensors`


class Amount(NamedTuple):
    """`least`: the bytes where a cache catches what is moved more than once."""

    numbers: int = 0
    tiles: int = 0
    bytes: int = 0
    least: int = 0


@dataclass(frozen=True, eq=False)
class Cell:
    """Sequences and query heads whose tiles a sweep visits alike."""

    batch: tuple[int, ...]
    head0: int
    head1: int
    q_len: int
    k_len: int
    visited: Tensor  # bool [m_blocks, n_blocks]
    looked: Tensor  # where the mask's elements are looked at

    @property
    def heads(self) -> int:
        """Over its sequences."""
        return len(self.batch) * (self.head1 - self.head0)


def lengths(layout: Layout) -> list[tuple[int, int]]:
    """(q_len, k_len) of each sequence."""
    return list(zip(layout.q_lens, layout.k_lens, strict=True))


def numbers(problem: Problem, name: str) -> tuple[str, int]:
    """A tensor's side and how many numbers it has a row, key or pair."""
    spec = TENSORS[name]
    return spec.side, 1 if spec.width == "1" else getattr(problem, spec.width)


def itemsize(problem: Problem, name: str, wide: frozenset[str], own: int = 0) -> int:
    """Bytes of a number; own: as it is stored."""
    kind = "sum" if name in wide else TENSORS[name].kind
    return {"dtype": problem.dtype.itemsize, "sum": problem.accumulate.itemsize, "byte": 1, "own": own}[kind]


def built(problem: Problem, layout: Layout, mask: Mask, sweep: Sweep) -> Schedule:
    """The schedule that a sweep runs: a stacked one visits what any query head of a key head needs."""
    if not sweep.stacked:
        problem = replace(problem, heads_k=problem.heads_q)
    if sweep.by_rules:
        mask = Mask(mask.band, mask.rows)
    return schedule.build(problem, layout, mask, sweep.tiles)


def visited(sweep: Sweep, group: Group) -> Tensor:
    """Whether a sweep visits each tile: bool [m_blocks, n_blocks]."""
    if sweep.every:
        return torch.ones_like(group.kinds, dtype=torch.bool)
    found = group.kinds != EMPTY
    if sweep.never_none and found.numel():  # of a sweep by queries
        found[:, 0] |= ~found.any(1)
    return found


def looked(sweep: Sweep, group: Group) -> Tensor:
    """Whether a sweep looks at the mask's elements in each tile."""
    found = visited(sweep, group)
    if sweep.looks or sweep.every:
        return found
    partial = group.kinds != FULL
    if sweep.listed:  # a last inner tile that is cut off needs the mask
        if sweep.outer == "q":
            partial[:, group.k_len // sweep.tiles.tile_n :] = True
        else:
            partial[group.q_len // sweep.tiles.tile_m :] = True
    return found & partial


def cells(problem: Problem, layout: Layout, mask: Mask, sweep: Sweep) -> list[Cell]:
    if not sweep.every:
        return [
            Cell(
                tuple(group.batch.tolist()), group.head0, group.head1, group.q_len, group.k_len,
                visited(sweep, group).cpu(), looked(sweep, group).cpu(),
            )
            for group in built(problem, layout, mask, sweep).groups
        ]  # fmt: skip
    alike: dict[tuple[int, int], list[int]] = {}
    for b, sizes in enumerate(lengths(layout)):
        alike.setdefault(sizes, []).append(b)
    found = []
    for sizes, members in alike.items():
        every = torch.ones(sweep.tiles.count(*sizes), dtype=torch.bool, device="cpu")
        found.append(Cell(tuple(members), 0, problem.heads_q, *sizes, every, every))
    return found


def area(chosen: Tensor, q_len: int, k_len: int, tiles: Tiles) -> int:
    """Pairs of the chosen tiles, for one head."""
    return int(chosen.cpu().long() @ _numbers(tiles.widths(k_len)) @ _numbers(tiles.heights(q_len)))


def _numbers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device="cpu")


def moves(
    problem: Problem, layout: Layout, mask: Mask, held: Held, sweep: Sweep
) -> tuple[list[tuple[str, bool, Amount]], int]:
    """(tensor, whether it is loaded, how much) of a sweep, and the pairs of the tiles that it visits."""
    own = cells(problem, layout, mask, sweep)
    by_side = _by_side(problem, layout, sweep, own)
    lists = (
        ("once", sweep.once_load, True),
        ("once", sweep.once_store, False),
        ("seen", sweep.seen_load, True),
        ("visit", sweep.visit_load, True),
        ("visit", sweep.visit_store, False),
        ("look", sweep.look_load, True),
    )
    found = []
    for how, names, load in lists:
        for name in names:
            if TENSORS[name].side != "pair":
                found.append((name, load, _sided(problem, layout, sweep, name, by_side[how])))
            elif name in held:
                parts = [_paired(problem, sweep, own, name, x, how) for x in held[name]]
                found.append((name, load, Amount(*(sum(each) for each in zip(*parts, strict=True)))))
    return found, by_side["visit"]["s"][0]


Sides = dict[str, tuple[int, int]]  # side -> rows, keys or pairs, and tiles, that one tensor of it moves


def _by_side(problem: Problem, layout: Layout, sweep: Sweep, own: list[Cell]) -> dict[str, Sides]:
    once, visit, seen = ({side: [0, 0] for side in "qks"} for _ in range(3))
    for q_len, k_len in lengths(layout):
        m_blocks, n_blocks = sweep.tiles.count(q_len, k_len)
        _add(once["q"], q_len * problem.heads_q * sweep.shares, m_blocks * problem.heads_q * sweep.shares)
        _add(once["k"], k_len * problem.heads_k, n_blocks * problem.heads_k)
    for cell in own:
        heads = cell.heads
        heads_k = heads // problem.group if sweep.stacked else heads
        if sweep.every:
            m_blocks, n_blocks = cell.visited.shape
            _add(visit["q"], cell.q_len * n_blocks * heads, m_blocks * n_blocks * heads)
            _add(visit["k"], cell.k_len * m_blocks * heads_k, m_blocks * n_blocks * heads_k)
            _add(visit["s"], cell.q_len * cell.k_len * heads, m_blocks * n_blocks * heads)
            continue
        seen_tiles = cell.visited.long()
        height = _numbers(sweep.tiles.heights(cell.q_len))
        width = _numbers(sweep.tiles.widths(cell.k_len))
        by_row, by_key, count = seen_tiles.sum(1), seen_tiles.sum(0), int(seen_tiles.sum())
        _add(visit["q"], int(by_row @ height) * heads, count * heads)
        _add(visit["k"], int(by_key @ width) * heads_k, count * heads_k)
        _add(visit["s"], area(cell.visited, cell.q_len, cell.k_len, sweep.tiles) * heads, count * heads)
        some_row, some_key = (by_row > 0).long(), (by_key > 0).long()
        _add(seen["q"], int(some_row @ height) * heads, int(some_row.sum()) * heads)
        _add(seen["k"], int(some_key @ width) * heads_k, int(some_key.sum()) * heads_k)
    found = {"once": once, "visit": visit, "seen": seen}
    return {how: {side: (x[0], x[1]) for side, x in sides.items()} for how, sides in found.items()}


def _add(total: list[int], amount: int, tiles: int) -> None:
    total[0] += amount
    total[1] += tiles


def _sided(problem: Problem, layout: Layout, sweep: Sweep, name: str, sides: Sides) -> Amount:
    """Of a tensor of rows, keys or score tiles; at least it moves as a whole, once."""
    side, width = numbers(problem, name)
    rows, tiles = sides[side]
    sizes = lengths(layout)
    whole = {
        "q": sum(m for m, _ in sizes) * problem.heads_q * (sweep.shares if TENSORS[name].by_share else 1),
        "k": sum(n for _, n in sizes) * problem.heads_k,
        "s": sum(m * n for m, n in sizes) * problem.heads_q,
    }[side]
    size = width * itemsize(problem, name, sweep.wide)
    return Amount(rows * width, tiles, rows * size, min(rows, whole) * size)


def _paired(problem: Problem, sweep: Sweep, own: list[Cell], name: str, stored: Stored, how: str) -> Amount:
    """Of a tensor that broadcasts over the pairs: of each tile what it has there, each number once."""
    size = itemsize(problem, name, sweep.wide, stored.itemsize)
    if how == "once":
        batch, heads, rows, keys = stored.shape
        m_blocks, n_blocks = sweep.tiles.count(rows, keys)
        total = stored.numbers
        return Amount(total, batch * heads * m_blocks * n_blocks, total * size, total * size)
    chosen = [cell.looked if how == "look" else cell.visited for cell in own]
    distinct, apart = _distinct(sweep, own, chosen, stored)
    if sweep.keeps:
        return Amount(distinct, apart, distinct * size, distinct * size)
    total = tiles = 0
    for cell, seen in zip(own, chosen, strict=True):
        _, by_head, by_row, by_key = stored.has
        heads = cell.heads if by_head or not sweep.stacked else cell.heads // problem.group
        height, width = _extent(cell, seen, sweep, by_row, by_key)
        total += int((height * width).sum()) * heads
        tiles += int(seen.sum()) * heads
    return Amount(total, tiles, total * size, distinct * size)


def _extent(cell: Cell, seen: Tensor, sweep: Sweep, by_row: bool, by_key: bool) -> tuple[Tensor, Tensor]:
    """Queries and keys of each chosen tile [m_blocks, n_blocks], 1 where a tensor repeats them, 0 in the others."""
    chosen = seen.long()
    height = _numbers(sweep.tiles.heights(cell.q_len))[:, None] if by_row else 1
    width = _numbers(sweep.tiles.widths(cell.k_len)) if by_key else 1
    return chosen * height, chosen * width


def _distinct(sweep: Sweep, own: list[Cell], chosen: list[Tensor], stored: Stored) -> tuple[int, int]:
    """Numbers and tiles, each once, of all that cells ask for: those that share a part of the tensor ask together."""
    by_batch, by_head, *_ = stored.has
    edges = sorted({h for cell in own for h in (cell.head0, cell.head1)})
    spans = list(pairwise(edges)) if by_head else [(0, edges[-1])] if edges else []
    together: dict[tuple[int, ...], list[int]] = {}
    for i, cell in enumerate(own):
        together.setdefault(cell.batch if by_batch else (), []).append(i)
    total = tiles = 0
    for members, indices in together.items():
        for first, end in spans:
            asking = [i for i in indices if own[i].head0 < end and own[i].head1 > first]
            times = (len(members) if by_batch else 1) * (end - first if by_head else 1)
            found = _union(sweep, [(own[i], chosen[i]) for i in asking], stored)
            total, tiles = total + found[0] * times, tiles + found[1] * times
    return total, tiles


def _union(sweep: Sweep, asking: list[tuple[Cell, Tensor]], stored: Stored) -> tuple[int, int]:
    """Numbers and tiles of one sequence's and head's share of the tensor that some cell asks for.

    Where cut tiles of two lengths lie on one another, the larger of each side counts.
    """
    _, _, by_row, by_key = stored.has
    shape = [max((seen.shape[dim] for _, seen in asking), default=0) for dim in (0, 1)]
    height = width = torch.zeros(shape, dtype=torch.long, device="cpu")
    if not height.numel():
        return 0, 0
    for cell, seen in asking:
        room = (0, shape[1] - seen.shape[1], 0, shape[0] - seen.shape[0])
        own_height, own_width = _extent(cell, seen, sweep, by_row, by_key)
        height, width = (
            torch.maximum(height, pad(own_height, room)),
            torch.maximum(width, pad(own_width, room)),
        )
    numbers_ = height * width
    if not by_row:
        numbers_ = numbers_.amax(0, keepdim=True)
    if not by_key:
        numbers_ = numbers_.amax(1, keepdim=True)
    return int(numbers_.sum()), int((numbers_ > 0).sum())
