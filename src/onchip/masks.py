"""The masks a user names. Each returns a `Mask`; combine them with ``&`` and ``|``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor  # type: ignore[import-not-found]

from onchip import rules
from onchip.mask import Blocks, Dense, Documents, Mask, Rows, Where
from onchip.plain import check_closed

Lengths = int | Tensor

__all__ = [
    "block_sparse",
    "causal",
    "chunked",
    "dense",
    "documents",
    "padding",
    "prefix",
    "sinks",
    "where",
    "window",
]


def causal(align: str = "bottom_right") -> Mask:
    """Each query sees the keys up to its own position.

    ``align="bottom_right"`` lets the last query see the last key (as flash_attn does, and as decoding with a cache
    needs); ``"top_left"`` lets the first query see the first key alone (as torch's ``is_causal`` does). They differ
    only where seqlen_q != seqlen_k.
    """
    if align == "bottom_right":
        return Mask(rules.Band(right=0))
    if align == "top_left":
        return Mask(rules.Band(top_right=0))
    raise ValueError(f"causal: align is {align!r}, expected 'bottom_right' or 'top_left'")


def window(left: int | None, right: int | None) -> Mask:
    """Each query sees ``left`` keys before its own position and ``right`` after it, and its own.

    None means unbounded: ``window(None, 0)`` is causal. A sliding window of w tokens in all is
    ``window(w - 1, 0)``.
    """
    for name, value in (("left", left), ("right", right)):
        if value is not None:
            _check_count(f"window: {name}", value, least=0)
    return Mask(rules.Band(left=left, right=right))


def sinks(n: int) -> Mask:
    """The first n keys, for every query: ``causal() & (window(1023, 0) | sinks(4))`` is streaming attention."""
    _check_count("sinks: n", n, least=0)
    return Mask(rows=(Rows("sinks", _first_keys, n),))


def padding(lengths: Lengths) -> Mask:
    """The first lengths[b] keys of sequence b: (batch,) integers, or one for all."""
    return Mask(rows=(Rows("padding", _first_keys, _check_lengths("padding", lengths)),))


def prefix(lengths: Lengths) -> Mask:
    """Prefix LM: causal, and the first lengths[b] keys of sequence b are visible to each of its queries."""
    return Mask(rows=(Rows("prefix", _prefix, _check_lengths("prefix", lengths)),))


def chunked(size: int) -> Mask:
    """Each query sees the keys of its own chunk of ``size`` positions; combine with `causal` for a decoder."""
    _check_count("chunked: size", size, least=1)
    return Mask(rows=(Rows("chunked", _chunk, size),))


def documents(
    ids: Tensor | None = None, *, ids_k: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Mask:
    """Queries see the keys of their own document, for several documents packed in one sequence.

    ``ids``: integers (seqlen,) or (batch, seqlen), equal within a document (neighbours or not); ``ids_k`` where the
    keys are other tokens. Or ``cu_seqlens``: the documents' boundaries (0, ..., seqlen), the same for each sequence.
    """
    if (ids is None) == (cu_seqlens is None):
        raise ValueError("documents: got both or none of ids and cu_seqlens, expected exactly one")
    if cu_seqlens is not None:
        return Mask(rows=(Rows("documents", _document, _document_bounds(cu_seqlens)),))
    q = _check_ids("ids", ids)
    k = q if ids_k is None else _check_ids("ids_k", ids_k)
    return Mask(elements=(Documents(q, k),))


def dense(visible: Tensor) -> Mask:
    """A bool tensor, True = visible, of at most 4 dims that broadcasts to (batch, heads_q, seqlen_q, seqlen_k)."""
    if not isinstance(visible, Tensor) or visible.dtype is not torch.bool:
        raise TypeError(
            f"dense: got {_kind(visible)}, expected a bool tensor (an additive mask is Score(bias=...))"
        )
    if visible.dim() > 4:
        raise ValueError(
            f"dense: got {visible.dim()} dims, expected at most 4: (batch, heads, seqlen_q, seqlen_k)"
        )
    return Mask(elements=(Dense(visible.view((1,) * (4 - visible.dim()) + visible.shape)),))


def where(fn: Callable[..., Any], *tensors: Tensor) -> Mask:
    """The pairs where ``fn(batch, head, q, k, *tensors)`` holds.

    fn is plain Python arithmetic on integers (min, max, abs, comparisons, & and |), and reads tensors by index:
    ``where(lambda b, h, q, k, ids: ids[b, q] == ids[b, k], ids)``. q and k count from the start of their sequence.
    """
    if not callable(fn):
        raise TypeError(f"where: got {_kind(fn)}, expected a function fn(batch, head, q, k, *tensors)")
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"where: tensors[{i}] is {_kind(tensor)}, expected a tensor")
    check_closed("where", fn)
    return Mask(elements=(Where(fn, tensors),))


def block_sparse(blocks: Tensor, tile: tuple[int, int]) -> Mask:
    """Whole blocks of ``tile = (tile_m, tile_n)`` pairs, True = visible.

    ``blocks``: bool (blocks_q, blocks_k), (heads, ...) or (batch, heads, ...), with ceil(seqlen / tile) blocks to
    each side. `onchip.patterns` makes common maps.
    """
    if not isinstance(blocks, Tensor) or blocks.dtype is not torch.bool:
        raise TypeError(f"block_sparse: blocks is {_kind(blocks)}, expected a bool tensor")
    if blocks.dim() not in (2, 3, 4):
        raise ValueError(f"block_sparse: blocks has {blocks.dim()} dims, expected 2 to 4")
    if not isinstance(tile, tuple) or len(tile) != 2:
        raise TypeError(f"block_sparse: tile is {tile!r}, expected (tile_m, tile_n)")
    for name, size in zip(("tile_m", "tile_n"), tile, strict=True):
        _check_count(f"block_sparse: {name}", size, least=1)
    return Mask(blocks=(Blocks(blocks.view((1,) * (4 - blocks.dim()) + blocks.shape), *tile),))


# Intervals of the Rows parts: (q, q_len, k_len, value) -> lo, hi.


def _first_keys(q, q_len, k_len, lengths):
    return None, lengths


def _prefix(q, q_len, k_len, lengths):
    diagonal = q + (k_len - q_len + 1)
    longer = isinstance(lengths, Tensor)
    return None, torch.maximum(diagonal, lengths) if longer else diagonal.clamp(min=lengths)


def _chunk(q, q_len, k_len, size):
    # Rows above the first key have a negative position: the floor puts them in a chunk without keys.
    start = torch.div(q + (k_len - q_len), size, rounding_mode="floor") * size
    return start, start + size


def _document(q, q_len, k_len, bounds):
    position = q + (k_len - q_len)  # negative: before the first key, in no document; past the end: any
    own = bounds[0, position.clamp(0, max(bounds.shape[1] - 1, 0))]
    return own[..., 0], torch.where(position < 0, 0, own[..., 1])


def _document_bounds(cu_seqlens: Tensor) -> Tensor:
    """[lo, hi) of every position, (1, seqlen, 2)."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"documents: cu_seqlens is {_kind(cu_seqlens)}, expected an int32 or int64 tensor")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(
            f"documents: cu_seqlens has shape {tuple(cu_seqlens.shape)}, expected (documents + 1,)"
        )
    cu = cu_seqlens.long()
    lengths = cu.diff()
    if cu[0] != 0 or (lengths < 0).any():
        raise ValueError(
            f"documents: cu_seqlens is {cu.tolist()[:8]}, expected to start at 0 and never to decrease"
        )
    return torch.stack([cu[:-1], cu[1:]], dim=1).repeat_interleave(lengths, dim=0)[None]


def _check_ids(name: str, ids: Any) -> Tensor:
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex():
        raise TypeError(f"documents: {name} is {_kind(ids)}, expected an integer tensor")
    if ids.dim() not in (1, 2):
        raise ValueError(
            f"documents: {name} has shape {tuple(ids.shape)}, expected (seqlen,) or (batch, seqlen)"
        )
    return ids if ids.dim() == 2 else ids[None]


def _check_lengths(name: str, lengths: Lengths) -> Lengths:
    if isinstance(lengths, Tensor):
        if is_batchedtensor(lengths):
            raise NotImplementedError(f"{name}: under vmap its lengths must be the same for every slice")
        if lengths.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: lengths is {_kind(lengths)}, expected int32 or int64")
        if lengths.dim() != 1:
            raise ValueError(f"{name}: lengths has shape {tuple(lengths.shape)}, expected (batch,)")
        read = lengths.device.type == "cpu" and not torch.compiler.is_compiling()  # see `inputs`
        if read and lengths.numel() and lengths.min() < 0:
            raise ValueError(f"{name}: got length {int(lengths.min())}, expected at least 0")
        return lengths
    _check_count(f"{name}: lengths", lengths, least=0)
    return lengths


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {_kind(value)}, expected an int")
    if not least <= value < 2**31:
        raise ValueError(f"{name} is {value}, expected at least {least} and below 2**31")


def _kind(x: Any) -> str:
    return f"a {x.dtype} tensor" if isinstance(x, Tensor) else f"{type(x).__name__} {x!r}"
