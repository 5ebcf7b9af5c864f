"""Which problem a call states: `Problem` (facts, hashable, no tensors) and `Operands` (its tensors).

Every check of user input that concerns q, k and v stands here, in `inputs.py` (lengths and caches), and in the
`check` methods of masks and scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor  # type: ignore[import-not-found]

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
    k_bounded: bool = False  # seqlen_k is only a bound: the lengths of a cache are on the device

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


@dataclass(frozen=True, eq=False)
class Operands:
    """The tensors of a problem. q, k, v in (batch, seqlen, heads, dim) order, or (total, heads, dim) when packed."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Layout
    mask: Mask
    score: Score
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Output:
    out: Tensor  # shaped as q, with dim_v
    lse: Tensor  # (batch, heads_q, seqlen_q) or (heads_q, total_q), natural log
    rest: Tensor | None = (
        None  # what lse lost to rounding, shaped as it: lse + rest is exact to twice the digits
    )


@dataclass(frozen=True, eq=False)
class Saved:
    """What a backward pass needs besides the operands; `needs` names the gradients that are wanted."""

    out: Tensor
    lse: Tensor
    rest: Tensor | None
    needs: frozenset[str]


@dataclass(frozen=True, eq=False)
class Grads:
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    bias: Tensor | None = None
    alibi: Tensor | None = None
    sink: Tensor | None = None


def state(
    q: Any, k: Any, v: Any, layout: Layout, kind: str, mask: Any, score: Any, **options: Any
) -> Problem:
    """The Problem of a call, after every check of it. q, k, v as in Operands (meta tensors do)."""
    mask, score = check_types(mask, score)
    problem = Problem(
        layout=kind,
        batch=layout.batch,
        seqlen_q=layout.seqlen_q,
        seqlen_k=layout.seqlen_k,
        heads_q=q.shape[-2],
        heads_k=k.shape[-2],
        dim=q.shape[-1],
        dim_v=v.shape[-1],
        dtype=q.dtype,
        device=options.pop("device", None) or q.device.type,
        k_bounded=kind in ("cache", "paged") and q.device.type != "cpu",
        scale=check_scale(options.pop("scale", None), q.shape[-1]),
        dropout=check_dropout(options.pop("dropout", 0.0)),
        mask_parts=tuple(
            name
            for name in ("band", "rows", "elements", "blocks", "unions")
            if getattr(mask, name) not in (None, ())
        ),
        score_parts=tuple(
            name for name in ("softcap", "alibi", "bias", "sink", "mod") if getattr(score, name) is not None
        ),
        blocks=(mask.blocks[0].tile_m, mask.blocks[0].tile_n) if mask.blocks else None,
        **options,
    )
    if problem.mask_parts:
        mask.check(problem)
    if problem.score_parts:
        score.check(problem)
    return problem


def dense_layout(q: Any, k: Any, v: Any) -> Dense:
    """The layout of (batch, seqlen, heads, dim) tensors, after the checks of their shapes and dtypes."""
    check_tensors(q, k, v, dims=4)
    for name, x, axis, want in (
        ("k", k, 0, q.shape[0]),
        ("v", v, 0, q.shape[0]),
        ("v", v, 1, k.shape[1]),
    ):
        if x.shape[axis] != want:
            what = ("batch", "seqlen_k")[axis]
            raise ValueError(f"{name}: has {what} {x.shape[axis]} (shape {tuple(x.shape)}), expected {want}")
    return Dense(q.shape[0], q.shape[1], k.shape[1])


def check_tensors(q: Any, k: Any, v: Any, dims: int, k_name: str = "k", v_name: str = "v") -> None:
    """Rank, dtype, device, dim and head ratio of q, k and v."""
    axes = "(batch, seqlen, heads, dim)" if dims == 4 else "(total, heads, dim)"
    for name, x in (("q", q), (k_name, k), (v_name, v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, expected a tensor {axes}")
        if x.layout is not torch.strided:
            raise TypeError(f"{name}: has layout {x.layout}, expected a strided tensor {axes}")
    facts = tuple((name, x.shape, x.dtype, x.device) for name, x in (("q", q), (k_name, k), (v_name, v)))
    _check_facts(facts, dims, axes)


@lru_cache(maxsize=1024)  # calls repeat their shapes; an error is not kept
def _check_facts(
    facts: tuple[tuple[str, torch.Size, torch.dtype, torch.device], ...], dims: int, axes: str
) -> None:
    (_, q, q_dtype, q_device), (k_name, k, _, _), (v_name, v, _, _) = facts
    for name, shape, dtype, device in facts:
        if len(shape) != dims:
            raise ValueError(f"{name}: has shape {tuple(shape)}, expected {dims} dims: {axes}")
        if dtype not in DTYPES:
            raise TypeError(f"{name}: has dtype {dtype}, expected float16, bfloat16, float32 or float64")
        if dtype is not q_dtype:
            raise TypeError(f"{name}: has dtype {dtype}, expected {q_dtype} as for q")
        if device != q_device:
            raise ValueError(f"{name}: is on {device}, expected {q_device} as for q")
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


def draw_seed(seed: Any, dropout: float) -> int:
    """The Philox key: given, or drawn from torch's default generator so that torch.manual_seed repeats it."""
    if seed is None:
        if dropout == 0:
            return 0
        drawn = torch.randint(0, 2**62, ())
        if is_batchedtensor(drawn):
            raise NotImplementedError("dropout: under vmap one seed serves every slice; pass seed=")
        return int(drawn)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed: got {type(seed).__name__}, expected an int or None")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: got {seed}, expected 0 <= seed < 2**64")
    return seed
