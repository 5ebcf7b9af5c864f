"""A run as a table, a JSON file and plots."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from onchip.bench.cases import Case
from onchip.bench.run import Row
from onchip.units import duration, size


def table(rows: list[Row]) -> Any:
    """A rich table, the fastest of each case and pass in bold."""
    from rich.table import Table

    found = Table(box=None, header_style="bold", pad_edge=False)
    found.add_column("case", overflow="fold")
    for name in ("pass", "implementation"):
        found.add_column(name, no_wrap=True)
    for name in ("time", "±", "TFLOP/s", "of the floor", "memory", "roundings"):
        found.add_column(name, justify="right", no_wrap=True)
    last = None
    for group in groups(rows):
        best = min(row.seconds for row in group if row.seconds is not None)
        for row in sorted(group, key=lambda r: r.seconds or 0.0):
            head = (row.case.label, row.step)
            shown = head if head != last else ("", "")
            last = head
            found.add_row(*shown, row.impl, *_figures(row), style="bold" if row.seconds == best else None)
    return found


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """The timed rows of each case and pass, in their order."""
    found: dict[tuple[Case, str], list[Row]] = {}
    for row in rows:
        if row.seconds is not None:
            found.setdefault((row.case, row.step), []).append(row)
    return list(found.values())


def _figures(row: Row) -> tuple[str, ...]:
    assert row.seconds is not None and row.spread is not None and row.tflops is not None
    reached = "" if row.floor is None else f"{100 * row.floor / row.seconds:.3g} %"
    error = row.checked if row.error is None else f"{row.error:.2g}" + ("" if row.ok else " WRONG")
    memory = "" if row.peak_memory is None else size(row.peak_memory)
    return duration(row.seconds), f"{100 * row.spread:.0f} %", f"{row.tflops:.3g}", reached, memory, error


def notes(rows: list[Row]) -> list[str]:
    """Why implementations did not run, each reason once with the number of cases."""
    found: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.note:
            found[row.impl, row.note] = found.get((row.impl, row.note), 0) + 1
    cases = len({row.case for row in rows})
    return [
        f"not {impl}{'' if count == cases else f' on {count} of {cases} cases'}: {note}"
        for (impl, note), count in found.items()
    ]


def write_json(rows: list[Row], about: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps({**about, "results": [row.to_json() for row in rows]}, indent=1) + "\n")


def write_plots(rows: list[Row], folder: Path, kinds: tuple[str, ...] = ("png", "svg")) -> list[Path]:
    """TFLOP/s and memory against N, and time against density, wherever the rows hold at least two of those.

    Files <what>-<pass>.<kind> in the folder.
    """
    found = []
    for step in dict.fromkeys(row.step for row in rows if row.seconds is not None):
        mine = [row for row in rows if row.step == step and row.seconds is not None]
        lengths = _lines(mine, lambda r: r.case.k_len, lambda r: r.tflops)
        found += plot(lengths, folder, f"tflops-{step}", "sequence length N", "TFLOP/s", kinds, log=True)
        memory = _lines(
            [r for r in mine if r.peak_memory is not None],
            lambda r: r.case.k_len,
            lambda r: (r.peak_memory or 0) / 2**20,
        )
        found += plot(memory, folder, f"memory-{step}", "sequence length N", "MiB", kinds, log=True)
        sparse = [row for row in mine if row.case.mask_text.startswith("blocks(")]
        times = _lines(sparse, _density, lambda r: (r.seconds or 0) * 1e3)
        found += plot(times, folder, f"density-{step}", "share of visible blocks", "ms", kinds, log=False)
    return found


Lines = dict[str, list[tuple[float, float]]]


def _density(row: Row) -> float:
    return float(row.case.mask_text.removeprefix("blocks(").split(",")[0].rstrip(") "))


def _lines(rows: list[Row], x: Any, y: Any) -> Lines:
    """Sorted points of each implementation and, where there are several, kind of mask."""
    masks = {_mask_kind(row) for row in rows}
    found: Lines = {}
    for row in rows:
        name = row.impl if len(masks) < 2 else f"{row.impl}, {_mask_kind(row)}"
        found.setdefault(name, []).append((x(row), y(row)))
    return {name: sorted(points) for name, points in found.items()}


def _mask_kind(row: Row) -> str:
    text = row.case.mask_text
    return "blocks" if text.startswith("blocks(") else text or "full"


def plot(
    lines: Lines, folder: Path, name: str, x: str, y: str, kinds: tuple[str, ...], log: bool
) -> list[Path]:
    """Files <name>.<kind> in the folder; none where no line has two points."""
    if max((len({px for px, _ in points}) for points in lines.values()), default=0) < 2:
        return []
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for label, points in lines.items():
        width = 2.5 if label.startswith("onchip") else 1.2
        axes.plot(*zip(*points, strict=True), "o-", label=label, linewidth=width, markersize=4)
    if log:
        axes.set_xscale("log", base=2)
        ticks = sorted({px for points in lines.values() for px, _ in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set(xlabel=x, ylabel=y)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in kinds]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths
