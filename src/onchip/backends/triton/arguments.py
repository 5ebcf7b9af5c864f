"""Kernel arguments from a problem and its operands."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from onchip import dropout, rules
from onchip.backends.compiled import arguments, emit, intervals, launch, lists
from onchip.backends.compiled.intervals import Rows
from onchip.backends.compiled.relaunch import described, fields_of
from onchip.backends.compiled.terms import Scores
from onchip.backends.triton.parts import Drop, Place, View
from onchip.backends.triton.planning import device_facts
from onchip.layout import Cache, Dense, Layout
from onchip.problem import Operands, Problem
from onchip.tiles import Tiles

_DENSE, _PLAIN = Place(), Scores()


def four_strides(tensor: Tensor) -> tuple[int, ...]:
    """(batch, row, head, dim); packed tensors have no batch."""
    return tensor.stride() if tensor.dim() == 4 else (0, *tensor.stride())


def make_view(fields: tuple) -> View:
    """`View(*fields)` at half of its time."""
    return tuple.__new__(View, fields)


def view(tensor: Tensor) -> View:
    """(batch, row, head, dim) or packed (row, head, dim)."""
    return make_view((tensor, *four_strides(tensor)))


def with_values(problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """The problem with values of one zero in place of none."""
    values = operands.k.new_zeros((*operands.k.shape[:-1], 1))
    return replace(problem, dim_v=1), operands._replace(v=values)


def power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@lru_cache(maxsize=256)
def _dims(dim: int, dim_v: int) -> dict[str, int]:
    """The head dims, and the widths of tiles that hold them.

    Neither tile is narrower than 128 bytes of half precision where the other is not. Tiles of two widths lie in shared
    memory in two patterns, and where K and V share an address, ptxas (12.8, of Triton 3.6) then built descriptors of V
    from registers that nothing had set: dims (40, 3) gave wrong results.
    """
    least = max(16, min(64, power(max(dim, dim_v))))
    return {"D": dim, "DIM": max(power(dim), least), "DV": dim_v, "DIM_V": max(power(dim_v), least)}


@lru_cache(maxsize=4096)
def _geometry(
    shape: torch.Size, strides: tuple[int, ...], itemsize: int, rows: int, dim: int, major: int
) -> dict[str, Any] | None:
    """Fields of a descriptor of [rows, dim] blocks; None where the bulk copy engine cannot address such a tensor."""
    aligned = all(s * itemsize % 16 == 0 and s > 0 for s in strides[:-1])
    if major < 9 or not aligned or strides[-1] != 1 or dim > 256 or 0 in shape:
        return None
    batches, length, heads, depth = shape if len(shape) == 4 else (1, *shape)
    batch, row, head, _ = strides if len(strides) == 4 else (0, *strides)
    if batches == 1:
        batch = max(batch, row * length, 16)
        batch += -batch % 16
    like = torch.empty(0, dtype={2: torch.float16, 4: torch.float32}[itemsize], device="cpu")
    return fields_of(
        TensorDescriptor(like, [batches, heads, length, depth], [batch, head, row, 1], [1, 1, rows, dim])
    )


def _row(tensor: Tensor | None) -> Tensor | None:
    """A tensor whose last elements are neighbours, as kernels read lengths and tables."""
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()


def cache_place(layout: Cache) -> Place:
    used, pads = _row(layout.used), _row(layout.pads)
    pages = _row(layout.page_table)
    if pages is None:
        return Place(used=used, leftpad=pads, index=_row(layout.rows))
    return Place(
        used=used, leftpad=pads, page_table=pages, page_stride=pages.stride(0), page_size=layout.page_size
    )


def _place(layout: Layout) -> Place:
    if isinstance(layout, Dense):
        return _DENSE
    if isinstance(layout, Cache):
        return cache_place(layout)
    return Place(*(_row(x) for x in (layout.cu_seqlens_q, layout.cu_seqlens_k, layout.used_q, layout.used_k)))


class Launch:
    """The arguments that the passes share."""

    def __init__(self, problem: Problem, operands: Operands):
        self.problem, self.operands = problem, operands
        self.place = _place(operands.layout)
        self.new = operands.layout.new if isinstance(operands.layout, Cache) else 0
        self.key = launch.key(problem, operands, None if self.place is _DENSE else self.place)

    @property
    def small_tensors(self) -> list[Tensor]:
        """Of lengths, pages and the seed."""
        found = [] if self.place is _DENSE else [x for x in self.place if isinstance(x, Tensor)]
        seed = self.operands.seed
        return found if isinstance(seed, int) else [*found, seed]

    @property
    def seed(self) -> tuple[int | Tensor, int | None]:
        """Its low and high word, as int32; or the tensor that holds it, and None."""
        seed = self.operands.seed
        if not isinstance(seed, int):
            return seed, None
        if seed == 0:
            return 0, 0
        return (seed + 2**31) % 2**32 - 2**31, ((seed >> 32) + 2**31) % 2**32 - 2**31

    def geometries(self, pair: tuple[Tensor, Tensor], rows: int) -> tuple[dict, dict] | None:
        """Fields of [rows, dim] and [rows, dim_v] descriptors of two tensors; None where one cannot have any."""
        if self.problem.layout not in ("dense", "varlen"):
            return None
        a, b = pair
        major = device_facts(a.device.index or 0).major
        first = _geometry(a.shape, a.stride(), a.itemsize, rows, self.dims["DIM"], major)
        second = _geometry(b.shape, b.stride(), b.itemsize, rows, self.dims["DIM_V"], major)
        return None if first is None or second is None else (first, second)

    def descriptors(self, pair: tuple[Tensor, Tensor], rows: int, again: bool = False) -> tuple[Any, Any]:
        """For the bulk copy engine: of two tensors, of dim and dim_v, both or none.

        again: as `Step.again` takes them.
        """
        fields = self.geometries(pair, rows)
        if fields is None or any(x.data_ptr() % 16 for x in pair):
            return None, None
        if again and self.problem.layout == "dense":  # the rows of packed tensors differ from call to call
            return pair
        (a, b), (of_a, of_b) = pair, fields
        return described(TensorDescriptor, a, of_a), described(TensorDescriptor, b, of_b)

    @property
    def dims(self) -> dict[str, int]:
        return _dims(self.problem.dim, self.problem.dim_v)

    @property
    def lengths(self) -> tuple[int, int]:
        return self.problem.seqlen_q, self.problem.seqlen_k

    @cached_property
    def band(self) -> rules.Band:
        return self.operands.mask.band or rules.Band()

    @cached_property
    def rows(self) -> Rows:
        return intervals.rows(self.problem, self.operands)

    def mask_function(self, tiles: Tiles | None) -> tuple[Any, Any]:
        """What the mask asks of pairs, compiled, and its arguments; with `tiles`, only of pairs in listed tiles."""
        mask = self.operands.mask
        if tiles is not None and mask.blocks and lists.tell_blocks(self.problem):
            cut = tuple(b for b in mask.blocks if b.tile_m % tiles.tile_m or b.tile_n % tiles.tile_n)
            if cut != mask.blocks:
                mask = replace(mask, blocks=cut)
                return arguments.mask_function(self.problem, self.operands._replace(mask=mask))
        return self._whole_function

    @cached_property
    def _whole_function(self) -> tuple[Any, Any]:
        return arguments.mask_function(self.problem, self.operands)

    @property
    def scores(self) -> Scores:
        score = self.operands.score
        if self.problem.score_parts in launch.FEW_SCORES:
            return (
                _PLAIN
                if not self.problem.score_parts
                else Scores(softcap=score.softcap, sink=_row(score.sink))
            )
        return self._scores

    @cached_property
    def _scores(self) -> Scores:
        return arguments.scores(self.operands)

    @cached_property
    def mod(self) -> Any:
        return arguments.mod(self.operands)

    @cached_property
    def mod_grad(self) -> Any:
        mod = self.operands.score.mod
        return None if mod is None else emit.mod_function(mod.slope_fn, mod.args)  # type: ignore[union-attr]

    @cached_property
    def drop(self) -> Drop | None:
        p = self.problem.dropout
        if p == 0.0:
            return None
        keep_scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
        return Drop(dropout.threshold(p), keep_scale)

    @cached_property
    def cleans(self) -> bool:
        """Whether a key or query may be out of sight, and so hold NaN, inside a tile that is visited.

        Not where a band shows each query its own key of as many, nor where the last query sees every key and every
        query sees one. Tails past a dense tensor are read as 0; past a packed sequence stands its neighbour.
        """
        band, problem = self.band, self.problem
        if set(problem.mask_parts) - {"band"} or problem.layout != "dense":
            return True
        if problem.seqlen_q == problem.seqlen_k:
            return any(edge is not None and edge < 0 for edge in band)
        no_edge = (band.left, band.top_left, band.top_right) == (None, None, None)
        seen = no_edge and (band.right is None or band.right >= 0)
        return not (seen and problem.seqlen_q <= problem.seqlen_k)

    def loops(self, tiles: Tiles, tiles_of: Any, function: Any, by_key: bool = False) -> dict[str, int]:
        """Which of the loops (masked, unmasked, masked) a kernel needs: FIRST to LAST - 1.

        Without a left edge there is no first one; a list holds its partial tiles in the first, and has none where whole
        blocks are the mask; a function without a list masks every tile, there too.
        """
        if tiles_of is not None:
            length, tile = (
                (self.problem.seqlen_q, tiles.tile_m) if by_key else (self.problem.seqlen_k, tiles.tile_n)
            )
            tail = self.problem.layout != "dense" or length % tile
            whole = self.problem.mask_parts == ("blocks",) and function is None and not tail
            return {"FIRST": 1 if whole else 0, "LAST": 2}
        band = rules.flip(self.band) if by_key else self.band
        edges = (function, self.rows.lo, band.left, band.top_left)
        # The last queries of a dense tensor need no mask in the backward direction: see the kernel.
        bare = by_key and self.problem.layout == "dense" and self.operands.score.mod is None
        right_edge = (band.right, band.top_right) != (None, None) or not bare
        last = 1 if function is not None else 3 if right_edge else 2
        return {"FIRST": 0 if any(edge is not None for edge in edges) else 1, "LAST": last}
