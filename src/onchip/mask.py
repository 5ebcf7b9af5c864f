"""Which keys a query may see: a `Mask` is an AND of optional parts, composable with ``&`` and ``|``.

The parts describe; they do no arithmetic on score tiles beyond `allow`, which answers for one rectangle of
(query, key) pairs. Which tiles are empty, partial or full is `schedule.py`'s question.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from onchip import rules
from onchip.plain import on_device, on_tensors

if TYPE_CHECKING:
    from onchip.problem import Problem


@dataclass(frozen=True)
class Region:
    """A rectangle of (query, key) pairs of some sequences of equal lengths, with the heads [head0, head1)."""

    batch: Tensor  # [g] sequence numbers
    head0: int
    head1: int
    q0: int
    q1: int
    k0: int
    k1: int
    q_len: int
    k_len: int

    def _range(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=self.batch.device)

    @cached_property
    def b(self) -> Tensor:  # [g, 1, 1, 1]
        return self.batch.view(-1, 1, 1, 1)

    @cached_property
    def h(self) -> Tensor:  # [1, heads, 1, 1]
        return self._range(self.head0, self.head1).view(1, -1, 1, 1)

    @cached_property
    def q(self) -> Tensor:  # [1, 1, queries, 1]
        return self._range(self.q0, self.q1).view(1, 1, -1, 1)

    @cached_property
    def k(self) -> Tensor:  # [1, 1, 1, keys]
        return self._range(self.k0, self.k1).view(1, 1, 1, -1)

    def cut(self, tensor: Tensor) -> Tensor:
        """This region of a tensor that broadcasts to (batch, heads, seqlen_q, seqlen_k)."""
        for dim, (start, stop) in enumerate(
            ((self.head0, self.head1), (self.q0, self.q1), (self.k0, self.k1)), 1
        ):
            if tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, start, stop - start)
        return tensor[self.batch] if tensor.shape[0] > 1 else tensor  # last: it copies


class Part(Protocol):
    """One condition of a mask. `allow` broadcasts to [g, heads, queries, keys] of the region."""

    def allow(self, region: Region) -> Tensor: ...
    def check(self, problem: Problem) -> None: ...
    def tensors(self) -> tuple[Tensor, ...]: ...
    def dependence(self, problem: Problem) -> tuple[bool, bool]:
        """Whether it differs between sequences of equal lengths, and between heads."""
        ...


@dataclass(frozen=True, eq=False, repr=False)
class Rows:
    """Keys [lo, hi) for each query, from a rule on the lengths and, where it has one, a value per sequence."""

    name: str
    interval: Callable[[Tensor, int, int, Any], tuple[Any, Any]]  # (q, q_len, k_len, value) -> lo, hi
    value: int | Tensor  # an int, (batch,) or (batch | 1, queries | 1, ...)

    def bounds(self, region: Region) -> tuple[Any, Any]:
        """lo and hi of the region's queries, each None or broadcastable to [g, 1, queries, 1]."""
        value: Any = self.value
        if isinstance(value, Tensor):
            value = value[region.batch] if value.shape[0] > 1 else value
            value = value.view(value.shape[0], 1, 1, 1) if value.dim() == 1 else value
        return self.interval(region.q, region.q_len, region.k_len, value)

    def allow(self, region: Region) -> Tensor:
        lo, hi = self.bounds(region)
        return rules.allow(region.q, region.k, region.q_len, region.k_len, rules.Band(), lo, hi)

    def check(self, problem: Problem) -> None:
        if isinstance(self.value, Tensor):
            _check_batch(self.name, self.value, problem)
        if self.name == "documents":
            _check_positions("cu_seqlens", self.tensors()[0].shape[1], problem)
        if self.name in ("prefix", "padding"):
            top: Any = self.value
            if isinstance(top, Tensor):  # on a GPU a look would be a wait: see `inputs`
                top = int(top.max()) if top.device.type == "cpu" and top.numel() else 0
            if top > problem.seqlen_k:
                raise ValueError(f"{self.name}: got length {top}, expected at most {problem.seqlen_k} keys")

    def __repr__(self) -> str:
        return f"{self.name}({_brief(self.value)})"

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.value,) if isinstance(self.value, Tensor) else ()

    def dependence(self, problem: Problem) -> tuple[bool, bool]:
        return isinstance(self.value, Tensor) and self.value.shape[0] > 1, False


@dataclass(frozen=True, eq=False, repr=False)
class Documents:
    """Query and key see each other iff their ids agree; sequences of ids (batch | 1, seqlen)."""

    ids_q: Tensor
    ids_k: Tensor

    def allow(self, region: Region) -> Tensor:
        ids_q, ids_k = (x[region.batch] if x.shape[0] > 1 else x for x in (self.ids_q, self.ids_k))
        # One list of ids is by key position, where the last query stands at the last key. Queries that stand before
        # the first key (in a packed sequence with more queries than keys) belong to no document.
        position = region.q[0, 0, :, 0] + (region.k_len - region.q_len if self.ids_q is self.ids_k else 0)
        own = ids_q[:, position.clamp(min=0)][:, None, :, None]
        return (own == ids_k[:, None, None, region.k0 : region.k1]) & (position >= 0)[:, None]

    def check(self, problem: Problem) -> None:
        if self.ids_q is self.ids_k:
            _check_positions("ids", self.ids_k.shape[1], problem)
        for name, ids, seqlen in (
            ("ids", self.ids_q, problem.seqlen_q),
            ("ids_k", self.ids_k, problem.seqlen_k),
        ):
            _check_batch(f"documents: {name}", ids, problem)
            fits = ids.shape[1] == seqlen or (name == "ids_k" and problem.fits_keys(ids.shape[1]))
            if self.ids_q is not self.ids_k and not fits:
                raise ValueError(f"documents: {name} has {ids.shape[1]} positions, expected {seqlen}")

    def __repr__(self) -> str:
        return f"documents({_brief(self.ids_k)})"

    def tensors(self) -> tuple[Tensor, ...]:
        return self.ids_q, self.ids_k

    def dependence(self, problem: Problem) -> tuple[bool, bool]:
        return self.ids_q.shape[0] > 1 or self.ids_k.shape[0] > 1, False


@dataclass(frozen=True, eq=False, repr=False)
class Dense:
    """A stored answer for every pair: bool, broadcastable to (batch, heads, seqlen_q, seqlen_k)."""

    visible: Tensor

    def allow(self, region: Region) -> Tensor:
        return region.cut(self.visible)

    def check(self, problem: Problem) -> None:
        problem.check_broadcast("dense", self.visible)

    def __repr__(self) -> str:
        return f"dense({_brief(self.visible)})"

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.visible,)

    def dependence(self, problem: Problem) -> tuple[bool, bool]:
        return self.visible.shape[0] > 1, self.visible.shape[1] > 1


@dataclass(frozen=True, eq=False, repr=False)
class Where:
    """A plain function of (batch, head, q, k, *tensors)."""

    fn: Callable[..., Any]
    args: tuple[Tensor, ...]

    def allow(self, region: Region) -> Tensor:
        try:
            visible = on_tensors(self.fn)(region.b, region.h, region.q, region.k, *self.args)
            visible = on_device(visible, region.batch.device)
            full = (
                region.batch.numel(),
                region.head1 - region.head0,
                region.q1 - region.q0,
                region.k1 - region.k0,
            )
            visible = visible.view(*(1,) * (4 - visible.dim()), *visible.shape)
            visible.expand(full)
        except Exception as error:  # whatever the user's function does
            what = (
                "branches on a value (if, and, or, not, a chained comparison)"
                if "Boolean" in str(error)
                else error
            )
            raise ValueError(
                f"where: {self._label} {what}; it takes tensors of indices: use onchip.plain.where, & and |, and read "
                "tensors within their shapes"
            ) from error
        if visible.dtype is not torch.bool:
            raise TypeError(f"where: {self._label} returned {visible.dtype}, expected bool (a comparison)")
        return visible

    @property
    def _label(self) -> str:
        return getattr(self.fn, "__name__", repr(self.fn))

    def check(self, problem: Problem) -> None:
        pass

    def __repr__(self) -> str:
        return f"where({self._label})"

    def tensors(self) -> tuple[Tensor, ...]:
        return self.args

    def dependence(self, problem: Problem) -> tuple[bool, bool]:
        """Read off the shape that the function returns for one pair of every sequence and head."""
        if problem.seqlen_q == 0 or problem.seqlen_k == 0:
            return False, False
        batch = torch.arange(problem.batch, device=problem.device)
        shape = self.allow(Region(batch, 0, problem.heads_q, 0, 1, 0, 1, 1, 1)).shape
        return shape[0] > 1, shape[1] > 1


@dataclass(frozen=True, eq=False, repr=False)
class Blocks:
    """Whole blocks of (tile_m, tile_n) pairs: bool (batch | 1, heads | 1, blocks_q, blocks_k)."""

    visible: Tensor
    tile_m: int
    tile_n: int

    def allow(self, region: Region) -> Tensor:
        blocks = self.visible[region.batch] if self.visible.shape[0] > 1 else self.visible
        blocks = blocks[:, region.head0 : region.head1] if blocks.shape[1] > 1 else blocks
        return blocks[:, :, region.q[0, 0] // self.tile_m, region.k[0, 0] // self.tile_n]

    def check(self, problem: Problem) -> None:
        need = (-(-problem.seqlen_q // self.tile_m), -(-problem.seqlen_k // self.tile_n))
        batch, heads, *blocks = self.visible.shape
        # On a bounded cache the caller vouches that the blocks cover its lengths.
        fits = blocks[0] == need[0] and (blocks[1] == need[1] or (problem.k_bounded and blocks[1] <= need[1]))
        if batch not in (1, problem.batch) or heads not in (1, problem.heads_q) or not fits:
            raise ValueError(
                f"block_sparse: blocks has shape {tuple(self.visible.shape)}, expected (batch | 1, heads | 1, "
                f"{need[0]}, {need[1]}) with batch {problem.batch} and heads {problem.heads_q}: seqlens "
                f"({problem.seqlen_q}, {problem.seqlen_k}) in blocks of ({self.tile_m}, {self.tile_n})"
            )

    def __repr__(self) -> str:
        return f"block_sparse({_brief(self.visible)}, tile=({self.tile_m}, {self.tile_n}))"

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.visible,)

    def dependence(self, problem: Problem) -> tuple[bool, bool]:
        return self.visible.shape[0] > 1, self.visible.shape[1] > 1


@dataclass(frozen=True, eq=False, repr=False)
class Union:
    """Visible where any of the masks says so."""

    masks: tuple[Mask, ...]

    def allow(self, region: Region) -> Tensor:
        visible = self.masks[0].allow(region)
        for mask in self.masks[1:]:
            visible = visible | mask.allow(region)
        return visible

    def check(self, problem: Problem) -> None:
        for mask in self.masks:
            mask.check(problem)

    def __repr__(self) -> str:
        return "(" + " | ".join(map(repr, self.masks)) + ")"

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for mask in self.masks for t in mask.tensors())

    def dependence(self, problem: Problem) -> tuple[bool, bool]:
        return _any_dependence([mask.dependence(problem) for mask in self.masks])


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """AND of its parts; a mask without parts shows every key. Built by the functions of `onchip.masks`.

    What it learns of its tensors is kept until torch changes them in place. Writes that torch does not see (into memory
    shared with numpy, or through ``.data``) need a new mask. A CUDA graph keeps nothing: each replay reads them.
    """

    band: rules.Band | None = None
    rows: tuple[Rows, ...] = ()
    elements: tuple[Documents | Dense | Where, ...] = ()
    blocks: tuple[Blocks, ...] = ()
    unions: tuple[Union, ...] = ()
    cache: dict = field(default_factory=dict, repr=False, compare=False)  # schedules, kept by schedule.py

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return Mask(
            _intersect(self.band, other.band),
            self.rows + other.rows,
            self.elements + other.elements,
            self.blocks + other.blocks,
            self.unions + other.unions,
        )

    def __or__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return Mask(unions=(Union((self, other)),))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The kinds of parts that it has."""
        kinds = ("band", "rows", "elements", "blocks", "unions")
        return tuple(name for name in kinds if getattr(self, name) not in (None, ()))

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Every part but the band, whose arithmetic is on lengths alone."""
        return (*self.rows, *self.elements, *self.blocks, *self.unions)

    def allow(self, region: Region) -> Tensor:
        """Visible pairs of a region: bool, broadcastable to [g, heads, queries, keys]."""
        answers = [part.allow(region) for part in self.parts]
        if self.band is not None or not answers:
            band = self.band or rules.Band()
            answers.append(rules.allow(region.q, region.k, region.q_len, region.k_len, band, None, None))
        return reduce(operator.and_, answers)

    def check(self, problem: Problem) -> None:
        """Raise ValueError where a part does not fit the problem's shapes or device."""
        for part in self.parts:
            for tensor in part.tensors():
                if tensor.device.type != problem.device:
                    raise ValueError(
                        f"mask: has a tensor on {tensor.device}, expected {problem.device} as for q"
                    )
            part.check(problem)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple([t for part in self.parts for t in part.tensors()])

    def dependence(self, problem: Problem) -> tuple[bool, bool]:
        return _any_dependence([part.dependence(problem) for part in self.parts])

    def __bool__(self) -> bool:
        raise TypeError("mask: `and`, `or` and `not` do not combine masks; use & and |")

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts without schedules: its tensors' versions count from anew."""
        return {**self.__dict__, "cache": {}}

    def __repr__(self) -> str:
        parts = [] if self.band is None else [repr(self.band)]
        return f"Mask({' & '.join(parts + [repr(part) for part in self.parts])})"


def _any_dependence(pairs: list[tuple[bool, bool]]) -> tuple[bool, bool]:
    return any(b for b, _ in pairs), any(h for _, h in pairs)


def _intersect(a: rules.Band | None, b: rules.Band | None) -> rules.Band | None:
    if a is None or b is None:
        return a or b
    return rules.Band(*(x if y is None else y if x is None else min(x, y) for x, y in zip(a, b, strict=True)))


def _brief(value: int | Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else str(value)


def _check_batch(name: str, tensor: Tensor, problem: Problem) -> None:
    if tensor.shape[0] not in (1, problem.batch):
        raise ValueError(f"{name}: got {tensor.shape[0]} sequences, expected {problem.batch}")


def _check_positions(name: str, positions: int, problem: Problem) -> None:
    if not problem.fits_keys(positions) or problem.seqlen_q > problem.seqlen_k:
        raise ValueError(
            f"documents: {name} covers {positions} positions, expected seqlen_k = {problem.seqlen_k} and no more than "
            f"that many queries (got {problem.seqlen_q}); pass ids and ids_k where queries and keys are other tokens"
        )
