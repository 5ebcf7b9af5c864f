"""DRAM bytes that ncu counts beside the bytes of the traffic model, on the first FlashAttention paper's problem.

    python benchmarks/traffic.py --out benchmarks/results/h200-traffic.json

Needs a GPU and ncu (Nsight Compute). Every implementation runs once, warm, in a process of its own under ncu, clocks
and caches left as they are: what the L2 cache catches does not reach DRAM. The model's `bytes` count every load and
store of a tile, its `least` none of a tensor's twice within a kernel, so a measurement should lie between the two.
`--one NAME:PASS` is the profiled process itself.
"""

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from record import write

from onchip import orders, traffic
from onchip.bench import peers, run
from onchip.bench.cases import Case

CASES = {
    # GPT-2 medium: the table of the paper's figure 2; and one long sequence, whose K and V the cache still holds.
    "gpt2": Case("GPT-2 medium", batch=64, seqlen_q=1024, heads_q=16, dim=64, dtype="float16", what="both"),
    "long": Case("N = 16384", batch=1, seqlen_q=16384, heads_q=16, dim=128, dtype="bfloat16", what="both"),
}
# Implementation -> the algorithm whose bytes stand beside it.
IMPLS = {
    "onchip-triton": "onchip",
    "onchip-hopper": "onchip",
    "sdpa-flash": "flash2",
    "standard": "eager",
}
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
SCALE = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def one(case: Case, impl: str, step: str) -> None:
    """Run the pass once with the profiler on."""
    given = peers.inputs(case, "cuda")
    call = peers.peer(impl).forward(given)
    leaves = [x.requires_grad_() for x in (given.q, given.k, given.v)]
    # The layout that a backward pass starts from: no copy of dout inside the measurement.
    out = call(*leaves)

    def work() -> object:
        if step == "forward":
            with torch.no_grad():
                return call(*leaves)
        return torch.autograd.grad(out, leaves, given.dout, retain_graph=True)

    work()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    work()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def counted(text: str) -> dict[str, float]:
    """{"read", "written": bytes, "kernels": number} of ncu's CSV output."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    found = {"read": 0.0, "written": 0.0}
    kernels = set()
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        amount = float(row["Metric Value"].replace(",", "")) * SCALE[row["Metric Unit"]]
        found["read" if row["Metric Name"] == METRICS[0] else "written"] += amount
        kernels.add(row["ID"])
    return {**found, "kernels": len(kernels)}


def measure(case: str, impl: str, step: str) -> dict[str, float]:
    command = ["ncu", "--csv", "--metrics", ",".join(METRICS), "--profile-from-start", "off"]
    command += ["--clock-control", "none", "--cache-control", "none"]
    command += [sys.executable, __file__, "--one", f"{case}:{impl}:{step}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode or '"ID"' not in done.stdout:
        raise RuntimeError((done.stderr or done.stdout).strip()[-300:])
    return counted(done.stdout)


def modelled(case: Case, impl: str, step: str) -> traffic.Traffic:
    stated = run.stated(peers.inputs(case, "cuda"))
    backend = impl.removeprefix("onchip-") if impl.startswith("onchip-") else None
    layout, mask = stated.operands.layout, stated.operands.mask
    return traffic.count(stated.problem, layout, mask, IMPLS[impl], step, backend=backend)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--impl", default=",".join(IMPLS))
    parser.add_argument("--one", help="CASE:IMPL:PASS, the process that ncu profiles")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/traffic.py: torch sees no GPU")
    if args.one:
        name, impl, step = args.one.split(":")
        one(CASES[name], impl, step)
        return
    if args.out is None or shutil.which("ncu") is None:
        sys.exit("benchmarks/traffic.py: needs --out FILE, and ncu on the PATH")
    results = []
    for name in args.cases.split(","):
        for impl in args.impl.split(","):
            for step in orders.STEPS:
                row: dict = {"case": name, "label": CASES[name].label, "impl": impl, "pass": step}
                try:
                    model = modelled(CASES[name], impl, step)
                    row |= {"model_bytes": model.bytes, "model_least": model.least, "flops": model.flops}
                    row |= measure(name, impl, step)
                except Exception as error:  # an implementation that is not there, or refuses
                    row["error"] = f"{type(error).__name__}: {error}"
                results.append(row)
                print(json.dumps(row), flush=True)
    regime = "one warm call under ncu --clock-control none --cache-control none, summed over its kernels"
    write(args.out, results, regime)


if __name__ == "__main__":
    main()
