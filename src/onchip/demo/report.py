"""Results of the demo -> a summary for the terminal and one self-contained page of HTML."""

from __future__ import annotations

import html
import io
import platform
import re
from collections.abc import Callable
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from onchip.demo import scaling

INK = "#010203"  # drawn in this colour, it takes the page's text colour, light or dark
COLORS = {"dense": "#d9822b", "onchip": "#1f9aa8"}
RC: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#88888855",
    "legend.frameon": False,
}

STYLE = """
:root { color-scheme: light dark; --line: #8884; --ink: #1b1f24; --paper: #fdfdfb; --dim: #57606a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --paper: #16191d; --dim: #9aa4af; } }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; font: 1rem/1.55 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption, .dim { color: var(--dim); font-size: .9rem; }
svg { width: 100%; height: auto; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
"""


def size(count: float) -> str:
    """Bytes for people: 1536 KiB -> "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"


def remark(ours: float, theirs: float) -> str:
    """What to say where onchip is slower."""
    if ours < 1.05 * theirs:
        return ""
    reason = "on this CPU it is made of torch operations, not a compiled kernel; what it saves is memory"
    return f" onchip takes {ours / theirs:.1f} times as long here: {reason}."


def sentences(results: dict[str, Any]) -> dict[str, str]:
    """What was measured, in plain words, by part of the demo."""
    found, train, lines = results["embed"], results["train"], results["scaling"]
    dense, ours = train["dense"], train["onchip"]
    said = {
        "embed": f"{found['passages']} passages, embedded with the encoder's stock attention in "
        f"{duration(found['seconds']['sdpa'])} and with onchip in {duration(found['seconds']['onchip'])}. The largest "
        f"difference of any number in the embeddings is {found['difference']:.1e} "
        f"(allowed: {found['tolerance']:.0e}).",
        "train": f"{len(ours['losses'])} steps at context {train['context']}: the loss falls from "
        f"{ours['losses'][0]:.2f} to {ours['losses'][-1]:.2f} nats per byte, and the two curves differ by at most "
        f"{train['difference']:.1e}. A step takes {duration(dense['step_seconds'])} with dense attention and "
        f"{duration(ours['step_seconds'])} with onchip; the peak of memory is {size(dense['peak_bytes'])} and "
        f"{size(ours['peak_bytes'])} above what the process held before.",
    }
    said["embed"] += remark(found["seconds"]["onchip"], found["seconds"]["sdpa"])
    said["train"] += remark(ours["step_seconds"], dense["step_seconds"])
    both = [(a, b) for a, b in zip(lines["dense"], lines["onchip"]) if "seconds" in a][-1]
    last = lines["onchip"][-1]
    said["scaling"] = (
        f"Forward and backward at N = {both[0]['seqlen']} take {duration(both[0]['seconds'])} and "
        f"{size(both[0]['peak_bytes'])} beyond q, k and v with dense attention, {duration(both[1]['seconds'])} and "
        f"{size(both[1]['peak_bytes'])} with onchip. At N = {last['seqlen']} onchip takes "
        f"{duration(last['seconds'])} and {size(last['peak_bytes'])}."
    )
    stop = lines["dense"][-1]
    if "needs_bytes" in stop:
        said["scaling"] += (
            f" Dense attention was not run from N = {stop['seqlen']} on: its scores alone need "
            f"{size(stop['needs_bytes'])} there, and the demo allows {size(scaling.DENSE_BUDGET)}."
        )
    return said


def summary(results: dict[str, Any]) -> list[str]:
    """Lines for the terminal."""
    said = sentences(results)
    best = results["embed"]["answers"]["onchip"][0]
    answer = f"{results['embed']['query']} -> [{best['topic']}] {best['passage'][:90]}..."
    return [said["embed"], answer, said["train"], said["scaling"]]


def plot(draw: Callable[[Axes], None], label: str) -> str:
    """An inline SVG of what `draw` puts on the axes, in the page's colours."""
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(4.6, 3.2), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # the same ids would come again in the next plot
    svg = re.sub(r"font: ([0-9.]+px)[^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)


def losses(train: dict[str, Any]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        axes.plot(train["dense"]["losses"], color=COLORS["dense"], linewidth=4, alpha=0.55, label="dense")
        axes.plot(train["onchip"]["losses"], color=COLORS["onchip"], linewidth=1.2, label="onchip")
        axes.set(xlabel="step", ylabel="loss, nats per byte")
        axes.legend()

    return draw


def against_length(lines: dict[str, Any], field: str, unit: float, label: str) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for name, records in lines.items():
            ran = [record for record in records if field in record]
            lengths = [record["seqlen"] for record in ran]
            values = [record[field] / unit for record in ran]
            axes.loglog(lengths, values, "o-", color=COLORS[name], markersize=4, label=name)
            if len(ran) < len(records):
                axes.plot(
                    lengths[-1:], values[-1:], "x", color=COLORS[name], markersize=11, markeredgewidth=2
                )
                needs = f"{size(records[-1]['needs_bytes'])} for N = {records[-1]['seqlen']}"
                note = f"x: {name} stops here,\nit needs {needs}"
                axes.text(0.03, 0.97, note, transform=axes.transAxes, va="top", color=COLORS[name])
        ticks = [record["seqlen"] for record in lines["onchip"]]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.set(xlabel="sequence length N", ylabel=label)
        axes.legend(loc="lower right")

    return draw


def table(answers: dict[str, list[dict[str, Any]]]) -> str:
    """The passages found, best first, with the similarity that either attention gives."""
    rows = []
    for stock, ours in zip(answers["sdpa"], answers["onchip"], strict=True):
        same = (
            ""
            if stock["passage"] == ours["passage"]
            else f" (stock attention: [{html.escape(stock['topic'])}])"
        )
        passage = ours["passage"][:240] + ("..." if len(ours["passage"]) > 240 else "")
        scores = f"<td>{stock['score']:.6f}</td><td>{ours['score']:.6f}</td>"
        rows.append(
            f"<tr>{scores}<td><b>{html.escape(ours['topic'])}</b>{same}: {html.escape(passage)}</td></tr>"
        )
    head = "<tr><th>stock</th><th>onchip</th><th>passage</th></tr>"
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def costs(train: dict[str, Any]) -> str:
    """Time and memory of the two training runs."""
    rows = [
        f"<tr><th>{name}</th><td>{duration(train[name]['step_seconds'])}</td><td>{size(train[name]['peak_bytes'])}</td></tr>"
        for name in ("dense", "onchip")
    ]
    return f"<table><tr><th></th><th>one step</th><th>peak memory</th></tr>{''.join(rows)}</table>"


def figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def page(results: dict[str, Any]) -> str:
    """The report: one HTML document that refers to no other file."""
    said = {part: html.escape(words) for part, words in sentences(results).items()}
    lines, threads = results["scaling"], torch.get_num_threads()
    curve = plot(losses(results["train"]), "loss against training step for dense attention and onchip")
    seconds = plot(against_length(lines, "seconds", 1, "seconds"), "time against sequence length")
    memory = plot(against_length(lines, "peak_bytes", 2**20, "MiB"), "memory against sequence length")
    shape = f"batch 1, {scaling.HEADS} heads, dim {scaling.DIM}, causal, fp32, forward and backward"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>onchip demo</title><style>{STYLE}</style></head><body>
<h1>onchip: the same attention without the N&times;N matrix</h1>
<p class="dim">Measured on this machine: {html.escape(platform.machine())}, {threads} threads, Python
{platform.python_version()}, torch {html.escape(torch.__version__)}, no GPU used.</p>
<h2>A pretrained sentence encoder, with its stock attention and with onchip</h2>
<p>{said["embed"]}</p>
<p>Which passage answers <q>{html.escape(results["embed"]["query"])}</q>? The similarity by either attention:</p>
{table(results["embed"]["answers"])}
<h2>Training a small transformer on the same text</h2>
<p>{said["train"]}</p>
<div class="plots">{figure(curve, "Same seed, same data: the thin line lies on the thick one.")}
{figure(costs(results["train"]), "Median step; memory above what the process held before the first step.")}</div>
<h2>Time and memory against the sequence length</h2>
<p>{said["scaling"]}</p>
<div class="plots">
{figure(seconds, f"Seconds per call ({shape}).")}
{figure(memory, "Peak memory beyond q, k and v. On these axes N^2 rises with slope 2 and N with slope 1.")}
</div>
<p class="dim">Dense attention here is softmax(QK<sup>T</sup>)V written out, as in a textbook; each run had a process of
its own. It computes the half of the scores that the causal mask hides, onchip skips it. Times are of one run and
depend on what else the machine does.</p>
</body></html>
"""
