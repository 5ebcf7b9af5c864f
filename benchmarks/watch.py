"""What `onchip.watch()` costs on this machine's CPU or GPU, as a share of the calls that it looks on at.

    python benchmarks/watch.py --out benchmarks/results/cpu-watch.json

For each shape the times of a call, of the look at it, which comes with each, and of a check, which comes with one of
EVERY; "share" is (look + check / EVERY) / call. "both" times EVERY calls with and without `watch` in turn, and says by
how much the watched ones are longer: the same share with the noise of the whole, where that takes under half a minute.
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import onchip
from onchip import devices
from onchip.autograd import Call
from onchip.observe import observing
from onchip.watching import EVERY, Watch, _Metrics

# batch, seqlen_q, seqlen_k, heads, heads_k, dim
SHAPES = {
    "training, N = 256": (1, 256, 256, 8, 8, 64),
    "training, N = 1024": (2, 1024, 1024, 8, 8, 64),
    "training, N = 4096": (1, 4096, 4096, 16, 4, 64),
    "decoding, 4096 keys": (8, 1, 4096, 32, 8, 128),
    "tiny, N = 16": (1, 16, 16, 1, 1, 16),
}
LONGEST = 30.0  # seconds of EVERY calls
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Grab:
    """The last call and its results."""

    args: tuple[Call, torch.Tensor, torch.Tensor, float]

    def called(self, *args: Any) -> None:
        self.args = args  # type: ignore[assignment]


def seconds(run: Callable[[], object], count: int, repeats: int) -> float:
    """Median of one run."""
    found = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        for _ in range(count):
            run()
        wait()
        found.append((time.perf_counter() - start) / count)
    return statistics.median(found)


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def inputs(
    batch: int, seqlen_q: int, seqlen_k: int, heads: int, heads_k: int, dim: int
) -> list[torch.Tensor]:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    shapes = (seqlen_q, heads), (seqlen_k, heads_k), (seqlen_k, heads_k)
    return [torch.randn(batch, n, h, dim, device=DEVICE).to(dtype) for n, h in shapes]


def parts(qkv: list[torch.Tensor], repeats: int) -> dict[str, float]:
    """Microseconds of a call, of the look at it, and of a check."""

    def call() -> torch.Tensor:
        return onchip.attention(*qkv, mask=onchip.causal())  # type: ignore[return-value]

    grab, seen = Grab(), Watch(every=10**9, _metrics=_Metrics.made())
    with observing(grab):
        call()
    seen.called(*grab.args)  # the first call is checked, and meets the problem
    problem, out, lse, _ = grab.args
    few = max(1, round(0.05 / seconds(call, 1, 3)))
    found = {
        "call_us": seconds(call, few, repeats),
        "look_us": seconds(lambda: seen.called(*grab.args), 20000, repeats),
        "check_us": seconds(lambda: seen._check(problem, out, lse), 20, repeats),
    }
    return {name: 1e6 * value for name, value in found.items()}


def both(qkv: list[torch.Tensor], rounds: int) -> float:
    """By what share EVERY calls under `watch` are longer than without, in turn."""

    def calls() -> None:
        for _ in range(EVERY):
            onchip.attention(*qkv, mask=onchip.causal())

    def watched() -> None:
        with onchip.watch():
            calls()

    times: dict[str, list[float]] = {"plain": [], "watched": []}
    for _ in range(rounds):
        times["plain"].append(seconds(calls, 1, 1))
        times["watched"].append(seconds(watched, 1, 1))
    return statistics.median(times["watched"]) / statistics.median(times["plain"]) - 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--rounds", type=int, default=5, help="of EVERY calls with and without; 0: none of them"
    )
    args = parser.parse_args()
    results = []
    for name, shape in SHAPES.items():
        qkv = inputs(*shape)
        row: dict[str, Any] = {"case": name, "shape": shape, **parts(qkv, args.repeats)}
        row["share"] = (row["look_us"] + row["check_us"] / EVERY) / row["call_us"]
        if args.rounds and EVERY * row["call_us"] / 1e6 < LONGEST:
            row["both"] = both(qkv, args.rounds)
        results.append(row)
        print(
            ", ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()
            )
        )
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else devices.cpu_name()
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    if _Metrics.made() is not None:  # which then counts, too
        versions["prometheus-client"] = version("prometheus-client")
    about = {
        "date": date.today().isoformat(),
        "device": f"{name}, {torch.get_num_threads()} threads",
        "versions": versions,
        "commit": git.stdout.strip(),
        "regime": f"medians of {args.repeats}; both: {args.rounds} rounds of {EVERY} calls each way, in turn",
        "every": EVERY,
    }
    if args.out is not None:
        args.out.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
