"""The whole demo, one part after the other, with a progress bar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from onchip.demo import fresh, report, text

EMBEDDING_TOLERANCE = 1e-5  # of numbers in unit vectors
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
    results: dict[str, Any] = {}
    for results in fresh.stream("embed", count=count):
        progress.advance(task, results.get("done", 0))
    check("embeddings", results["difference"], EMBEDDING_TOLERANCE)
    return {**results, "tolerance": EMBEDDING_TOLERANCE}


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
    losses = (results[name]["losses"] for name in ("dense", "onchip"))
    dense, ours = (torch.tensor(x, dtype=torch.float64, device="cpu") for x in losses)
    results["difference"] = (dense - ours).abs().max().item()  # NaN if any is, unlike Python's max
    check("losses", results["difference"], LOSS_TOLERANCE)
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


def check(what: str, difference: float, tolerance: float) -> None:
    if not difference <= tolerance:  # also when it is NaN
        raise RuntimeError(f"the {what} with onchip differ by {difference:.1e}, more than {tolerance:.0e}")
