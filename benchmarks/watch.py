"""What `onchip.watch()` costs on this machine's CPU or GPU, as a share of training steps and of bare calls.

    python benchmarks/watch.py --out benchmarks/results/cpu-watch.json

For each case the time of a run (a training step of a small transformer, or a call), of the look that comes with each
call in it, and of a check, which comes with one of EVERY; "share" is calls x (look + check / EVERY) / run. "both" is
the same share by timing runs with and without `watch` in turn, where a run takes less than twice SLICE.
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
from torch import Tensor, nn

import onchip
from onchip import devices, observe
from onchip.autograd import Call
from onchip.watching import EVERY, Exporter, Watch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
# batch, seqlen, heads, dim, layers
MODELS = {
    "training, 2 layers of 32, N = 32": (4, 32, 2, 16, 2),
    "training, 6 layers of 384, N = 256": (8, 256, 6, 64, 6),
    "training, 12 layers of 768, N = 1024": (1, 1024, 12, 64, 12),
}
# batch, seqlen_q, seqlen_k, heads, heads_k, dim
CALLS = {
    "call, N = 256": (1, 256, 256, 8, 8, 64),
    "call, N = 1024": (2, 1024, 1024, 8, 8, 64),
    "call, N = 4096": (1, 4096, 4096, 16, 4, 64),
    "call, decoding, 4096 keys": (8, 1, 4096, 32, 8, 128),
    "call, N = 16": (1, 16, 16, 1, 1, 16),
}
SLICE = 0.1  # seconds of runs that are timed as one
TOKENS = 96  # the vocabulary


class Layer(nn.Module):
    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.heads, width = heads, heads * dim
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        out: Tensor = onchip.attention(q, k, v, mask=onchip.causal())  # type: ignore[assignment]
        x = x + self.out(out.flatten(-2))
        return x + self.mlp(self.norms[1](x))


def step(batch: int, seqlen: int, heads: int, dim: int, layers: int) -> Callable[[], object]:
    """One step of training a transformer to predict random tokens."""
    made = [Layer(heads, dim) for _ in range(layers)]
    model = nn.Sequential(nn.Embedding(TOKENS, heads * dim), *made, nn.Linear(heads * dim, TOKENS))
    model = model.to(DEVICE, DTYPE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(TOKENS, (batch, seqlen + 1), device=DEVICE)

    def run() -> None:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return run


def call(
    batch: int, seqlen_q: int, seqlen_k: int, heads: int, heads_k: int, dim: int
) -> Callable[[], object]:
    shapes = (seqlen_q, heads), (seqlen_k, heads_k), (seqlen_k, heads_k)
    q, k, v = (torch.randn(batch, n, h, dim, device=DEVICE, dtype=DTYPE) for n, h in shapes)
    return lambda: onchip.attention(q, k, v, mask=onchip.causal())


class Grab:
    """The last call and its results."""

    args: tuple[Call, Tensor, Tensor, float]

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


def looked(grab: Grab, repeats: int) -> float:
    """Seconds that a watched call is longer than one that nobody looks on at, but for the checks."""
    made, out, lse, _ = grab.args
    plain, seen = observe._plain, Watch(every=10**9)
    seen.called(*grab.args)  # the first call is checked, and meets the problem
    observe._plain = lambda made: (out, lse)
    observe._observers = (seen,)
    try:
        alone = seconds(lambda: observe._plain(made), 20000, repeats)
        return seconds(lambda: observe._observed(made), 20000, repeats) - alone
    finally:
        observe._plain, observe._observers = plain, ()


def parts(run: Callable[[], object], calls: int, repeats: int) -> dict[str, float]:
    """Microseconds of a run, of the look at each of its calls, and of a check, and their share."""
    grab = Grab()
    with observe.observing(grab):
        run()
    made, out, lse, _ = grab.args
    seen = Watch()
    few = max(1, round(0.05 / seconds(run, 1, 3)))
    found = {
        "run_us": seconds(run, few, repeats),
        "look_us": looked(grab, repeats),
        "check_us": seconds(lambda: seen._check(made, out.detach(), lse.detach()), 20, repeats),
    }
    share = calls * (found["look_us"] + found["check_us"] / EVERY) / found["run_us"]
    return {"calls": calls, **{name: 1e6 * value for name, value in found.items()}, "share": share}


def both(run: Callable[[], object], calls: int, count: int, rounds: int) -> float:
    """By what share runs under `watch` are longer than without: medians of pairs of neighbours, `count` runs each.

    Slices with looks alone and slices with a check, too, whose share is then that of one check in EVERY calls.
    """
    quiet = Watch(every=10**9)

    def looks() -> None:
        with observe.observing(quiet):
            several()

    def checks() -> None:
        with onchip.watch():
            several()

    def several() -> None:
        for _ in range(count):
            run()

    looks()  # the first call of all is checked
    kinds = {"plain": several, "looks": looks, "checks": checks}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(rounds):
        for name in sorted(kinds, reverse=turn % 2 == 1):
            times[name].append(seconds(kinds[name], 1, 1))

    def share(name: str, other: str) -> float:
        pairs = zip(times[name], times[other], times["plain"], strict=True)
        return statistics.median((x - y) / z for x, y, z in pairs)

    return share("looks", "plain") + share("checks", "looks") * count * calls / EVERY


def about(args: argparse.Namespace) -> dict[str, Any]:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else devices.cpu_name()
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    if Exporter.made() is not None:  # which then counts, too
        versions["prometheus-client"] = version("prometheus-client")
    return {
        "date": date.today().isoformat(),
        "device": name if DEVICE == "cuda" else f"{name}, {torch.get_num_threads()} threads",
        "versions": versions,
        "commit": args.commit or git.stdout.strip(),
        "regime": f"{str(DTYPE).removeprefix('torch.')}; medians of {args.repeats}; "
        f"both: medians of {args.rounds} rounds of {SLICE} s each way, in turn",
        "every": EVERY,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of the tree, where git cannot say")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--rounds", type=int, default=60, help="of runs with and without `watch`; 0: none of them"
    )
    args = parser.parse_args()
    cases = [(name, step(*sizes), sizes[-1]) for name, sizes in MODELS.items()]
    cases += [(name, call(*shape), 1) for name, shape in CALLS.items()]
    results = []
    for name, run, calls in cases:
        row: dict[str, Any] = {"case": name, **parts(run, calls, args.repeats)}
        count = round(SLICE / row["run_us"] * 1e6)
        if args.rounds and count:
            row["both"] = both(run, calls, count, args.rounds)
        results.append(row)
        values = (f"{key} {x:.4g}" if isinstance(x, float) else str(x) for key, x in row.items())
        print(", ".join(values), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({**about(args), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
