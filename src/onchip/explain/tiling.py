"""The steps of the animation: every algorithm on a grid of lengths, dims, masks and tiles, in a few hundred kilobytes.

The numbers are those of `steps.walk`, one head in fp16, checked against `traffic.count` for each dim; the page only
adds up and draws them. Equal step orders, tables of moves and maps of tiles are stored once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from onchip import masks, orders, schedule, steps, stored, traffic
from onchip.amounts import numbers
from onchip.bench.cases import parse_mask
from onchip.layout import Dense
from onchip.mask import Mask
from onchip.problem import Problem, dense_layout, state
from onchip.tiles import Tiles

# "onchip" is the backend that stands for it on the page, "hopper" its forward pass for Hopper GPUs beside Triton's.
ALGORITHMS = ("standard", "flash1", "flash2", "onchip", "hopper")
SEQLENS, DIMS, TILES = (512, 1024, 2048), (64, 128), (32, 64, 128, 256)
ACROSS = 32  # tiles to a side at most: what a picture on a phone can show, and a viewer can step through
SHORTEST, LONGEST = 64, ACROSS * TILES[-1]

# (name, expression of onchip.bench.cases or None, what it is); {n} stands for a share of the sequence.
MASKS: tuple[tuple[str, str | None, str], ...] = (
    ("full", "", "every query sees every key"),
    ("causal", "causal", "a query sees the keys up to its own position"),
    ("window", "window({n/16}, {n/16})", "only near keys, on both sides"),
    ("causal window", "causal & window({n/4}, 0)", "sliding window, as in Mistral"),
    (
        "window and sinks",
        "causal & (window({n/8}, 0) | sinks(4))",
        "streaming: near keys, and the first four",
    ),
    ("chunked", "causal & chunked({n/4})", "causal within chunks of a quarter"),
    ("prefix", "prefix({n/4})", "a prompt that all see, then causal"),
    ("padding", "padding({5n/8})", "the last keys are padding"),
    ("documents", "causal & documents(4)", "four packed documents, each causal"),
    ("local and global", "local_global(64)", "blocks of 64: neighbours, first row and column"),
    (
        "butterfly",
        "butterfly(64)",
        "blocks of 64: butterfly, as in the first paper's section on block sparsity",
    ),
    ("random blocks", "blocks(0.25, 64)", "a random quarter of the blocks of 64"),
    ("where", None, "any function of the positions; here bands along the diagonal"),
    ("dense", None, "any bool tensor, read where a tile is partly hidden; here a disc"),
)


def algorithms(backend: str) -> tuple[str, ...]:
    """Those of a page: the Hopper kernel, whose backward pass is Triton's, only beside that."""
    return ALGORITHMS if backend == "triton" else ALGORITHMS[:-1]


def model(name: str, backend: str) -> tuple[str, str]:
    """(algorithm, backend) of `traffic.count` and `steps.walk`."""
    return ("onchip", "hopper") if name == "hopper" else (name, backend)


def expression(template: str, seqlen: int) -> str:
    """The template with {n/4} as a quarter of seqlen, and so on.

    >>> expression("prefix({n/4}) & padding({5n/8})", 1024)
    'prefix(256) & padding(640)'
    """
    for text, share in (("{n/4}", (1, 4)), ("{n/8}", (1, 8)), ("{n/16}", (1, 16)), ("{5n/8}", (5, 8))):
        template = template.replace(text, str(seqlen * share[0] // share[1]))
    return template


def make_mask(name: str, template: str | None, seqlen: int) -> tuple[str, Mask]:
    """(as the page writes it, the mask)."""
    if template is not None:
        text = expression(template, seqlen)
        found = parse_mask(text, seqlen, seqlen)
        return text or "full", Mask() if found is None else found
    if name == "where":
        return "where(lambda b, h, q, k: (q - k) % 512 < 160)", masks.where(
            lambda b, h, q, k: (q - k) % 512 < 160
        )
    at = torch.arange(seqlen, device="cpu") - (seqlen - 1) / 2
    return "dense(disc)", masks.dense(at[:, None] ** 2 + at**2 < (0.45 * seqlen) ** 2)


def make_problem(seqlen: int, dim: int, mask: Mask, batch: int = 1, heads: int = 1) -> Problem:
    """Self-attention in fp16; a head is one of many, so that its keys are not split to fill a device."""
    q = torch.empty(batch, seqlen, heads, dim, dtype=torch.float16, device="meta")
    return state(q, q, q, dense_layout(q, q, q), "dense", mask, None, device="cpu", num_splits=1)


def tile_sizes(seqlen: int) -> list[int]:
    found = [t for t in TILES if t <= seqlen <= ACROSS * t]
    return found or [seqlen]


@dataclass
class _Pool:
    """Things by content, each kept once, under a number."""

    found: dict[Any, int] = field(default_factory=dict)

    def add(self, item: Any) -> int:
        return self.found.setdefault(item, len(self.found))

    def items(self) -> list[Any]:
        return list(self.found)


@dataclass
class _Grid:
    """What has been gathered. `orders` and `maps` are bytes, `moves` is JSON."""

    backend: str
    orders: _Pool = field(default_factory=_Pool)
    maps: _Pool = field(default_factory=_Pool)
    moves: _Pool = field(default_factory=_Pool)
    dense: dict[Any, Any] = field(default_factory=dict)  # standard attention's steps, which no mask changes
    runs: dict[str, list[Any]] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)


def grid(
    backend: str,
    seqlens: tuple[int, ...] = SEQLENS,
    dims: tuple[int, ...] = DIMS,
    chosen: tuple[tuple[str, str | None, str], ...] = MASKS,
) -> tuple[dict[str, Any], bytes]:
    """(index, bytes): every algorithm and pass for each length, dim, mask and pair of tile sizes.

    index: "seqlens", "dims", "masks" [name, what it is, {seqlen: text}], "tiles" {seqlen: sizes}, "sram" {dim: {"m,n":
    numbers that a tile keeps}}, "moves" [[phase, loads, stores]] with pairs (tensor, numbers), "orders" and "maps"
    [[start, length]] into the bytes, "kinds" {"seqlen,mask,m,n": map}, "runs" {"seqlen,mask,m,n,algorithm,pass":
    [order, [moves of each dim], [[reads, writes, visible pairs] of each dim]]}. An order has three bytes a step:
    the change of m, of n, and which move; a row or column alone has the number 0, tiles count from 1. A map has one
    byte a tile: 0 empty, 1 partial, 2 full.
    """
    found = _Grid(backend)
    texts: list[dict[int, str]] = []
    for number, (name, template, _) in enumerate(chosen):
        texts.append({})
        for seqlen in seqlens:
            texts[-1][seqlen], mask = make_mask(name, template, seqlen)
            for tiles in _tiles(seqlen):
                _add_tiles(found, seqlen, number, mask, tiles, dims)
    data, places = bytearray(), {"orders": [], "maps": []}
    for part, pool in (("orders", found.orders), ("maps", found.maps)):
        for item in pool.items():
            places[part].append([len(data), len(item)])
            data += item
    sizes = {(t.tile_m, t.tile_n) for seqlen in seqlens for t in _tiles(seqlen)}
    index = {
        "seqlens": list(seqlens),
        "dims": list(dims),
        "masks": [[name, about, text] for (name, _, about), text in zip(chosen, texts)],
        "tiles": {seqlen: tile_sizes(seqlen) for seqlen in seqlens},
        "sram": {
            d: {f"{m},{n}": orders.tile_numbers(Tiles(m, n), d, d) for m, n in sorted(sizes)} for d in dims
        },
        "itemsize": torch.float16.itemsize,
        "algorithms": algorithms(backend),
        "passes": orders.STEPS,
        "moves": found.moves.items(),
        "kinds": found.kinds,
        "runs": found.runs,
        **places,
    }
    return index, bytes(data)


def _tiles(seqlen: int) -> Iterator[Tiles]:
    sizes = tile_sizes(seqlen)
    return (Tiles(m, n) for m in sizes for n in sizes)


def _add_tiles(
    found: _Grid, seqlen: int, number: int, mask: Mask, tiles: Tiles, dims: tuple[int, ...]
) -> None:
    place = Dense(1, seqlen, seqlen)
    problem = make_problem(seqlen, dims[0], mask)
    key = f"{seqlen},{number},{tiles.tile_m},{tiles.tile_n}"
    kinds = steps.kinds(problem, place, mask, tiles)
    found.kinds[key] = found.maps.add(bytes(kind for row in kinds for kind in row))
    for a, name in enumerate(algorithms(found.backend)):
        algorithm, backend = model(name, found.backend)
        for p, step in enumerate(orders.STEPS):
            order, kept = _steps(found, problem, place, mask, algorithm, step, tiles, backend)
            moves, totals = [], []
            for d in dims:
                own = replace(problem, dim=d, dim_v=d)
                table = tuple(
                    (at, _scaled(loads, own, problem), _scaled(stores, own, problem))
                    for at, loads, stores in kept
                )
                options: dict[str, Any] = {"tiles": tiles, "backend": backend}
                counted = traffic.count(own, place, mask, algorithm, step, **options)
                _check(counted, order, table)
                totals.append([counted.reads, counted.writes, counted.pairs])
                moves.append(found.moves.add(table))
            found.runs[f"{key},{a},{p}"] = [found.orders.add(order), moves, totals]


def _steps(
    found: _Grid,
    problem: Problem,
    place: Dense,
    mask: Mask,
    algorithm: str,
    step: str,
    tiles: Tiles,
    backend: str,
) -> tuple[bytes, Table]:
    """`_walk`, but standard attention's once for all masks that are not stored, which do not change it."""
    if algorithm != "standard" or any(stored.looked_up(mask)):
        return _walk(problem, place, mask, algorithm, step, tiles, backend)
    key = (problem.seqlen_q, tiles, step)
    if key not in found.dense:
        found.dense[key] = _walk(problem, place, mask, algorithm, step, tiles, backend)
    return found.dense[key]


Amounts = tuple[tuple[str, int], ...]
Table = tuple[tuple[str, Amounts, Amounts], ...]


def _walk(
    problem: Problem, place: Dense, mask: Mask, algorithm: str, step: str, tiles: Tiles, backend: str
) -> tuple[bytes, Table]:
    """The order as bytes, and the table of what may happen at a step: (phase, loads, stores)."""
    table: dict[tuple[str, Amounts, Amounts], int] = {}
    order, m, n = bytearray(), 0, 0
    for s in steps.walk(problem, place, mask, algorithm, step, tiles=tiles, backend=backend):
        at = (s.phase, tuple(s.load.items()), tuple(s.store.items()))
        to_m, to_n = (0 if block is None else block + 1 for block in (s.m_block, s.n_block))
        order += bytes(((to_m - m) % 256, (to_n - n) % 256, table.setdefault(at, len(table))))
        m, n = to_m, to_n
    return bytes(order), tuple(table)


def _scaled(amounts: Amounts, problem: Problem, walked: Problem) -> Amounts:
    """Amounts of a walk in another problem's dim: as many rows, each as wide as its tensor is there."""
    return tuple((name, n // numbers(walked, name)[1] * numbers(problem, name)[1]) for name, n in amounts)


def _check(model: traffic.Traffic, order: bytes, table: Table) -> None:
    """RuntimeError unless the steps add up to the traffic model's totals."""
    moved = [0, 0]
    for which, (_, loads, stores) in enumerate(table):
        times = order[2::3].count(which)
        moved[0] += times * sum(amount for _, amount in loads)
        moved[1] += times * sum(amount for _, amount in stores)
    if moved != [model.reads, model.writes]:
        raise RuntimeError(
            f"{model.algorithm} {model.step}: the steps read and write {moved} numbers, the traffic model says "
            f"{[model.reads, model.writes]}"
        )


def visible(mask: Mask, seqlen: int, tile: int) -> list[list[int]]:
    """The kinds of a mask's tiles, for a picture."""
    problem = make_problem(seqlen, 64, mask)
    return steps.kinds(problem, Dense(1, seqlen, seqlen), mask, Tiles(tile, tile))


def share(mask: Mask, seqlen: int, tile: int) -> float:
    """The share of tiles that are not empty."""
    kinds = visible(mask, seqlen, tile)
    cells = [kind for row in kinds for kind in row]
    return sum(kind != schedule.EMPTY for kind in cells) / len(cells)
