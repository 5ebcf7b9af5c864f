"""The public functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor  # type: ignore[import-not-found]

from onchip import autograd, kept, ops, problem as problems, select
from onchip.autograd import Call
from onchip.inputs import Rotary, cache_layout, varlen_layout
from onchip.layout import Cache, Layout
from onchip.mask import Mask
from onchip.problem import Operands, Problem, check_types
from onchip.score import Score

Result = Tensor | tuple[Tensor, Tensor]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    backend: str | None = None,
    deterministic: bool = True,
) -> Result:
    """Exact softmax attention in O(N) memory.

    >>> out = attention(q, k, v, mask=causal())

    Shapes: q (batch, seqlen_q, heads_q, dim), k (batch, seqlen_k, heads_k, dim), v (batch, seqlen_k, heads_k, dim_v);
    heads_q a multiple of heads_k. ``layout="bhsd"``: heads before seqlen. Any strides. dtype float16, bfloat16,
    float32 or float64, the same for all.
    mask, score: see `onchip.masks` and `Score`. scale: 1/sqrt(dim) by default. dropout: probability in [0, 1] on the
    softmax weights; the same seed gives the same bits on every backend, None draws one from torch's generator (the
    device's in a CUDA graph, of which each replay draws anew).
    backend: None for the first that serves the problem, or a name. deterministic: the same inputs give the same bits.

    Returns out, shaped as q with dim_v; with return_lse also lse (batch, heads_q, seqlen_q), the natural log of the
    softmax's denominator in float32 (float64 for float64). A query that sees no key has out 0 and lse -inf.
    Differentiable in q, k, v, the score's bias, alibi and sink, through out and lse.

    Raises ValueError or TypeError naming the argument that does not fit, NotImplementedError where no backend, or
    not the named one, serves the problem.
    """
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout: got {layout!r}, expected 'bshd' or 'bhsd'")
    q, k, v = _cast(q, k, v)
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) if isinstance(x, Tensor) and x.dim() == 4 else x for x in (q, k, v))
    if ops.traced():
        rest = (mask, score, scale, dropout, seed, deterministic, backend)
        out, lse = ops.attention(q, k, v, (None,) * 4, (None, None), *rest)
    else:
        whole = kept.facts(q, k, v, mask, score, scale, dropout, seed, deterministic, backend)
        call = kept.recall(whole, q, k, v)
        if call is not None:
            out, lse = autograd.apply(call)
        else:
            place, problem = problems.dense(q, k, v, mask, score, scale, dropout, deterministic)
            call = _call(problem, q, k, v, place, mask, score, backend, seed)
            out, lse = autograd.apply(call)
            kept.keep(whole, call)
    out = out.transpose(1, 2) if layout == "bhsd" else out
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    deterministic: bool = True,
) -> Result:
    """`attention` over sequences of different lengths, packed without padding.

    Shapes: q (total_q, heads_q, dim), k (total_k, heads_k, dim), v (total_k, heads_k, dim_v). Sequence b is rows
    cu_seqlens[b] up to cu_seqlens[b + 1]; int32 or int64, (sequences + 1,), from 0 to the total. seqused (sequences,):
    only so many rows of each count; the others of q get out 0, of k are ignored whatever they hold. max_seqlen: the
    longest length that the caller expects, an int or 0-d tensor; a longer sequence is an error. It is
    then the seqlen_q or seqlen_k to which tensors of masks and scores broadcast; else that is the longest length.
    Masks and scores count q and k from the start of their own sequence, and take sequences for batch.

    Returns out (total_q, heads_q, dim_v) and, with return_lse, lse (heads_q, total_q). Otherwise as `attention`.
    """
    q, k, v = _cast(q, k, v)
    if ops.traced():
        lengths, longest = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), (max_seqlen_q, max_seqlen_k)
        rest = (mask, score, scale, dropout, seed, deterministic, backend)
        out, lse = ops.attention(q, k, v, lengths, longest, *rest)
        return (out, lse) if return_lse else out
    place = varlen_layout(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
    )
    problem = problems.state(
        q, k, v, place, "varlen", mask, score, scale=scale, dropout=dropout, deterministic=deterministic
    )
    out, lse = autograd.apply(_call(problem, q, k, v, place, mask, score, backend, seed))
    return (out, lse) if return_lse else out


def attention_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: int | Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    rotary: Rotary | None = None,
    num_splits: int = 0,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Result:
    """Attention of new queries over a cache of keys and values, which new ones may first be appended to, in place.

    Shapes: q (batch, seqlen_q, heads_q, dim); k_cache (rows, capacity, heads_k, dim) and v_cache (..., dim_v), where
    sequence b uses row b or cache_batch_idx[b]; or, with page_table (batch, pages) int32 or int64, pages
    (num_pages, page_size, heads_k, dim) of any size. cache_seqlens: an int or (batch,), the slots in use before the
    append. k, v (batch, seqlen_new, heads_k, dim | dim_v): written to the slots after them. cache_leftpad (batch,):
    the first slot in use, which is key 0. Slots not in use may hold anything.
    rotary turns k and q before use: key i of a sequence stands at position i, the last query at the last key.
    mask: None shows every key in use; `causal()` is what decoding and chunked prefill want. num_splits: a hint to
    split the keys of one query over workers, 0 = automatic.

    Returns out (batch, seqlen_q, heads_q, dim_v) and, with return_lse, lse (batch, heads_q, seqlen_q).
    Inference only: NotImplementedError where a gradient would be lost. Errors leave the cache unchanged.
    """
    _refuse_grad(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    if not isinstance(num_splits, int) or isinstance(num_splits, bool):
        raise TypeError(f"num_splits: got {type(num_splits).__name__}, expected an int")
    if num_splits < 0:
        raise ValueError(f"num_splits: got {num_splits}, expected at least 0")
    q, k, v = _as_cache(q, k_cache, k, v)
    if ops.traced():
        places = (page_table, cache_batch_idx, cache_leftpad)
        rest = (rotary, num_splits, mask, score, scale, backend)
        out, lse = ops.attention_with_cache(q, k_cache, v_cache, k, v, cache_seqlens, places, *rest)
        return (out, lse) if return_lse else out
    new = _check_new(q, k_cache, v_cache, k, v)
    place = cache_layout(q, k_cache, v_cache, new, cache_seqlens, page_table, cache_batch_idx, cache_leftpad)
    kind = "cache" if page_table is None else "paged"
    problem = problems.state(
        q, k_cache, v_cache, place, kind, mask, score, scale=scale, num_splits=num_splits
    )
    call = _call(problem, q, k_cache, v_cache, place, mask, score, backend, None)
    if rotary is not None:
        _check_rotary(rotary, q, place)
    with torch.no_grad():
        out, lse = _append_and_run(call, place, k, v, rotary)
    return (out, lse) if return_lse else out


def _cast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Under autocast, what torch.matmul would do: floating inputs, but not float64, to the autocast dtype."""
    if not torch._C._is_any_autocast_enabled():
        return q, k, v
    kind = q.device.type if isinstance(q, Tensor) else "cpu"
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)

    def cast(x: Any) -> Any:
        eligible = isinstance(x, Tensor) and x.is_floating_point() and x.dtype is not torch.float64
        return x.to(dtype) if eligible else x

    return cast(q), cast(k), cast(v)


def _call(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    place: Layout,
    mask: Mask | None,
    score: Score | None,
    backend: str | None,
    seed: int | Tensor | None,
) -> Call:
    module = select.load(select.choose(problem, backend))
    mask, score = check_types(mask, score)
    operands = Operands(q, k, v, place, mask, score, problems.draw_seed(seed, problem.dropout, q))
    return Call(problem, operands, module, module.tiles(problem))


def _refuse_grad(**tensors: Any) -> None:
    for name, x in tensors.items():
        if torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
            raise NotImplementedError(
                f"{name}: requires grad, and attention_with_cache has no backward; call it under torch.no_grad(), or "
                "attention() for a gradient"
            )


def _check_new(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any) -> int:
    """The number of keys to append."""
    if (k is None) != (v is None):
        raise ValueError("k, v: got one of them, expected both or none")
    if k is None:
        return 0
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{name}: got {type(x).__name__}, expected a tensor (batch, seqlen_new, heads_k, dim)"
            )
        if x.dtype is not cache.dtype:
            raise TypeError(f"{name}: has dtype {x.dtype}, expected {cache.dtype} as for {name}_cache")
        if x.device != cache.device:
            raise ValueError(f"{name}: is on {x.device}, expected {cache.device} as for {name}_cache")
        want = (q.shape[0], k.shape[1] if k.dim() == 4 else -1, cache.shape[-2], cache.shape[-1])
        if tuple(x.shape) != want:
            raise ValueError(
                f"{name}: has shape {tuple(x.shape)}, expected (batch, seqlen_new, heads_k, dim) = {want} as for q and "
                f"{name}_cache"
            )
    return k.shape[1]


def _check_rotary(rotary: Any, q: Tensor, place: Cache) -> None:
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary: got {type(rotary).__name__}, expected onchip.Rotary(cos, sin)")
    rotary.check(q.shape[-1], place.seqlen_k - 1 if q.device.type == "cpu" else None, q.device)


def _rotate(rotary: Rotary, q: Tensor, k: Tensor | None, place: Cache) -> tuple[Tensor, Tensor | None]:
    """q and k turned to their positions: the last of each stands at the last key."""
    turned = []
    for x in (q, k):
        if x is None:
            turned.append(None)
            continue
        positions = (place.lengths - x.shape[1])[:, None] + torch.arange(x.shape[1], device=x.device)
        turned.append(rotary.rotate(x, positions))
    return turned[0], turned[1]


def _append_and_run(
    call: Call, place: Cache, k: Tensor | None, v: Tensor | None, rotary: Rotary | None
) -> tuple[Tensor, Tensor]:
    """Turn q and k, write k and v to their slots, then attend; an error, of a user's function say, takes them back."""
    q, k_cache, v_cache, _, mask, score, seed = call.operands
    before = where = None
    if k is not None:
        _check_storage(k_cache, v_cache)
        if k.device.type == "cpu":
            _check_slots(*_slots(place, k))
    append = getattr(call.backend, "append", None)
    if append is not None and not _has_user_code(call.problem):
        q = append(place, q, k_cache, v_cache, k, v, rotary)
    else:
        if rotary is not None:
            q, k = _rotate(rotary, q, k, place)
        if k is not None and v is not None:
            where = _slots(place, k)
            before = [cache[where] for cache in (k_cache, v_cache)] if _has_user_code(call.problem) else None
            k_cache[where], v_cache[where] = k, v
    call.operands = Operands(q, k_cache, v_cache, place, mask, score, seed)
    try:
        return autograd.apply(call)
    except Exception:
        for cache, old in zip((k_cache, v_cache), before or (), strict=before is not None):
            cache[where] = old
        raise


def _has_user_code(problem: Problem) -> bool:
    return "mod" in problem.score_parts or bool({"elements", "unions"} & set(problem.mask_parts))


def _check_storage(k_cache: Tensor, v_cache: Tensor) -> None:
    """Caches that are appended to hold each slot once."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if 0 in cache.stride() and any(
            stride == 0 and size > 1 for size, stride in zip(cache.shape, cache.stride(), strict=True)
        ):
            raise ValueError(
                f"{name}: is expanded (strides {cache.stride()}), expected storage of its own to append to"
            )
    if k_cache.numel() and k_cache.data_ptr() == v_cache.data_ptr():
        raise ValueError("v_cache: shares its storage with k_cache, expected another tensor to append to")


def _slots(place: Cache, k: Tensor) -> tuple[Tensor, Tensor]:
    """(row, slot) of every new key in the caches."""
    batch = torch.arange(k.shape[0], device=k.device)
    return place.locate(batch, place.lengths - k.shape[1], k.shape[1])


def _check_slots(row: Tensor, slot: Tensor) -> None:
    if torch.stack([row, slot]).flatten(1).unique(dim=1).shape[1] < row.numel():
        raise ValueError(
            "k: two sequences would append to one slot, expected distinct cache_batch_idx or pages"
        )


def _as_cache(q: Any, k_cache: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Under autocast, q and the new keys in the cache's dtype: the cache itself cannot be cast."""
    if any(isinstance(x, Tensor) and is_batchedtensor(x) for x in (q, k_cache, k, v)):
        raise NotImplementedError(
            "attention_with_cache: vmap over it is not implemented; it writes to its cache"
        )
    if not isinstance(k_cache, Tensor) or not isinstance(q, Tensor):
        return q, k, v
    kind = q.device.type
    if (
        not torch._C._is_any_autocast_enabled()
        or not torch.amp.is_autocast_available(kind)
        or not torch.is_autocast_enabled(kind)
    ):
        return q, k, v
    return tuple(
        x.to(k_cache.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in (q, k, v)
    )  # type: ignore
