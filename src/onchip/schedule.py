"""Which tiles of the score matrix are empty, partial or full, and in which order they are visited.

A tile is EMPTY when no pair in it is visible, FULL when every pair that exists in it is, PARTIAL otherwise. The
answer is exact for every mask: bands by arithmetic (`rules.spans`), other masks part by part, and where the parts
leave a tile open (an AND of two partial tiles may be empty) by looking at its elements, one tile row at a time.
Nothing of size N x N is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from onchip import capture, rules
from onchip.layout import Layout
from onchip.mask import Blocks, Documents, Mask, Part, Region, Rows, Union
from onchip.plain import on_tensors
from onchip.problem import Problem
from onchip.tiles import Tiles

T = TypeVar("T")
EMPTY, PARTIAL, FULL = 0, 1, 2
_OPEN = 3  # its parts do not decide it

# Elements of one look at a stretch of a tile row: about 32 MiB of int64 temporaries.
_LOOK = 1 << 22
_KEEP = 96  # of each mask: some 10 a shape of a training or serving loop, lists and launches of its passes


@dataclass(frozen=True, eq=False)
class Group:
    """Sequences and query heads that share their lengths and the tiles to visit.

    Heads come as whole groups of query heads with one key head: a tile that is empty, or full, for only some of
    them is visited as PARTIAL. `counts` keeps the exact kinds of each query head.
    """

    batch: Tensor  # [g] sequence numbers, ascending
    head0: int
    head1: int
    q_len: int
    k_len: int
    kinds: Tensor  # [m_blocks, n_blocks] uint8
    counts: tuple[int, int, int]  # empty, partial and full tiles over its sequences and query heads

    def rows(self) -> Iterator[tuple[int, list[tuple[int, bool]]]]:
        """Query tiles in order, each with the key tiles to visit and whether each is full."""
        for m_block, row in enumerate(self.kinds.tolist()):
            yield m_block, [(n_block, kind == FULL) for n_block, kind in enumerate(row) if kind != EMPTY]

    @property
    def heads(self) -> int:
        return self.batch.numel() * (self.head1 - self.head0)


@dataclass(frozen=True, eq=False)
class Schedule:
    """The tiles of a whole problem, as groups that a backend may run each in one go."""

    tiles: Tiles
    mask: Mask
    groups: tuple[Group, ...]

    def count(self, kind: int) -> int:
        """Tiles of this kind over every sequence and query head."""
        return sum(g.counts[kind] for g in self.groups)

    def pairs(self) -> int:
        """Visible (query, key) pairs over every sequence and query head."""
        return sum(_pairs(self.mask, g, self.tiles) for g in self.groups)


def build(problem: Problem, layout: Layout, mask: Mask, tiles: Tiles) -> Schedule:
    """The schedule of a problem, kept with the mask while its tensors stay unchanged."""
    key = ("schedule", tiles)
    return keep(
        problem,
        layout,
        mask,
        key,
        lambda: Schedule(tiles, mask, tuple(_groups(problem, layout, mask, tiles))),
    )


_ABSENT: Any = object()
_CAPTURED = (
    "mask: while a CUDA graph is captured this backend cannot look at it; capture with backend='triton', whose graphs "
    "follow the mask's tensors"
)


def keep(problem: Problem, layout: Layout, mask: Mask, key: tuple, make: Callable[[], T]) -> T:
    """What `make` builds from a mask for this problem's sizes, kept with the mask among the last few such things.

    A CUDA graph would go on with what is found while it is captured: that must be there, and from no tensor.
    """
    tensors, captured = mask.tensors(), capture.capturing(problem.device)
    if captured and (tensors or problem.layout != "dense"):
        raise NotImplementedError(_CAPTURED)
    if any(t.is_inference() for t in tensors):  # those carry no version to tell a change by
        return make()
    whole = _whole(problem, layout, tensors, key)
    found = mask.cache.get(whole, _ABSENT)
    if found is _ABSENT and captured:
        raise NotImplementedError(_CAPTURED)
    if found is _ABSENT:  # two threads may both make it; either's will do
        found = mask.cache[whole] = make()
        while len(mask.cache) > _KEEP:
            mask.cache.pop(next(iter(mask.cache)), None)
    return found


def lasting(problem: Problem, layout: Layout, mask: Mask, key: tuple) -> Any:
    """What `keep` has that holds in every replay of a graph: of a dense call under a mask without tensors; or None."""
    if problem.layout != "dense" or mask.tensors():
        return None
    return mask.cache.get(_whole(problem, layout, (), key))


def _whole(problem: Problem, layout: Layout, tensors: tuple[Tensor, ...], key: tuple) -> tuple:
    sizes = (
        problem.batch,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.heads_q,
        problem.group,
        problem.device,
        torch.cuda.current_device() if problem.device == "cuda" and torch.cuda.is_initialized() else 0,
    )
    return (*key, sizes, tuple(layout.q_lens), tuple(layout.k_lens), tuple(t._version for t in tensors))


def _groups(problem: Problem, layout: Layout, mask: Mask, tiles: Tiles) -> Iterator[Group]:
    by_lengths: dict[tuple[int, int], list[int]] = {}
    for b, lengths in enumerate(zip(layout.q_lens, layout.k_lens, strict=True)):
        by_lengths.setdefault(lengths, []).append(b)
    if problem.heads_q == 0 or not by_lengths:
        return
    differs_by_batch, differs_by_head = mask.dependence(problem)
    for (q_len, k_len), members in by_lengths.items():
        batch = torch.tensor(members, device=problem.device)
        asked = batch if differs_by_batch else batch[:1]
        heads = problem.heads_q if differs_by_head else 1
        kinds = classify(mask, Region(asked, 0, heads, 0, q_len, 0, k_len, q_len, k_len), tiles)
        yield from _split(kinds.expand(len(asked), heads, -1, -1), batch, q_len, k_len, problem)


def _split(kinds: Tensor, batch: Tensor, q_len: int, k_len: int, problem: Problem) -> Iterator[Group]:
    """Groups of sequences, and runs of key heads, with equal kinds; kinds is [g | 1, heads_q | 1, ...]."""
    size = problem.group if kinds.shape[1] > 1 else 1  # query heads of a step
    visits = _shared(kinds.unflatten(1, (-1, size)))  # [g | 1, steps, m_blocks, n_blocks]
    for rows in _equal_rows(visits):
        members = batch[rows] if visits.shape[0] > 1 else batch
        start = 0
        for step in range(1, visits.shape[1] + 1):
            if step < visits.shape[1] and torch.equal(visits[rows[0], step], visits[rows[0], start]):
                continue
            head0, head1 = (start * size, step * size) if kinds.shape[1] > 1 else (0, problem.heads_q)
            exact = kinds[rows, head0:head1] if kinds.shape[1] > 1 else kinds[rows]
            copies = members.numel() * (head1 - head0) // (exact.shape[0] * exact.shape[1])
            counts = [int((exact == kind).sum()) * copies for kind in (EMPTY, PARTIAL, FULL)]
            yield Group(members, head0, head1, q_len, k_len, visits[rows[0], start], (*counts,))  # type: ignore[arg-type]
            start = step


def _shared(kinds: Tensor) -> Tensor:
    """One kind for the query heads (dim 2) of each key head: their common one, else PARTIAL."""
    same = (kinds == kinds[:, :, :1]).all(2)
    return torch.where(same, kinds[:, :, 0], torch.full_like(kinds[:, :, 0], PARTIAL))


def _equal_rows(kinds: Tensor) -> list[list[int]]:
    if kinds.shape[0] == 1 or kinds.numel() == 0:
        return [list(range(kinds.shape[0]))]
    _, label = torch.unique(kinds.flatten(1), dim=0, return_inverse=True)
    return [torch.nonzero(label == i).flatten().tolist() for i in range(int(label.max()) + 1)]


def classify(mask: Mask, region: Region, tiles: Tiles, look: bool = True) -> Tensor:
    """Kinds of the tiles of whole sequences: uint8 [g | 1, heads | 1, m_blocks, n_blocks].

    Without a look at elements nothing waits for the device, and what they would decide is PARTIAL.
    """
    if tiles.lead and mask.parts:
        raise ValueError(f"tiles: lead is {tiles.lead}, expected 0 under a mask of more than a band")
    if region.q_len == 0 or region.k_len == 0:
        shape = (1, 1, *tiles.count(region.q_len, region.k_len))
        return torch.zeros(shape, dtype=torch.uint8, device=region.batch.device)
    kinds = _mask_kinds(mask, region, tiles)
    if not look:
        return kinds.masked_fill(kinds == _OPEN, PARTIAL)
    if (kinds == _OPEN).any():
        kinds = kinds.expand(region.batch.numel(), region.head1 - region.head0, -1, -1).clone()
        for i in range(kinds.shape[2]):
            _look(mask, region, tiles, i, kinds[:, :, i])
    return kinds


def _mask_kinds(mask: Mask, region: Region, tiles: Tiles) -> Tensor:
    known = [
        _band_kinds(mask.band or rules.Band(), region, tiles),
        *(_kinds(p, region, tiles) for p in mask.parts),
    ]
    return reduce(_both, known)


def _both(a: Tensor, b: Tensor) -> Tensor:
    """Kinds of an AND: a full tile leaves the other's kind, two that are neither full nor empty leave it open."""
    kinds = torch.where(a == FULL, b, torch.where(b == FULL, a, torch.full_like(a, _OPEN)))
    return kinds.masked_fill((a == EMPTY) | (b == EMPTY), EMPTY)


def _either(a: Tensor, b: Tensor) -> Tensor:
    kinds = torch.where(a == EMPTY, b, torch.where(b == EMPTY, a, torch.full_like(a, _OPEN)))
    return kinds.masked_fill((a == FULL) | (b == FULL), FULL)


def _kinds(part: Part, region: Region, tiles: Tiles) -> Tensor:
    """What a part says of each tile without a look at elements: [g | 1, heads | 1, m_blocks, n_blocks]."""
    if isinstance(part, Rows | Documents):
        return _row_kinds(part, region, tiles) if isinstance(part, Rows) else _all_open(region, tiles)
    if isinstance(part, Blocks):
        return _block_kinds(part, region, tiles)
    if isinstance(part, Union):
        return reduce(_either, [_mask_kinds(m, region, tiles) for m in part.masks])
    return _all_open(region, tiles)


def _all_open(region: Region, tiles: Tiles) -> Tensor:
    shape = (1, 1, *tiles.count(region.q_len, region.k_len))
    return torch.full(shape, _OPEN, dtype=torch.uint8, device=region.batch.device)


def _band_kinds(band: rules.Band, region: Region, tiles: Tiles) -> Tensor:
    m_blocks, n_blocks = tiles.count(region.q_len, region.k_len)
    device = region.batch.device
    i, j = torch.arange(m_blocks, device=device)[:, None], torch.arange(n_blocks, device=device)

    def kinds(i: Any, tile_m: int, q_len: int, band: rules.Band) -> Tensor:
        spans = on_tensors(rules.spans)(i, tile_m, tiles.tile_n, q_len, region.k_len, band)
        lo, full_lo, full_hi, hi = spans  # numbers, or [m_blocks, 1]
        found = torch.where((lo <= j) & (j < hi), PARTIAL, EMPTY)
        return torch.where((full_lo <= j) & (j < full_hi), FULL, found).to(torch.uint8)

    found = kinds(i, tiles.tile_m, region.q_len + tiles.lead, tiles.led(band, region.q_len, region.k_len))
    if tiles.lead:  # whose first rows are none
        found = torch.where(i == 0, kinds(0, tiles.tile_m - tiles.lead, region.q_len, band), found)
    return found.expand(1, 1, m_blocks, n_blocks)


def _row_kinds(rows: Rows, region: Region, tiles: Tiles) -> Tensor:
    """From the interval of every query: full where all contain the tile, not empty where any meets it."""
    device, k_len = region.batch.device, region.k_len
    lo, hi = (
        x if isinstance(x, Tensor) else torch.full((), default if x is None else x, device=device)
        for x, default in zip(rows.bounds(region), (0, k_len), strict=True)
    )
    lo, hi = torch.broadcast_tensors(lo.clamp(min=0).view(*_four(lo)), hi.clamp(max=k_len).view(*_four(hi)))
    lo, hi = (_by_tile(x[:, 0], tiles.tile_m) for x in (lo, hi))
    m_blocks, n_blocks = tiles.count(region.q_len, k_len)
    start = torch.arange(n_blocks, device=device) * tiles.tile_n  # [n_blocks]
    stop = (start + tiles.tile_n).clamp(max=k_len)
    full = (lo.amax(2) <= start) & (stop <= hi.amin(2))  # [g, m_blocks | 1, n_blocks]
    at_once = max(_LOOK // max(lo.shape[0] * lo.shape[2] * n_blocks, 1), 1)
    some = [
        (torch.maximum(row_lo, start) < torch.minimum(row_hi, stop)).any(2)
        for row_lo, row_hi in zip(lo.split(at_once, 1), hi.split(at_once, 1), strict=True)
    ]
    kinds = torch.where(full, FULL, torch.where(torch.cat(some, 1), PARTIAL, EMPTY)).to(torch.uint8)
    return kinds[:, None].expand(-1, -1, m_blocks, -1)


def _by_tile(rows: Tensor, tile_m: int) -> Tensor:
    """[g, queries, 1] as [g, m_blocks, tile_m, 1], the last tile filled up with the last query; [g, 1, 1, 1] of one."""
    queries = rows.shape[1]
    if queries == 1:
        return rows[:, None]
    m_blocks = -(-queries // tile_m)
    index = torch.arange(m_blocks * tile_m, device=rows.device).clamp(max=queries - 1)
    return rows[:, index].unflatten(1, (m_blocks, tile_m))


def _four(x: Tensor) -> tuple[int, ...]:
    return (*(1,) * (4 - x.dim()), *x.shape)


def _block_kinds(blocks: Blocks, region: Region, tiles: Tiles) -> Tensor:
    """From the blocks that each tile overlaps, through running sums over the map."""
    seen = blocks.visible[region.batch] if blocks.visible.shape[0] > 1 else blocks.visible
    sums = pad(seen.int().cumsum(2).cumsum(3), (1, 0, 1, 0))
    edges = []
    axes = ((tiles.tile_m, region.q_len, blocks.tile_m), (tiles.tile_n, region.k_len, blocks.tile_n))
    for size, length, block in axes:
        start = torch.arange(0, length, size, device=region.batch.device)
        edges.append((start // block, ((start + size).clamp(max=length) + block - 1) // block))
    (top, bottom), (left, right) = edges
    rows = sums[:, :, bottom] - sums[:, :, top]
    total = rows[..., right] - rows[..., left]
    area = (bottom - top)[:, None] * (right - left)
    kinds = torch.where(total == area, FULL, torch.where(total > 0, PARTIAL, EMPTY))
    return kinds.to(torch.uint8)


def _look(mask: Mask, region: Region, tiles: Tiles, i: int, kinds: Tensor) -> None:
    """Decide the open tiles of tile row i by their elements; kinds [g, heads, n_blocks] is written in place."""
    open_tiles = (kinds == _OPEN).flatten(0, 1).any(0).nonzero().flatten().tolist()
    if not open_tiles:
        return
    q0, q1 = tiles.queries(i, region.q_len)
    height = q1 - q0
    sequences, heads = kinds.shape[:2]
    if sequences * heads * height * tiles.tile_n > _LOOK and sequences * heads > 1:
        axis = 0 if sequences >= heads else 1
        half = kinds.shape[axis] // 2
        for part, (start, stop) in zip(_halves(region, axis, half), ((0, half), (half, None)), strict=True):
            _look(mask, part, tiles, i, kinds[start:stop] if axis == 0 else kinds[:, start:stop])
        return
    at_once = max(_LOOK // (kinds.shape[0] * kinds.shape[1] * height * tiles.tile_n), 1)
    for start, stop in _stretches(open_tiles, at_once):
        some, every = _look_at(mask, region, tiles, i, start, stop)
        decided = torch.where(every, FULL, torch.where(some, PARTIAL, EMPTY)).to(torch.uint8)
        part = kinds[:, :, start:stop]
        part.copy_(torch.where(part == _OPEN, decided, part))


def _halves(region: Region, axis: int, half: int) -> tuple[Region, Region]:
    """The region's first `half` sequences (axis 0) or heads (axis 1), and the others."""
    if axis == 0:
        return replace(region, batch=region.batch[:half]), replace(region, batch=region.batch[half:])
    middle = region.head0 + half
    return replace(region, head1=middle), replace(region, head0=middle)


def _stretches(numbers: list[int], longest: int) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers as [start, stop), none over the longest."""
    start = previous = numbers[0]
    for n in numbers[1:]:
        if n != previous + 1 or n - start >= longest:
            yield start, previous + 1
            start = n
        previous = n
    yield start, previous + 1


def _tile_region(region: Region, tiles: Tiles, i: int, start: int, stop: int) -> Region:
    (q0, q1), k0 = tiles.queries(i, region.q_len), start * tiles.tile_n
    k1 = min(stop * tiles.tile_n, region.k_len)
    return Region(region.batch, region.head0, region.head1, q0, q1, k0, k1, region.q_len, region.k_len)


def _look_at(
    mask: Mask, region: Region, tiles: Tiles, i: int, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Whether any and whether every existing pair is visible, in tiles [start, stop) of row i."""
    area = _tile_region(region, tiles, i, start, stop)
    visible = mask.allow(area)
    keys = area.k1 - area.k0
    some, every = (x.expand(-1, -1, keys) for x in (visible.any(2), visible.all(2)))  # [g, heads, keys]
    tail = (stop - start) * tiles.tile_n - some.shape[-1]
    some, every = pad(some, (0, tail), value=False), pad(every, (0, tail), value=True)
    by_tile = (-1, tiles.tile_n)
    return some.unflatten(2, by_tile).any(3), every.unflatten(2, by_tile).all(3)


def _pairs(mask: Mask, group: Group, tiles: Tiles) -> int:
    """Visible pairs of a group: full tiles by size, partial ones by counting."""
    region = Region(
        group.batch, group.head0, group.head1, 0, group.q_len, 0, group.k_len, group.q_len, group.k_len
    )
    total = 0
    for m_block, visits in group.rows():
        for n_block, full in visits:
            area = _tile_region(region, tiles, m_block, n_block, n_block + 1)
            total += (area.q1 - area.q0) * (area.k1 - area.k0) * group.heads if full else _count(mask, area)
    return total


def _count(mask: Mask, area: Region) -> int:
    """Visible pairs of a region, by looking at no more than _LOOK of them at once."""
    sequences, heads = area.batch.numel(), area.head1 - area.head0
    size = (area.q1 - area.q0) * (area.k1 - area.k0)
    if mask.parts and sequences * heads * size > _LOOK and sequences * heads > 1:
        axis = 0 if sequences >= heads else 1
        return sum(_count(mask, half) for half in _halves(area, axis, (sequences, heads)[axis] // 2))
    visible = mask.allow(area)
    return int(visible.sum()) * (sequences * heads * size // visible.numel())
