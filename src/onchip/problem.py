"""Which problem a call states: `Problem` (facts, hashable, no tensors) and `Operands` (its tensors).

Every check of user input that concerns q, k and v stands here, in `inputs.py` (lengths and caches), and in the
`check` methods of masks and scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor  # type: ignore[import-not-found]

from onchip import capture, rules
from onchip.layout import Dense, Layout
from onchip.mask import Mask
from onchip.score import Score

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Problem:
    """The facts on which a backend decides: sizes, dtype, layout, and what is set. seqlens are the longest ones."""

    layout: str  # "dense", "varlen", "cache" or "paged"
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    dim: int
    dim_v: int
    dtype: torch.dtype
    device: str
    scale: float
    dropout: float = 0.0
    deterministic: bool = True
    num_splits: int = 0
    mask_parts: tuple[str, ...] = ()
    score_parts: tuple[str, ...] = ()
    blocks: tuple[int, int] | None = None  # tile of a block-sparse mask
    bounded: tuple[bool, bool] = (False, False)  # the mask's band, to the left and to the right
    k_bounded: bool = False  # seqlen_k is only a bound: the lengths of a cache are on the device

    def __hash__(self) -> int:  # kept: a problem is the key of what each call looks up
        try:
            return self._hash  # type: ignore[attr-defined]
        except AttributeError:
            values = tuple(getattr(self, name) for name in self.__dataclass_fields__)
            object.__setattr__(self, "_hash", hash(values))
            return self._hash  # type: ignore[attr-defined]

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return max(self.heads_q // max(self.heads_k, 1), 1)

    @property
    def accumulate(self) -> torch.dtype:
        """The dtype of the softmax and of every sum."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    def fits_keys(self, size: int) -> bool:
        """Whether something of this size covers the keys; on a bounded cache the caller vouches that it does."""
        return size == self.seqlen_k or (self.k_bounded and size <= self.seqlen_k)

    def check_broadcast(self, name: str, tensor: Tensor) -> None:
        """Raise ValueError unless the tensor broadcasts to (batch, heads_q, seqlen_q, seqlen_k)."""
        full = (self.batch, self.heads_q, self.seqlen_q, self.seqlen_k)
        fits = [size in (1, want) for size, want in zip(reversed(tensor.shape), reversed(full), strict=False)]
        if fits and not fits[0]:
            fits[0] = self.fits_keys(tensor.shape[-1])
        if tensor.dim() > 4 or not all(fits):
            raise ValueError(
                f"{name}: has shape {tuple(tensor.shape)}, expected one that broadcasts to (batch, heads_q, seqlen_q, "
                f"seqlen_k) = {full}"
            )


# Named tuples: a call makes some of each, and a frozen dataclass takes four times as long to make (2 us).


class Operands(NamedTuple):
    """The tensors of a problem. q, k, v in (batch, seqlen, heads, dim) order, or (total, heads, dim) when packed."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Layout
    mask: Mask
    score: Score
    seed: int | Tensor = 0  # or the same 64 bits on q's GPU, which a graph draws anew


class Output(NamedTuple):
    out: Tensor  # shaped as q, with dim_v
    lse: Tensor  # (batch, heads_q, seqlen_q) or (heads_q, total_q), natural log
    # What lse lost to rounding, shaped as it: lse + rest is exact to twice the digits.
    rest: Tensor | None = None


class Saved(NamedTuple):
    """What a backward pass needs besides the operands; `needs` names the gradients that are wanted."""

    out: Tensor
    lse: Tensor
    rest: Tensor | None
    needs: frozenset[str]


class Grads(NamedTuple):
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    bias: Tensor | None = None
    alibi: Tensor | None = None
    sink: Tensor | None = None


def resolved(x: Tensor | None) -> Tensor | None:
    """The tensor as its memory holds it, which is what kernels read: torch may leave a negation to be done (is_neg)."""
    return x.resolve_neg() if x is not None and x.is_neg() else x


def state(
    q: Any,
    k: Any,
    v: Any,
    layout: Layout,
    kind: str,
    mask: Any,
    score: Any,
    *,
    scale: Any = None,
    dropout: Any = 0.0,
    deterministic: bool = True,
    num_splits: int = 0,
    device: str | None = None,
) -> Problem:
    """The Problem of a call, after every check of it. q, k, v as in Operands (meta tensors do)."""
    mask, score = check_types(mask, score)
    dim = q.shape[-1]
    problem = _problem(
        kind, layout.batch, layout.seqlen_q, layout.seqlen_k, q.shape[-2], k.shape[-2], dim, v.shape[-1], q.dtype,
        device or q.device.type, check_scale(scale, dim), check_dropout(dropout), deterministic, num_splits, mask.names,
        score.names, _block_tile(mask), _bounded(mask), kind in ("cache", "paged") and q.device.type != "cpu",
    )  # fmt: skip
    check_fit(problem, mask, score)
    return problem


def _bounded(mask: Mask) -> tuple[bool, bool]:
    return (False, False) if mask.band is None else rules.bounded(mask.band)


def _block_tile(mask: Mask) -> tuple[int, int] | None:
    return (mask.blocks[0].tile_m, mask.blocks[0].tile_n) if mask.blocks else None


def check_fit(problem: Problem, mask: Mask, score: Score) -> None:
    """Raise where a tensor of the mask or score does not fit the problem."""
    if problem.mask_parts:
        mask.check(problem)
    if problem.score_parts:
        score.check(problem)


_problem = lru_cache(maxsize=4096)(Problem)  # calls repeat theirs


def dense_layout(q: Any, k: Any, v: Any) -> Dense:
    """The layout of (batch, seqlen, heads, dim) tensors, after the checks of their shapes and dtypes."""
    check_tensors(q, k, v, dims=4)
    return _dense_layout(q.shape, k.shape, v.shape)


@lru_cache(maxsize=4096)
def _dense_layout(q: torch.Size, k: torch.Size, v: torch.Size) -> Dense:
    for name, shape, axis, want in (("k", k, 0, q[0]), ("v", v, 0, q[0]), ("v", v, 1, k[1])):
        if shape[axis] != want:
            what = ("batch", "seqlen_k")[axis]
            raise ValueError(f"{name}: has {what} {shape[axis]} (shape {tuple(shape)}), expected {want}")
    return Dense(q[0], q[1], k[1])


def dense(
    q: Any, k: Any, v: Any, mask: Any, score: Any, scale: Any, dropout: Any, deterministic: bool
) -> tuple[Dense, Problem]:
    """`dense_layout` and `state` of a dense call in one look-up: calls repeat their facts."""
    check_strided(("q", "k", "v"), (q, k, v), 4)
    mask, score = check_types(mask, score)
    place, problem = _dense(
        (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device), mask.names,
        score.names, _block_tile(mask), _bounded(mask), scale, dropout, deterministic,
    )  # fmt: skip
    check_fit(problem, mask, score)
    return place, problem


@lru_cache(maxsize=4096, typed=True)  # an error is not kept; typed: True is no scale, though it equals 1
def _dense(
    shapes: tuple[torch.Size, ...],
    dtypes: tuple[torch.dtype, ...],
    devices: tuple[torch.device, ...],
    mask_parts: tuple[str, ...],
    score_parts: tuple[str, ...],
    blocks: tuple[int, int] | None,
    bounded: tuple[bool, bool],
    scale: Any,
    dropout: Any,
    deterministic: bool,
) -> tuple[Dense, Problem]:
    _check_facts(("q", "k", "v"), shapes, dtypes, devices, 4)
    q, _, v = shapes
    place = _dense_layout(*shapes)
    problem = _problem(
        "dense", place.batch, place.seqlen_q, place.seqlen_k, q[2], shapes[1][2], q[3], v[3], dtypes[0],
        devices[0].type, check_scale(scale, q[3]), check_dropout(dropout), deterministic, 0, mask_parts,
        score_parts, blocks, bounded,
    )  # fmt: skip
    return place, problem


def check_tensors(q: Any, k: Any, v: Any, dims: int, k_name: str = "k", v_name: str = "v") -> None:
    """Rank, dtype, device, dim and head ratio of q, k and v."""
    names = ("q", k_name, v_name)
    check_strided(names, (q, k, v), dims)
    _check_facts(
        names, (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype),
        (q.device, k.device, v.device), dims,
    )  # fmt: skip


def check_strided(names: tuple[str, str, str], tensors: tuple[Any, Any, Any], dims: int) -> None:
    for name, x in zip(names, tensors):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, expected a tensor {_axes(dims)}")
        if x.layout is not torch.strided or x.is_nested:
            kind = "is nested" if x.is_nested else f"has layout {x.layout}"
            raise TypeError(f"{name}: {kind}, expected a strided tensor {_axes(dims)}")


def _axes(dims: int) -> str:
    return "(batch, seqlen, heads, dim)" if dims == 4 else "(total, heads, dim)"


@lru_cache(maxsize=4096)  # calls repeat their shapes; an error is not kept
def _check_facts(
    names: tuple[str, str, str],
    shapes: tuple[torch.Size, ...],
    dtypes: tuple[torch.dtype, ...],
    devices: tuple[torch.device, ...],
    dims: int,
) -> None:
    for name, shape, dtype, device in zip(names, shapes, dtypes, devices, strict=True):
        if len(shape) != dims:
            raise ValueError(f"{name}: has shape {tuple(shape)}, expected {dims} dims: {_axes(dims)}")
        if dtype not in DTYPES:
            raise TypeError(f"{name}: has dtype {dtype}, expected float16, bfloat16, float32 or float64")
        if dtype is not dtypes[0]:
            raise TypeError(f"{name}: has dtype {dtype}, expected {dtypes[0]} as for q")
        if device != devices[0]:
            raise ValueError(f"{name}: is on {device}, expected {devices[0]} as for q")
    (_, k_name, v_name), (q, k, v) = names, shapes
    heads_q, heads_k = q[-2], k[-2]
    if q[-1] == 0:
        raise ValueError(f"q: has dim 0 (shape {tuple(q)}), expected at least 1")
    if k[-1] != q[-1]:
        raise ValueError(f"{k_name}: has dim {k[-1]}, expected {q[-1]} as for q")
    if v[-2] != heads_k:
        raise ValueError(f"{v_name}: has {v[-2]} heads, expected {heads_k} as for {k_name}")
    if heads_q != heads_k and (heads_k == 0 or heads_q % heads_k):
        raise ValueError(
            f"q, {k_name}: have {heads_q} and {heads_k} heads, expected heads_q a multiple of heads_k"
        )


def check_types(mask: Any, score: Any) -> tuple[Mask, Score]:
    if mask is not None and not isinstance(mask, Mask):
        raise TypeError(
            f"mask: got {type(mask).__name__}, expected a Mask such as onchip.causal() or onchip.dense(t)"
        )
    if score is not None and not isinstance(score, Score):
        raise TypeError(f"score: got {type(score).__name__}, expected onchip.Score(...)")
    return _SHOW_ALL if mask is None else mask, _PLAIN if score is None else score


_SHOW_ALL, _PLAIN = Mask(), Score()


def check_scale(scale: Any, dim: int) -> float:
    """1/sqrt(dim) unless given; 0 and negative scales are valid."""
    if scale is None:
        return 1.0 / math.sqrt(dim)
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale: got {type(scale).__name__}, expected a float or None")
    if not math.isfinite(scale):
        raise ValueError(f"scale: got {scale}, expected a finite number")
    return float(scale)


def check_dropout(dropout: Any) -> float:
    if isinstance(dropout, bool) or not isinstance(dropout, int | float):
        raise TypeError(f"dropout: got {type(dropout).__name__}, expected a float")
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"dropout: got {dropout}, expected a probability in [0, 1]")
    return float(dropout)


def draw_seed(seed: Any, dropout: float, q: Tensor) -> int | Tensor:
    """The Philox key: given, or drawn from torch's default generator so that torch.manual_seed repeats it.

    In a call that is captured as a CUDA graph it is a tensor, of the device's generator: each replay draws anew.
    """
    if seed is None:
        if dropout == 0:
            return 0
        if capture.capturing(q.device.type):
            seed = torch.randint(0, 2**62, (1,), device=q.device)
        else:
            seed = torch.randint(0, 2**62, (), device="cpu")
    if isinstance(seed, Tensor):
        return _read_seed(seed, q)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed: got {type(seed).__name__}, expected an int or None")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: got {seed}, expected 0 <= seed < 2**64")
    return seed


def _read_seed(seed: Tensor, q: Tensor) -> int | Tensor:
    """The number, but on q's GPU the tensor as it is, since a look would wait."""
    if is_batchedtensor(seed):
        raise NotImplementedError("dropout: under vmap one seed serves every slice; pass seed=")
    if seed.dtype is not torch.int64 or seed.numel() != 1:
        raise ValueError(f"seed: got {seed.dtype} {tuple(seed.shape)}, expected an int or one int64")
    return seed if seed.is_cuda and seed.device == q.device else int(seed) % 2**64
