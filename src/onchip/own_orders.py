"""The order in which onchip's backends visit score tiles, and what they move there: as `orders.Sweep`s.

Which tiles a pass visits is the schedule's business. Query tiles (or key tiles) of a GPU's pass run side by side: their
order is that of their programs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from onchip import devices, orders, select
from onchip.orders import Sweep
from onchip.schedule import Tiles

if TYPE_CHECKING:
    from onchip.problem import Problem


def sweeps(
    problem: Problem,
    name: str,
    step: str,
    needs: tuple[str, ...],
    tiles: Tiles | None,
    by_head: bool,
    device: str | None,
) -> tuple[Sweep, ...]:
    """The sweeps of a backend's pass; see `orders.sweeps`."""
    module: Any = select.load(name)
    stated = getattr(module, "sweeps", None)  # a backend may state its own order
    if stated is not None:
        return stated(problem, step, needs, tiles)
    if name == "reference":
        whole = tiles or module.tiles(problem)
        return orders.standard(whole) if step == "forward" else orders.standard_backward(whole)
    if name == "cpu":
        return _cpu(step, needs, tiles or module.tiles(problem))
    if name == "native":
        return _native(problem, step, needs, tiles or module.tiles(problem), by_head)
    if step == "backward":
        return _triton_backward(problem, needs, tiles, device)  # of Hopper's forward pass too
    return _hopper(problem, tiles, by_head) if name == "hopper" else _triton(problem, tiles, by_head, device)


def _cpu(step: str, needs: tuple[str, ...], tiles: Tiles) -> tuple[Sweep, ...]:
    """backends/cpu/tiled.py: query tiles outside, the query heads of a key head stacked."""
    if step == "forward":
        loads, stores = ("q",), ("out", "lse")
        products = ("dim", "dim_v")
        return (Sweep("attend", "q", tiles, loads, stores, (), ("k", "v"), (), products, stacked=True),)
    sums = tuple(name for name, need in (("dv", "v"), ("dk", "k")) if need in needs)
    stores = ("dq",) if "q" in needs else ()
    products = ["dim"] + ["dim_v"] * ("v" in needs)
    if {"q", "k"} & set(needs):
        products += ["dim_v", *("dim" for n in ("q", "k") if n in needs)]
    return (
        Sweep(
            "gradients", "q", tiles, ("q", "out", "dout", "lse"), stores, (), ("k", "v", *sums), sums,
            tuple(products), stacked=True, wide=frozenset(sums),
        ),
    )  # fmt: skip


def _native(
    problem: Problem, step: str, needs: tuple[str, ...], tiles: Tiles, by_head: bool
) -> tuple[Sweep, ...]:
    """backends/cpu/kernels: forward by blocks of queries, backward by blocks of keys through all rows of a key head.

    Packed copies of rows and keys count as the tensors themselves, read at each visit; splits and chunks of the keys
    are left out. The heads of a few queries share a block.
    """
    if step == "forward":
        stacked = problem.group > 1 and problem.seqlen_q * problem.group <= tiles.tile_m and not by_head
        products = ("dim", "dim_v")
        return (
            Sweep(
                "attend", "q", tiles, ("q",), ("out", "lse"), (), ("k", "v"), (), products, stacked=stacked
            ),
        )
    products = ["dim"] + ["dim_v"] * ("v" in needs)  # S, dV
    if {"q", "k"} & set(needs):
        products += ["dim_v", *("dim" for n in ("q", "k") if n in needs)]  # dP, dQ, dK
    rows, sums = ("q", "dout", "lse", "delta"), ("dq",) if "q" in needs else ()
    stores = tuple("d" + n for n in ("k", "v") if n in needs)
    return (
        Sweep("delta", "q", tiles, ("out", "dout"), ("delta",)),
        Sweep(
            "gradients", "k", tiles, ("k", "v"), stores, (), (*rows, *sums), sums, tuple(products),
            wide=frozenset(sums),
        ),
        *((Sweep("round dq", "q", tiles, (), sums),) if sums else ()),
    )  # fmt: skip


def chosen_tiles(problem: Problem, name: str, device: str | None = None) -> Tiles:
    """A backend's forward tiles: here, or for Triton on another known GPU, by whose capability its table goes."""
    if device is None or name != "triton":
        return select.load(name).tiles(problem)
    from onchip.backends.triton.table import config

    found = config(problem, "forward", _facts(device), problem.seqlen_q)
    return Tiles(found.tile_m, found.tile_n)


def _facts(device: str | None) -> Any:
    """What Triton's table asks of this GPU, or of a known one without the rows that `onchip tune` measured there."""
    from onchip.backends.triton.arguments import device_facts
    from onchip.backends.triton.table import Facts

    if device is None:
        return device_facts(0)
    known = devices.device(device)
    return Facts(known.capability, known.units, "")


def _triton(problem: Problem, tiles: Tiles | None, by_head: bool, device: str | None) -> tuple[Sweep, ...]:
    """backends/triton: query tiles outside, the longest of a causal mask first; a few queries' heads are one tile.

    Lists of tiles are made where the mask holds more than bands and intervals; over a
    cache, whose lengths are on the device, there are none.
    """
    from onchip.backends.triton.table import packs

    pack = packs(problem, by_head)
    found = tiles or chosen_tiles(replace(problem, seqlen_q=problem.seqlen_q * pack), "triton", device)
    own = Tiles(max(found.tile_m // pack, 1), found.tile_n)
    stores, products, cached = ("out", "lse"), ("dim", "dim_v"), problem.layout in ("cache", "paged")
    return (
        Sweep(
            "attend", "q", own, ("q",), stores, (), ("k", "v"), (), products, stacked=pack > 1,
            backwards=("right",), listed=_listed(problem, "rows") and not cached, by_rules=cached,
        ),
    )  # fmt: skip


def _hopper(problem: Problem, tiles: Tiles | None, by_head: bool) -> tuple[Sweep, ...]:
    """backends/hopper: query tiles outside, the longest of a causal mask first, each from its last keys to its first.

    Under more than a band it goes by lists of tiles. The keys before the first that a band shows are cut off, and its
    blocks count from there: they are counted from key 0 here.
    """
    from onchip.backends.hopper.variant import packs

    found = tiles or select.load("hopper").tiles(problem)
    pack = packs(problem, found.tile_m, by_head)
    own, listed = Tiles(max(found.tile_m // pack, 1), found.tile_n), _listed(problem)
    stores, products = ("out", "lse"), ("dim", "dim_v")
    return (
        Sweep(
            "attend", "q", own, ("q",), stores, (), ("k", "v"), (), products, stacked=pack > 1,
            backwards=("right", "top_right"), descending=not listed, listed=listed, never_none=True,
        ),
    )  # fmt: skip


def _listed(problem: Problem, *others: str) -> bool:
    """Whether the mask holds more than a band and these parts."""
    return bool(set(problem.mask_parts) - {"band", *others})


def _triton_backward(
    problem: Problem, needs: tuple[str, ...], tiles: Tiles | None, device: str | None
) -> tuple[Sweep, ...]:
    """backends/triton: dK and dV with key tiles outside, dQ with query tiles outside, each pass recomputing scores."""
    from onchip.backends.triton.table import config, separate

    def own(name: str) -> Tiles:
        chosen = config(problem, name, _facts(device))
        return tiles or Tiles(chosen.tile_m, chosen.tile_n)

    def by_keys(name: str, loads: tuple, stores: tuple, visits: tuple, products: tuple) -> Sweep:
        return Sweep(name, "k", own(name), loads, stores, (), visits, (), products, listed=_listed(problem))

    delta = Tiles(64 if problem.dim_v <= 128 else 16, own("dq").tile_n)
    found = [Sweep("delta", "q", delta, ("out", "dout", "lse"), ("delta",))]
    rows = ("q", "dout", "lse", "delta")
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
    if "q" in needs:
        products = ("dim", "dim_v", "dim")  # S, dP, dQ
        found.append(
            Sweep(
                "dq", "q", own("dq"), rows, ("dq",), (), ("k", "v"), (), products, backwards=("right",),
                listed=_listed(problem, "rows"),
            )
        )  # fmt: skip
    return tuple(found)
