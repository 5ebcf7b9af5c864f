"""The order in which onchip's backends visit score tiles, and what they move there: as `orders.Sweep`s.

Which tiles a pass visits is the schedule's business. Query tiles (or key tiles) of a GPU's pass run side by side: their
order is that of their programs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from onchip import orders, select
from onchip.mask import Mask
from onchip.orders import Sweep
from onchip.tiles import Tiles

if TYPE_CHECKING:
    from onchip.problem import Problem

_LEFT, _RIGHT = ("left", "top_left"), ("right", "top_right")


def sweeps(
    problem: Problem,
    name: str,
    step: str,
    needs: tuple[str, ...],
    tiles: Tiles | None,
    mask: Mask,
    device: str | None,
) -> tuple[Sweep, ...]:
    """The sweeps of a backend's pass; see `orders.sweeps`."""
    module: Any = select.load(name)
    stated = getattr(module, "sweeps", None)  # a backend may state its own order
    if stated is not None:
        return stated(problem, step, needs, tiles)
    if name == "reference":
        whole = tiles or module.tiles(problem)
        dbias = ("dbias",) if "bias" in needs else ()
        return orders.standard(whole) if step == "forward" else orders.standard_backward(whole, dbias)
    if name == "cpu":
        return _cpu(step, needs, tiles or module.tiles(problem))
    if step == "backward" and name != "native":
        return _triton_backward(problem, needs, tiles, device)  # of Hopper's forward pass too
    by_head = bool(problem.mask_parts) and mask.dependence(problem)[1]  # then no heads share a tile
    if name == "native":
        return _native(problem, step, needs, tiles or module.tiles(problem), mask, by_head)
    return _hopper(problem, tiles, by_head) if name == "hopper" else _triton(problem, tiles, by_head, device)


def _cpu(step: str, needs: tuple[str, ...], tiles: Tiles) -> tuple[Sweep, ...]:
    """backends/cpu/tiled.py: query tiles outside, the query heads of a key head stacked."""
    if step == "forward":
        loads, stores, visits = ("q",), ("out", "lse"), ("k", "v", "bias")
        products = ("dim", "dim_v")
        return (
            Sweep("attend", "q", tiles, loads, stores, (), visits, (), orders.STORED, products, stacked=True),
        )
    sums = tuple(name for name, need in (("dv", "v"), ("dk", "k"), ("dbias", "bias")) if need in needs)
    stores = ("dq",) if "q" in needs else ()
    return (
        Sweep(
            "gradients", "q", tiles, ("q", "out", "dout", "lse"), stores, (), ("k", "v", "bias", *sums), sums,
            orders.STORED, _products(needs), stacked=True, wide=frozenset(sums),
        ),
    )  # fmt: skip


def _products(needs: tuple[str, ...]) -> tuple[str, ...]:
    """Of a backward pass in one sweep: S, dV, then dP, dQ, dK."""
    found = ["dim"] + ["dim_v"] * ("v" in needs)
    if {"q", "k", "bias", "alibi"} & set(needs):
        found += ["dim_v", *("dim" for n in ("q", "k") if n in needs)]
    return tuple(found)


def _native(
    problem: Problem, step: str, needs: tuple[str, ...], tiles: Tiles, mask: Mask, by_head: bool
) -> tuple[Sweep, ...]:
    """backends/cpu/kernels: forward by blocks of queries, backward by blocks of keys through all rows of a key head.

    Packed copies of rows and keys count as the tensors themselves, read at each visit; what chunks of the keys, heads
    and sequences sum apart is left out. The heads of a few queries share a block.
    """
    own = select.load("native")
    if step == "forward":
        stacked = problem.group > 1 and problem.seqlen_q * problem.group <= tiles.tile_m and not by_head
        shares = own.shares(problem)  # type: ignore[attr-defined]
        parts = ("partial", "partial_l", "partial_m")
        attend = Sweep(
            "attend", "q", tiles, ("q",), ("out", "lse"), (), ("k", "v", "bias"), (), (), ("dim", "dim_v"),
            stacked=stacked,
        )  # fmt: skip
        return (*_shown(mask, "q", tiles, stacked), *_by_shares(attend, shares, parts))
    rows, sums = ("q", "dout", "lse", "delta"), ("dq",) if "q" in needs else ()
    stores = tuple("d" + n for n in ("k", "v") if n in needs)
    dbias = ("dbias",) if "bias" in needs else ()
    wide = frozenset((*sums, *dbias))
    return (
        Sweep("delta", "q", tiles, ("out", "dout"), ("delta",)),
        *_shown(mask, "k", tiles, False),
        Sweep(
            "gradients", "k", tiles, ("k", "v"), stores, (), (*rows, "bias", *sums, *dbias), (*sums, *dbias), (),
            _products(needs), wide=wide,
        ),
        *((Sweep("round dq", "q", tiles, (), sums),) if sums else ()),
        *(_rounding(problem, tiles) if dbias else ()),
    )  # fmt: skip


def _shown(mask: Mask, outer: str, tiles: Tiles, stacked: bool) -> tuple[Sweep, ...]:
    """What the native kernels read of a mask pair by pair, in every tile of its bands and intervals.

    A stored mask that stands alone is read where it lies; what else has elements is written down, a byte a pair.
    """
    from onchip.backends.cpu import arguments

    if not arguments.elements(mask):
        return ()
    read = Sweep("look", outer, tiles, stacked=stacked, by_rules=True, looks=True)
    if arguments.shown_in_place(mask):
        return (replace(read, look_load=("mask",)),)
    show = Sweep(
        "show", outer, tiles, visit_store=("shown",), look_load=orders.STORED, every=True, keeps=True
    )
    return show, replace(read, look_load=("shown",))


def _rounding(problem: Problem, tiles: Tiles) -> tuple[Sweep, ...]:
    """The sums of a bias's gradient, brought to its own dtype, which is taken to be the problem's."""
    if problem.dtype is problem.accumulate:
        return ()
    return (
        Sweep("read the sums of dbias", "q", tiles, ("dbias",), wide=frozenset({"dbias"})),
        Sweep("round dbias", "q", tiles, (), ("dbias",)),
    )


def _by_shares(attend: Sweep, shares: int, parts: tuple[str, ...]) -> tuple[Sweep, ...]:
    """A forward pass whose keys are split: each share leaves its results, which a last step joins."""
    if shares == 1:
        return (attend,)
    return (
        replace(attend, once_store=parts, shares=shares),
        Sweep("read the shares", "q", attend.tiles, parts, shares=shares),
        Sweep("join them", "q", attend.tiles, (), attend.once_store),
    )


def chosen_tiles(problem: Problem, name: str, device: str | None = None) -> Tiles:
    """A backend's forward tiles: here, or for Triton on another known GPU, by whose capability its table goes."""
    if device is None or name != "triton":
        return select.load(name).tiles(problem)
    from onchip.backends.triton.planning import known_facts
    from onchip.backends.triton.table import config

    found = config(problem, "forward", known_facts(device), problem.seqlen_q)
    return Tiles(found.tile_m, found.tile_n)


def _triton(problem: Problem, tiles: Tiles | None, by_head: bool, device: str | None) -> tuple[Sweep, ...]:
    """backends/triton: query tiles outside, the longest first; a few queries' heads are one tile.

    Lists of tiles are made where the mask holds more than bands and intervals; over a cache, whose lengths are on the
    device, there are none.
    """
    from onchip.backends.triton.planning import by_length, known_facts, shares
    from onchip.backends.triton.table import packs

    pack = packs(problem, by_head)
    found = tiles or chosen_tiles(replace(problem, seqlen_q=problem.seqlen_q * pack), "triton", device)
    own = Tiles(max(found.tile_m // pack, 1), found.tile_n)
    stores, products, cached = ("out", "lse"), ("dim", "dim_v"), problem.layout in ("cache", "paged")
    listed = _listed(problem, "rows") and not cached
    attend = Sweep(
        "attend", "q", own, ("q",), stores, (), ("k", "v", "bias"), (), orders.STORED, products, stacked=pack > 1,
        backwards=_RIGHT, listed=listed, by_length=listed and by_length(problem), by_rules=cached, looks=cached,
    )  # fmt: skip
    split = shares(problem, own, pack, known_facts(device).multiprocessors)
    return _by_shares(attend, split, ("partial", "partial_lse"))


def _hopper(problem: Problem, tiles: Tiles | None, by_head: bool) -> tuple[Sweep, ...]:
    """backends/hopper: query tiles outside, the longest of a causal mask first, each from its last keys to its first.

    Under more than a band it goes by lists of tiles. The keys before the first that a band shows are cut off, and its
    blocks count from there: they are counted from key 0 here.
    """
    from onchip.backends.hopper.variant import packs

    found = tiles or select.load("hopper").tiles(problem)
    pack = packs(problem, found.tile_m, by_head)
    own, listed = Tiles(max(found.tile_m // pack, 1), found.tile_n, found.lead), _listed(problem)
    stores, products = ("out", "lse"), ("dim", "dim_v")
    return (
        Sweep(
            "attend", "q", own, ("q",), stores, (), ("k", "v", "bias"), (), orders.STORED, products, stacked=pack > 1,
            backwards=_RIGHT, descending=not listed, listed=listed, by_length=listed, never_none=True,
        ),
    )  # fmt: skip


def _listed(problem: Problem, *others: str) -> bool:
    """Whether the mask holds more than a band and these parts."""
    return bool(set(problem.mask_parts) - {"band", *others})


def _triton_backward(
    problem: Problem, needs: tuple[str, ...], tiles: Tiles | None, device: str | None
) -> tuple[Sweep, ...]:
    """backends/triton: dK and dV with key tiles outside, dQ with query tiles outside, each pass recomputing scores.

    The gradient of a bias is one more, through every tile. It is taken to read a tile's rows anew, as it does where the
    bias has keys; of packed sequences it visits the tiles of the longest, which is left out.
    """
    from onchip.backends.triton.planning import by_length, delta_tile, known_facts
    from onchip.backends.triton.table import config, separate

    def own(name: str) -> Tiles:
        chosen = config(problem, name, known_facts(device))
        return tiles or Tiles(chosen.tile_m, chosen.tile_n)

    def by_keys(name: str, loads: tuple, stores: tuple, visits: tuple, products: tuple) -> Sweep:
        looks, listed = orders.STORED, _listed(problem)
        return Sweep(
            name, "k", own(name), loads, stores, (), (*visits, "bias"), (), looks, products, backwards=_LEFT,
            forwards=_RIGHT, listed=listed, by_length=listed and by_length(problem),
        )  # fmt: skip

    delta = Tiles(delta_tile(problem), own("dq").tile_n)
    found = [Sweep("delta", "q", delta, ("out", "dout", "lse"), ("row_lse", "delta"))]
    rows = ("q", "dout", "row_lse", "delta")
    if separate(problem):
        if "k" in needs:  # S, dP, dK
            products = ("dim", "dim_v", "dim")
            found.append(by_keys("dk", ("k", "v"), ("dk",), rows, products))
        if "v" in needs:  # S, dV
            products = ("dim", "dim_v")
            found.append(by_keys("dv", ("k",), ("dv",), rows[:3], products))
    elif {"k", "v"} & set(needs):
        products = ("dim", "dim_v", "dim_v", "dim")  # S, dV, dP, dK
        found.append(by_keys("dkdv", ("k", "v"), ("dk", "dv"), rows, products))
    if {"q", "alibi"} & set(needs):
        products, listed = ("dim", "dim_v", "dim"), _listed(problem, "rows")  # S, dP, dQ
        found.append(
            Sweep(
                "dq", "q", own("dq"), rows, ("dq",), (), ("k", "v", "bias"), (), orders.STORED, products,
                backwards=_RIGHT, listed=listed, by_length=listed and by_length(problem),
            )
        )  # fmt: skip
    if "bias" in needs:
        found += _triton_bias(problem, own("dq"))
    return tuple(found)


def _triton_bias(problem: Problem, tiles: Tiles) -> list[Sweep]:
    """A program a tile of the bias; it is summed on chip over what shares it, and written once over zeros."""
    wide, visits = frozenset({"dbias"}), ("q", "dout", "row_lse", "delta", "k", "v", "bias")
    products = ("dim", "dim_v")  # S, dP
    return [
        Sweep("zero dbias", "q", tiles, (), ("dbias",), wide=wide),
        Sweep(
            "dbias", "q", tiles, (), ("dbias",), (), visits, (), orders.STORED, products, every=True, wide=wide
        ),
        *_rounding(problem, tiles),
    ]  # fmt: skip
