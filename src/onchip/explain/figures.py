"""The numbers of every part of the page but the animation, from the traffic model, the devices and recorded runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from onchip import devices, intensity, masks, orders, patterns, traffic
from onchip.bench.cases import parse_mask
from onchip.devices import Device
from onchip.explain.tiling import make_problem, share, visible
from onchip.layout import Dense
from onchip.mask import Mask
from onchip.traffic import Traffic

MEASURED = Path(__file__).parent / "measured"
SHOWN = ("standard", "eager", "flash1", "flash2", "onchip", "minimum")
LENGTHS = tuple(2**i for i in range(8, 17))
MEMORIES = tuple(n * 2**10 for n in (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024))
TRIPS = (1024, 4096, 16384)
RUNS = (  # file, what ran
    ("h200-hopper", "onchip's Hopper kernel"),
    ("h200-triton", "onchip's Triton kernels"),
    ("h200-peers", "other libraries alone, more of them"),
)
SERIES = {
    "onchip": "onchip",
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3",
    "fa3-cu13": "FlashAttention-3, CUDA 13 build",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN",
}


def figures(backend: str, cpu: bool) -> dict[str, Any]:
    """All of them. cpu: with this machine's CPU among the devices (two seconds to measure)."""
    known = [devices.device(name) for name in devices.NAMES if name != "cpu"]
    if cpu:
        known.append(devices.device("cpu"))
    return {
        "backend": backend,
        "devices": [described(device) for device in known],
        "trips": {n: trips(n, backend) for n in TRIPS},
        "paper": paper(known, backend),
        "lengths": against_length(backend),
        "memory": against_memory(),
        "rooflines": {device.name: roofline(device) for device in known},
        "points": measured_points(backend),
        "sparse": sparse(backend),
        "runs": [run(*which) for which in RUNS],
        "series": SERIES,
    }


def measured(name: str) -> dict[str, Any]:
    """A recorded run: a file of this folder's measured/, a copy of that of benchmarks/results."""
    return json.loads((MEASURED / f"{name}.json").read_text())


def rows_of(name: str, case: str, step: str) -> list[dict[str, Any]]:
    """A recorded run's rows of a case and pass."""
    return [row for row in measured(name)["results"] if (row["case"], row.get("pass")) == (case, step)]


def described(device: Device) -> dict[str, Any]:
    title = f"This CPU: {devices.cpu_name()}" if device.name == "cpu" else device.name
    return {**device.to_json(), "title": title}


def count(
    seqlen: int,
    dim: int,
    algorithm: str,
    step: str,
    backend: str,
    mask: Mask | None = None,
    batch: int = 1,
    heads: int = 1,
    sram: int = orders.SRAM,
) -> Traffic:
    """The traffic model on self-attention in fp16."""
    mask = Mask() if mask is None else mask
    problem = make_problem(seqlen, dim, mask, batch, heads)
    place = Dense(batch, seqlen, seqlen)
    return traffic.count(problem, place, mask, algorithm, step, backend=backend, sram=sram)


def trips(seqlen: int, backend: str) -> dict[str, Any]:
    """Forward traffic of one head, dim 64, of standard attention and of ours, tensor by tensor."""
    return {name: count(seqlen, 64, name, "forward", backend).to_json() for name in ("standard", "onchip")}


def paper(known: list[Device], backend: str) -> dict[str, Any]:
    """The first paper's table: batch 64, 16 heads, N = 1024, d = 64, with the least time on each device."""
    found: dict[str, Any] = {}
    for name in SHOWN:
        found[name] = {}
        for step in orders.STEPS:
            model = count(1024, 64, name, step, backend, batch=64, heads=16)
            floors = {device.name: model.floor(device) for device in known}
            found[name][step] = {
                "flops": model.flops,
                "bytes": model.bytes,
                "least": model.least,
                "extra_memory": model.extra_memory,
                "floors": {device: [floor.compute, floor.memory] for device, floor in floors.items()},
            }
    return found


def against_length(backend: str) -> dict[str, Any]:
    """Bytes of one head, dim 64, by sequence length."""
    names = [name for name in SHOWN if name != "eager"]
    return {
        "seqlens": LENGTHS,
        "tiles": next(iter(count(4096, 64, "onchip", "forward", backend).to_json()["tiles"].values())),
        **{
            step: {name: [count(n, 64, name, step, backend).bytes for n in LENGTHS] for name in names}
            for step in orders.STEPS
        },
    }


def against_memory(seqlen: int = 4096, dim: int = 64) -> dict[str, Any]:
    """Forward numbers of one head by the bytes of fast memory; the papers' Algorithm 1 takes larger blocks in more."""
    item = torch.float16.itemsize
    models = [count(seqlen, dim, "flash1", "forward", "cpu", sram=sram) for sram in MEMORIES]
    problem = make_problem(seqlen, dim, Mask())
    standard = count(seqlen, dim, "standard", "forward", "cpu")
    blocks = [orders.flash1_tiles(dim, dim, sram // item) for sram in MEMORIES]
    return {
        "seqlen": seqlen,
        "dim": dim,
        "sram": MEMORIES,
        "flash1": [model.reads + model.writes for model in models],
        "bound": [traffic.lower_bound(problem, models[0].pairs, sram) for sram in MEMORIES],
        "standard": [standard.reads + standard.writes] * len(MEMORIES),
        "blocks": [[b.tile_m, b.tile_n] for b in blocks],
        "ratio": [traffic.theta_ratio(dim, sram // item) for sram in MEMORIES],
    }


def roofline(device: Device) -> dict[str, Any]:
    """The roof in fp16, and what each operation of attention could reach below it."""
    seqlen, dim, batch, heads = 4096, 64, 4, 16
    shapes: dict[str, tuple[int, ...]] = {
        "matmul": (4096, 4096, 4096),
        "softmax": (batch, heads, seqlen, seqlen),
        "dropout": (batch, heads, seqlen, seqlen),
        "mask": (batch, heads, seqlen, seqlen),
        "layer_norm": (batch * seqlen, heads * dim),
        "attention": (batch, seqlen, heads, dim),
    }
    found = {op: intensity.roofline(op, shape, device) for op, shape in shapes.items()}
    return {
        "peak": device.rate(torch.float16),
        "bandwidth": device.bandwidth,
        "ridge": found["matmul"].ridge,
        "ops": [[op, r.intensity, r.attainable, r.bound] for op, r in found.items()],
    }


def measured_points(backend: str) -> list[dict[str, Any]]:
    """H200 points of the roofline: FLOPs a byte against FLOP/s, forward.

    "measured": the bytes too, by ncu. The others have the model's `least` bytes, their FLOP/s are measured.
    """
    found = []
    moved = {row["impl"]: row for row in rows_of("h200-traffic", "gpt2", "forward")}
    times = {row["impl"]: row["ms"] * 1e-3 for row in rows_of("h200-peers", "gpt2", "forward")}
    for impl, ran_as, label in (
        ("fa2", "sdpa-flash", SERIES["fa2"]),
        ("standard", "standard", "standard attention, PyTorch"),
    ):
        row = moved[ran_as]
        found.append(
            {
                "label": f"{label}, N = 1024, d = 64",
                "intensity": row["flops"] / (row["read"] + row["written"]),
                "flops": row["flops"] / times[impl],
                "bytes": "measured",
            }
        )
    for row in measured("h200-hopper")["results"]:
        if row["case"] == "forward" and not row["causal"] and row["seqlen"] in (512, 2048, 16384):
            batch, heads = 16384 // row["seqlen"], 2048 // row["dim"]
            model = count(row["seqlen"], row["dim"], "onchip", "forward", "hopper", None, batch, heads)
            found.append(
                {
                    "label": f"onchip, Hopper kernel, N = {row['seqlen']}, d = {row['dim']}",
                    "intensity": model.flops / model.least,
                    "flops": row["tflops"]["onchip"] * 1e12,
                    "bytes": "modelled",
                }
            )
    return found


def sparse(backend: str) -> dict[str, Any]:
    """Block-sparse masks: the share of blocks, of traffic and of measured time; and pictures of patterns."""
    rows = {row["mask"]: row for row in measured("h200-triton")["results"] if row["case"] == "mask"}
    full = {step: count(16384, 128, "onchip", step, backend, heads=16) for step in orders.STEPS}
    found = []
    for name in ("full", "blocks_50", "blocks_25", "blocks_12"):
        row = rows[name]
        mask = None if row["density"] is None else parse_mask(f"blocks({row['density']}, 128)", 16384, 16384)
        found.append({"name": name, "blocks": row["density"] or 1.0, "ms": row["ms"]})
        for step in orders.STEPS:
            model = count(16384, 128, "onchip", step, backend, mask, heads=16)
            found[-1][step] = {
                "traffic": model.bytes / full[step].bytes,
                "flops": model.flops / full[step].flops,
                "time": row["ms"][step] / rows["full"]["ms"][step],
            }
    return {"rows": found, "patterns": [_pattern(*each, backend) for each in _patterns()]}


def _patterns(side: int = 32) -> list[tuple[str, str, Mask]]:
    strided = patterns.strided(side, side, stride=8, local=4)
    near = patterns.local_global(side, side, local=1, global_=1)
    both = (("local_global", near), ("strided", strided), ("butterfly", patterns.butterfly(side)))
    abouts = (
        "neighbours and global blocks, as in Longformer",
        "as in the Sparse Transformer",
        "as in the first paper",
    )
    named = [(n, about, masks.block_sparse(m, tile=(128, 128))) for (n, m), about in zip(both, abouts)]
    random = parse_mask("blocks(0.25, 128)", side * 128, side * 128)
    assert random is not None
    return [("all blocks", "no mask", Mask()), *named, ("random", "a quarter of the blocks", random)]


def _pattern(name: str, about: str, mask: Mask, backend: str, side: int = 32) -> dict[str, Any]:
    seqlen = side * 128
    ours, all_ours = (count(seqlen, 128, "onchip", "forward", backend, m).bytes for m in (mask, None))
    return {
        "name": name,
        "about": about,
        "kinds": ["".join(map(str, row)) for row in visible(mask, seqlen, 128)],
        "blocks": share(mask, seqlen, 128),
        "traffic": ours / all_ours,
    }


def run(name: str, title: str) -> dict[str, Any]:
    """A recorded run for the page: what it was, and TFLOP/s by pass, dim and mask."""
    found = measured(name)
    tables: dict[str, dict[str, list[float]]] = {}
    for row in sorted(found["results"], key=lambda row: row.get("seqlen", 0)):
        if row["case"] in orders.STEPS:
            mask = "causal" if row["causal"] else "full"
            table = tables.setdefault(f"{row['case']},{row['dim']},{mask}", {"seqlen": []})
            table["seqlen"].append(row["seqlen"])
            for impl, rate in row["tflops"].items():
                table.setdefault(impl, []).append(round(rate, 1))
    versions = ", ".join(f"{key} {value}" for key, value in found["versions"].items())
    note = [found["note"].rstrip(".")] if "note" in found else []
    return {
        "title": title,
        "about": "; ".join([found["device"], found["date"], versions, found["regime"], *note]),
        "tables": tables,
    }
