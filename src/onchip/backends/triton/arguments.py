"""Kernel arguments from a problem and its operands."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from onchip import dropout, rules
from onchip.backends.triton import emit, lists
from onchip.backends.triton.parts import Drop, Place, Rows, Scores, View
from onchip.backends.triton.table import Config
from onchip.layout import Cache, Varlen
from onchip.mask import Rows as RowsPart
from onchip.problem import Operands, Problem
from onchip.schedule import Tiles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def view(tensor: Tensor) -> View:
    """(batch, row, head, dim) or packed (row, head, dim)."""
    strides = tensor.stride() if tensor.dim() == 4 else (0, *tensor.stride())
    return View(tensor, *strides)


def lse_view(lse: Tensor) -> View:
    """(batch, heads, rows), or packed (heads, rows)."""
    batch, head, row = lse.stride() if lse.dim() == 3 else (0, *lse.stride())
    return View(lse, batch, row, head, 1)


def power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@lru_cache(maxsize=16)
def device_facts(index: int) -> tuple[int, int]:
    """(compute capability major, multiprocessors); the interpreter counts as the newest."""
    if INTERPRETED or not torch.cuda.is_available():
        return 9, 4
    properties = torch.cuda.get_device_properties(index)
    major = properties.major if torch.version.hip is None else 0
    return major, properties.multi_processor_count


def descriptor(tensor: Tensor, rows: int, dim: int) -> TensorDescriptor | None:
    """A descriptor of [rows, dim] blocks for the bulk copy engine; None where the engine cannot address the tensor."""
    index = tensor.device.index or 0
    strides = tensor.stride()
    aligned = (
        all(s * tensor.itemsize % 16 == 0 and s > 0 for s in strides[:-1]) and tensor.data_ptr() % 16 == 0
    )
    if device_facts(index)[0] < 9 or not aligned or strides[-1] != 1 or dim > 256 or tensor.numel() == 0:
        return None
    four = tensor if tensor.dim() == 4 else tensor[None]
    batch, row, head, _ = four.stride()
    shape = [four.shape[0], four.shape[2], four.shape[1], four.shape[3]]
    if four.shape[0] == 1:
        batch = max(batch, row * four.shape[1], 16)
        batch += -batch % 16
    return TensorDescriptor(four, shape, [batch, head, row, 1], [1, 1, rows, dim])


def _as_rows(lo: Tensor | None, hi: Tensor | None) -> Rows:
    """Bounds (batch | 1, queries | 1) as int32 with their strides; either may be absent."""
    present = [x for x in (lo, hi) if x is not None]
    if not present:
        return Rows()
    shape = torch.broadcast_shapes(*(x.shape for x in present))
    lo, hi = (None if x is None else x.int().expand(shape).contiguous() for x in (lo, hi))
    return Rows(lo, hi, shape[1] if shape[0] > 1 else 0, 1 if shape[1] > 1 else 0)


@dataclass(frozen=True, eq=False)
class Launch:
    """The arguments that the passes share."""

    problem: Problem
    operands: Operands

    @cached_property
    def dims(self) -> dict[str, int]:
        dim, dim_v = self.problem.dim, self.problem.dim_v
        return {"D": dim, "DIM": max(power(dim), 16), "DV": dim_v, "DIM_V": max(power(dim_v), 16)}

    @cached_property
    def lengths(self) -> tuple[int, int]:
        return self.problem.seqlen_q, self.problem.seqlen_k

    @cached_property
    def place(self) -> Place:
        layout = self.operands.layout
        if isinstance(layout, Varlen):
            return Place(layout.cu_seqlens_q, layout.cu_seqlens_k, layout.used_q, layout.used_k)
        if isinstance(layout, Cache):
            pages = layout.page_table
            if pages is None:
                return Place(lengths=layout.lengths, leftpad=layout.leftpad, index=layout.index)
            return Place(
                lengths=layout.lengths, leftpad=layout.leftpad, page_table=pages, page_stride=pages.stride(0),
                page_size=layout.page_size,
            )  # fmt: skip
        return Place()

    @cached_property
    def band(self) -> rules.Band:
        return self.operands.mask.band or rules.Band()

    def _bounds(self, part: RowsPart) -> Rows:
        """The interval of every query under a rows part."""
        q = torch.arange(max(self.problem.seqlen_q, 1), device=self.operands.q.device).view(1, 1, -1, 1)
        q_len, k_len = self.operands.layout.device_lengths()
        value = part.value
        if isinstance(value, Tensor) and value.dim() == 1:
            value = value.view(-1, 1, 1, 1)
        found = part.interval(q, q_len, k_len, value)
        lo, hi = (None if x is None else torch.as_tensor(x, device=q.device) for x in found)
        return _as_rows(
            *(x if x is None else x.reshape((1,) * (4 - x.dim()) + x.shape)[:, 0, :, 0] for x in (lo, hi))
        )

    @cached_property
    def rows(self) -> Rows:
        """The intersection of the mask's rows parts."""
        lo = hi = None
        for part in self.operands.mask.rows:
            own_lo, own_hi, *_ = self._bounds(part)
            lo = own_lo if lo is None else lo if own_lo is None else torch.maximum(lo, own_lo)
            hi = own_hi if hi is None else hi if own_hi is None else torch.minimum(hi, own_hi)
        return _as_rows(lo, hi)

    @cached_property
    def mask_function(self) -> tuple[Any, Any]:
        function, args = emit.mask_function(self.operands.mask, self._bounds)
        return function, args or None

    @cached_property
    def scores(self) -> Scores:
        score = self.operands.score
        args = None
        if score.mod is not None and score.mod.args:  # type: ignore[union-attr]
            args = tuple(emit.table(t) for t in score.mod.args)  # type: ignore[union-attr]
        fields: dict[str, Any] = {"softcap": score.softcap, "sink": score.sink, "args": args}
        if score.alibi is not None:
            slopes = score.alibi.contiguous()
            fields |= {"alibi": slopes, "alibi_batch": slopes.shape[1] if slopes.dim() == 2 else 0}
        if score.bias is not None:
            four = score.bias.reshape((1,) * (4 - score.bias.dim()) + score.bias.shape)
            strides = (0 if n == 1 else s for n, s in zip(four.shape, four.stride(), strict=True))
            names = ("bias_batch", "bias_head", "bias_row", "bias_key")
            fields |= {"bias": four, **dict(zip(names, strides, strict=True))}
        return Scores(**fields)

    @cached_property
    def mod(self) -> Any:
        mod = self.operands.score.mod
        return None if mod is None else emit.mod_function(mod.fn, mod.args)  # type: ignore[union-attr]

    @cached_property
    def mod_grad(self) -> Any:
        mod = self.operands.score.mod
        return None if mod is None else emit.mod_function(mod.grad, mod.args)  # type: ignore[union-attr]

    @cached_property
    def drop(self) -> Drop | None:
        p = self.problem.dropout
        if p == 0.0:
            return None
        keep_scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
        seed = self.operands.seed
        return Drop(dropout.threshold(p), seed if seed < 2**63 else seed - 2**64, 0, keep_scale)

    def lists(self, chosen: Config, by_key: bool = False) -> tuple[Any, int]:
        return lists.build(self.problem, self.operands, Tiles(chosen.tile_m, chosen.tile_n), by_key)

    @cached_property
    def cleans(self) -> bool:
        """Whether a key or query may be out of sight, and so hold NaN, inside a tile that is visited.

        Not where the last query sees every key and every query sees one: no edge to the left, and no query before
        the first key. Tails past a dense tensor are read as 0; past a packed sequence stands its neighbour.
        """
        band, problem = self.band, self.problem
        others = set(problem.mask_parts) - {"band"}
        edges = band.left, band.top_left, band.top_right
        seen = not others and edges == (None, None, None) and (band.right is None or band.right >= 0)
        return not (seen and problem.layout == "dense" and problem.seqlen_q <= problem.seqlen_k)

    def loops(self, tiles_of: Any, by_key: bool = False) -> dict[str, int]:
        """Which of the loops (masked, unmasked, masked) a kernel needs: FIRST to LAST - 1.

        Without a left edge there is no first one; a list holds its partial tiles in the first; a function without
        a list masks every tile, there too.
        """
        band = rules.flip(self.band) if by_key else self.band
        function = self.mask_function[0]
        edges = (tiles_of, function, self.rows.lo, band.left, band.top_left)
        last = 2 if tiles_of is not None else 1 if function is not None else 3
        return {"FIRST": 0 if any(edge is not None for edge in edges) else 1, "LAST": last}

    def uses_descriptors(self) -> bool:
        return self.problem.layout in ("dense", "varlen")
