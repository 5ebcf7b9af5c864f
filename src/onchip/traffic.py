"""How many numbers an attention pass moves between slow and fast memory, and how many FLOPs it does.

Counted from the very schedule of tiles that kernels run, tensor by tensor, for onchip's own order and for those of the
papers (`orders.py`). What a cache catches between the two memories is not in these counts: `Traffic.least` is what is
left when it catches every repeated read. Left out: tensors that a mask or score holds (a dense mask, an additive bias;
`onchip.plan` states their bytes and adds them to its floor), tile lists, and partial results of split keys.

>>> found = compare(problem, layout, mask)  # as onchip.plan(...).traffic does
>>> found["onchip"]["forward"].bytes, found["standard"]["forward"].bytes
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from onchip import orders, schedule
from onchip.devices import Device
from onchip.layout import Layout
from onchip.mask import Mask
from onchip.orders import ALGORITHMS, SRAM, STEPS, TENSORS, Sweep
from onchip.problem import Problem
from onchip.schedule import EMPTY, FULL, Group, Schedule, Tiles


@dataclass(frozen=True)
class Moved:
    """One tensor's traffic: numbers (elements) and tiles, over every sequence and head."""

    loads: int = 0
    stores: int = 0
    tiles_loaded: int = 0
    tiles_stored: int = 0
    read_bytes: int = 0
    write_bytes: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Floor:
    """The least time that a pass can take on a device, and what sets it."""

    device: str
    compute: float  # seconds of arithmetic at the device's peak
    memory: float  # seconds to move `Traffic.least` bytes

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory)

    @property
    def bound(self) -> str:
        return "compute" if self.compute >= self.memory else "memory"

    def fraction(self, seconds: float) -> float:
        """The share of the floor that a measured time reaches: 1.0 at the limit."""
        if not seconds > 0:
            raise ValueError(f"seconds: got {seconds}, expected a time above 0")
        return self.seconds / seconds


@dataclass(frozen=True)
class Traffic:
    """A pass of an algorithm: what it moves and computes.

    flops: of its matrix products over the visible pairs (for standard attention over all pairs), 2 a multiply-add.
    tile_flops: the same over every pair of the visited tiles, masked ones too. extra_memory: peak bytes beyond
    inputs, outputs and gradients. least: the bytes that remain when a cache catches every repeated read and write
    within a sweep, as it may where several heads' keys fit in it; between sweeps, whole tensors pass through.
    """

    algorithm: str
    step: str
    dtype: torch.dtype
    tensors: dict[str, Moved]
    pairs: int
    flops: int
    tile_flops: int
    extra_memory: int
    least: int
    tiles: dict[str, Tiles] = field(default_factory=dict)  # of each sweep

    @property
    def reads(self) -> int:
        """Numbers read."""
        return sum(moved.loads for moved in self.tensors.values())

    @property
    def writes(self) -> int:
        return sum(moved.stores for moved in self.tensors.values())

    @property
    def read_bytes(self) -> int:
        return sum(moved.read_bytes for moved in self.tensors.values())

    @property
    def write_bytes(self) -> int:
        return sum(moved.write_bytes for moved in self.tensors.values())

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def intensity(self) -> float:
        """FLOPs a byte of `bytes`; 0 where nothing is moved."""
        return self.flops / self.bytes if self.bytes else 0.0

    def floor(self, device: Device) -> Floor:
        """No less than its FLOPs at peak, no less than its `least` bytes at the main memory's bandwidth."""
        return Floor(device.name, self.flops / device.rate(self.dtype), self.least / device.bandwidth)

    def to_json(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm,
            "step": self.step,
            "tensors": {name: vars(moved) for name, moved in self.tensors.items()},
            "reads": self.reads,
            "writes": self.writes,
            "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes,
            "bytes": self.bytes,
            "least": self.least,
            "pairs": self.pairs,
            "flops": self.flops,
            "tile_flops": self.tile_flops,
            "extra_memory": self.extra_memory,
            "intensity": self.intensity,
            "tiles": {name: [t.tile_m, t.tile_n] for name, t in self.tiles.items()},
        }


def count(
    problem: Problem,
    layout: Layout,
    mask: Mask,
    algorithm: str = "onchip",
    step: str = "forward",
    *,
    backend: str | None = None,
    needs: tuple[str, ...] = ("q", "k", "v"),
    tiles: Tiles | None = None,
    sram: int = SRAM,
    device: str | None = None,
) -> Traffic:
    """The `Traffic` of one pass; the options are those of `orders.sweeps`."""
    by_head = bool(problem.mask_parts) and mask.dependence(problem)[1]
    options: dict[str, Any] = {
        "backend": backend,
        "needs": needs,
        "tiles": tiles,
        "sram": sram,
        "device": device,
    }
    found = orders.sweeps(problem, algorithm, step, by_head=by_head, **options)
    tensors: dict[str, Moved] = {}
    pairs = visible_pairs(problem, layout, mask, found[-1].tiles)
    area = sum(m * n for m, n in lengths(layout)) * problem.heads_q
    flops = tile_flops = least = 0
    for sweep in found:
        part, visited = _sweep(problem, layout, mask, sweep)
        least += _least(problem, layout, sweep, part)
        for name, moved in part.items():
            tensors[name] = tensors.get(name, Moved()) + moved
        width = sum(getattr(problem, product) for product in sweep.products)
        flops += 2 * (area if sweep.every else pairs) * width
        tile_flops += 2 * visited * width
    extra = _extra_memory(problem, layout, algorithm, step, area, backend)
    shapes = {sweep.name: sweep.tiles for sweep in found}
    return Traffic(algorithm, step, problem.dtype, tensors, pairs, flops, tile_flops, extra, least, shapes)


def compare(
    problem: Problem,
    layout: Layout,
    mask: Mask,
    algorithms: Iterable[str] = ALGORITHMS,
    **options: Any,
) -> dict[str, dict[str, Traffic]]:
    """{algorithm: {"forward": Traffic, "backward": Traffic}} on one problem."""
    steps = STEPS if problem.layout in ("dense", "varlen") else STEPS[:1]  # a cache has no backward pass
    return {
        name: {step: count(problem, layout, mask, name, step, **options) for step in steps}
        for name in algorithms
    }


def lower_bound(problem: Problem, pairs: int, sram: int = SRAM) -> float:
    """Numbers that no exact algorithm can undercut for every M, up to a constant: N^2 d^2 / M of the first paper.

    The visible pairs stand for N^2; M is `sram` bytes in numbers of the problem's dtype.
    """
    return pairs * problem.dim * problem.dim_v / (sram / problem.dtype.itemsize)


def theta_ratio(dim: int, sram: int) -> float:
    """M / d^2: how many times less than standard attention's N^2 the N^2 d^2 / M of FlashAttention is; M in numbers."""
    return sram / (dim * dim)


def lengths(layout: Layout) -> list[tuple[int, int]]:
    """(q_len, k_len) of each sequence."""
    return list(zip(layout.q_lens, layout.k_lens, strict=True))


def visible_pairs(problem: Problem, layout: Layout, mask: Mask, tiles: Tiles) -> int:
    """Visible (query, key) pairs over every sequence and query head; counted once for a mask, whatever the tiles."""

    def pairs() -> int:
        found = schedule.build(problem, layout, mask, tiles)
        full = sum(_area(g.kinds == FULL, g, tiles) * g.heads for g in found.groups)
        edges = (replace(g, kinds=g.kinds.masked_fill(g.kinds == FULL, EMPTY)) for g in found.groups)
        return full + replace(found, groups=tuple(edges)).pairs()

    return schedule.keep(problem, layout, mask, ("pairs",), pairs)


def _area(chosen: Tensor, group: Group, tiles: Tiles) -> int:
    """Pairs of the chosen tiles, for one head."""
    rows = chosen.cpu().long() @ _sizes(group.k_len, tiles.tile_n)
    return int(rows @ _sizes(group.q_len, tiles.tile_m))


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


def numbers(problem: Problem, name: str) -> tuple[str, int]:
    """A tensor's side and how many numbers it has a row, key or pair."""
    spec = TENSORS[name]
    return spec.side, 1 if spec.width == "1" else getattr(problem, spec.width)


def itemsize(problem: Problem, name: str, wide: frozenset[str] = frozenset()) -> int:
    kind = "sum" if name in wide else TENSORS[name].kind
    return {"dtype": problem.dtype.itemsize, "sum": problem.accumulate.itemsize, "byte": 1}[kind]


@dataclass
class _Amounts:
    """Rows, keys or pairs, and tiles, that one tensor of each side moves in a sweep."""

    visit: dict[str, list[int]]
    once: dict[str, list[int]]
    seen: dict[str, list[int]]


def _sweep(problem: Problem, layout: Layout, mask: Mask, sweep: Sweep) -> tuple[dict[str, Moved], int]:
    """What a sweep moves, and the pairs of the tiles that it visits."""
    amounts = _amounts(problem, layout, mask, sweep)
    moved: dict[str, Moved] = {}
    lists = (
        (amounts.once, sweep.once_load, sweep.once_store),
        (amounts.seen, sweep.seen_load, ()),
        (amounts.visit, sweep.visit_load, sweep.visit_store),
    )
    for source, loads, stores in lists:
        for names, load in ((loads, True), (stores, False)):
            for name in names:
                side, width = numbers(problem, name)
                rows, tiles = source[side]
                size = itemsize(problem, name, sweep.wide)
                total = rows * width
                one = (
                    Moved(total, 0, tiles, 0, total * size, 0)
                    if load
                    else Moved(0, total, 0, tiles, 0, total * size)
                )
                moved[name] = moved.get(name, Moved()) + one
    return moved, amounts.visit["s"][0]


def _amounts(problem: Problem, layout: Layout, mask: Mask, sweep: Sweep) -> _Amounts:
    visit, once, seen = ({side: [0, 0] for side in "qks"} for _ in range(3))
    for q_len, k_len in lengths(layout):
        m_blocks, n_blocks = sweep.tiles.count(q_len, k_len)
        _add(once["q"], q_len * problem.heads_q, m_blocks * problem.heads_q)
        _add(once["k"], k_len * problem.heads_k, n_blocks * problem.heads_k)
    if sweep.every:
        area = sum(m * n for m, n in lengths(layout))
        tiles = sum(m * n for m, n in (sweep.tiles.count(*own) for own in lengths(layout)))
        _add(visit["s"], area * problem.heads_q, tiles * problem.heads_q)
        return _Amounts(visit, once, seen)
    for group in built(problem, layout, mask, sweep).groups:
        seen_tiles = visited(sweep, group).cpu().long()
        height = _sizes(group.q_len, sweep.tiles.tile_m)
        width = _sizes(group.k_len, sweep.tiles.tile_n)
        heads = group.heads  # over its sequences
        heads_k = heads // problem.group if sweep.stacked else heads
        by_row, by_key, count = seen_tiles.sum(1), seen_tiles.sum(0), int(seen_tiles.sum())
        _add(visit["q"], int(by_row @ height) * heads, count * heads)
        _add(visit["k"], int(by_key @ width) * heads_k, count * heads_k)
        _add(visit["s"], _area(seen_tiles, group, sweep.tiles) * heads, count * heads)
        some_row, some_key = (by_row > 0).long(), (by_key > 0).long()
        _add(seen["q"], int(some_row @ height) * heads, int(some_row.sum()) * heads)
        _add(seen["k"], int(some_key @ width) * heads_k, int(some_key.sum()) * heads_k)
    return _Amounts(visit, once, seen)


def _add(total: list[int], amount: int, tiles: int) -> None:
    total[0] += amount
    total[1] += tiles


def _sizes(length: int, tile: int) -> Tensor:
    """The length of each tile, the last one cut."""
    start = torch.arange(0, length, tile)
    return (start + tile).clamp(max=length) - start


def _least(problem: Problem, layout: Layout, sweep: Sweep, moved: dict[str, Moved]) -> int:
    """Bytes of a sweep that reads no tensor, and writes none, more than once as a whole."""
    sizes = lengths(layout)
    whole = {
        "q": sum(m for m, _ in sizes) * problem.heads_q,
        "k": sum(n for _, n in sizes) * problem.heads_k,
        "s": sum(m * n for m, n in sizes) * problem.heads_q,
    }
    total = 0
    for name, part in moved.items():
        side, width = numbers(problem, name)
        size = whole[side] * width * itemsize(problem, name, sweep.wide)
        total += min(part.read_bytes, size) + min(part.write_bytes, size)
    return total


def _extra_memory(
    problem: Problem, layout: Layout, algorithm: str, step: str, area: int, backend: str | None
) -> int:
    """Peak bytes of a pass beyond inputs, outputs and gradients; for onchip the backend's own estimate of both."""
    rows = sum(m for m, _ in lengths(layout)) * problem.heads_q
    score, total = area * problem.dtype.itemsize, rows * problem.accumulate.itemsize
    forward = step == "forward"
    if algorithm == "onchip":
        from onchip import select

        module = select.load(select.choose(problem) if backend is None else backend)
        return module.extra_memory(problem, module.tiles(problem))
    if algorithm == "standard":  # S and P; then P, dP and dS
        return (2 if forward else 3) * score
    if algorithm == "eager":  # three in a row, the last ones alive at once; then P, dP, P * dP and dS
        kept = area if problem.dropout else 0
        return (3 if forward else 4 + (problem.dropout > 0)) * score + kept
    if algorithm == "flash1":  # l and m
        return 2 * total
    if algorithm == "flash2":  # delta, and dQ in float32
        return 0 if forward else total * (1 + problem.dim)
    return 0
