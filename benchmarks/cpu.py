"""The CPU backends beside torch's scaled_dot_product_attention, interleaved in one process, on the same memory.

python benchmarks/cpu.py --out benchmarks/results/cpu-native.json [--backend cpu] [--only decode]
"""

import argparse
import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import onchip
from onchip import select

SHAPES = (
    (16, 16, 1024, 64),
    (16, 16, 4096, 64),
    (8, 8, 4096, 128),
    (16, 4, 4096, 64),
)  # heads, heads_k, seqlen, dim
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
READ = 2**27  # floats that torch sums, to measure at which rate this machine reads memory
BACKEND: str | None = None
Calls = dict[str, Callable[[], Any]]


def measure(calls: Calls, repeats: int) -> dict[str, dict[str, float]]:
    """Median wall and process milliseconds of each call, taken in turn."""
    wall: dict[str, list[float]] = {name: [] for name in calls}
    work: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start, busy = time.perf_counter(), time.process_time()
            call()
            wall[name].append((time.perf_counter() - start) * 1e3)
            work[name].append((time.process_time() - busy) * 1e3)
    return {
        "ms": {name: statistics.median(t) for name, t in wall.items()},
        "process_ms": {name: statistics.median(t) for name, t in work.items()},
    }


def inputs(
    heads: int, heads_k: int, seqlen: int, dim: int, dtype: torch.dtype, grad: bool
) -> tuple[list, list]:
    """q, k, v for onchip, and the same memory as torch wants it: (batch, heads, seqlen, dim)."""
    ours = [torch.randn(1, seqlen, h, dim).to(dtype).requires_grad_(grad) for h in (heads, heads_k, heads_k)]
    return ours, [x.detach().transpose(1, 2).requires_grad_(grad) for x in ours]


def attend(tensors: list, **options: Any) -> Any:
    return onchip.attention(*tensors, backend=BACKEND, **options)


def sdpa(tensors: list, **options: Any) -> Any:
    grouped = tensors[0].shape[1] != tensors[1].shape[1]
    return F.scaled_dot_product_attention(*tensors, enable_gqa=grouped, **options)


def passes() -> Iterator[tuple[dict, Calls]]:
    for dtype in DTYPES:
        for shape in SHAPES:
            for causal in (False, True):
                cases = both_passes(shape, dtype, causal)
                yield next(cases)
                if dtype is not torch.float16 or shape[2] < 4096:  # torch's takes 14 s a call at 4096
                    yield from cases


def both_passes(
    shape: tuple[int, int, int, int], dtype: torch.dtype, causal: bool
) -> Iterator[tuple[dict, Calls]]:
    ours, theirs = inputs(*shape, dtype, grad=True)
    mask = onchip.causal() if causal else None
    facts = {"shape": shape, "dtype": str(dtype)[6:], "mask": "causal" if causal else "full"}
    yield from both_ways(facts, ours, theirs, {"mask": mask}, {"is_causal": causal})


def both_ways(
    facts: dict, ours: list, theirs: list, options: dict, other: dict
) -> Iterator[tuple[dict, Calls]]:
    with torch.no_grad():
        calls = {"onchip": lambda: attend(ours, **options), "sdpa": lambda: sdpa(theirs, **other)}
        yield {"case": "forward", **facts}, calls
    out, out_sdpa = attend(ours, **options), sdpa(theirs, **other)
    dout = torch.randn_like(out)
    calls = {
        "onchip": lambda: torch.autograd.grad(out, ours, dout, retain_graph=True),
        "sdpa": lambda: torch.autograd.grad(out_sdpa, theirs, dout.transpose(1, 2), retain_graph=True),
    }
    yield {"case": "backward", **facts}, calls


def features() -> Iterator[tuple[dict, Calls]]:
    heads, n = 8, 4096
    ours, theirs = inputs(heads, heads, n, 64, torch.float32, grad=True)
    q, k = torch.arange(n)[:, None], torch.arange(n)
    window, random = (k <= q) & (k > q - 512), torch.rand(n, n) < 0.5
    bias = torch.randn(heads, n, n)
    cases: dict[str, tuple[dict, dict]] = {
        "window 512": ({"mask": onchip.window(511, 0)}, {"attn_mask": window}),
        "dense mask": ({"mask": onchip.dense(random)}, {"attn_mask": random}),
        "where, causal": ({"mask": onchip.where(lambda b, h, q, k: k <= q)}, {"attn_mask": k <= q}),
        "bias": ({"score": onchip.Score(bias=bias)}, {"attn_mask": bias[None]}),
        "dropout 0.1": ({"dropout": 0.1}, {"dropout_p": 0.1}),
    }
    for name, (options, other) in cases.items():
        facts = {"shape": (heads, heads, n, 64), "dtype": "float32", "mask": name}
        yield from both_ways(facts, ours, theirs, options, other)
    ours, theirs = inputs(8, 8, 256, 64, torch.float32, grad=False)
    other = torch.randn(256, 256)
    facts = {"case": "small", "shape": (8, 8, 256, 64), "dtype": "float32", "mask": "full, after a torch op"}
    yield (
        facts,
        {"onchip": lambda: (other @ other, attend(ours)), "sdpa": lambda: (other @ other, sdpa(theirs))},
    )


def decode() -> Iterator[tuple[dict, Calls]]:
    read = torch.ones(READ)
    for dtype in DTYPES[:2]:
        for batch, keys in ((1, 4096), (8, 4096), (1, 65536)):
            q, k, v = (torch.randn(batch, s, h, 128).to(dtype) for s, h in ((1, 32), (keys, 8), (keys, 8)))
            theirs = [x.transpose(1, 2) for x in (q, k, v)]
            facts = {
                "case": "decode",
                "shape": (32, 8, keys, 128),
                "batch": batch,
                "dtype": str(dtype)[6:],
                "mask": "full",
            }

            def ours(q: Any = q, k: Any = k, v: Any = v, keys: int = keys) -> Any:
                return onchip.attention_with_cache(q, k, v, cache_seqlens=keys, backend=BACKEND)

            calls: Calls = {"onchip": ours, "sdpa": lambda t=theirs: sdpa(t)}
            if keys == 65536:  # far more than a cache holds; of the others the sum would leave nothing there
                calls["read"] = read.sum
            yield {**facts, "bytes": 2 * k.numel() * k.element_size()}, calls


def read_bandwidth() -> float:
    """GB/s at which torch sums 512 MiB."""
    return READ * 4 / measure({"sum": torch.ones(READ).sum}, 7)["ms"]["sum"] / 1e6


def host() -> dict:
    """Microseconds of a call that computes next to nothing."""
    ours, theirs = inputs(1, 1, 1, 16, torch.float32, grad=False)
    calls: Calls = {"onchip": lambda: attend(ours), "sdpa": lambda: sdpa(theirs)}
    found = {}
    for name, call in calls.items():
        times = []
        for _ in range(200):
            start = time.perf_counter()
            for _ in range(20):
                call()
            times.append((time.perf_counter() - start) / 20 * 1e6)
        found[name] = statistics.median(times)
    return {"case": "host", "us": found}


def main() -> None:
    global BACKEND
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--backend", choices=list(select.BACKENDS))
    parser.add_argument("--only", help="cases to run: forward,backward,small,decode")
    args = parser.parse_args()
    BACKEND = args.backend
    wanted = None if args.only is None else args.only.split(",")
    results = []
    for source in (passes, features, decode):
        for facts, calls in source():
            if wanted and facts["case"] not in wanted:
                continue
            found = measure(calls, args.repeats)
            ratios = [found[kind]["sdpa"] / found[kind]["onchip"] for kind in ("ms", "process_ms")]
            row = {**facts, **found, "sdpa/onchip": ratios[0], "process sdpa/onchip": ratios[1]}
            if "bytes" in facts:
                row["gb_per_s"] = facts["bytes"] / found["ms"]["onchip"] / 1e6
            if "read" in calls:
                row["read_gb_per_s"] = READ * 4 / found["ms"]["read"] / 1e6
            results.append(row)
            label = ", ".join(str(facts[key]) for key in ("case", "dtype", "shape", "mask"))
            print(label, *(f"{x:.2f}" for x in (*found["ms"].values(), *ratios)), flush=True)
    results.append(host())
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    threads, kernels = torch.get_num_threads(), onchip.backends.cpu.isa.status()
    about = {
        "date": date.today().isoformat(),
        "device": f"{threads} threads, {platform.machine()}, {kernels}",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "commit": commit,
        "regime": f"interleaved, medians of {args.repeats}",
        "read_gb_per_s": read_bandwidth(),
    }
    assert all(math.isfinite(r.get("sdpa/onchip", 1.0)) for r in results)
    args.out.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
