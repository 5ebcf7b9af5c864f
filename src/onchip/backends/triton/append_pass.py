"""Before attention over a cache: new keys and values into their slots, and rotary embedding of queries and new keys.

One small kernel, without a look at lengths from the host. Nothing is written outside of a cache, whatever lengths and
page numbers hold.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.backends.triton.arguments import cache_place, power, view
from onchip.backends.triton.parts import Place, View
from onchip.inputs import Rotary
from onchip.layout import Cache


@triton.jit
def rotated(x: View, offset, position, cos, sin, positions, half, d, ok, INTERLEAVED: tl.constexpr):
    """The elements d of a row, of which the first 2 * half are turned to its position; fp32."""
    value = tl.load(x.ptr + offset + d * x.dim, mask=ok, other=0.0).to(tl.float32)
    turns = ok & (d < 2 * half)
    if INTERLEAVED:
        column = d // 2
        partner = d ^ 1
        first = d % 2 == 0
    else:
        column = d % half
        partner = tl.where(d < half, d + half, d - half)
        first = d < half
    other = tl.load(x.ptr + offset + partner * x.dim, mask=turns, other=0.0).to(tl.float32)
    # Queries before the first key stand at negative positions: cos(-x) = cos(x), sin(-x) = -sin(x).
    row = tl.minimum(tl.abs(position), positions - 1).to(tl.int64) * half
    c = tl.load(cos + row + column, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + row + column, mask=turns, other=0.0).to(tl.float32)
    s = tl.where((position < 0) != first, -s, s)
    return value * c + other * s


@triton.jit
def stored(x: View, offset, d, ok, value):
    tl.store(x.ptr + offset + d * x.dim, value.to(x.ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["seqlen_q", "new", "cache_rows", "capacity", "positions"])
def append_kernel(q: View, k: View, v: View, q_out: View, k_cache: View, v_cache: View, place: Place, cos, sin,
                  seqlen_q, new, cache_rows, capacity, positions, half, heads_q, heads_k, D: tl.constexpr,
                  DV: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    """One program a row of a sequence: first the new keys with their values, then the queries."""
    i = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    used = tl.load(place.used + b).to(tl.int32)
    pad = 0
    if place.leftpad is not None:
        pad = tl.load(place.leftpad + b).to(tl.int32)
    d = tl.arange(0, DIM)
    if k is not None:
        if i < new:
            slot = used + i
            inside = (slot >= 0) & (slot < capacity)
            row = b
            at = slot
            if place.page_table is not None:
                page = tl.where(inside, slot // place.page_size, 0)
                row = tl.load(place.page_table + b * place.page_stride + page).to(tl.int64)
                at = slot % place.page_size
            elif place.index is not None:
                row = tl.load(place.index + b).to(tl.int64)
            inside = inside & (row >= 0) & (row < cache_rows)
            to_k = row * k_cache.batch + at.to(tl.int64) * k_cache.row
            to_v = row * v_cache.batch + at.to(tl.int64) * v_cache.row
            from_k = b * k.batch + i.to(tl.int64) * k.row
            from_v = b * v.batch + i.to(tl.int64) * v.row
            for h in range(heads_k):
                ok = inside & (d < D)
                if cos is None:
                    key = tl.load(k.ptr + from_k + h * k.head + d * k.dim, mask=ok, other=0.0)
                else:
                    key = rotated(
                        k, from_k + h * k.head, slot - pad, cos, sin, positions, half, d, ok, INTERLEAVED
                    )
                stored(k_cache, to_k + h * k_cache.head, d, ok, key)
                ok = inside & (d < DV)
                value = tl.load(v.ptr + from_v + h * v.head + d * v.dim, mask=ok, other=0.0)
                stored(v_cache, to_v + h * v_cache.head, d, ok, value)
    if q_out is not None:
        if i >= new:
            j = i - new
            position = used + new - pad - seqlen_q + j  # the last query stands at the last key
            here = b * q.batch + j.to(tl.int64) * q.row
            there = b * q_out.batch + j.to(tl.int64) * q_out.row
            for h in range(heads_q):
                ok = d < D
                turned = rotated(
                    q, here + h * q.head, position, cos, sin, positions, half, d, ok, INTERLEAVED
                )
                stored(q_out, there + h * q_out.head, d, ok, turned)


def append(
    layout: Cache,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary: Rotary | None,
) -> Tensor:
    """k and v (both or none) into the caches, turned by rotary if given; the queries, turned likewise."""
    device = q.get_device()  # -1: the CPU, under the interpreter
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return append(layout, q, k_cache, v_cache, k, v, rotary)
    batch, seqlen_q, heads_q, dim = q.shape
    new = 0 if k is None else k.shape[1]
    turned = torch.empty(q.shape, dtype=q.dtype, device=q.device) if rotary is not None else None
    rows = new + (seqlen_q if turned is not None else 0)
    if rows == 0 or batch == 0:
        return q
    cos = sin = None
    positions, half = 1, 1
    if rotary is not None:
        cos, sin = rotary.cos.contiguous(), rotary.sin.contiguous()
        positions, half = cos.shape
    capacity = (
        k_cache.shape[1] if layout.page_table is None else layout.page_table.shape[1] * layout.page_size
    )
    views: list[Any] = [None if x is None else view(x) for x in (k, v, turned)]
    append_kernel[(rows, batch)](
        view(q), views[0], views[1], views[2], view(k_cache), view(v_cache), cache_place(layout), cos, sin,
        seqlen_q, new, k_cache.shape[0], capacity, positions, half, heads_q, k_cache.shape[2], D=dim,
        DV=v_cache.shape[3], DIM=power(max(dim, v_cache.shape[3])), num_warps=1,
        INTERLEAVED=rotary is not None and rotary.interleaved)  # fmt: skip
    return q if turned is None else turned
