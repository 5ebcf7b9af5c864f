"""The whole demo, one part after the other, with a progress bar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from onchip.demo import embed, fresh, report, text

LOSS_TOLERANCE = 1e-3  # nats per byte: rounding differs between the two, and training amplifies it


def run(out: Path, steps: int = 200, quick: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Run everything, write out/report.html and out/results.json, print a summary; return the results.

    quick: a small version of the same for tests. Raises RuntimeError when the two attentions disagree.
    """
    console = console or Console()
    out.mkdir(parents=True, exist_ok=True)  # before the work: an unwritable place should fail at once
    context = 128 if quick else 1024
    lengths = [256, 512] if quick else [1024, 2048, 4096, 8192, 16384]
    columns = (TextColumn("{task.description:42}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        results: dict[str, Any] = {"embed": embedding(progress, 24 if quick else None)}
        results["train"] = {"context": context, **training(progress, steps, context)}
        results["scaling"] = scaling(progress, lengths)
    (out / "results.json").write_text(json.dumps(results, indent=1))
    page = out / "report.html"
    page.write_text(report.page(results), encoding="utf-8")
    for line in report.summary(results):
        console.print(line, highlight=False, markup=False)
    console.print(f"report: {page.resolve()}", highlight=False, soft_wrap=True)
    return results


def embedding(progress: Progress, count: int | None) -> dict[str, Any]:
    task = progress.add_task("embed passages: stock, then onchip", total=2 * len(text.passages()[:count]))
    last: dict[str, Any] = {}
    for last in embed.run(count):
        progress.advance(task, last.get("done", 0))
    return last


def training(progress: Progress, steps: int, context: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in ("dense", "onchip"):
        task = progress.add_task(f"train a transformer: {name}", total=steps)
        losses = []
        for record in fresh.stream("train", attention=name, steps=steps, context=context):
            if "loss" in record:
                losses.append(record["loss"])
                progress.advance(task)
            else:
                results[name] = {"losses": losses, **record}
    pairs = zip(results["dense"]["losses"], results["onchip"]["losses"], strict=True)
    results["difference"] = max(abs(a - b) for a, b in pairs)
    if not results["difference"] <= LOSS_TOLERANCE:  # also when it is NaN
        raise RuntimeError(
            f"the losses differ by {results['difference']:.1e}, more than {LOSS_TOLERANCE:.0e}"
        )
    return results


def scaling(progress: Progress, lengths: list[int]) -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {}
    for name in ("dense", "onchip"):
        task = progress.add_task(f"time and memory up to N={lengths[-1]}: {name}", total=len(lengths))
        results[name] = []
        for record in fresh.stream("scaling", attention=name, lengths=lengths):
            results[name].append(record)
            progress.advance(task)
    return results
