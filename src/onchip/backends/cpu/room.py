"""What the tiled loop holds at once of a piece, named as in `tiled.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from onchip.backends.cpu import looks
from onchip.layout import Varlen

if TYPE_CHECKING:
    from onchip.backends.cpu.tiled import Piece


def of_piece(piece: Piece, step: str, needs: Iterable[str]) -> int:
    """Bytes in either pass; of what stands between products and weights, a few tiles for each kind of thing."""
    problem, group, tiles = piece.problem, piece.group, piece.tiles
    dim, dim_v, forward = problem.dim, problem.dim_v, step == "forward"
    rows, keys = piece.heads * group.q_len, piece.size * group.k_len
    tile_m, tile_n = min(tiles.tile_m, group.q_len), min(tiles.tile_n, group.k_len)
    tile_rows = piece.heads * tile_m
    numbers = _copied(piece) * keys + tile_rows * (
        3 * dim + 3 * dim_v
    )  # a tile's rows, and those of the tile before it
    if forward:
        numbers += rows * (dim_v + 2)  # out_rows, lse_rows, rest_rows
    else:
        numbers += rows * dim * ("q" in needs) + keys * (dim * ("k" in needs) + dim_v * ("v" in needs))
        numbers += tile_rows * dim * ("q" in needs)
    numbers += tile_rows * tile_n * _tiles(piece, forward)
    masked = bool(set(problem.mask_parts) - {"band"})
    return numbers * problem.accumulate.itemsize + (_mask(piece, forward) if masked else 0)


def _mask(piece: Piece, forward: bool) -> int:
    """Bytes of the first tile's mask and of the one before it, found by making one, and of what it zeroes."""
    problem, group, tiles = piece.problem, piece.group, piece.tiles
    tile_m, tile_n = min(tiles.tile_m, group.q_len), min(tiles.tile_n, group.k_len)
    if not tile_m * tile_n:
        return 0
    with looks.Counted() as counted:
        limit = piece.grid(0, tile_m, 0, full=False).make_limit()
    copies = 0
    if limit.unseen_keys is not None:  # keys and values with zeros, and those of the tile before it
        copies += 2 * piece.size * tile_n * (problem.dim + problem.dim_v)
    if limit.blind_queries is not None:
        copies += piece.heads * tile_m * (problem.dim + (0 if forward else problem.dim_v))
    return counted.most + sum(x.nbytes for x in limit[:2]) + copies * problem.accumulate.itemsize


def _copied(piece: Piece) -> int:
    """Numbers of a key in copies of K and V, made where they change their dtype or do not lie as products take them.

    Two changes take two steps, the second of which has V twice.
    """
    problem, layout = piece.problem, piece.operands.layout
    several = piece.batch.numel() > 1
    gathered = problem.layout == "paged" or (several and problem.layout != "dense")
    merged = several and piece.size > piece.batch.numel()
    steps = gathered + merged + (problem.dtype is not problem.accumulate)
    if isinstance(layout, Varlen) and several:
        steps += 1  # queries too
    return (problem.dim + problem.dim_v) * (steps > 0) + problem.dim_v * (steps > 1)


# Score tiles that the parts of a score take besides s, in the forward and the backward pass: measured.
_MODIFIED = {"bias": (2, 2), "softcap": (3, 5), "alibi": (4, 4), "mod": (5, 5)}


def _tiles(piece: Piece, forward: bool) -> int:
    """Score tiles at once: s (and dp), modified ones, and those of dropout with its random words."""
    parts = (_MODIFIED[name][not forward] for name in piece.problem.score_parts if name in _MODIFIED)
    return (1 if forward else 2) + max(parts, default=0) + (5 if piece.problem.dropout else 0)
