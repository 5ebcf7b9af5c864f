"""benchmarks/README.md from the recorded runs in benchmarks/results: `python benchmarks/table.py`."""

import json
import statistics
from pathlib import Path

HERE = Path(__file__).parent


def rows(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def about(run: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    note = f" {run['note']}" if "note" in run else ""
    return f"{run['device']}, {run['date']}, {versions}, commit {run['commit']}; {run['regime']}.{note}\n"


def rates(run: dict, step: str, peers: dict[str, str]) -> str:
    """TFLOP/s of a pass beside its peers (their name in the run -> in the table), and our share of the best of them."""
    body = [
        [str(r["dim"]), str(r["seqlen"]), "causal" if r["causal"] else "full"]
        + [f"{r['tflops'][name]:.0f}" for name in ("onchip", *peers)]
        + [f"{r['tflops']['onchip'] / max(r['tflops'][name] for name in peers):.2f}"]
        for r in run["results"]
        if r["case"] == step
    ]
    title = f"\n### {step.capitalize()}, TFLOP/s, bf16, 16384 tokens, heads x dim = 2048\n\n"
    return title + rows(["dim", "seqlen", "mask", "onchip", *peers.values(), "onchip / the best"], body)


def hopper(run: dict) -> str:
    known = {"fa3": "FlashAttention-3", "fa4": "FlashAttention-4", "cudnn": "cuDNN"}
    text = rates(run, "forward", {k: name for k, name in known.items() if k in run["results"][0]["tflops"]})
    ratios = [r["tflops"]["onchip"] / max(v for k, v in r["tflops"].items() if k != "onchip") for r in run["results"]
              if r["case"] == "forward"]  # fmt: skip
    return text + f"\nGeometric mean of the last column: {statistics.geometric_mean(ratios):.3f}.\n"


def others(run: dict) -> str:
    """Times as a graph and as plain calls, the last where a mask is kept from call to call."""
    found = {r["name"]: r for r in run["results"]}
    plain = {"causal by where": "causal", "causal with a score mod": "causal"}

    def beside(name: str) -> str:
        """A pair's time against what it should be near: the plain mask's, or that of dense sequences."""
        row = found[name]
        if row["share"] is not None:
            other = f"16 x 2048, {name.rsplit(', ', 1)[-1]}" if "packed" in name else "full"
        elif name in plain:
            other = plain[name]
        else:
            return ""
        kind = "call_ms" if "blocks" in name or "where" in name else "graph_ms"
        return f"{row[kind] / found[other][kind] / (row['share'] or 1):.2f} of {other}'s"

    def ms(row: dict, kind: str) -> str:
        return f"{row[kind]:.3f}" if kind in row else ""

    body = [[name, ms(r, "graph_ms"), ms(r, "call_ms"), beside(name)] for name, r in found.items()]
    text = "\n### Dim 128, 16 heads, 16384 tokens where nothing else is said\n\n"
    return text + rows(["problem", "ms as a graph", "ms as calls", "time a pair"], body)


def triton(run: dict) -> str:
    peers = {"fa2": "FlashAttention-2", "cudnn": "cuDNN"}
    return "".join(rates(run, step, peers) for step in ("forward", "backward"))


def gpu(run: dict) -> str:
    kinds: dict[str, list[dict]] = {}
    for row in run["results"]:
        kinds.setdefault(row["case"], []).append(row)
    text = triton(run)
    body = [
        [
            r["mask"],
            f"{r['ms']['forward']:.2f}",
            f"{r['ms']['backward']:.2f}",
            "" if r["density"] is None else f"{100 * r['density']:.1f} %",
        ]
        for r in kinds.get("mask", [])
    ]
    text += "\n### Masks at dim 128, 16 heads, 16384 tokens, milliseconds\n\n"
    text += rows(["mask", "forward", "backward", "blocks visible"], body)
    body = [
        [str(r["batch"]), str(r["keys"]), f"{r['ms']['onchip']:.3f}", f"{r['eager_ms']:.3f}"]
        + [f"{r['gb_per_s'][name]:.0f}" for name in ("onchip", "sdpa")]
        for r in kinds["decode"]
    ]
    text += "\n### Decoding, 32 query heads on 8 key heads, dim 128, as CUDA graphs\n\n"
    text += rows(["batch", "keys", "ms", "ms without a graph", "GB/s of K and V", "SDPA GB/s"], body)
    body = [[r["call"], f"{r['us']:.0f}"] for r in kinds["host"]]
    return text + "\n### Host time of one small call, microseconds\n\n" + rows(["call", "us"], body)


def cpu(run: dict) -> str:
    body = [
        [str(tuple(r["shape"])), "causal" if r["causal"] else "full", r["case"]]
        + [f"{r['ms'][name]:.1f}" for name in ("onchip", "sdpa")]
        + [f"{r['sdpa/onchip']:.2f}"]
        for r in run["results"]
    ]
    header = ["(batch, heads, seqlen, dim)", "mask", "pass", "onchip ms", "SDPA ms", "SDPA / onchip"]
    return "\n" + rows(header, body)


def native(run: dict) -> str:
    header = [
        "case",
        "dtype",
        "(heads, heads_k, seqlen_k, dim)",
        "mask",
        "onchip ms",
        "SDPA ms",
        "SDPA / onchip",
        "by process time",
    ]
    body = [
        [
            r["case"] + (f" of {r['batch']}" if "batch" in r else ""),
            r["dtype"],
            str(tuple(r["shape"])),
            r["mask"],
        ]
        + [f"{r['ms'][name]:.2f}" for name in ("onchip", "sdpa")]
        + [f"{r[name]:.2f}" for name in ("sdpa/onchip", "process sdpa/onchip")]
        for r in run["results"]
        if "ms" in r
    ]
    speeds = ", ".join(f"{r['gb_per_s']:.1f}" for r in run["results"] if "gb_per_s" in r)
    text = "\n" + rows(header, body)
    if speeds:
        text += f"\nDecoding read K and V at {speeds} GB/s, in this order"
        text += f"; torch sums a tensor at {run['read_gb_per_s']:.1f} GB/s.\n"
    for r in run["results"]:
        if "read_gb_per_s" in r:
            reached = r["gb_per_s"] / r["read_gb_per_s"]
            text += f"\nIn turn with the decoding of {r['shape'][2]} keys in {r['dtype']}, it sums one at "
            text += f"{r['read_gb_per_s']:.1f} GB/s, of which decoding reaches {reached:.0%}.\n"
    us = run["results"][-1]["us"]
    return (
        text
        + f"\nA call that computes next to nothing takes {us['onchip']:.0f} us, SDPA's {us['sdpa']:.0f}.\n"
    )


def host(run: dict) -> str:
    names = {"onchip": "Triton", "onchip_grad": "with a gradient", "hopper": "Hopper", "sdpa": "SDPA",
             "loop": "a loop of Python"}  # fmt: skip
    body = [
        [str(r["machine"]), r["commit"]]
        + [f"{r['us'][n]:.1f} ({r['least_us'][n]:.1f})" if n in r["us"] else "" for n in names]
        for r in run["results"]
    ]
    return "\n" + rows(["machine", "commit", *names.values()], body)


def tiles(run: dict) -> str:
    header = [
        "pass",
        "dim",
        "bytes of a number",
        "seqlen",
        "tile_m, tile_n, warps, stages",
        "full ms",
        "causal ms",
    ]
    body = [
        [r["pass"], str(r["dim"]), str(r["itemsize"]), str(r["seqlen"]), ", ".join(map(str, r["config"]))]
        + [f"{r[name]:.2f}" for name in ("full_ms", "causal_ms")]
        for r in run["results"]
    ]
    return "\n16384 tokens, heads x dim = 2048.\n\n" + rows(header, body)


def order(run: dict) -> str:
    """Milliseconds by how many heads' tiles are taken in turn; and of what else was tried."""
    sections = ["one head", "12.5 MiB", "25 MiB", "37.5 MiB", "50 MiB"]
    ideas = ["one head", "25 MiB", "one reciprocal a row", "and queries by the copy engine", "and output by it",
             "rescaled where a score rises by 2^8", "FlashAttention-2"]  # fmt: skip

    def table(names: list[str], kept: list[dict]) -> str:
        about = ("pass", "dim", "seqlen", "mask", "run")
        cells = [[f"{r['ms'][n]:.3f}" if n in r["ms"] else "" for n in names] for r in kept]
        return rows(
            [*about, *names], [[str(r[a]) for a in about] + line for r, line in zip(kept, cells, strict=True)]
        )

    cut = [r for r in run["results"] if len(r["ms"].keys() & {*sections}) > 1]
    forward = [r for r in run["results"] if r["pass"] == "forward" and "FlashAttention-2" in r["ms"]]
    return (
        f"\n### By section, ms\n\n{table(sections, cut)}"
        f"\n### Else tried in the forward pass, ms\n\nThe reciprocal in sections of 25 MiB, what follows beside it; "
        f"the rare rescaling one head at a time.\n\n{table(ideas, forward)}"
    )


def watch(run: dict) -> str:
    header = [
        "run",
        "ms",
        "calls in it",
        "look us",
        f"check us, one of {run['every']} calls",
        "share of the run",
    ]
    body = []
    for r in run["results"]:
        times = [f"{r['run_us'] / 1e3:.3f}", str(r["calls"]), f"{r['look_us']:.1f}", f"{r['check_us']:.0f}"]
        body.append([r["case"], *times, f"{r['share']:.2%}", f"{r['both']:.2%}" if "both" in r else ""])
    return "\n" + rows([*header, "the same by timing both ways"], body)


def main() -> None:
    text = "# Benchmarks\n\nMade by `benchmarks/table.py` from the runs in `results/`. Compare within one table only.\n"
    for title, name, table in (
        ("Hopper backend", "h200-hopper", hopper),
        ("Hopper backend, other problems", "h200-hopper-others", others),
        ("Triton backend", "h200-triton", gpu),
        ("Host time of one small call on seven machines, microseconds", "h200-host", host),
        ("Triton backend: in which order programs take tiles", "h200-order", order),
        ("Triton backend: tiles tried for float32, and past dim 256", "h200-tiles", tiles),
        ("CPU: native kernels", "cpu-native", native),
        ("CPU: native kernels on a newer core (an earlier commit)", "cpu-native-zen5", native),
        ("CPU: the tiled loop of torch operations", "cpu-tiled", cpu),
        ("CPU: what onchip.watch() costs", "cpu-watch", watch),
        ("H200: what onchip.watch() costs", "h200-watch", watch),
    ):
        file = HERE / "results" / f"{name}.json"
        if not file.exists():  # not measured yet
            continue
        run = json.loads(file.read_text())
        text += f"\n## {title}\n\n{about(run)}{table(run)}"
    (HERE / "README.md").write_text(text)


if __name__ == "__main__":
    main()
