"""What the passes take, of a problem and a device alone: configurations, shares of the keys, bytes.

Nothing here needs triton, so that a plan can be made without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod

import torch

from onchip import devices
from onchip.backends.compiled import intervals, lists
from onchip.backends.compiled.launch import INTERPRETED
from onchip.backends.compiled.order import section
from onchip.backends.triton.table import Config, Facts, config, l2_share, modifies, packs, separate
from onchip.mask import Mask
from onchip.problem import Operands, Problem
from onchip.tiles import Tiles


@lru_cache(maxsize=16)
def device_facts(index: int) -> Facts:
    """The interpreter counts as the newest device."""
    if INTERPRETED or not torch.cuda.is_available():
        return Facts(9, 4, "")
    properties = torch.cuda.get_device_properties(index)
    major = properties.major if torch.version.hip is None else 0
    return Facts(major, properties.multi_processor_count, properties.name, properties.L2_cache_size)


def known_facts(device: str | None) -> Facts:
    """Of this GPU, or of a known one, without the rows that `onchip tune` measured there."""
    if device is None:
        return device_facts(0)
    known = devices.device(device)
    return Facts(known.capability, known.units, "")


def choose_splits(problem: Problem, programs: int, key_tiles: int, multiprocessors: int) -> int:
    """Shares of the keys, so that few long sequences still fill the device; none under 4 tiles. From shapes alone.

    One program a multiprocessor reads as fast as two do. Decoding over 64k keys, 32/8 heads (H200), GB/s of K and V:
    batch 1: 16 shares 3779, 33 shares 3654; batch 16, which has 128 programs without: 1 share 4378, 3 shares 3819.
    """
    if problem.layout == "varlen" or programs == 0:
        return 1
    return max(1, min(multiprocessors // programs, key_tiles // 4, 128))


def shares(problem: Problem, tiles: Tiles, pack: int, multiprocessors: int) -> int:
    """Of the keys, whose results are joined. tiles: of queries whose heads are stacked, `pack` of them."""
    m_blocks, key_tiles = tiles.count(problem.seqlen_q, max(problem.seqlen_k, 1))
    programs = m_blocks * problem.heads_q // pack * problem.batch
    splits = problem.num_splits or choose_splits(problem, programs, key_tiles, multiprocessors)
    return 1 if problem.layout == "varlen" or keeps_rest(problem) else min(splits, key_tiles)


def by_length(problem: Problem) -> bool:
    """Whether a pass takes its lists, if it has any, by their length.

    Not those of functions and stored masks: causal by a function, dim 128 and N = 16384, took the forward pass 2.47 ms
    in that order, and on other machines 2.31 to 2.34 without (H200, 2026-12-02). Why is not known.
    """
    return "elements" not in problem.mask_parts


@lru_cache(maxsize=1024)
def sections(problem: Problem, step: str, blocks: int, heads: int, facts: Facts) -> int:
    """Heads of a pass (or packs, or key heads) whose tiles are taken in turn, where tiles differ in length.

    blocks: tiles of a head. Under a causal mask of 2048 to 16384 keys forward passes take
    1 to 12 % less, backward ones up to 10 %; with 12 % of blocks 4 and 2 % (H200, 2026-12-02).
    """
    left, right = problem.bounded
    by_key = step not in ("forward", "dq")
    listed = lists.needed(problem, by_key)
    if blocks == 1 or (not by_length(problem) if listed else left == right):
        return 1
    rows = problem.seqlen_q * problem.group if by_key else problem.seqlen_k
    size = rows * (problem.dim + problem.dim_v) * problem.dtype.itemsize
    room = facts.l2 * l2_share(step, max(problem.dim, problem.dim_v))
    return section(size, heads * problem.batch, max(heads // problem.heads_k, 1), room)


def keeps_rest(problem: Problem) -> bool:
    """What modified scores' lse loses to rounding is for a backward pass, and not merged."""
    return modifies(problem) and problem.layout in ("dense", "varlen")


def partial_shapes(problem: Problem, splits: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of out and lse of each share of the keys, in float32."""
    lse = splits, problem.batch, problem.seqlen_q, problem.heads_q
    return (*lse, problem.dim_v), lse


def cut(problem: Problem, mask: Mask, facts: Facts, name: str = "forward") -> tuple[Config, int, Tiles, int]:
    """Its configuration, the heads that share a tile, the tiles of each head, and the shares of the keys."""
    by_head = problem.group > 1 and bool(problem.mask_parts) and mask.dependence(problem)[1]
    pack = packs(problem, by_head)
    chosen = config(problem, name, facts, problem.seqlen_q * pack)
    tiles = Tiles(chosen.tile_m // pack, chosen.tile_n)
    return chosen, pack, tiles, shares(problem, tiles, pack, facts.multiprocessors)


def forward_memory(problem: Problem, operands: Operands, facts: Facts) -> int:
    """Bytes of the shares' results, of `rest`, and of what the mask becomes."""
    if operands.q.numel() == 0 or problem.seqlen_k == 0:
        return 0
    _, _, tiles, splits = cut(problem, operands.mask, facts)
    numbers = sum(map(prod, partial_shapes(problem, splits))) if splits > 1 else 0
    if keeps_rest(problem):
        numbers += operands.q[..., 0].numel()
    return (
        4 * numbers
        + lists.size(problem, operands, tiles, False, ordered=by_length(problem))
        + intervals.size(problem, operands)
    )


def statistics_shape(problem: Problem, rows: int) -> tuple[int, ...]:
    """What the backward pass keeps of query rows (`parts.Statistics`): with room up to the end of the widest tile."""
    rows += -rows % 128
    lead = (problem.heads_q,) if problem.layout == "varlen" else (problem.batch, problem.heads_q)
    return 3 if modifies(problem) else 2, *lead, rows


def delta_tile(problem: Problem) -> int:
    """Rows of a program of one warp."""
    return 32 if problem.dim_v <= 128 else 16 if problem.dim_v <= 256 else 8


def key_passes(problem: Problem, needs: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The passes that make dK and dV, as far as wanted: one, or one each where a table row says so."""
    passes = {"dk": ("k",), "dv": ("v",)} if separate(problem) else {"dkdv": ("k", "v")}
    return {name: outputs for name, outputs in passes.items() if not set(outputs).isdisjoint(needs)}


def backward_memory(problem: Problem, operands: Operands, needs: Iterable[str], facts: Facts) -> int:
    """Bytes of the rows' statistics and `rest`, of what the mask becomes, and of what sums the score's gradients."""
    q, score, rows = operands.q, operands.score, 4 * operands.q[..., 0].numel()
    shape = statistics_shape(problem, q.shape[-3])
    stats = 4 * prod(shape)
    packed, heads = problem.layout == "varlen", problem.heads_q
    sink = rows * (2 if problem.batch == 1 or packed else 4) + 4 * heads if "sink" in needs else 0
    if q.numel() == 0 or problem.seqlen_k == 0:
        return stats + sink
    of_queries = not {"q", "alibi"}.isdisjoint(needs)
    passes = dict.fromkeys(key_passes(problem, needs), True) | ({"dq": False} if of_queries else {})
    listed = {(by_key, Tiles(*config(problem, name, facts)[:2])) for name, by_key in passes.items()}
    held = stats + (rows if modifies(problem) else 0)
    held += sum(
        lists.size(problem, operands, tiles, by_key, ordered=by_length(problem)) for by_key, tiles in listed
    )
    held += intervals.size(problem, operands)
    if of_queries and "q" not in needs:
        held += q.numel() * q.element_size()
    # Of packed sequences the slopes' running sums are in float64, twice at once.
    wide = stats // shape[0]
    slopes = wide + (4 * wide + 8 * heads if packed else 4 * problem.batch * heads) if "alibi" in needs else 0
    bias = score.bias if "bias" in needs else None
    sums = 0 if bias is None or bias.dtype is torch.float32 else 4 * bias.numel()
    return held + max(slopes, sums, sink)
