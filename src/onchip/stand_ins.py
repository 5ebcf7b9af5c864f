"""What a plan is asked about, without storage: tensors of shapes alone, layouts of lengths alone, devices by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onchip.inputs import cache_layout, varlen_layout
from onchip.layout import Cache, Layout


def tensors(q: Any, k: Any, v: Any, layout: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v without storage, as (batch, seqlen, heads, dim)."""
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout: got {layout!r}, expected 'bshd' or 'bhsd'")
    found = [stand_in(name, x, dtype) for name, x in (("q", q), ("k", k), ("v", v))]
    return [x.transpose(1, 2) if layout == "bhsd" and x.dim() == 4 else x for x in found]


def stand_in(name: str, x: Any, dtype: torch.dtype) -> Tensor:
    """A tensor without storage of the same shape, strides and dtype."""
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    if not isinstance(x, tuple | list) or not all(type(n) is int and n >= 0 for n in x):
        raise TypeError(f"{name}: got {x!r}, expected a tensor or a shape (batch, seqlen, heads, dim)")
    return torch.empty(tuple(x), dtype=dtype, device="meta")


def packed(tensors: tuple[Tensor, Tensor, Tensor], cu_q: Tensor | None, cu_k: Tensor | None) -> Layout:
    """The packed layout of stand-ins: its boundaries are read, so they are brought to the CPU."""
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if not isinstance(cu, Tensor):
            raise TypeError(f"{name}: got {type(cu).__name__}, expected a tensor, as for the other one")
    q, k, v = _like(tensors)
    return varlen_layout(q, k, v, cu_q.cpu(), cu_k.cpu(), None, None, None, None)  # type: ignore[union-attr]


def cached(
    tensors: tuple[Tensor, Tensor, Tensor],
    cache_seqlens: Any,
    new: Any,
    page_table: Any,
    batch_idx: Tensor | None,
    leftpad: Tensor | None,
    bounded: bool,
) -> Cache:
    """The layout of a call over a cache. bounded: its lengths are on a device, so that the host knows a bound alone."""
    if isinstance(new, bool) or not isinstance(new, int) or new < 0:
        raise ValueError(f"new: got {new!r}, expected an int of at least 0, the keys that the call appends")
    if isinstance(cache_seqlens, tuple | list):
        cache_seqlens = torch.tensor(cache_seqlens, device="cpu")
    if isinstance(page_table, tuple | list):  # its shape alone: pages one after the other
        if len(page_table) != 2 or not all(type(n) is int and n >= 0 for n in page_table):
            raise TypeError(f"page_table: got {page_table!r}, expected a tensor or a shape (batch, pages)")
        page_table = torch.arange(page_table[0] * page_table[1], device="cpu").view(*page_table)
    given = (cache_seqlens, page_table, batch_idx, leftpad)
    lengths, table, rows, pads = (x.cpu() if isinstance(x, Tensor) else x for x in given)
    q, k, v = _like(tensors)
    place = cache_layout(q, k, v, new, lengths, table, rows, pads)
    if not bounded:
        return place
    slots = tensors[1].shape[1] * (1 if table is None else table.shape[1])
    return replace(place, seqlen_k=slots)


def _like(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The same on the CPU, where what stands in lengths is read."""
    return [torch.empty((), dtype=x.dtype, device="cpu").expand(x.shape) for x in tensors]


def autocast(tensors: list[Tensor], device: str, over_cache: bool) -> list[Tensor]:
    """q, k and v as a call under the autocast that is on for this device type gets them; a cache stays as it is."""
    if not torch._C._is_any_autocast_enabled() or not torch.amp.is_autocast_available(device):
        return tensors
    if not torch.is_autocast_enabled(device):
        return tensors
    if over_cache:
        return [tensors[0].to(tensors[1].dtype), *tensors[1:]]
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x for x in tensors]


def where(device: str) -> tuple[str, str | None]:
    """torch's device type, and the name of a known device."""
    from onchip import devices

    if isinstance(device, str):
        if devices.is_cpu(device):
            return "cpu", None
        try:
            return "cuda", devices.device(device).name
        except ValueError:
            pass
    try:
        return torch.device(device).type, None
    except (RuntimeError, TypeError):
        names = ", ".join(devices.NAMES)
        raise ValueError(f"device: got {device!r}, expected one of {names}, or torch's name of one") from None
