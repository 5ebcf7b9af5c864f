"""`onchip tune`: the tile table measured anew on the GPU at hand, kept in the user's cache.

Every candidate of a pass is compiled in worker processes, checked against what the table's own tiles compute, and timed
on a long full and a long causal problem; the smallest sum of the two medians wins.
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from onchip import masks
from onchip.backends.compiled import launch
from onchip.backends.triton import backward_pass, forward_pass, planning, table
from onchip.backends.triton.planning import device_facts
from onchip.backends.triton.table import Config
from onchip.problem import Operands, Problem, Saved, check_types, dense

NEEDS = {"dkdv": ("k", "v"), "dk": ("k",), "dv": ("v",), "dq": ("q",)}
TOKENS, WIDTH = 16384, 2048


class Row(NamedTuple):
    """A row of the table that is to be measured."""

    step: str
    dim: int
    itemsize: int


class Timed(NamedTuple):
    config: Config
    ms: (
        tuple[float, float] | None
    )  # full, causal; None: it does not run on this device, or gives other results


def rows(dim: int, itemsize: int) -> list[Row]:
    """The rows that a head dim uses."""
    keys = ("dk", "dv") if dim > 128 else ("dkdv",)
    return [Row(step, dim, itemsize) for step in ("forward", *keys, "dq")]


def candidates(row: Row) -> Iterator[Config]:
    """Tiles that may fit: the limits are a tile's registers and its share of shared memory."""
    sides = (16, 32, 64, 128) if row.itemsize == 2 else (16, 32, 64)
    # Where a row takes many registers, tiles of few are the ones that fit.
    least, most = (1024, 1 << 14) if row.itemsize == 2 and row.dim <= 256 else (256, 2048)
    for tile_m, tile_n, warps, stages in itertools.product(sides, sides, (4, 8), (1, 2, 3, 4)):
        by_key = row.step in ("dkdv", "dk", "dv")
        kept = (tile_n if by_key else tile_m) * row.dim * (2 if row.step == "dkdv" else 1)
        staged = (tile_m if by_key else tile_n) * row.dim * 2 * row.itemsize * stages
        if not least <= tile_m * tile_n <= most or kept > 256 * warps * 32 // 2 or staged > 200 * 1024:
            continue
        yield Config(tile_m, tile_n, warps, stages)


def tune(
    rows: Iterable[Row], seqlen: int = 8192, each: Callable[[Row, Timed], None] = lambda row, timed: None
) -> dict[Row, list[Timed]]:
    """Every candidate of every row, the fastest first; the row's present tiles are among them."""
    if not torch.cuda.is_available():
        raise RuntimeError("tune: found no GPU, expected one that Triton serves")
    found = {}
    jobs = [(row, config) for row in rows for config in _with_present(row)]
    workers = max(1, min((os.cpu_count() or 2) - 1, 16, len(jobs)))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, *zip(*((row, config, seqlen) for row, config in jobs), strict=True)))
    for row, config in jobs:
        timed = Timed(config, _measure(row, config, seqlen))
        each(row, timed)
        found.setdefault(row, []).append(timed)
    return {
        row: sorted(all_, key=lambda t: sum(t.ms) if t.ms else float("inf")) for row, all_ in found.items()
    }


def keep(found: dict[Row, list[Timed]]) -> Any:
    """Write the fastest of each row to the user's cache, beside what other devices have there; the file's path."""
    path, device = table.overrides_file(), device_facts(torch.cuda.current_device()).name
    known = json.loads(path.read_text())["devices"] if path.exists() else {}
    new = {row: timed[0].config for row, timed in found.items() if timed[0].ms}
    old = {
        Row(r["pass"], r["dim"], r["itemsize"]): Config(*(r[f] for f in Config._fields))
        for r in known.get(device, [])
    }
    known[device] = [
        {"pass": row.step, "dim": row.dim, "itemsize": row.itemsize, **config._asdict()}
        for row, config in (old | new).items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"date": date.today().isoformat(), "triton": triton.__version__, "devices": known}
    path.write_text(json.dumps(about, indent=1) + "\n")
    table.overrides.cache_clear()
    launch.forget()
    return path


def _with_present(row: Row) -> list[Config]:
    present = _present(row)
    return [present, *(c for c in candidates(row) if c != present)]


def _present(row: Row) -> Config:
    problem = _case(row, 256, False)[0]
    return table.config(problem, row.step, device_facts(torch.cuda.current_device()))


def _case(row: Row, seqlen: int, causal: bool) -> tuple[Problem, Operands, Tensor]:
    dtype = torch.bfloat16 if row.itemsize == 2 else torch.float32
    shape = (max(TOKENS // seqlen, 1), seqlen, WIDTH // row.dim, row.dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4))
    mask, score = check_types(masks.causal() if causal else None, None)
    layout, problem = dense(q, k, v, mask, score, None, 0.0, True)
    operands = Operands(q, k, v, layout, mask, score)
    return problem, operands, dout


def using(step: str, config: Config, run: Callable[[], Any]) -> Any:
    """run() while a pass takes this configuration, whatever the table has."""
    modules, chosen = (planning, backward_pass), table.config

    def choose(problem: Any, asked: str, *more: Any) -> Config:
        return config if asked == step else chosen(problem, asked, *more)

    launch.forget()
    try:
        for module in modules:
            module.config = choose  # type: ignore[assignment]
        return run()
    finally:
        for module in modules:
            module.config = chosen
        launch.forget()


def _runner(row: Row, seqlen: int, causal: bool) -> Callable[[], tuple[Any, ...]]:
    """The pass on fresh random tensors."""
    problem, operands, dout = _case(row, seqlen, causal)
    if row.step == "forward":
        return lambda: forward_pass.forward(problem, operands)[:1]
    output = forward_pass.forward(problem, operands)
    needs = frozenset(NEEDS[row.step])
    saved = Saved(output.out, output.lse, None, needs)
    return lambda: tuple(
        g for g in backward_pass.backward(problem, operands, saved, dout, None) if g is not None
    )


def _compile(row: Row, config: Config, seqlen: int) -> None:
    """In a worker: fills Triton's cache."""
    for causal in (False, True):
        run = _runner(row, 256, causal)
        try:
            using(row.step, config, run)
        except Exception:  # what does not compile or fit is seen, and left out, when it is timed
            return


def _measure(row: Row, config: Config, seqlen: int) -> tuple[float, float] | None:
    times = []
    for causal in (False, True):
        run = _runner(row, seqlen, causal)
        expected = run()
        try:
            agrees = all(
                torch.allclose(a.float(), b.float(), atol=2e-2, rtol=2e-2)
                for a, b in zip(using(row.step, config, run), expected, strict=True)
            )
            if not agrees:
                return None
            timer = functools.partial(triton.testing.do_bench, run, warmup=5, rep=30, return_mode="median")
            times.append(using(row.step, config, timer))
        except Exception:  # out of shared memory or registers, or a compiler's limit
            return None
    return times[0], times[1]
