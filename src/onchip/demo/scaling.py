"""Time and memory of one attention call, forward and backward, against the sequence length."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from onchip.demo import dense, fresh

HEADS, DIM = 2, 64
DENSE_BUDGET = 2 << 30  # bytes: a laptop can spare them


def run(attention: str, lengths: list[int]) -> Iterator[dict[str, Any]]:
    """Yield {"seqlen", "seconds", "peak_bytes"} for each of `lengths` (ascending), causal, fp32, batch 1.

    Memory is the peak of this process above what it held before the first call, less q, k, v: the output, the
    gradients and everything in between. Dense attention stops with {"seqlen", "needs_bytes"} where its scores would
    pass `DENSE_BUDGET`.
    """
    call = fresh.attention_named(attention)
    measure(call, 128)  # load kernels and start threads before memory is compared
    before, _ = fresh.resident()
    for seqlen in lengths:
        needs = dense.score_bytes(1, seqlen, HEADS)
        if attention == "dense" and needs > DENSE_BUDGET:
            yield {"seqlen": seqlen, "needs_bytes": needs}
            return
        repeats = 3 if seqlen <= 2048 else 1  # the fastest of them
        seconds = min(measure(call, seqlen) for _ in range(repeats))
        inputs = 3 * 4 * seqlen * HEADS * DIM
        yield {
            "seqlen": seqlen,
            "seconds": seconds,
            "peak_bytes": max(0, fresh.resident()[1] - before - inputs),
        }


def measure(call: Any, seqlen: int) -> float:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, seqlen, HEADS, DIM, requires_grad=True, device="cpu") for _ in range(3))
    began = time.perf_counter()
    call(q, k, v).sum().backward()
    return time.perf_counter() - began
