"""How many numbers an attention pass moves between slow and fast memory, and how many FLOPs it does.

Counted from the very schedule of tiles that kernels run, tensor by tensor, for onchip's own order and for those of the
papers (`orders.py`). What a cache catches between the two memories is not in these counts: `Traffic.least` is what is
left when it catches every repeated read.

Of a mask and a score, what is read pair by pair counts: a bias and its gradient, stored masks, documents' ids. So do
the results of keys' shares, where keys are split. Left out is what has a number a query, a key or a block of them at
most (bounds of intervals, lengths, page tables, slopes, sinks, block maps, lists of tiles), and tables of functions,
which are read by an index that the function computes. `onchip.plan` states the bytes of those that a mask and a score
hold, and adds them to its floor. To sort the tiles their tensors are read too, once for many calls: left out as well.

>>> found = compare(problem, layout, mask)  # as onchip.plan(...).traffic does
>>> found["onchip"]["forward"].bytes, found["standard"]["forward"].bytes
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from onchip import amounts, orders, schedule, select, stored
from onchip.amounts import lengths
from onchip.devices import Device
from onchip.layout import Layout, Varlen
from onchip.mask import Mask
from onchip.orders import ALGORITHMS, SRAM, STEPS
from onchip.problem import Operands, Problem
from onchip.schedule import EMPTY, FULL
from onchip.score import Score
from onchip.tiles import Tiles


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

    flops: of its matrix products over the visible pairs, 2 a multiply-add (over all pairs where every tile is visited:
    standard attention, and Triton's gradient of a bias).
    tile_flops: the same over every pair of the visited tiles, masked ones too. least: the bytes that remain when a
    cache catches every repeated read and write within a sweep, as it may where several heads' keys fit in it; between
    sweeps, whole tensors pass through.
    extra_memory: peak bytes that the pass takes beyond its inputs and results. Of onchip it is what the backend's own
    planning states: results of keys' shares, delta and in Triton lse as its passes want it, what lse lost to rounding
    (kept for the backward pass, and counted in both), sums in float32 whose results are narrower, lists of tiles and
    intervals of queries (both stay with the mask), bits of a mask and on a CPU what looking at it takes, threads'
    buffers. Exact for kernels, but what a look at a mask takes on the way to its lists and intervals, and on a GPU to
    its bits (some MiB), is left out; of the
    backends that are torch operations an estimate. No inputs (q, k, v, mask, score; out, lse and dout of a backward
    pass) and no results (out, lse, gradients), not the copies that `Plan.copies` names, nor what torch's allocator
    rounds up to.
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
            "leads": {name: t.lead for name, t in self.tiles.items()},
        }


def count(
    problem: Problem,
    layout: Layout,
    mask: Mask,
    algorithm: str = "onchip",
    step: str = "forward",
    *,
    score: Score | None = None,
    backend: str | None = None,
    needs: tuple[str, ...] = ("q", "k", "v"),
    tiles: Tiles | None = None,
    sram: int = SRAM,
    device: str | None = None,
) -> Traffic:
    """The `Traffic` of one pass; the options are those of `orders.sweeps`. score: the problem's, if it holds a bias."""
    options: dict[str, Any] = {
        "backend": backend,
        "needs": needs,
        "tiles": tiles,
        "sram": sram,
        "device": device,
    }
    found = orders.sweeps(problem, algorithm, step, mask=mask, **options)
    held = stored.tensors(problem, mask, score)
    tensors: dict[str, Moved] = {}
    pairs = visible_pairs(problem, layout, mask, found[-1].tiles)
    area = sum(m * n for m, n in lengths(layout)) * problem.heads_q
    flops = tile_flops = least = 0
    for sweep in found:
        moves, visited = amounts.moves(problem, layout, mask, held, sweep)
        for name, load, amount in moves:
            least += amount.least
            tensors[name] = tensors.get(name, Moved()) + _moved(amount, load)
        width = sum(getattr(problem, product) for product in sweep.products)
        flops += 2 * (area if sweep.every else pairs) * width
        tile_flops += 2 * visited * width
    if algorithm == "onchip":
        extra = _own_memory(problem, layout, mask, score or Score(), step, backend, needs, device)
    else:
        extra = _extra_memory(problem, layout, algorithm, step, area)
    shapes = {sweep.name: sweep.tiles for sweep in found}
    return Traffic(algorithm, step, problem.dtype, tensors, pairs, flops, tile_flops, extra, least, shapes)


def _moved(amount: amounts.Amount, load: bool) -> Moved:
    numbers, tiles, size, _ = amount
    return Moved(numbers, 0, tiles, 0, size, 0) if load else Moved(0, numbers, 0, tiles, 0, size)


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


def visible_pairs(problem: Problem, layout: Layout, mask: Mask, tiles: Tiles) -> int:
    """Visible (query, key) pairs over every sequence and query head; counted once for a mask, whatever the tiles."""

    def pairs() -> int:
        found = schedule.build(problem, layout, mask, tiles)
        full = sum(amounts.area(g.kinds == FULL, g.q_len, g.k_len, tiles) * g.heads for g in found.groups)
        edges = (replace(g, kinds=g.kinds.masked_fill(g.kinds == FULL, EMPTY)) for g in found.groups)
        return full + replace(found, groups=tuple(edges)).pairs()

    return schedule.keep(problem, layout, mask, ("pairs",), pairs)


def _own_memory(
    problem: Problem,
    layout: Layout,
    mask: Mask,
    score: Score,
    step: str,
    backend: str | None,
    needs: tuple[str, ...],
    device: str | None,
) -> int:
    """Peak bytes of a pass of onchip beyond its inputs and results, as the backend that runs it states them."""
    module = select.load(select.choose(problem) if backend is None else backend)
    if step == "backward":
        module = select.backward_of(module)
    leading = [(layout.batch, layout.seqlen_q), (layout.batch, layout.seqlen_k)]
    if isinstance(layout, Varlen):
        leading = [(int(cu[-1]),) for cu in (layout.cu_seqlens_q, layout.cu_seqlens_k)]
    rows, keys = (
        (*size, heads) for size, heads in zip(leading, (problem.heads_q, problem.heads_k), strict=True)
    )
    shapes = (*rows, problem.dim), (*keys, problem.dim), (*keys, problem.dim_v)
    q, k, v = (torch.empty(shape, dtype=problem.dtype, device="meta") for shape in shapes)
    return module.extra_memory(problem, Operands(q, k, v, layout, mask, score), step, needs, device)


def _extra_memory(problem: Problem, layout: Layout, algorithm: str, step: str, area: int) -> int:
    """The same of the papers' algorithms."""
    rows = sum(m for m, _ in lengths(layout)) * problem.heads_q
    score, total = area * problem.dtype.itemsize, rows * problem.accumulate.itemsize
    forward = step == "forward"
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
