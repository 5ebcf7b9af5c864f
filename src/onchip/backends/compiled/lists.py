"""The tiles to visit under masks that are more than a band: made from the schedule, kept with the mask."""

from __future__ import annotations

import torch
from torch import Tensor

from onchip import schedule
from onchip.backends.compiled.terms import Lists
from onchip.mask import Region
from onchip.problem import Operands, Problem
from onchip.schedule import EMPTY, FULL, PARTIAL, Tiles


def build(
    problem: Problem, operands: Operands, tiles: Tiles, by_key: bool, rows: bool = False
) -> tuple[Lists | None, int]:
    """Lists of key tiles for each query tile (or of query tiles for each key tile), and their width.

    None where spans of the band do: masks of a band alone, and of a band and rows in the forward direction unless
    `rows` asks for them. A cache has none either, since its lengths are on the device: every tile of the band is then
    visited and masked.
    """
    parts = set(problem.mask_parts) - {"band"} - (set() if by_key or rows else {"rows"})
    if not parts or problem.layout in ("cache", "paged"):
        return None, 0
    key = ("lists", by_key, tiles)
    make = lambda: _lists(_kinds(problem, operands, tiles, by_key), by_key)  # noqa: E731
    return schedule.keep(problem, operands.layout, operands.mask, key, make)


def _kinds(problem: Problem, operands: Operands, tiles: Tiles, by_key: bool) -> Tensor:
    """Kinds of every tile [batch | 1, heads | 1, m_blocks, n_blocks]; a tile whose tail needs the mask is PARTIAL."""
    mask, layout = operands.mask, operands.layout
    by_batch, by_head = mask.dependence(problem)
    heads = problem.heads_q if by_head else 1
    sequences = list(zip(layout.q_lens, layout.k_lens, strict=True))
    if len(set(sequences)) > 1:
        by_batch = True
    m_blocks, n_blocks = tiles.count(problem.seqlen_q, problem.seqlen_k)
    shape = (problem.batch if by_batch else 1, heads, m_blocks, n_blocks)
    kinds = torch.full(shape, EMPTY, dtype=torch.uint8, device=problem.device)
    for q_len, k_len in set(sequences):
        members = [b for b, lengths in enumerate(sequences) if lengths == (q_len, k_len)] if by_batch else [0]
        batch = torch.tensor(members, device=problem.device)
        region = Region(batch, 0, heads, 0, q_len, 0, k_len, q_len, k_len)
        found = schedule.classify(mask, region, tiles)
        found = found.expand(len(members), heads, -1, -1).clone()
        length, tile = (q_len, tiles.tile_m) if by_key else (k_len, tiles.tile_n)
        if length % tile:
            tail = found[:, :, length // tile] if by_key else found[..., length // tile]
            tail[tail == FULL] = PARTIAL
        kinds[batch, :, : found.shape[2], : found.shape[3]] = found
    return kinds


def _lists(kinds: Tensor, by_key: bool) -> tuple[Lists, int]:
    kinds = kinds.mT if by_key else kinds
    counts = torch.stack([(kinds == PARTIAL).sum(-1), (kinds == FULL).sum(-1)], dim=-1).int().contiguous()
    rank = torch.where(kinds == PARTIAL, 0, torch.where(kinds == FULL, 1, 2))
    tiles = rank.argsort(dim=-1, stable=True).int().contiguous()
    batch, heads, rows, width = tiles.shape
    return Lists(tiles, counts, heads * rows if batch > 1 else 0, rows if heads > 1 else 0, 1), width
