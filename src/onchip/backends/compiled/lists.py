"""The tiles to visit under masks that are more than a band: made from the schedule, kept with the mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from onchip import capture, rules, schedule
from onchip.mask import Region
from onchip.problem import Operands, Problem
from onchip.schedule import EMPTY, FULL, PARTIAL
from onchip.tiles import Tiles

T = TypeVar("T")


class Lists(NamedTuple):
    """Tiles to visit in each row of tiles: the partial ones, then the full ones."""

    tiles: Any
    counts: Any  # [..., 2] partial, full
    batch: Any
    head: Any
    row: Any


def needed(problem: Problem, by_key: bool, rows: bool = False) -> bool:
    parts = set(problem.mask_parts) - {"band"} - (set() if by_key or rows else {"rows"})
    return bool(parts) and problem.layout not in ("cache", "paged")


def size(
    problem: Problem,
    operands: Operands,
    tiles: Tiles,
    by_key: bool,
    rows: bool = False,
    ordered: bool = True,
) -> int:
    """Bytes of what `build` makes, which stays with the mask: an int32 a tile, and two a row of them; `ordered`: and
    of `longest_first`."""
    if not needed(problem, by_key, rows):
        return 0
    batch, heads, *blocks = _shape(problem, operands, tiles)
    lists, width = reversed(blocks) if by_key else blocks
    return 4 * batch * heads * lists * (width + (3 if ordered else 2))


def build(
    problem: Problem, operands: Operands, tiles: Tiles, by_key: bool, rows: bool = False
) -> tuple[Lists | None, int]:
    """Lists of key tiles for each query tile (or of query tiles for each key tile), and their width.

    None where spans of the band do: masks of a band alone, and of a band and rows in the forward direction unless
    `rows` asks for them. A cache has none either, since its lengths are on the device: every tile of the band is then
    visited and masked. A call that is captured as a graph makes its list within the graph, anew in each replay; but
    takes the one that a call before made where no tensor can change the mask.
    """
    if not needed(problem, by_key, rows):
        return None, 0
    kinds = _kinds
    if capture.capturing(problem.device):
        kinds = _packed_kinds if problem.layout == "varlen" else _kinds_unseen
    make = lambda: _lists(kinds(problem, operands, tiles, by_key), by_key)  # noqa: E731
    return _kept(problem, operands, ("lists", by_key, tiles), make)


def longest_first(
    problem: Problem, operands: Operands, tiles: Tiles, lists: Lists, by_key: bool = False
) -> Tensor:
    """Numbers of the rows of `build`'s lists, by how many tiles they visit: programs that take them so end together.
    Strided as the rows, and kept as the lists are.
    """
    make = lambda: lists.counts.sum(-1).argsort(dim=-1, descending=True, stable=True).int()  # noqa: E731
    return _kept(problem, operands, ("order", by_key, tiles), make)


def _kept(problem: Problem, operands: Operands, key: tuple, make: Callable[[], T]) -> T:
    """`make()`, kept with the mask; in a capture anew, unless what a call before it kept holds in every replay."""
    if capture.capturing(problem.device):
        known = schedule.lasting(problem, operands.layout, operands.mask, key)
        return make() if known is None else known
    return schedule.keep(problem, operands.layout, operands.mask, key, make)


def tell_blocks(problem: Problem) -> bool:
    """Whether lists leave out the tiles that no block of a mask shows; else a kernel must ask the blocks."""
    return problem.layout == "dense" or (problem.layout == "varlen" and not capture.capturing(problem.device))


def _sequences(operands: Operands) -> list[tuple[int, int]]:
    """Queries and keys of each."""
    return list(zip(operands.layout.q_lens, operands.layout.k_lens, strict=True))


def _shape(problem: Problem, operands: Operands, tiles: Tiles) -> tuple[int, int, int, int]:
    """[batch | 1, heads | 1, m_blocks, n_blocks]: one where the tiles are those of all."""
    by_batch, by_head = operands.mask.dependence(problem)
    apart = by_batch or len(set(_sequences(operands))) > 1
    m_blocks, n_blocks = tiles.count(problem.seqlen_q, problem.seqlen_k)
    return problem.batch if apart else 1, problem.heads_q if by_head else 1, m_blocks, n_blocks


def _kinds(problem: Problem, operands: Operands, tiles: Tiles, by_key: bool) -> Tensor:
    """Kinds of every tile [batch | 1, heads | 1, m_blocks, n_blocks]; a tile whose tail needs the mask is PARTIAL."""
    mask, sequences = operands.mask, _sequences(operands)
    shape = _shape(problem, operands, tiles)
    heads, apart = shape[1], mask.dependence(problem)[0] or len(set(sequences)) > 1
    kinds = torch.full(shape, EMPTY, dtype=torch.uint8, device=problem.device)
    for q_len, k_len in set(sequences):
        members = [b for b, lengths in enumerate(sequences) if lengths == (q_len, k_len)] if apart else [0]
        batch = torch.tensor(members, device=problem.device)
        region = Region(batch, 0, heads, 0, q_len, 0, k_len, q_len, k_len)
        found = schedule.classify(mask, region, tiles)
        found = _with_tail(found.expand(len(members), heads, -1, -1), region, tiles, by_key)
        kinds[batch, :, : found.shape[2], : found.shape[3]] = found
    return kinds


def _with_tail(kinds: Tensor, region: Region, tiles: Tiles, by_key: bool) -> Tensor:
    """A copy in which tiles that reach past the sequence, of keys or by key of queries, are not FULL."""
    kinds = kinds.clone()
    length, tile = (region.q_len, tiles.tile_m) if by_key else (region.k_len, tiles.tile_n)
    if length % tile:
        tail = kinds[:, :, length // tile] if by_key else kinds[..., length // tile]
        tail.masked_fill_(tail == FULL, PARTIAL)
    return kinds


def _kinds_unseen(problem: Problem, operands: Operands, tiles: Tiles, by_key: bool) -> Tensor:
    """`_kinds` of equal lengths by work on the device alone: what only a look at elements decides is PARTIAL."""
    by_batch, by_head = operands.mask.dependence(problem)
    q_len, k_len = problem.seqlen_q, problem.seqlen_k
    batch = torch.arange(problem.batch if by_batch else 1, device=operands.q.device)
    region = Region(batch, 0, problem.heads_q if by_head else 1, 0, q_len, 0, k_len, q_len, k_len)
    return _with_tail(schedule.classify(operands.mask, region, tiles, look=False), region, tiles, by_key)


def _packed_kinds(problem: Problem, operands: Operands, tiles: Tiles, by_key: bool) -> Tensor:
    """PARTIAL for the tiles of each sequence that meet the band, by lengths that only the device knows."""
    device, band = operands.q.device, operands.mask.band or rules.Band()
    q_len, k_len = (
        torch.as_tensor(x, device=device).view(-1, 1, 1) for x in operands.layout.device_lengths()
    )
    m_blocks, n_blocks = tiles.count(problem.seqlen_q, problem.seqlen_k)
    first_q = torch.arange(m_blocks, device=device)[:, None] * tiles.tile_m
    first_k = torch.arange(n_blocks, device=device) * tiles.tile_n
    last_q, last_k = first_q + tiles.tile_m - 1, first_k + tiles.tile_n - 1
    meets = (first_q < q_len) & (first_k < k_len)  # [batch, m_blocks, n_blocks]
    # Each alignment by itself: the rules' min and max of two are those of numbers.
    for edges in (rules.Band(band.left, band.right), rules.Band(None, None, band.top_left, band.top_right)):
        if (edges.left, edges.top_left) != (None, None):
            meets &= rules.first_diagonal(q_len, k_len, edges) <= last_k - first_q
        if (edges.right, edges.top_right) != (None, None):
            meets &= first_k - last_q <= rules.last_diagonal(q_len, k_len, edges)
    return (meets * PARTIAL).to(torch.uint8)[:, None]


def _lists(kinds: Tensor, by_key: bool) -> tuple[Lists, int]:
    kinds = kinds.mT if by_key else kinds
    counts = torch.stack([(kinds == PARTIAL).sum(-1), (kinds == FULL).sum(-1)], dim=-1).int().contiguous()
    rank = torch.where(kinds == PARTIAL, 0, torch.where(kinds == FULL, 1, 2))
    tiles = rank.argsort(dim=-1, stable=True).int().contiguous()
    batch, heads, rows, width = tiles.shape
    return Lists(tiles, counts, heads * rows if batch > 1 else 0, rows if heads > 1 else 0, 1), width
