"""Attention on a GPU beside torch's own: forward, backward, masks, decoding and host time, in one interleaved run.

    python benchmarks/gpu.py --out benchmarks/results/h200-triton.json

Cool regime: an idle pause before each measurement, implementations in turn, medians, fresh random inputs. Every timed
configuration is first checked: out against float64 on a few sampled query rows, gradients against FlashAttention-2's.
FLOPs: 4 N^2 d h b forward (the visible share of it under a mask), 2.5 times that backward.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import write
from torch.nn.attention import SDPBackend, sdpa_kernel

import onchip

# Hopper's own forward pass has benchmarks/hopper.py.
attention = functools.partial(onchip.attention, backend="triton")
PEERS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
TOKENS, WIDTH = 16384, 2048  # batch * seqlen, heads * dim


def measure(calls: dict[str, Callable[[], object]], repeats: int, pause: float) -> dict[str, float]:
    """Median milliseconds of each call, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            torch.cuda.synchronize()
            time.sleep(pause)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()  # warm clocks and caches, outside the measurement
            start.record()
            for _ in range(4):
                call()
            stop.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(stop) / 4)
    return {name: statistics.median(t) for name, t in times.items()}


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph, as a server replays it: without host time."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def error(out: torch.Tensor, q, k, v, mask: onchip.Mask | None) -> float:
    """Largest difference from float64 on sampled query rows of the first sequence and head."""
    rows = torch.randint(0, q.shape[1], (16,), device=q.device)
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)[rows]
    if mask is not None:
        from onchip.mask import Region

        n = q.shape[1]
        region = Region(torch.zeros(1, dtype=torch.long, device=q.device), 0, 1, 0, n, 0, n, n, n)
        visible = mask.allow(region)[0, 0][rows]
    s = q[0, rows, 0].double() @ k[0, :, 0].double().t() * q.shape[-1] ** -0.5
    truth = s.masked_fill(~visible, -torch.inf).softmax(-1) @ v[0, :, 0].double()
    return (out[0, rows, 0].double() - truth).abs().max().item()


def gradient_error(backward: dict[str, Callable[[], Any]]) -> float:
    """Largest difference of a gradient from FlashAttention-2's, as a share of its norm: about 5e-3 in bfloat16."""
    ours, theirs = backward["onchip"](), backward["fa2"]()
    pairs = [(a.float(), b.transpose(1, 2).float()) for a, b in zip(ours, theirs, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def grid(record: list[dict], seqlens: list[int], repeats: int, pause: float) -> None:
    for dim in (64, 128, 256):
        for n in seqlens:
            shape = (TOKENS // n, n, WIDTH // dim, dim)
            for causal in (False, True):
                q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
                mask = onchip.causal() if causal else None
                flops = 4 * shape[0] * shape[2] * n * n * dim * (0.5 if causal else 1.0)
                forward, backward = _calls(q, k, v, dout, mask, causal)
                off = error(attention(q, k, v, mask=mask), q, k, v, mask)
                share = gradient_error(backward)
                assert share < 2e-2, f"gradients differ by {share:.1e} at dim {dim}, N = {n}"
                for step, calls, work in (("forward", forward, flops), ("backward", backward, 2.5 * flops)):
                    ms = measure(calls, repeats, pause)
                    rates = {name: work / t / 1e9 for name, t in ms.items()}
                    row = {"case": step, "dim": dim, "seqlen": n, "causal": causal, "ms": ms, "tflops": rates}
                    record.append(row | {"error": off, "gradient_error": share})
                    print(
                        step,
                        dim,
                        n,
                        causal,
                        {name: round(r) for name, r in rates.items()},
                        f"{off:.1e}",
                        flush=True,
                    )


def _calls(q, k, v, dout, mask, causal: bool):
    ours = [x.detach().requires_grad_() for x in (q, k, v)]
    theirs = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    out = attention(*ours, mask=mask)
    forward: dict[str, Callable[[], object]] = {"onchip": lambda: attention(q, k, v, mask=mask)}
    backward: dict[str, Callable[[], object]] = {
        "onchip": lambda: torch.autograd.grad(out, ours, dout, retain_graph=True)
    }
    for name, kind in PEERS.items():

        def sdpa(kind=kind):
            with sdpa_kernel(kind):
                return F.scaled_dot_product_attention(*theirs, is_causal=causal)

        peer_out = sdpa()
        forward[name] = sdpa
        backward[name] = lambda o=peer_out: torch.autograd.grad(
            o, theirs, dout.transpose(1, 2), retain_graph=True
        )
    return forward, backward


def masks(record: list[dict], repeats: int, pause: float) -> None:
    """The price of a mask, at dim 128 and 16384 keys; block-sparse time against density."""
    n, dim = 16384, 128
    q, k, v, dout = (torch.randn(1, n, 16, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    side = n // 128
    density = {f"blocks_{d}": torch.rand(side, side, device="cuda") < d / 100 for d in (50, 25, 12)}
    cases: dict[str, tuple[onchip.Mask | None, onchip.Score | None]] = {
        "full": (None, None),
        "causal": (onchip.causal(), None),
        "where_causal": (onchip.where(lambda b, h, q, k: k <= q), None),
        "causal_mod": (
            onchip.causal(),
            onchip.Score(mod=onchip.mod(lambda s, b, h, q, k: s - (q - k) * 0.001)),
        ),
        "window_1024": (onchip.window(1024, 0), None),
        **{name: (onchip.block_sparse(blocks, tile=(128, 128)), None) for name, blocks in density.items()},
    }
    for name, (mask, score) in cases.items():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, mask=mask, score=score)
        ms = measure(
            {
                "forward": lambda m=mask, s=score: attention(q, k, v, mask=m, score=s),
                "backward": lambda o=out, x=leaves: torch.autograd.grad(o, x, dout, retain_graph=True),
            },
            repeats,
            pause,
        )
        share = float(density[name].float().mean()) if name in density else None
        record.append({"case": "mask", "mask": name, "ms": ms, "density": share})
        print("mask", name, {step: round(t, 3) for step, t in ms.items()}, share, flush=True)


def decode(record: list[dict], repeats: int, pause: float) -> None:
    """One new query over a cache, 32 query heads on 8 key heads, dim 128, as a CUDA graph: GB/s of K and V."""
    for batch, length in ((1, 8192), (16, 8192), (64, 8192), (1, 65536), (16, 65536), (64, 65536)):
        cache = [torch.randn(batch, length, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        q = torch.randn(batch, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
        lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)
        heads_first = [x.transpose(1, 2) for x in (q, *cache)]
        calls = {
            "onchip": lambda c=cache, x=q, n=lengths: onchip.attention_with_cache(x, *c, cache_seqlens=n),
            "sdpa": lambda x=heads_first: F.scaled_dot_product_attention(*x, enable_gqa=True),
        }
        eager = measure({"onchip": calls["onchip"]}, repeats, pause)
        ms = measure({name: captured(call) for name, call in calls.items()}, repeats, pause)
        rate = {name: 2 * cache[0].nbytes / t / 1e6 for name, t in ms.items()}
        row = {"case": "decode", "batch": batch, "keys": length, "ms": ms, "eager_ms": eager["onchip"]}
        record.append(row | {"gb_per_s": rate})
        print(
            "decode",
            batch,
            length,
            {n: round(r) for n, r in rate.items()},
            f"{eager['onchip']:.3f}",
            flush=True,
        )


def host(record: list[dict], repeats: int) -> None:
    """Microseconds of host time a call, on a problem whose kernels are shorter than that, of rounds in turn.

    Hosts differ: beside the calls stands a loop of Python alone.
    """
    q, k, v = (torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    calls = {
        "onchip": lambda: attention(q, k, v, mask=None),
        "onchip_grad": lambda: attention(*leaves),
        "sdpa": lambda: F.scaled_dot_product_attention(*heads_first),
        "a Python loop over 1000 numbers": lambda: [x for x in range(1000) if x < 0],
    }
    if torch.cuda.get_device_capability() == (9, 0):
        calls["hopper"] = lambda: onchip.attention(q, k, v, backend="hopper")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            for _ in range(50):
                call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(1000):
                call()
            times[name].append((time.perf_counter() - start) * 1e3)
            torch.cuda.synchronize()
    for name, us in times.items():
        middle = statistics.median(us)
        record.append({"case": "host", "call": name, "us": middle, "least_us": min(us)})
        print("host", name, f"{middle:.1f} us, least {min(us):.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="decode,masks,grid,host")
    parser.add_argument("--seqlens", default="512,2048,8192,16384")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.2, help="idle seconds before a measurement")
    args = parser.parse_args()
    record: list[dict] = []
    parts = {
        "host": lambda: host(record, args.repeats),
        "decode": lambda: decode(record, args.repeats, args.pause),
        "masks": lambda: masks(record, args.repeats, args.pause),
        "grid": lambda: grid(record, [int(n) for n in args.seqlens.split(",")], args.repeats, args.pause),
    }
    for part in args.parts.split(","):
        parts[part]()
        regime = f"cool: {args.pause} s idle before each of {args.repeats} measurements, interleaved, medians"
        write(args.out, record, regime)


if __name__ == "__main__":
    main()
