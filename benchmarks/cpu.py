"""The tiled CPU loop beside torch's scaled_dot_product_attention, interleaved in one process.

python benchmarks/cpu.py --out benchmarks/results/cpu-tiled.json
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F

import onchip

SHAPES = ((1, 16, 1024, 64), (1, 8, 4096, 128))  # batch, heads, seqlen, dim


def measure(calls: dict, repeats: int) -> dict[str, float]:
    """Median milliseconds of each call, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def case(shape: tuple[int, int, int, int], causal: bool, repeats: int) -> list[dict]:
    batch, heads, seqlen, dim = shape
    q, k, v, dout = (torch.randn(batch, seqlen, heads, dim) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    theirs = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    mask = onchip.causal() if causal else None

    def ours() -> torch.Tensor:
        return onchip.attention(*leaves, mask=mask)  # type: ignore[return-value]

    def sdpa() -> torch.Tensor:
        return F.scaled_dot_product_attention(*theirs, is_causal=causal)

    out, sdpa_out = ours(), sdpa()
    error = (out - sdpa_out.transpose(1, 2)).abs().max().item()
    assert error < 1e-5, f"the two differ by {error}"
    steps = {
        "forward": {"onchip": ours, "sdpa": sdpa},
        "backward": {
            "onchip": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
            "sdpa": lambda: torch.autograd.grad(sdpa_out, theirs, dout.transpose(1, 2), retain_graph=True),
        },
    }
    rows = []
    for step, calls in steps.items():
        ms = measure(calls, repeats)
        rows.append(
            {
                "case": step,
                "shape": shape,
                "causal": causal,
                "ms": ms,
                "sdpa/onchip": ms["sdpa"] / ms["onchip"],
            }
        )
        print(
            step,
            shape,
            causal,
            {n: round(t, 1) for n, t in ms.items()},
            round(rows[-1]["sdpa/onchip"], 2),
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    results = [
        row for shape in SHAPES for causal in (False, True) for row in case(shape, causal, args.repeats)
    ]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    about = {
        "date": date.today().isoformat(),
        "device": f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, {platform.machine()}",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "commit": commit,
        "regime": f"float32, interleaved, medians of {args.repeats}",
    }
    args.out.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
