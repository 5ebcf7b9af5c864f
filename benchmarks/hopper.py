"""The Hopper forward kernel beside FlashAttention-3 and -4 and cuDNN, in one interleaved run of CUDA graphs.

    python benchmarks/hopper.py --fa3 /path/to/fa3_fwd/_C.abi3.so --fa4 --only grid \
        --out benchmarks/results/h200-hopper.json
    python benchmarks/hopper.py --only others --out benchmarks/results/h200-hopper-others.json

The library is that of the PyPI wheel fa3-fwd; --fa4 wants the packages flash-attn-4 and nvidia-cutlass-dsl on the path.
Each is optional, cuDNN is always there. Every output of the grid is compared with cuDNN's; other problems' are checked
on sampled rows against float64. FLOPs: 4 N^2 d h b, half of it for causal.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from record import write
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


def repeatable(name: str, call: Callable[[], torch.Tensor], plain: set[str]) -> Callable[[], object]:
    """The replay of a graph; or the call, its host time included, where its implementation cannot be captured: then
    its name goes into `plain`.
    """
    try:
        return captured(call).replay
    except Exception as error:
        if name == "onchip":
            raise
        print(f"{name} is timed by plain calls: {type(error).__name__}: {error}", flush=True)
        plain.add(name)
        return call


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()  # warm clocks and caches
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / repeats


def calls(
    dim: int, seqlen: int, causal: bool, peers: tuple[str, ...]
) -> dict[str, Callable[[], torch.Tensor]]:
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

    def cute():
        from flash_attn.cute.interface import _flash_attn_fwd

        return _flash_attn_fwd(q, k, v, causal=causal, num_splits=1)[0]

    found = {"cudnn": cudnn, "onchip": lambda: onchip.attention(q, k, v, mask=mask, backend="hopper")}
    return found | {name: call for name, call in (("fa3", flash), ("fa4", cute)) if name in peers}


def interleaved(
    runs: dict[str, Callable[[], object]], repeats: int, rounds: int, pause: float
) -> dict[str, float]:
    """Median milliseconds of each, taken in turn, every other round backwards."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in sorted(runs, reverse=turn % 2 == 1):
            torch.cuda.synchronize()
            time.sleep(pause)
            times[name].append(milliseconds(runs[name], repeats))
    return {name: statistics.median(t) for name, t in times.items()}


def cell(
    dim: int, seqlen: int, causal: bool, peers: tuple[str, ...], rounds: int, pause: float, plain: set[str]
) -> dict[str, float]:
    """TFLOP/s of each implementation."""
    functions = calls(dim, seqlen, causal, peers)
    outputs = {name: call().float() for name, call in functions.items()}
    for name, out in outputs.items():
        error = (out - outputs["cudnn"]).norm() / outputs["cudnn"].norm()
        assert error < 6e-3, f"{name}: differs by {error:.1e} at dim {dim}, N = {seqlen}"
    replays = {name: repeatable(name, call, plain) for name, call in functions.items()}
    flops = 4 * seqlen * TOKENS * WIDTH / (2 if causal else 1)
    repeats = max(3, min(40, int(8e-3 / (flops / 500e12))))
    ms = interleaved(replays, repeats, rounds, pause)
    return {name: flops / t * 1e-9 for name, t in ms.items()}


def others() -> dict[str, tuple[Callable[[], torch.Tensor], Callable[[], None], float | None]]:
    """Problems at dim 128: name -> (call, check, share of visible pairs or of the dense call's work)."""
    n, dim = 16384, 128

    def randn(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    q, k, v = (randn(1, n, 16, dim) for _ in range(3))
    side = n // 128
    found = {}

    def add(name, tensors, share=None, visible=None, **options):
        def call():
            return onchip.attention(*tensors, backend="hopper", **options)

        def check():
            x, y, z = (t[0].double() for t in tensors)
            rows = torch.randint(0, x.shape[0], (16,), device="cuda")
            scores = x[rows, 0] @ y[:, 0].t() * dim**-0.5
            if visible is not None:
                keys = torch.arange(y.shape[0], device="cuda")
                scores = scores.masked_fill(~visible(rows[:, None], keys[None]), -torch.inf)
            truth = scores.softmax(-1).nan_to_num(0.0) @ z[:, 0]
            error = (call()[0, rows, 0].double() - truth).abs().max().item()
            assert error < 2e-2, f"{name}: differs by {error:.1e}"

        found[name] = call, check, share

    def causal(i, j):
        return j <= i

    gqa = randn(2, 8192, 32, dim), randn(2, 8192, 8, dim), randn(2, 8192, 8, dim)
    add("GQA 32/8, N = 8192, batch 2, causal", gqa, visible=causal, mask=onchip.causal())
    add("full", (q, k, v))
    add("causal", (q, k, v), visible=causal, mask=onchip.causal())
    add("causal by where", (q, k, v), visible=causal, mask=onchip.where(lambda b, h, i, j: j <= i))
    window = onchip.window(1024, 0)
    add("window 1024", (q, k, v), visible=lambda i, j: (j <= i) & (j >= i - 1024), mask=window)
    zero = onchip.Score(mod=onchip.mod(lambda s, b, h, i, j: s - (i - j) * 0.0))
    add("causal with a score mod", (q, k, v), visible=causal, mask=onchip.causal(), score=zero)
    for percent in (50, 25, 12.5):
        blocks = torch.rand(side, side, device="cuda") < percent / 100
        share = float(blocks.float().mean())

        def seen(i, j, blocks=blocks):
            return blocks[i // 128, j // 128]

        add(
            f"{percent} % of blocks",
            (q, k, v),
            share,
            seen,
            mask=onchip.block_sparse(blocks, tile=(128, 128)),
        )
    lengths = torch.randint(128, 4097, (64,), generator=torch.Generator().manual_seed(0))
    cu = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to("cuda", torch.int32)
    total, pairs = int(lengths.sum()), int(lengths.square().sum())
    packed = [randn(total, 16, dim) for _ in range(3)]
    dense = [randn(16, 2048, 16, dim) for _ in range(3)]
    bounds = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 4096, "max_seqlen_k": 4096}
    for name, mask in (("full", None), ("causal", onchip.causal())):

        def varlen(mask=mask):
            return onchip.attention_varlen(*packed, mask=mask, backend="hopper", **bounds)

        def check(mask=mask, varlen=varlen):
            last = slice(int(cu[-2]), total)
            alone = onchip.attention(*(x[None, last] for x in packed), mask=mask, backend="hopper")
            torch.testing.assert_close(varlen()[last], alone[0], atol=2e-2, rtol=2e-2)

        found[f"64 packed sequences, {name}"] = varlen, check, pairs / (16 * 2048**2)
        add(f"16 x 2048, {name}", dense, visible=None if mask is None else causal, mask=mask)
    return found


def record(results: list[dict], rates: dict[str, float], dim: int, seqlen: int, causal: bool) -> float:
    ratio = rates["onchip"] / max(rate for name, rate in rates.items() if name != "onchip")
    results.append({"case": "forward", "dim": dim, "seqlen": seqlen, "causal": causal, "tflops": rates})
    shown = {name: round(rate) for name, rate in rates.items()}
    print(dim, seqlen, "causal" if causal else "full", shown, round(ratio, 3), flush=True)
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fa3", type=Path, help="the library _C.abi3.so of the wheel fa3-fwd")
    parser.add_argument("--fa3-version", default="unknown", help="of the wheel that the library is from")
    parser.add_argument("--fa4", action="store_true", help="time FlashAttention-4, too")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds of idling before a measurement")
    parser.add_argument("--commit", help="where git does not tell it")
    parser.add_argument("--only", choices=("grid", "others"), help="one half of the benchmark")
    options = parser.parse_args()
    if options.fa3 is not None:
        torch.ops.load_library(str(options.fa3))
    peers = (*(("fa3",) if options.fa3 is not None else ()), *(("fa4",) if options.fa4 else ()))
    results, ratios, plain = [], [], set()
    grid = itertools.product((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384), (False, True))
    for dim, seqlen, causal in () if options.only == "others" else grid:
        rates = cell(dim, seqlen, causal, peers, options.rounds, options.pause, plain)
        ratios.append(record(results, rates, dim, seqlen, causal))
    if ratios:
        print("geometric mean:", round(statistics.geometric_mean(ratios), 4), flush=True)
    regime = f"cool: {options.pause} s idle before each, CUDA graphs, interleaved, medians of {options.rounds} rounds"
    regime += f"; by plain calls: {', '.join(sorted(plain))}" if plain else ""
    versions = {"cudnn": str(torch.backends.cudnn.version())}
    if options.fa3 is not None:
        versions["fa3-fwd"] = options.fa3_version
    if options.fa4:
        versions |= {name: version(name) for name in ("flash-attn-4", "nvidia-cutlass-dsl")}

    def keep() -> None:
        if options.out is not None:
            write(options.out, results, regime, options.commit, **versions)

    keep()  # whatever becomes of the rest
    for name, (call, check, share) in ({} if options.only == "grid" else others()).items():
        check()
        # In a graph a mask that must be looked at is so in each replay; a call's host time is beside its kernel's.
        ms = interleaved({"graph": captured(call).replay, "call": call}, 4, options.rounds, options.pause)
        results.append(
            {"case": "other", "name": name, "share": share, **{f"{k}_ms": t for k, t in ms.items()}}
        )
        print(name, {kind: round(t, 3) for kind, t in ms.items()}, share, flush=True)
    keep()


if __name__ == "__main__":
    main()
