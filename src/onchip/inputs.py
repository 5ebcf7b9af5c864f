"""Reading a call's lengths: varlen boundaries, cache lengths, pages; every error of theirs is raised here.

What depends on values in a tensor is checked where that costs no wait for a device: on the CPU. On a GPU the caller
vouches for lengths (a mask's too), boundaries and page numbers; kernels write inside their tensors whatever they hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor  # type: ignore[import-not-found]

from onchip import capture
from onchip.layout import Cache, Varlen
from onchip.problem import check_tensors

INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary position embedding: cos and sin (positions, rotary_dim / 2), of the first rotary_dim of dim.

    interleaved: pairs are neighbours (0, 1), (2, 3), ... (GPT-J); else halves (0, r/2), (1, r/2 + 1), ... (GPT-NeoX).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def __post_init__(self) -> None:
        for name, x in (("cos", self.cos), ("sin", self.sin)):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(
                    f"rotary: {name} is {kind}, expected a floating tensor (positions, rotary_dim / 2)"
                )
        if self.cos.dim() != 2 or self.cos.shape != self.sin.shape:
            raise ValueError(
                f"rotary: cos and sin have shapes {tuple(self.cos.shape)} and {tuple(self.sin.shape)}, expected the "
                "same (positions, rotary_dim / 2)"
            )

    def check(self, dim: int, last: int | None, device: torch.device | None = None) -> None:
        """Raise ValueError where the tables are too wide for dim, end before position `last` (None: unknown), or are
        on another device."""
        for name, x in (("cos", self.cos), ("sin", self.sin)):
            if device is not None and x.device != device:
                raise ValueError(f"rotary: {name} is on {x.device}, expected {device} as for q")
        if 2 * self.cos.shape[1] > dim:
            raise ValueError(
                f"rotary: cos has {self.cos.shape[1]} columns, expected at most dim / 2 = {dim // 2}"
            )
        if last is not None and last >= self.cos.shape[0]:
            raise ValueError(f"rotary: cos has {self.cos.shape[0]} positions, expected at least {last + 1}")

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (batch, seqlen, heads, dim) turned to positions (batch, seqlen); computed in float32 or better."""
        half = self.cos.shape[1]
        wide = torch.promote_types(x.dtype, torch.float32)
        # Queries before the first key stand at negative positions: cos(-x) = cos(x), sin(-x) = -sin(x).
        index = positions.abs().clamp(max=max(self.cos.shape[0] - 1, 0))
        cos, sin = (t.to(wide)[index][:, :, None] for t in (self.cos, self.sin))
        sin = torch.where((positions < 0)[:, :, None, None], -sin, sin)
        head, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
        a, b = (
            (head[..., 0::2], head[..., 1::2]) if self.interleaved else (head[..., :half], head[..., half:])
        )
        turned = (a * cos - b * sin, a * sin + b * cos)
        mixed = torch.stack(turned, -1).flatten(-2) if self.interleaved else torch.cat(turned, -1)
        return torch.cat([mixed.to(x.dtype), rest], dim=-1)


def integers(name: str, x: Any, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An integer tensor of this shape on q's device; TypeError or ValueError otherwise."""
    if isinstance(x, Tensor) and is_batchedtensor(x):
        raise NotImplementedError(f"{name}: under vmap lengths must be the same for every slice")
    if not isinstance(x, Tensor) or x.dtype not in INTEGERS:
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: got {kind}, expected an int32 or int64 tensor {shape}")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: has shape {tuple(x.shape)}, expected {shape}")
    if x.device != like.device:
        raise ValueError(f"{name}: is on {x.device}, expected {like.device} as for q")
    return x


def varlen_layout(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_q: Any,
    max_k: Any,
    used_q: Any,
    used_k: Any,
) -> Varlen:
    """The layout of packed (total, heads, dim) tensors, after the checks of shapes, boundaries and lengths."""
    check_tensors(q, k, v, dims=3)
    if v.shape[0] != k.shape[0]:
        raise ValueError(
            f"v: has total {v.shape[0]} (shape {tuple(v.shape)}), expected {k.shape[0]} as for k"
        )
    cu_q, cu_k = (
        _boundaries(side, cu, x) for side, cu, x in (("q", cu_seqlens_q, q), ("k", cu_seqlens_k, k))
    )
    if cu_q.numel() != cu_k.numel():
        counts = cu_k.numel() - 1, cu_q.numel() - 1
        raise ValueError(f"cu_seqlens_k: has {counts[0]} sequences, expected {counts[1]} as for cu_seqlens_q")
    used_q, used_k = (
        None if used is None else integers(f"seqused_{side}", used, (cu_q.numel() - 1,), q)
        for side, used in (("q", used_q), ("k", used_k))
    )
    longest_q = _longest("q", cu_q, q.shape[0], max_q, used_q)
    return Varlen(cu_q, cu_k, used_q, used_k, longest_q, _longest("k", cu_k, k.shape[0], max_k, used_k))


def _boundaries(side: str, cu_seqlens: Any, packed: Tensor) -> Tensor:
    name = f"cu_seqlens_{side}"
    if isinstance(cu_seqlens, Tensor) and (cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1):
        raise ValueError(f"{name}: has shape {tuple(cu_seqlens.shape)}, expected (sequences + 1,)")
    return integers(name, cu_seqlens, (cu_seqlens.numel() if isinstance(cu_seqlens, Tensor) else 1,), packed)


def _longest(side: str, cu: Tensor, total: int, limit: Any, used: Tensor | None) -> int:
    """What the caller names, else the longest sequence; on a GPU a name is taken without a look at the boundaries."""
    if limit is not None:
        limit = _count(f"max_seqlen_{side}", limit, least=0)
        if cu.device.type != "cpu":
            return limit
    elif capture.capturing(cu.device.type):
        raise ValueError(f"max_seqlen_{side}: got None in a CUDA graph, expected an int: a look would wait")
    name, lengths = f"cu_seqlens_{side}", cu.diff()
    if cu[0] != 0:
        raise ValueError(f"{name}: starts at {int(cu[0])}, expected 0")
    if (lengths < 0).any():
        at = int((lengths < 0).nonzero()[0])
        raise ValueError(
            f"{name}: decreases from {int(cu[at])} to {int(cu[at + 1])} at {at + 1}, expected no decrease"
        )
    if cu[-1] != total:
        raise ValueError(f"{name}: ends at {int(cu[-1])}, expected the total {total} of {side}")
    if used is not None:
        wrong = (used < 0) | (used > lengths)
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise ValueError(
                f"seqused_{side}: sequence {at} uses {int(used[at])} rows, expected 0 to its length {int(lengths[at])}"
            )
        lengths = used
    top = int(lengths.max()) if lengths.numel() else 0
    if limit is not None and top > limit:
        raise ValueError(f"max_seqlen_{side}: got {limit}, expected at least the longest sequence, {top}")
    return top if limit is None else limit


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in INTEGERS:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an int")
    if value < least:
        raise ValueError(f"{name}: got {value}, expected at least {least}")
    return value


def cache_layout(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    new: int,
    cache_seqlens: Any,
    page_table: Any,
    batch_idx: Any,
    leftpad: Any,
) -> Cache:
    """The layout of a call on a cache that will hold `new` further keys a sequence, after every check of it."""
    check_tensors(q, k_cache, v_cache, dims=4, k_name="k_cache", v_name="v_cache")
    if v_cache.shape[:2] != k_cache.shape[:2]:
        raise ValueError(
            f"v_cache: has shape {tuple(v_cache.shape)}, expected {tuple(k_cache.shape[:2])} first"
        )
    batch, device = q.shape[0], q.device
    if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int64, device=device)
    used = integers("cache_seqlens", cache_seqlens, (batch,), q)
    pads = None if leftpad is None else integers("cache_leftpad", leftpad, (batch,), q)
    rows = None
    if page_table is None:
        rows = _cache_rows(q, k_cache, batch_idx)
        capacity, page_size = k_cache.shape[1], 0
    else:
        page_table, page_size = _pages(q, k_cache, page_table, batch_idx), k_cache.shape[1]
        capacity = page_table.shape[1] * page_size
    if device.type != "cpu":
        return Cache(q.shape[1], capacity, used, new, pads, rows, page_table, page_size)
    _check_capacity(used, new, capacity, page_size)
    if pads is not None and ((pads < 0) | (pads > used)).any():
        at = int(((pads < 0) | (pads > used)).nonzero()[0])
        raise ValueError(
            f"cache_leftpad: got {int(pads[at])} for sequence {at}, expected 0 to {int(used[at])}"
        )
    if page_table is not None:
        _check_pages(page_table, used + new, page_size, k_cache.shape[0])
    longest = int((used if pads is None else used - pads).max()) + new if batch else 0
    return Cache(q.shape[1], longest, used, new, pads, rows, page_table, page_size)


def _cache_rows(q: Tensor, k_cache: Tensor, batch_idx: Any) -> Tensor | None:
    batch, rows = q.shape[0], k_cache.shape[0]
    if batch_idx is None:
        if rows < batch:
            raise ValueError(f"k_cache: has {rows} rows, expected at least the batch, {batch}")
        return None
    index = integers("cache_batch_idx", batch_idx, (batch,), q)
    if index.device.type == "cpu" and ((index < 0) | (index >= rows)).any():
        raise ValueError(
            f"cache_batch_idx: got {index.tolist()[:8]}, expected 0 to {rows - 1}, the rows of k_cache"
        )
    return index


def _pages(q: Tensor, k_cache: Tensor, page_table: Any, batch_idx: Any) -> Tensor:
    if batch_idx is not None:
        raise ValueError("cache_batch_idx: given with page_table, expected one or the other")
    if isinstance(page_table, Tensor) and page_table.dim() != 2:
        raise ValueError(f"page_table: has shape {tuple(page_table.shape)}, expected (batch, pages)")
    columns = page_table.shape[1] if isinstance(page_table, Tensor) else 1
    if k_cache.shape[1] == 0:
        raise ValueError(f"k_cache: has page size 0 (shape {tuple(k_cache.shape)}), expected at least 1")
    return integers("page_table", page_table, (q.shape[0], columns), q)


def _check_capacity(seqlens: Tensor, new: int, capacity: int, page_size: int) -> None:
    if seqlens.numel() == 0:
        return
    if (seqlens < 0).any():
        raise ValueError(f"cache_seqlens: got {int(seqlens.min())}, expected at least 0")
    need = int(seqlens.max()) + new
    if need > capacity:
        at = int(seqlens.argmax())
        what = f"cache_seqlens: sequence {at} has {int(seqlens[at])} keys and {new} new ones"
        if page_size:
            columns = -(-need // page_size)
            raise ValueError(
                f"{what}, expected page_table to have at least {columns} columns of {page_size} keys"
            )
        raise ValueError(f"{what}, expected at most the capacity {capacity} of k_cache")


def _check_pages(page_table: Tensor, lengths: Tensor, page_size: int, pages: int) -> None:
    """Entries past a sequence's last page may hold anything."""
    used = torch.arange(page_table.shape[1], device=page_table.device) * page_size < lengths[:, None]
    wrong = used & ((page_table < 0) | (page_table >= pages))
    if wrong.any():
        b, column = wrong.nonzero()[0].tolist()
        page = int(page_table[b, column])
        raise ValueError(
            f"page_table: sequence {b} has page {page} in column {column}, expected 0 to {pages - 1}"
        )
