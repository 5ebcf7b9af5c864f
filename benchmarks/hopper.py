"""The Hopper forward kernel beside FlashAttention-3 and cuDNN, in one interleaved run of CUDA graphs.

    python benchmarks/hopper.py --fa3 /path/to/fa3_fwd/_C.abi3.so --out benchmarks/results/h200-hopper.json

The library is that of the PyPI wheel fa3-fwd; without it cuDNN is the only peer. Every output is compared with cuDNN's.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import onchip

TOKENS, WIDTH = 16384, 2048  # batch * seqlen, heads * dim


def captured(call: Callable[[], torch.Tensor]) -> torch.cuda.CUDAGraph:
    call()  # compiles, outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def milliseconds(replay: Callable[[], None], repeats: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()  # warm clocks and caches
    start.record()
    for _ in range(repeats):
        replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / repeats


def calls(dim: int, seqlen: int, causal: bool, fa3: bool) -> dict[str, Callable[[], torch.Tensor]]:
    shape = (TOKENS // seqlen, seqlen, WIDTH // dim, dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    mask = onchip.causal() if causal else None

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)

    def flash():
        window = {"window_size_left": -1, "window_size_right": -1}
        return torch.ops.fa3_fwd.fwd(
            q, k, v, num_splits=1, softmax_scale=dim**-0.5, is_causal=causal, **window
        )[0]

    found = {"cudnn": cudnn, "onchip": lambda: onchip.attention(q, k, v, mask=mask, backend="hopper")}
    return found | ({"fa3": flash} if fa3 else {})


def cell(dim: int, seqlen: int, causal: bool, fa3: bool, rounds: int, pause: float) -> dict[str, float]:
    """TFLOP/s of each implementation."""
    functions = calls(dim, seqlen, causal, fa3)
    outputs = {name: call().float() for name, call in functions.items()}
    for name, out in outputs.items():
        error = (out - outputs["cudnn"]).norm() / outputs["cudnn"].norm()
        assert error < 6e-3, f"{name}: differs by {error:.1e} at dim {dim}, N = {seqlen}"
    graphs = {name: captured(call) for name, call in functions.items()}
    flops = 4 * seqlen * TOKENS * WIDTH / (2 if causal else 1)
    repeats = max(3, min(40, int(8e-3 / (flops / 500e12))))
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds):
        for name in sorted(graphs, reverse=turn % 2 == 1):
            torch.cuda.synchronize()
            time.sleep(pause)
            times[name].append(milliseconds(graphs[name].replay, repeats))
    return {name: flops / statistics.median(t) * 1e-9 for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fa3", type=Path, help="the library _C.abi3.so of the wheel fa3-fwd")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds of idling before a measurement")
    options = parser.parse_args()
    if options.fa3 is not None:
        torch.ops.load_library(str(options.fa3))
    results = []
    for dim in (64, 128, 256):
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                rates = cell(dim, seqlen, causal, options.fa3 is not None, options.rounds, options.pause)
                best = max(rate for name, rate in rates.items() if name != "onchip")
                row = {
                    "dim": dim,
                    "seqlen": seqlen,
                    "causal": causal,
                    **rates,
                    "ratio": rates["onchip"] / best,
                }
                results.append(row)
                print(json.dumps({k: round(x, 3) if isinstance(x, float) else x for k, x in row.items()}))
    if options.out is not None:
        device = torch.cuda.get_device_name()
        options.out.write_text(
            json.dumps({"device": device, "torch": torch.__version__, "rows": results}, indent=1)
        )


if __name__ == "__main__":
    main()
