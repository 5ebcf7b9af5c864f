"""What is compiled into the kernel, and how a problem is cut into tiles."""

import math
from typing import NamedTuple

from onchip.backends.compiled.order import section
from onchip.backends.hopper.table import Config, modifies, padded
from onchip.mask import Mask
from onchip.problem import Problem

_SHARED = 232448 - 1024  # bytes that a program may have on compute capability 9.0, less its barriers
_L2 = 25 << 20  # bytes: half of the cache of an H100 or H200


class Variant(NamedTuple):
    """What is compiled in besides the user's functions."""

    warpgroups: int
    tile_n: int
    stages: int
    held: int  # columns of the queries in registers
    ahead: bool  # a quarter of the softmax stands before the wait for the values
    dim: int  # of a tile, padded to 64, 128 or 256
    dim_v: int
    group: int  # query heads of a key head
    pack: int  # of which so many are stacked as rows of a tile
    packed: bool  # sequences are packed: descriptors as `parts.packed_rows` says
    dynamic: bool  # a program draws its tiles, one at a time, as they differ in length
    band_only: bool  # the mask is a band: keys outside it are cut off, not only masked
    exact: bool  # lists hold tiles that are visible as a whole
    masked: bool  # some block may need a mask: for the mask itself, or for the tail of the keys
    right: bool  # a band bounded to the right
    left: bool  # a band bounded to the left
    from_end: bool  # warpgroups without queries are in the first tile, which is the shortest, not in the last
    uneven: bool  # under a bound to the right, a tile with more queries than a block has keys: see `work.own_edges`
    edges: bool  # some blocks of a visit are masked, as `Tile` says; of a band, beside the first one
    modified: bool  # scores change before the softmax
    share_q: bool  # the output leaves through the queries' shared memory
    tight: bool  # registers are few: what is used once a tile is made there (`parts.wide` to `zero_of`)


def variant(problem: Problem, chosen: Config, pack: int, divisor: tuple[int, int] | None = None) -> Variant:
    """`divisor`: of the blocks, as `grain` says."""
    packed = problem.layout == "varlen"
    band_only = not set(problem.mask_parts) - {"band"}
    dim, dim_v = padded(problem.dim), padded(problem.dim_v)
    left, right = problem.bounded
    held = min(chosen.held, dim)
    exact = False
    if divisor is not None:
        tile_q, tile_n = chosen.tile_m // pack, chosen.tile_n
        exact = not (divisor[0] % tile_q or divisor[1] % tile_n or problem.seqlen_k % tile_n)
    edges = right or left or not (band_only or exact)
    uneven = band_only and right and chosen.tile_m // pack > chosen.tile_n
    masked = packed or (bool(problem.mask_parts) and not exact) or problem.seqlen_k % chosen.tile_n != 0
    fits = chosen.shared_memory(dim, dim_v) <= _SHARED
    return Variant(
        warpgroups=chosen.warpgroups,
        tile_n=chosen.tile_n,
        stages=chosen.stages,
        held=held,
        ahead=chosen.ahead,
        dim=dim,
        dim_v=dim_v,
        group=problem.group,
        pack=pack,
        packed=packed,
        dynamic=packed or bool(problem.mask_parts),
        band_only=band_only,
        exact=exact,
        masked=masked,
        right=right,
        left=left,
        from_end=lead(problem, chosen, pack) > 0,
        uneven=uneven,
        edges=edges,
        modified=modifies(problem),
        share_q=not fits,
        tight=held > 0 or masked or bool(problem.mask_parts) or modifies(problem),
    )


def lead(problem: Problem, chosen: Config, pack: int) -> int:
    """Rows of whole warpgroups that the first tile has before the first query, where a band makes it the shortest."""
    band_only = problem.mask_parts == ("band",) and problem.layout == "dense"
    # A mod may look up a table by the query, which is never below 0.
    if not band_only or not problem.bounded[1] or pack > 1 or modifies(problem):
        return 0
    return -problem.seqlen_q % chosen.tile_m // 64 * 64


def grain(problem: Problem, mask: Mask) -> tuple[int, int] | None:
    """Numbers of queries and keys that divide all blocks of a mask of blocks alone."""
    if problem.mask_parts != ("blocks",) or problem.layout != "dense":
        return None
    return math.gcd(*(x.tile_m for x in mask.blocks)), math.gcd(*(x.tile_n for x in mask.blocks))


def packs(problem: Problem, tile_m: int, by_head: bool) -> int:
    """Query heads of a key head stacked in one tile: all of them, where one tile holds their rows.

    `by_head`: the mask differs between heads, so that each needs tiles of its own.
    """
    group = problem.group
    whole = group & (group - 1) == 0 and group <= 64
    few = problem.seqlen_q * group <= tile_m
    return group if problem.layout == "dense" and whole and few and not by_head else 1


def sections(problem: Problem, heads: int) -> int:
    """Heads (or packs of them) whose keys and values are read at once: a divisor of all, in half of the L2 cache."""
    size = problem.seqlen_k * (problem.dim + problem.dim_v) * problem.dtype.itemsize
    return section(size, heads * problem.batch, max(heads // problem.heads_k, 1), _L2)
