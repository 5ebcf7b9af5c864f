"""What `onchip bench` and `onchip verify` do: run with a progress bar, print a table, write files."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from onchip import verifying
from onchip.bench import cases as workloads, files, paper as papers, peers, report, run
from onchip.bench.cases import Case
from onchip.bench.timing import Regime


def cases(path: Path | None, *, seqlens: str, masks: list[str], what: str, **sizes: Any) -> list[Case]:
    """The cases of a file, or every seqlen with every mask. "decode": seqlen keys of a cache and one query."""
    if path is not None:
        return files.load(path)
    try:
        lengths = [int(n) for n in seqlens.split(",")]
    except ValueError:
        raise ValueError(f"--seqlen: got {seqlens!r}, expected numbers as 512,1024") from None
    if what not in (*workloads.PASSES, "decode"):
        raise ValueError(f"--pass: got {what!r}, expected {', '.join(workloads.PASSES)} or decode")
    found = []
    for mask in masks or [""]:
        for n in lengths:
            if what == "decode":
                found.append(Case(**sizes | {"seqlen_q": 1, "seqlen_k": n, "mask": mask, "cache": True}))
            else:
                found.append(Case(**sizes, seqlen_q=n, mask=mask, what=what))
    for case in found:  # before the work: the last may be wrong
        case.check()
    return found


def screen() -> Console:
    """The terminal; what goes to a file or a pipe is not folded."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def wide(console: Console) -> Console:
    """For a table, whose figures a terminal narrower than it would cut off: its lines wrap there."""
    return console if console.width >= 120 else Console(width=120)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def plots(console: Console, make: Callable[[Any, Path], list[Path]], found: Any, out: Path) -> list[Path]:
    """The files that `make` draws; none, and a line that says so, without what draws them."""
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no plots: they need matplotlib (pip install matplotlib)", style="dim", highlight=False)
        return []
    return make(found, out)


def regime(repeats: int, cool: float) -> Regime:
    return Regime(repeats, cool)


def bench(chosen: list[Case], impls: list[str], repeats: int, cool: float, out: Path | None) -> str:
    """Run, print and write; a sentence where onchip failed or was wrong, else ""."""
    console = screen()
    pace = regime(repeats, cool)
    for name in impls:
        peers.peer(name)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # before the work: an unwritable place should fail at once
    with progress(console) as tick:
        rows = run.run(chosen, impls, device(), pace, tick)
    about = run.about(device(), pace)
    wide(console).print(report.table(rows))
    for line in report.notes(rows):
        console.print(line, style="dim", highlight=False, markup=False)
    console.print(f"{about['device']}; {about['regime']}", style="dim", highlight=False)
    console.print(
        "times: medians ± half the middle half's range; roundings: error against float64", style="dim"
    )
    if out is not None:
        report.write_json(rows, about, out / "results.json")
        paths = [out / "results.json", *plots(console, report.write_plots, rows, out)]
        console.print("written: " + ", ".join(map(str, paths)), highlight=False, soft_wrap=True)
    ours = [row for row in rows if row.impl.startswith("onchip") and not row.ok]
    return "; ".join(f"{row.impl} on {row.case.label}: {row.note or 'wrong'}" for row in ours)


def paper(out: Path | None, repeats: int, cool: float, quick: bool) -> None:
    console = screen()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with progress(console) as tick:
        found = papers.experiments(device(), regime(repeats, cool), quick, tick)
    for title, made in papers.tables(found):
        console.print(title, style="bold", highlight=False)
        wide(console).print(made)
        console.print()
    about = found["about"]
    console.print(f"{about['device']}; {about['regime']}", style="dim", highlight=False)
    if out is not None:
        (out / "paper.json").write_text(json.dumps(found, indent=1) + "\n")
        paths = [out / "paper.json", *plots(console, papers.plots, found, out)]
        console.print("written: " + ", ".join(map(str, paths)), highlight=False, soft_wrap=True)


def verify(case: Case, backend: str | None) -> str:
    """Print the worst element of each tensor; a sentence where one is off, else ""."""
    console = screen()
    with progress(console) as tick:
        worst = verifying.verify(case, device(), backend, lambda done, total: tick("float64", done, total))
    console.print(f"{case.label}, {case.dtype}", style="bold", highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("tensor", "error", "roundings", "found", "float64", "worst at"):
        table.add_column(name, justify="left" if name in ("tensor",) else "right", no_wrap=True)
    for w in worst:
        place = ", ".join(map(str, w.at))
        style = None if w.ok else "bold red"
        table.add_row(
            w.name,
            f"{w.error:.2e}",
            f"{w.roundings:.2f}",
            f"{w.found:.6g}",
            f"{w.truth:.6g}",
            place,
            style=style,
        )
    wide(console).print(table)
    console.print(
        "worst at: sequence, head, row, column; roundings: of the dtype, of the greatest number", style="dim"
    )
    wrong = [w.name for w in worst if not w.ok]
    return f"{', '.join(wrong)}: off by more than exact attention in {case.dtype} is" if wrong else ""


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each label, told of by tick(label, done, total)."""
    columns = (TextColumn("{task.description:44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # In a file or a pipe it would leave an empty line and no more.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def tick(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=total)
            bars.update(tasks[label], completed=done)

        yield tick
