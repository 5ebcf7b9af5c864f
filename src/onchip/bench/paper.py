"""The three experiments of the first FlashAttention paper's figure 2, on the device at hand.

Left, the table: FLOPs, traffic and time of standard attention and of ours, forward and backward. Middle: the key
block's size against traffic and time. Right: time of block-sparse attention against the share of visible blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from onchip import orders, select, traffic
from onchip.autograd import Call
from onchip.bench import peers, report
from onchip.bench.cases import Case
from onchip.bench.run import about, run, stated
from onchip.bench.timing import Regime, measure
from onchip.tiles import Tiles

# GPT-2 medium: batch 64, 16 heads, N = 1024, d = 64, fp16. A CPU takes one sequence of float32.
GPU = Case("GPT-2 medium", batch=64, seqlen_q=1024, heads_q=16, dim=64, dtype="float16", what="both")
CPU = replace(GPU, name="GPT-2 medium, one sequence", batch=1, dtype="float32")
SMALL = replace(CPU, name="small", seqlen_q=256, heads_q=2)
BLOCKS = (64, 128, 256, 512)
DENSITIES = (0.125, 0.25, 0.5, 0.75, 1.0)

Tick = Callable[[str, int, int], None]


def experiments(device: str, regime: Regime, small: bool = False, tick: Tick | None = None) -> dict[str, Any]:
    """{"table", "blocks", "sparse", "about"}: plain lists of dicts."""
    case = SMALL if small else GPU if device == "cuda" else CPU
    pace = replace(regime, repeats=2) if small else regime
    longer = replace(case, seqlen_q=4 * case.seqlen_q, batch=max(case.batch // 16, 1))
    return {
        "case": case.to_json(),
        "table": the_table(case, device, pace, tick),
        "blocks": block_sizes(replace(case, what="forward"), device, pace, tick),
        "sparse": densities(longer, device, pace, tick),
        "about": about(device, pace),
    }  # fmt: skip


def the_table(case: Case, device: str, regime: Regime, tick: Tick | None) -> list[dict[str, Any]]:
    """Standard attention and onchip: GFLOP and GB of forward and backward by the model, milliseconds measured."""
    rows = run([case], ("standard", "onchip"), device, regime, tick)
    call = stated(peers.inputs(case, device))
    problem, layout, mask = call.problem, call.operands.layout, call.operands.mask
    found = []
    for impl, algorithm in (("standard", "eager"), ("onchip", "onchip")):
        passes = [traffic.count(problem, layout, mask, algorithm, step) for step in orders.STEPS]
        times = {row.step: row.seconds for row in rows if row.impl == impl and row.seconds is not None}
        notes = [row.note for row in rows if row.impl == impl and row.note]
        found.append(
            {
                "impl": impl,
                "gflop": sum(p.flops for p in passes) / 1e9,
                "gb": sum(p.bytes for p in passes) / 1e9,
                "gb_cached": sum(p.least for p in passes) / 1e9,
                "ms": sum(times.values()) * 1e3 if len(times) == 2 else None,
                "error_roundings": max((row.error or 0.0 for row in rows if row.impl == impl), default=None),
                "note": notes[0] if notes else "",
            }
        )
    return found


def block_sizes(case: Case, device: str, regime: Regime, tick: Tick | None) -> list[dict[str, Any]]:
    """Forward traffic of Algorithm 1 and of our order for each block of keys, and the time of our kernel with it.

    On a CPU that is the tiled loop, on a GPU Triton's kernel with other tiles than its table has.
    """
    call = stated(peers.inputs(case, device))
    problem, operands = call.problem, call.operands
    sizes = [n for n in BLOCKS if n <= case.seqlen_q]
    told = None if tick is None else (lambda done: tick("block size", done, regime.repeats))
    name, times = ("cpu", loop_times) if device == "cpu" else ("triton", kernel_times)
    if select.load(name).refuse(problem) is not None:  # the model stands alone
        name, times = None, lambda call, sizes, *_: {n: (Tiles(n, n), None) for n in sizes}
    found = []
    layout, mask = operands.layout, operands.mask
    for n, (tiles, seconds) in times(call, sizes, device, regime, told).items():
        first = traffic.count(problem, layout, mask, "flash1", tiles=Tiles(min(n, problem.dim), n))
        ours = traffic.count(problem, layout, mask, "onchip", backend=name, tiles=tiles)
        body = {
            "block": n,
            "queries": tiles.tile_m,
            "flash1_gb": first.bytes / 1e9,
            "onchip_gb": ours.bytes / 1e9,
        }
        found.append({**body, "ms": None if seconds is None else seconds * 1e3})
    return found


Timed = dict[int, tuple[Tiles, float | None]]  # block of keys -> tiles, seconds; None: it does not fit


def loop_times(call: Call, sizes: list[int], device: str, regime: Regime, told: Any) -> Timed:
    """The tiled loop's forward pass with square tiles."""
    loop = select.load("cpu")
    calls: dict[str, Callable[[], object]] = {}
    for n in sizes:
        calls[str(n)] = lambda n=n: loop.forward(call.problem, call.operands, Tiles(n, n))
    times = measure(calls, device, regime, told)
    return {n: (Tiles(n, n), times[str(n)].median) for n in sizes}


def kernel_times(call: Call, sizes: list[int], device: str, regime: Regime, told: Any) -> Timed:
    """The Triton kernel's forward pass, one block size after the other: each change prepares its launches anew."""
    from onchip.backends.triton import forward_pass, planning, table, tune

    problem, operands = call.problem, call.operands
    facts = planning.device_facts(operands.q.device.index or 0)
    present = table.config(problem, "forward", facts, problem.seqlen_q)
    found: Timed = {}
    for n in sizes:
        config = _with_keys(present, n)
        run = lambda: forward_pass.forward(problem, operands)  # noqa: E731
        try:
            times = tune.using("forward", config, lambda run=run: measure({"": run}, device, regime, told))
            seconds = times[""].median
        except Exception:  # out of shared memory or registers, or a compiler's limit
            seconds = None
        found[n] = Tiles(config.tile_m, n), seconds
    return found


def _with_keys(present: Any, n: int) -> Any:
    """The present tile's configuration with n keys a tile, and as many queries where their scores fit in registers.

    Those hold up to twice the present tile's scores, shared memory the keys of its stages.
    """
    scores = present.tile_m * present.tile_n
    queries = max(16, min(n, 2 * scores // n))
    stages = max(1, min(present.num_stages, present.tile_n * present.num_stages // n))
    return type(present)(queries, n, 8 if queries * n > scores else present.num_warps, stages)


def densities(case: Case, device: str, regime: Regime, tick: Tick | None) -> list[dict[str, Any]]:
    """Forward and backward milliseconds against the share of visible blocks, and the visible share of the pairs."""
    cases = [replace(case, name="", mask=f"blocks({d}, 128)") for d in DENSITIES]
    rows = run(cases, ("onchip",), device, regime, tick)
    found = []
    for density, own in zip(DENSITIES, cases, strict=True):
        times = {row.step: row.seconds for row in rows if row.case == own and row.seconds is not None}
        ms = {step: None if step not in times else times[step] * 1e3 for step in orders.STEPS}
        found.append({"density": density, **ms})
    return found


def tables(found: dict[str, Any]) -> list[tuple[str, Any]]:
    """The three as a title and a rich table each."""
    from rich.table import Table

    titles = {
        "table": "attention, forward and backward (GFLOP and GB by the model)",
        "blocks": "forward: block size against traffic and time",
        "sparse": "block-sparse: share of visible blocks against time",
    }
    result = []
    for name, title in titles.items():
        made = Table(box=None, header_style="bold", pad_edge=False)
        for column in found[name][0]:
            made.add_column(column, justify="right")
        for body in found[name]:
            made.add_row(*(_cell(value) for value in body.values()))
        result.append((title, made))
    return result


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def plots(found: dict[str, Any], folder: Path) -> list[Path]:
    """PNG and SVG of the second and third experiment."""
    kinds = ("png", "svg")
    gb: report.Lines = {
        name: [(r["block"], r[key]) for r in found["blocks"]]
        for name, key in (("Algorithm 1", "flash1_gb"), ("onchip", "onchip_gb"))
    }
    ms: report.Lines = {"onchip": [(r["block"], r["ms"]) for r in found["blocks"] if r["ms"] is not None]}
    sparse: report.Lines = {
        step: [(r["density"], r[step]) for r in found["sparse"] if r[step] is not None]
        for step in orders.STEPS
    }
    return [
        *report.plot(gb, folder, "paper-block-traffic", "keys of a block", "GB", kinds, log=True),
        *report.plot(ms, folder, "paper-block-time", "keys of a block", "ms", kinds, log=True),
        *report.plot(sparse, folder, "paper-sparse", "share of visible blocks", "ms", kinds, log=False),
    ]
