"""A `Plan` as the lines of a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onchip.layout import Cache
from onchip.units import dtype_name, duration, operations, size

if TYPE_CHECKING:
    from onchip.plan import Plan
    from onchip.traffic import Traffic


def lines(plan: Plan) -> list[str]:
    """All but the times."""
    p, total = plan.problem, max(plan.empty + plan.partial + plan.full, 1)
    own, standard = plan.passes(), plan.passes("standard")
    backward = own.get("backward")
    work = f"work       {plan.pairs:,} visible pairs, {operations(plan.flops)} forward"
    if backward is not None:
        work += f", {operations(backward.flops)} backward"
    copied = ", ".join(plan.copies)
    return [
        f"attention  {_shape(plan)}, heads {p.heads_q}/{p.heads_k}, dim {p.dim}/{p.dim_v}, "
        f"{dtype_name(p.dtype)} on {plan.device_name or p.device}",
        f"backend    {_kind(plan.backend)}, tiles of {plan.tiles.tile_m} x {plan.tiles.tile_n}{_first(plan)}",
        *(
            f"           not {name}: {reason}"
            for name, reason in plan.refusals.items()
            if name != plan.backend
        ),
        *(
            [f"cast       {dtype_name(plan.cast_from)} to {dtype_name(p.dtype)} before the call, by autocast"]
            if plan.cast_from is not None
            else []
        ),
        *(
            [f"copies     {copied}: made contiguous before the call, since their strides do not fit"]
            if copied
            else []
        ),
        *_cache(plan),
        f"tiles      {plan.empty} empty (skipped), {plan.partial} partial, {plan.full} full: "
        f"{100 * (plan.partial + plan.full) / total:.1f} % visited",
        *(f"           {row}" for row in plan.picture()),
        work,
        *(_moved(step, part, standard[step]) for step, part in own.items()),
        *(
            [f"           and {size(plan.held)} of vectors and tables that the mask and the score hold"]
            if plan.held
            else []
        ),
        *_others(plan),
        *(
            f"memory     {step}: {size(part.extra_memory)} beyond inputs and results; "
            f"standard attention {size(standard[step].extra_memory)}"
            for step, part in own.items()
        ),
    ]


def _shape(plan: Plan) -> str:
    p = plan.problem
    if not isinstance(plan.layout, Cache):
        batch = f"{p.batch} packed, longest" if p.layout == "varlen" else f"batch {p.batch}, seqlen"
        return f"{batch} {p.seqlen_q} x {p.seqlen_k}"
    low, high = min(plan.layout.k_lens, default=0), max(plan.layout.k_lens, default=0)
    keys = f"{high:,}" if low == high else f"{low:,} to {high:,}"
    return f"batch {p.batch} over a cache, {p.seqlen_q} x {keys}"


def _cache(plan: Plan) -> list[str]:
    """What of a cache is in use, and what the call appends."""
    place, p = plan.layout, plan.problem
    if not isinstance(place, Cache):
        return []
    row = p.heads_k * (p.dim + p.dim_v) * p.dtype.itemsize
    used, room = row * sum(place.k_lens), row * plan.slots
    pages = f" in pages of {place.page_size}" if place.page_size else ""
    lines = [f"cache      {size(used)} of keys and values, in room for {size(room)}{pages}"]
    if place.new:
        lines.append(
            f"append     {place.new} to each sequence: {size(plan.appended)} read, {size(plan.appended)} written"
        )
    return lines


def times(plan: Plan) -> list[str]:
    """The least time of each pass."""
    try:
        floors = {step: plan.floor(step) for step in plan.passes("minimum")}
    except ValueError as error:  # a GPU that is not a known one
        return [f"floor      {error}"]
    return [
        f"floor      {step}: {duration(floor.seconds)} on {floor.device}, {floor.bound}-bound "
        f"(arithmetic {duration(floor.compute)}, memory {duration(floor.memory)})"
        for step, floor in floors.items()
    ]


def _moved(step: str, own: Traffic, standard: Traffic) -> str:
    ratio = standard.bytes / own.bytes if own.bytes else 1.0
    moved = f"{size(own.read_bytes)} read, {size(own.write_bytes)} written"
    return (
        f"traffic    {step}: {moved}, {own.intensity:.1f} FLOP/byte ({size(own.least)} past a cache); "
        f"standard attention {size(standard.bytes)}, {ratio:.1f} times as much"
    )


def _others(plan: Plan) -> list[str]:
    """The traffic of other orders on the same problem, and what none can be below."""
    from onchip.orders import SRAM

    names = {"flash1": "FlashAttention", "flash2": "FlashAttention-2", "minimum": "each tensor once"}
    moved = {
        step: ", ".join(f"{title} {size(plan.passes(name)[step].bytes)}" for name, title in names.items())
        for step in plan.passes()
    }
    bound = size(plan.lower_bound * plan.problem.dtype.itemsize)
    return [
        *(f"others     {step}: {text}" for step, text in moved.items()),
        f"bound      forward: {bound}, N^2 d^2 / M for {SRAM >> 10} KiB of SRAM; no exact algorithm is below its order",
    ]


def _first(plan: Plan) -> str:
    heights = plan.tiles.heights(plan.problem.seqlen_q)
    return f", the first of {heights[0]} queries" if plan.tiles.lead and len(heights) > 1 else ""


def _kind(backend: str) -> str:
    """The backend's name; of the CPU's two, which loop it is."""
    if backend == "native":
        from onchip.backends.cpu.isa import status

        return f"native ({status()})"
    return "cpu (the tiled loop of torch operations)" if backend == "cpu" else backend
