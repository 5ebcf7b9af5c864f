"""An algorithm tile by tile: what is loaded and stored at each step, with running totals, for one head.

`to_json` puts an algorithm's steps and totals (`traffic.py`) in a form that a page can draw without a sum of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from onchip import amounts, orders, schedule, stored, traffic
from onchip.layout import Layout
from onchip.mask import Mask, Region
from onchip.orders import ALGORITHMS, SRAM, STEPS, TENSORS, Sweep
from onchip.problem import Problem
from onchip.schedule import EMPTY, FULL, Group
from onchip.score import Score
from onchip.stored import Stored
from onchip.tiles import Tiles

LIMIT = 100_000  # tiles of an algorithm in one JSON


@dataclass(frozen=True)
class Step:
    """One visit: a score tile (m_block, n_block), or only a row or column of tiles where the other is None.

    load, store: numbers of each tensor moved now; read, written: numbers moved so far, this step included.
    """

    phase: str
    m_block: int | None
    n_block: int | None
    load: dict[str, int]
    store: dict[str, int]
    read: int
    written: int


def walk(
    problem: Problem,
    layout: Layout,
    mask: Mask,
    algorithm: str = "onchip",
    step: str = "forward",
    *,
    sequence: int = 0,
    head: int = 0,
    score: Score | None = None,
    **options: Any,
) -> Iterator[Step]:
    """The steps of one query head of one sequence, in the order in which the algorithm takes them.

    A stacked tile's keys are charged in full to each of its heads; on a problem of one sequence and one head the last
    step's totals are `traffic.count`'s. The options are those of `orders.sweeps`.
    """
    if not 0 <= sequence < problem.batch:
        raise ValueError(f"sequence: got {sequence}, expected 0 to {problem.batch - 1}")
    if not 0 <= head < problem.heads_q:
        raise ValueError(f"head: got {head}, expected 0 to {problem.heads_q - 1}")
    read = written = 0
    held = stored.tensors(problem, mask, score)
    for sweep in orders.sweeps(problem, algorithm, step, mask=mask, **options):
        for m, n, load, store in _sweep(problem, layout, mask, held, sweep, sequence, head):
            read, written = read + sum(load.values()), written + sum(store.values())
            yield Step(sweep.name, m, n, load, store, read, written)


Move = tuple[int | None, int | None, dict[str, int], dict[str, int]]


@dataclass(frozen=True)
class _Grid:
    """The tiles of one head as a sweep visits them: `visits[outer]` are inner tiles in their order."""

    problem: Problem
    sweep: Sweep
    heights: list[int]
    widths: list[int]
    visits: list[list[int]]
    looked: list[list[bool]]  # [m_block][n_block]
    held: amounts.Held
    moved: set[tuple] = field(default_factory=set)  # parts of them, where a part moves once

    @property
    def by_rows(self) -> bool:
        return self.sweep.outer == "q"

    def place(self, outer: int | None, inner: int | None) -> tuple[int | None, int | None]:
        """(m_block, n_block)."""
        return (outer, inner) if self.by_rows else (inner, outer)

    def amounts(self, names: tuple[str, ...], outer: int | None, inner: int | None) -> dict[str, int]:
        """Numbers of the named tensors in this tile; of those of its outer or inner side where only that is given."""
        m, n = self.place(outer, inner)
        sizes = {"q": None if m is None else self.heights[m], "k": None if n is None else self.widths[n]}
        sizes["s"] = None if m is None or n is None else self.heights[m] * self.widths[n]
        found: dict[str, int] = {}
        for name in names:
            side, width = amounts.numbers(self.problem, name)
            size = self._held(name, m, n) if side == "pair" else sizes[side]
            if size:
                found[name] = size * width
        return found

    def once(self, names: tuple[str, ...], outer: int | None, inner: int | None) -> dict[str, int]:
        """The same of tensors that move once, by each share of the keys."""
        found = self.amounts(tuple(n for n in names if TENSORS[n].side != "pair"), outer, inner)
        found = {name: n * self.sweep.shares if TENSORS[name].side == "q" else n for name, n in found.items()}
        whole = {name for name in names if TENSORS[name].side == "pair" and name in self.held}
        return found | {name: self._strip(self.held[name], outer) for name in whole if outer is not None}

    def looks(self, outer: int, inner: int) -> dict[str, int]:
        """What is read of the mask's tensors there."""
        m, n = self.place(outer, inner)
        assert m is not None and n is not None
        return self.amounts(self.sweep.look_load, outer, inner) if self.looked[m][n] else {}

    def _held(self, name: str, m: int | None, n: int | None) -> int:
        """Numbers that a mask's or score's tensors of this name have of a score tile."""
        total = 0
        if m is None or n is None or name not in self.held:
            return total
        for which, tensor in enumerate(self.held[name]):
            _, _, by_row, by_key = tensor.has
            part = name, which, m if by_row else None, n if by_key else None
            if not (self.sweep.keeps and part in self.moved):
                total += (self.heights[m] if by_row else 1) * (self.widths[n] if by_key else 1)
            self.moved.add(part)
        return total

    def _strip(self, tensors: tuple[Stored, ...], outer: int) -> int:
        """An outer tile's share of whole tensors: what they have of its rows or keys, else all with the first tile."""
        side = 2 if self.by_rows else 3
        own = (self.heights if self.by_rows else self.widths)[outer]
        parts = (
            t.numbers // t.shape[side] * own if t.has[side] else t.numbers * (outer == 0) for t in tensors
        )
        return sum(parts)


def _sweep(
    problem: Problem, layout: Layout, mask: Mask, held: amounts.Held, sweep: Sweep, sequence: int, head: int
) -> Iterator[Move]:
    groups = amounts.built(problem, layout, mask, sweep).groups
    group = next(g for g in groups if g.head0 <= head < g.head1 and bool((g.batch == sequence).any()))
    heights, widths = sweep.tiles.heights(group.q_len), sweep.tiles.widths(group.k_len)
    looked = amounts.looked(sweep, group).tolist()
    grid = _Grid(problem, sweep, heights, widths, _visits(sweep, group), looked, held)
    outer = range(len(grid.visits))
    if sweep.by_length:  # as compiled/lists.py has them
        lengths = (group.kinds != EMPTY).sum(1 if grid.by_rows else 0)
        outer = lengths.argsort(descending=True, stable=True).tolist()
    elif _bounded(mask, sweep.backwards) and not _bounded(mask, sweep.forwards):
        outer = outer[::-1]
    last = {j: i for i in outer for j in grid.visits[i]}
    done: set[int] = set()
    for i in outer:
        yield from _outer(grid, i, last, done)
    for j in range(len(widths if grid.by_rows else heights)):
        if j not in last:  # inner tiles that no visit has moved
            load = grid.once(sweep.once_load, None, j)
            store = grid.once(sweep.once_store, None, j)
            if load or store:
                yield (*grid.place(None, j), load, store)


def _bounded(mask: Mask, by: tuple[str, ...]) -> bool:
    """Whether its band is, by one of these edges."""
    return mask.band is not None and any(getattr(mask.band, edge) is not None for edge in by)


def _visits(sweep: Sweep, group: Group) -> list[list[int]]:
    """The inner tiles that each outer one visits, in the sweep's order."""
    visited, kinds = amounts.visited(sweep, group), group.kinds
    if not (sweep.visit_load or sweep.visit_store or sweep.look_load or sweep.products):
        visited = torch.zeros_like(visited)  # a pass over rows or keys: nothing happens at a score tile
    inner, tile = group.k_len, sweep.tiles.tile_n
    if sweep.outer == "k":
        visited, kinds, inner, tile = visited.mT, kinds.mT, group.q_len, sweep.tiles.tile_m
    found = [[j for j, seen in enumerate(row) if seen] for row in visited.tolist()]
    if sweep.listed:  # a last tile that is cut off needs the mask, and counts as partial
        full = [[kind == FULL for kind in row] for row in kinds.tolist()]
        cut = inner // tile
        found = [
            sorted(row, key=lambda j, of=of: of[j] and j != cut) for row, of in zip(found, full, strict=True)
        ]
    return [row[::-1] for row in found] if sweep.descending else found


def _outer(grid: _Grid, i: int, last: dict[int, int], done: set[int]) -> Iterator[Move]:
    """The visits of outer tile i. `last`: the last outer tile that visits an inner one; `done`: inner ones so far."""
    sweep, visits = grid.sweep, grid.visits[i]
    load, store = grid.once(sweep.once_load, i, None), grid.once(sweep.once_store, i, None)
    if not visits:
        yield (*grid.place(i, None), load, store)
        return
    load |= grid.amounts(sweep.seen_load, i, None)
    for j in visits:
        load = {**load, **grid.amounts(sweep.visit_load, i, j), **grid.looks(i, j)}
        now = grid.amounts(sweep.visit_store, i, j)
        if j not in done:
            done.add(j)
            load |= grid.once(sweep.once_load, None, j) | grid.amounts(sweep.seen_load, None, j)
        if last[j] == i:
            now |= grid.once(sweep.once_store, None, j)
        if j == visits[-1]:
            now |= store
        yield (*grid.place(i, j), load, now)
        load = {}


def kinds(
    problem: Problem, layout: Layout, mask: Mask, tiles: Tiles, sequence: int = 0, head: int = 0
) -> list[list[int]]:
    """The kind of every tile of one head: 0 empty, 1 partial, 2 full."""
    q_len, k_len = amounts.lengths(layout)[sequence]
    batch = torch.tensor([sequence], device=problem.device)
    region = Region(batch, head, head + 1, 0, q_len, 0, k_len, q_len, k_len)
    return schedule.classify(mask, region, tiles)[0, 0].tolist()


def to_json(
    problem: Problem,
    layout: Layout,
    mask: Mask,
    algorithms: tuple[str, ...] = ("standard", "flash1", "flash2", "onchip"),
    *,
    steps: tuple[str, ...] = STEPS,
    tiles: Tiles | None = None,
    sram: int = SRAM,
    backend: str | None = None,
    score: Score | None = None,
) -> dict[str, Any]:
    """One head of a problem as plain lists and dicts: what each algorithm moves, step by step, and its totals.

    {"problem": {...}, "mask": repr, "sram": bytes, "lower_bound": numbers, "algorithms": {name: {step: {"totals":
    Traffic.to_json(), "phases": [{"name", "outer", "tiles": [m, n], "lead", "kinds": [[0 | 1 | 2]], "every"}],
    "tensors": [name], "steps": [[phase, m | -1, n | -1, [[tensor, numbers]], [[tensor, numbers]], read, written]]}}}}.
    phase and tensor are indices into the two lists; the pairs are loads, then stores. The problem's own batch and
    heads are replaced by one sequence and one head, of many: its keys are split only if the problem says so. ValueError
    where an algorithm has more than 100,000 tiles.
    """
    one = replace(problem, batch=1, heads_q=1, heads_k=1, num_splits=problem.num_splits or 1)
    options: dict[str, Any] = {"tiles": tiles, "sram": sram, "backend": backend}
    first = _first(layout)
    found: dict[str, Any] = {}
    for name in algorithms:
        if name not in ALGORITHMS:
            raise ValueError(f"algorithms: got {name!r}, expected some of {', '.join(ALGORITHMS)}")
        found[name] = {step: _algorithm(one, first, mask, score, name, step, options) for step in steps}
    pairs = next(iter(next(iter(found.values())).values()))["totals"]["pairs"] if found and steps else 0
    names = ("seqlen_q", "seqlen_k", "dim", "dim_v")
    facts = {name: getattr(one, name) for name in names}
    return {
        "problem": {**facts, "dtype": str(one.dtype).removeprefix("torch.")},
        "mask": repr(mask),
        "sram": sram,
        "lower_bound": traffic.lower_bound(one, pairs, sram),
        "algorithms": found,
    }


def _first(layout: Layout) -> Layout:
    from onchip.layout import Dense

    return Dense(1, layout.q_lens[0], layout.k_lens[0])


def _algorithm(
    problem: Problem,
    layout: Layout,
    mask: Mask,
    score: Score | None,
    name: str,
    step: str,
    options: dict[str, Any],
) -> dict[str, Any]:
    sweeps = orders.sweeps(problem, name, step, mask=mask, **options)
    for sweep in sweeps:
        m, n = sweep.tiles.count(problem.seqlen_q, problem.seqlen_k)
        if m * n > LIMIT:
            raise ValueError(
                f"tiles: {name} has {m} x {n} of them, expected at most {LIMIT}; take larger ones"
            )
    totals = traffic.count(problem, layout, mask, name, step, score=score, **options)
    tensors = list(totals.tensors)
    phases = [sweep.name for sweep in sweeps]
    rows = []
    for s in walk(problem, layout, mask, name, step, score=score, **options):
        m, n = (-1 if block is None else block for block in (s.m_block, s.n_block))
        moves = [[[tensors.index(t), amount] for t, amount in part.items()] for part in (s.load, s.store)]
        rows.append([phases.index(s.phase), m, n, *moves, s.read, s.written])
    return {
        "totals": totals.to_json(),
        "phases": [
            {
                "name": sweep.name,
                "outer": sweep.outer,
                "tiles": [sweep.tiles.tile_m, sweep.tiles.tile_n],
                "lead": sweep.tiles.lead,
                "every": sweep.every,
                "kinds": kinds(problem, layout, mask, sweep.tiles),
            }
            for sweep in sweeps
        ],
        "tensors": tensors,
        "steps": rows,
    }
