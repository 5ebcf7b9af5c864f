"""The order in which an algorithm visits score tiles and what it moves there: the papers' (onchip's: `own_orders.py`).

A pass is a few `Sweep`s, one for each kernel or loop nest. Bytes, FLOPs (`traffic.py`) and the step-by-step walk
(`steps.py`) are all read off them, so that an order is stated once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from onchip import select
from onchip.mask import Mask
from onchip.tiles import Tiles

if TYPE_CHECKING:
    from onchip.problem import Problem

STEPS = ("forward", "backward")
SRAM = 192 * 2**10  # bytes: a multiprocessor of the A100, on which the first paper's block sizes were chosen


@dataclass(frozen=True)
class Sweep:
    """One pass over the tiles of every head. Names are of `TENSORS`; q-side ones move by rows, k-side ones by keys.

    `once_load`, `once_store`: each tile of the tensor once. `seen_load`: once, and only where some tile of its row or
    column is visited. `visit_load`, `visit_store`: at every visited tile. `look_load`: at those where the mask's
    elements are looked at. What the mask or score does not hold moves nothing.
    """

    name: str
    outer: str  # "q" or "k": the tiles of the outer loop
    tiles: Tiles
    once_load: tuple[str, ...] = ()
    once_store: tuple[str, ...] = ()
    seen_load: tuple[str, ...] = ()
    visit_load: tuple[str, ...] = ()
    visit_store: tuple[str, ...] = ()
    look_load: tuple[str, ...] = ()
    products: tuple[str, ...] = ()  # "dim" or "dim_v": the inner length of each matrix product on a tile
    every: bool = False  # empty tiles too
    # The query heads of a key head are rows of one tile, so that its keys are moved once.
    stacked: bool = False
    wide: frozenset[str] = frozenset()  # moved in the dtype of sums, not the problem's
    shares: int = 1  # of the keys: each moves the q-side tensors of `once_load` and `once_store`
    keeps: bool = False  # what several tiles share of a mask's or score's tensor is moved once
    # How a backend chooses and orders the tiles to visit.
    backwards: tuple[str, ...] = ()  # the outer tiles, where the mask's band is bounded by one of these
    forwards: tuple[str, ...] = ()  # and by none of these
    descending: bool = False  # the inner tiles, from the last to the first
    listed: bool = False  # the inner tiles, from a list: partial ones, then full ones
    by_length: bool = False  # the outer tiles, the one of the longest list first
    never_none: bool = False  # an outer tile that sees nothing visits the first inner one, and masks it
    by_rules: bool = False  # parts of the mask other than bands and intervals hide elements, but skip no tile
    looks: bool = False  # at the mask's elements in every visited tile, not in partial ones alone


class Spec(NamedTuple):
    side: str  # "q", "k", "s", a score tile, or "pair": of a score tile what the tensor, which broadcasts, has of it
    width: str  # "dim", "dim_v" or "1"
    kind: str  # "dtype", "sum" (the accumulation dtype), "byte", or "own": as it is stored
    by_share: bool = False  # each share of the keys has one of its own


TENSORS: dict[str, Spec] = {
    "q": Spec("q", "dim", "dtype"),
    "k": Spec("k", "dim", "dtype"),
    "v": Spec("k", "dim_v", "dtype"),
    "out": Spec("q", "dim_v", "dtype"),
    "lse": Spec("q", "1", "sum"),
    "dout": Spec("q", "dim_v", "dtype"),
    "dq": Spec("q", "dim", "dtype"),
    "dk": Spec("k", "dim", "dtype"),
    "dv": Spec("k", "dim_v", "dtype"),
    "delta": Spec("q", "1", "sum"),
    "row_lse": Spec("q", "1", "sum"),  # lse as the passes after want it
    "l": Spec("q", "1", "sum"),
    "m": Spec("q", "1", "sum"),
    "S": Spec("s", "1", "dtype"),
    "scaled": Spec("s", "1", "dtype"),
    "masked": Spec("s", "1", "dtype"),
    "P": Spec("s", "1", "dtype"),
    "dropped": Spec("s", "1", "dtype"),
    "kept": Spec("s", "1", "byte"),
    "dropped_grad": Spec("s", "1", "dtype"),
    "dP": Spec("s", "1", "dtype"),
    "P*dP": Spec("s", "1", "dtype"),
    "dS": Spec("s", "1", "dtype"),
    "dmasked": Spec("s", "1", "dtype"),
    "dscaled": Spec("s", "1", "dtype"),
    "biased": Spec("s", "1", "dtype"),
    "bias": Spec("pair", "1", "own"),
    "dbias": Spec("pair", "1", "own"),
    "mask": Spec("pair", "1", "own"),  # the elements of stored masks
    "ids": Spec("pair", "1", "own"),  # documents' ids, by query and by key
    "shown": Spec("pair", "1", "own"),  # a mask's elements as a backend has written them down
    "partial": Spec(
        "q", "dim_v", "sum", True
    ),  # out, lse, and the sum and the maximum of weights, of a share of keys
    "partial_lse": Spec("q", "1", "sum", True),
    "partial_l": Spec("q", "1", "sum", True),
    "partial_m": Spec("q", "1", "sum", True),
}
STORED = ("mask", "ids")  # what a mask is looked up in
ALGORITHMS = ("onchip", "standard", "eager", "flash1", "flash2", "minimum")


def sweeps(
    problem: Problem,
    algorithm: str = "onchip",
    step: str = "forward",
    *,
    backend: str | None = None,
    needs: tuple[str, ...] = ("q", "k", "v"),
    tiles: Tiles | None = None,
    sram: int = SRAM,
    mask: Mask | None = None,
    device: str | None = None,
) -> tuple[Sweep, ...]:
    """The sweeps of an algorithm's forward or backward pass.

    onchip: the named backend's (None: the chosen one's) with its own tiles. standard: the first paper's Algorithms 0
    and 3, one kernel a line. eager: the same as PyTorch's operations run it, with a kernel each for scale, mask,
    dropout and two for the softmax's gradient. flash1: its Algorithms 1 and 4, blocks from `sram` bytes. flash2: the
    order of FlashAttention-2. minimum: every input once where its tiles have a pair, every output once. Each reads
    bias and mask where it makes scores. `tiles` replaces the tile sizes of any.
    mask: the problem's, if it has one. device: the known GPU whose tiles are meant, if not this one. needs: the
    gradients that are wanted; of the papers' algorithms q, k and v always are.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: got {algorithm!r}, expected one of {', '.join(ALGORITHMS)}")
    if step not in STEPS:
        raise ValueError(f"step: got {step!r}, expected 'forward' or 'backward'")
    forward = step == "forward"
    if algorithm == "onchip":
        from onchip import own_orders

        name = select.choose(problem) if backend is None else backend
        return own_orders.sweeps(problem, name, step, needs, tiles, Mask() if mask is None else mask, device)
    dbias = ("dbias",) if "bias" in needs else ()
    if algorithm == "flash1":
        own = tiles or flash1_tiles(problem.dim, problem.dim_v, sram // problem.dtype.itemsize)
        return _flash1(own) if forward else _flash1_backward(own, dbias)
    own = tiles or Tiles(128, 128)
    if algorithm == "flash2":
        return _flash2(own) if forward else _flash2_backward(own, dbias)
    if algorithm == "standard":
        return standard(own) if forward else standard_backward(own, dbias)
    if algorithm == "eager":
        return _eager(own, problem) if forward else _eager_backward(own, problem, dbias)
    return _minimum(own) if forward else _minimum_backward(own, dbias)


def flash1_tiles(dim: int, dim_v: int, sram: int) -> Tiles:
    """Algorithm 1's block sizes for a fast memory of `sram` numbers: B_c = ceil(M / 4d), B_r = min(B_c, d)."""
    d = max(dim, dim_v)
    if sram < 4:
        raise ValueError(f"sram: got {sram} numbers, expected at least 4")
    columns = -(-sram // (4 * d))
    return Tiles(max(min(columns, d), 1), max(columns, 1))


def tile_numbers(tiles: Tiles, dim: int, dim_v: int) -> int:
    """Numbers that a tile keeps in fast memory: its rows of q and out, its keys' k and v, and its scores."""
    return (tiles.tile_m + tiles.tile_n) * (dim + dim_v) + tiles.tile_m * tiles.tile_n


def _flash1(tiles: Tiles) -> tuple[Sweep, ...]:
    """Its line 2 writes O, l and m as they are before the first key."""
    rows, visits = ("out", "l", "m"), ("q", "out", "l", "m", "bias")
    return (
        Sweep("zero O", "q", tiles, (), rows),
        Sweep("attend", "k", tiles, ("k", "v"), (), (), visits, rows, STORED, ("dim", "dim_v")),
    )


def _flash1_backward(tiles: Tiles, dbias: tuple[str, ...]) -> tuple[Sweep, ...]:
    """Algorithm 4, whose line 5 writes dQ as zeros. (It names dK and dV there too, which are stored once, whole.)"""
    products = ("dim", "dim_v", "dim_v", "dim", "dim")  # S, dV, dP, dQ, dK
    visits, stores = ("q", "out", "dout", "dq", "l", "m", "bias", *dbias), ("dq", *dbias)
    return (
        Sweep("zero dQ", "q", tiles, (), ("dq",)),
        Sweep(
            "gradients", "k", tiles, ("k", "v"), ("dk", "dv"), (), visits, stores, STORED, products,
            wide=frozenset(dbias),
        ),
    )  # fmt: skip


def _flash2(tiles: Tiles) -> tuple[Sweep, ...]:
    visits = ("k", "v", "bias")
    return (Sweep("attend", "q", tiles, ("q",), ("out", "lse"), (), visits, (), STORED, ("dim", "dim_v")),)


def _flash2_backward(tiles: Tiles, dbias: tuple[str, ...]) -> tuple[Sweep, ...]:
    """Key blocks outside; dQ is summed in float32 in main memory, then rounded."""
    products = ("dim", "dim_v", "dim_v", "dim", "dim")
    visits = ("q", "dout", "dq", "lse", "delta", "bias", *dbias)
    wide = frozenset({"dq", *dbias})
    return (
        Sweep("delta", "q", tiles, ("out", "dout"), ("delta",)),
        Sweep("zero dq", "q", tiles, (), ("dq",), wide=wide),
        Sweep(
            "gradients", "k", tiles, ("k", "v"), ("dk", "dv"), (), visits, ("dq", *dbias), STORED, products,
            wide=wide,
        ),
        Sweep("read the sums of dq", "q", tiles, ("dq",), wide=wide),
        Sweep("round dq", "q", tiles, (), ("dq",)),
    )  # fmt: skip


def standard(tiles: Tiles) -> tuple[Sweep, ...]:
    """Bias and mask are read with the scores, at the softmax."""
    return (
        _kernel("S = QK^T", tiles, ("q", "k"), stores=("S",), products=("dim",)),
        _kernel("P = softmax(S)", tiles, loads=("S", "bias"), stores=("P",), looks=STORED),
        _kernel("O = PV", tiles, ("v",), ("out",), ("P",), products=("dim_v",)),
    )


def standard_backward(tiles: Tiles, dbias: tuple[str, ...]) -> tuple[Sweep, ...]:
    return (
        *_value_grads(tiles, "P"),
        _kernel("dS", tiles, loads=("P", "dP"), stores=("dS",)),
        *_bias_grad(tiles, "dS", dbias),
        *_score_grads(tiles, "dS"),
    )


def _value_grads(tiles: Tiles, weights: str, upstream: str = "dP") -> tuple[Sweep, ...]:
    return (
        _kernel("dV = P^T dO", tiles, ("dout",), ("dv",), (weights,), products=("dim_v",)),
        _kernel("dP = dO V^T", tiles, ("dout", "v"), stores=(upstream,), products=("dim_v",)),
    )


def _bias_grad(tiles: Tiles, scores: str, dbias: tuple[str, ...]) -> tuple[Sweep, ...]:
    """The sum of the scores' gradient over what shares the bias; of a bias for every pair it is that gradient."""
    return (_kernel("dbias", tiles, out=dbias, loads=(scores,)),) if dbias else ()


def _score_grads(tiles: Tiles, scores: str) -> tuple[Sweep, ...]:
    return (
        _kernel("dQ = dS K", tiles, ("k",), ("dq",), (scores,), products=("dim",)),
        _kernel("dK = dS^T Q", tiles, ("q",), ("dk",), (scores,), products=("dim",)),
    )


def _eager(tiles: Tiles, problem: Problem) -> tuple[Sweep, ...]:
    masked, drops = bool(problem.mask_parts), problem.dropout > 0
    biased = "bias" in problem.score_parts
    scores = "biased" if biased else "scaled"
    weights = "dropped" if drops else "P"
    return (
        _kernel("S = QK^T", tiles, ("q", "k"), stores=("S",), products=("dim",)),
        _kernel("scale", tiles, loads=("S",), stores=("scaled",)),
        *((_kernel("bias", tiles, loads=("scaled", "bias"), stores=("biased",)),) if biased else ()),
        *((_kernel("mask", tiles, loads=(scores,), stores=("masked",), looks=STORED),) if masked else ()),
        _kernel("P = softmax(S)", tiles, loads=("masked" if masked else scores,), stores=("P",)),
        *((_kernel("dropout", tiles, loads=("P",), stores=("dropped", "kept")),) if drops else ()),
        _kernel("O = PV", tiles, ("v",), ("out",), (weights,), products=("dim_v",)),
    )


def _eager_backward(tiles: Tiles, problem: Problem, dbias: tuple[str, ...]) -> tuple[Sweep, ...]:
    masked, drops = bool(problem.mask_parts), problem.dropout > 0
    upstream = "dropped_grad" if drops else "dP"
    outer = "dmasked" if masked else "dS"
    return (
        *_value_grads(tiles, "dropped" if drops else "P", upstream),
        *((_kernel("dropout", tiles, loads=(upstream, "kept"), stores=("dP",)),) if drops else ()),
        _kernel("P * dP", tiles, loads=("P", "dP"), stores=("P*dP",)),
        _kernel("dS", tiles, loads=("P", "P*dP"), stores=("dS",)),
        *((_kernel("mask", tiles, loads=("dS",), stores=("dmasked",), looks=STORED),) if masked else ()),
        *_bias_grad(tiles, outer, dbias),
        _kernel("scale", tiles, loads=(outer,), stores=("dscaled",)),
        *_score_grads(tiles, "dscaled"),
    )


def _kernel(
    name: str,
    tiles: Tiles,
    once: tuple[str, ...] = (),
    out: tuple[str, ...] = (),
    loads: tuple[str, ...] = (),
    *,
    stores: tuple[str, ...] = (),
    looks: tuple[str, ...] = (),
    products: tuple[str, ...] = (),
) -> Sweep:
    """A kernel of standard attention: the scores tile by tile, empty ones too; the other operands once."""
    return Sweep(name, "q", tiles, once, out, (), loads, stores, looks, products, every=True, keeps=True)


def _minimum(tiles: Tiles) -> tuple[Sweep, ...]:
    seen, results = ("q", "k", "v"), ("out", "lse")
    products = ("dim", "dim_v")
    return (
        Sweep("once", "q", tiles, (), results, seen, ("bias",), (), STORED, products, stacked=True, keeps=True),
    )  # fmt: skip


def _minimum_backward(tiles: Tiles, dbias: tuple[str, ...]) -> tuple[Sweep, ...]:
    seen, results = ("q", "k", "v", "out", "dout", "lse"), ("dq", "dk", "dv", *dbias)
    products = ("dim", "dim_v", "dim_v", "dim", "dim")
    return (
        Sweep("once", "q", tiles, (), results, seen, ("bias",), (), STORED, products, stacked=True, keeps=True),
    )  # fmt: skip
