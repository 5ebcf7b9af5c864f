"""onchip as an attention implementation of Hugging Face transformers (5.x).

    from onchip.integrations.transformers import register

    register()
    model = AutoModel.from_pretrained(path, attn_implementation="onchip")

transformers asks two things of an implementation: a mask function, called once per forward with a description of who
sees whom, and an attention function, called by every layer with q, k, v and what the mask function returned. Causal,
bidirectional and sliding-window patterns with padding on either side stay a description of O(seqlen) numbers; any
other pattern becomes the boolean (batch, 1, seqlen_q, seqlen_k) tensor that transformers builds for its `sdpa`
implementation, with a warning that says so. What the attention function does not understand it refuses by name.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

import onchip

# Keyword arguments that reach every layer and do not bear on attention: positions are already in q, k and the mask.
UNRELATED = {
    "deterministic",  # onchip is so by default
    "max_length_k",  # told by cu_seq_lens
    "max_length_q",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",  # a model's own argument, which some hand down
    "seq_idx",  # of recurrent layers beside attention's
    "use_cache",
}


def register(name: str = "onchip") -> None:
    """Make `attn_implementation=name` select onchip, in every model that uses transformers' attention interface."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, visible_keys)


class Visible(Tensor):
    """Who sees whom, as an onchip mask behind the shape that transformers expects: (batch, 1, seqlen_q, seqlen_k).

    It has no elements, so a model that reads or edits its mask gets a NotImplementedError and not a wrong answer.
    `keys`: the leading keys to attend to (a static cache has unused slots behind them).
    """

    mask: onchip.Mask | None
    keys: int

    @staticmethod
    def of(shape: tuple[int, ...], device: Any, mask: onchip.Mask | None, keys: int) -> Visible:
        made: Any = Tensor._make_wrapper_subclass(
            Visible, shape, dtype=torch.bool, device=torch.device(device)
        )
        made.mask, made.keys = mask, keys
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(
            f"onchip: this model computes with its attention mask ({func}), which has no elements"
        )

    def __repr__(self) -> str:  # Tensor's own would read elements
        return f"Visible(shape={tuple(self.shape)}, keys={self.keys})"


def visible_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask function (transformers fixes its signature): a `Visible`, or a bool tensor for an unknown pattern.

    Query i is at position q_offset + i, key j at kv_offset + j; attention_mask (batch, positions) is True at tokens.
    """
    if unknown := kwargs.keys() - {
        "local_size",
        "dtype",
        "config",
    }:  # the window again; for other kinds of masks
        raise NotImplementedError(f"onchip: a mask with {', '.join(sorted(unknown))}, which is not supported")
    common = (batch_size, q_length, kv_length, cast(int, q_offset), kv_offset, mask_function, attention_mask)
    if torch.compiler.is_compiling():  # a graph can neither look into closures nor carry a Visible
        causal = mask_function is causal_mask_function and allow_is_causal_skip
        full = mask_function is bidirectional_mask_function and allow_is_bidirectional_skip
        if (causal or full) and attention_mask is None and kv_length == q_length:
            return None  # `implied_mask` knows, as transformers' own attention does
        return sdpa_mask(*common, allow_is_causal_skip=False, use_vmap=use_vmap, device=device)
    found = pattern(mask_function)
    # Without leave to skip, the model needs a real tensor; for packed sequences transformers never gives leave.
    if found and (allow_is_causal_skip or allow_is_bidirectional_skip or found.ids is not None):
        end = int(q_offset) + q_length - kv_offset  # one past the last query's own key
        keys = min(end, kv_length) if found.right == 0 else kv_length
        # Bands and chunks are aligned so that the last query is at the last key, chunks also with the first key, which
        # a cache that forgets moves; without them that does not matter.
        aligned = keys == end and (found.chunk is None or kv_offset % found.chunk == 0)
        if aligned or found == Pattern():
            tokens = None if attention_mask is None else token_mask(attention_mask[:, kv_offset:], keys)
            parts = [part for part in (*found.masks(), tokens) if part is not None]
            mask = reduce(operator.and_, parts) if parts else None
            shape = (batch_size, 1, q_length, kv_length)
            return Visible.of(shape, device, mask, keys)
    if q_length > 1:
        name = getattr(mask_function, "__qualname__", repr(mask_function))
        size = batch_size * q_length * kv_length
        warnings.warn(f"onchip: mask {name} is stored as a boolean tensor of {size} bytes", stacklevel=2)
    return sdpa_mask(*common, allow_is_causal_skip=False, use_vmap=use_vmap, device=device)


class Pattern(NamedTuple):
    """What a mask function of transformers shows: how far a query sees to the left and right (None = all the way), its
    chunk, its document (ids (batch, seqlen)). remapped: positions count from the start of each document."""

    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    ids: Tensor | None = None
    remapped: bool = False

    def masks(self) -> list[onchip.Mask]:
        if self.left is not None and self.left < 0:
            return [onchip.sinks(0)]  # no key at all
        bounded = self.left is not None or self.right is not None
        parts = [onchip.window(self.left, self.right)] if bounded else []
        parts += [] if self.chunk is None else [onchip.chunked(self.chunk)]
        return parts + ([] if self.ids is None else [onchip.documents(self.ids)])


def pattern(mask_function: Callable) -> Pattern | None:
    """The Pattern of a mask function; None when that does not describe it."""
    found = _pattern(mask_function)
    # A window of 0, of a model that has switched its window off: with causal it shows nothing, alone what is ahead.
    if found is not None and found.left is not None and found.left < 0 and found.right is None:
        return None
    # Distances within a document are the same wherever positions count from; chunks are not.
    if found is not None and found.remapped and (found.ids is None or found.chunk is not None):
        return None
    return found


def _pattern(mask_function: Callable) -> Pattern | None:
    """transformers composes its mask functions from closures; they are recognised by name, so one that is renamed in
    another version merely becomes a boolean tensor."""
    if mask_function is causal_mask_function:
        return Pattern(right=0)
    if mask_function is bidirectional_mask_function:
        return Pattern()
    if not inspect.isfunction(mask_function) or mask_function.__module__ != causal_mask_function.__module__:
        return None
    closure = inspect.getclosurevars(mask_function).nonlocals
    match mask_function.__qualname__.split(".")[0]:
        case "sliding_window_overlay":
            return Pattern(left=closure["sliding_window"] - 1)
        case "sliding_window_bidirectional_overlay":
            return Pattern(closure["sliding_window"], closure["sliding_window"])
        case "chunked_overlay" if not closure["left_padding"].any():
            return Pattern(chunk=closure["chunk_size"])
        case "packed_sequence_mask_function":
            return Pattern(ids=closure["packed_sequence_mask"])
        case "remap_positions_for_packed_sequence":
            inner = _pattern(closure["mask_function"])
            return None if inner is None else inner._replace(remapped=True)
        case "and_masks":
            return _all(closure["mask_functions"])
    return None


def _all(mask_functions: tuple[Callable, ...]) -> Pattern | None:
    parts = [_pattern(part) for part in mask_functions]
    known = [part for part in parts if part is not None]
    ids = [part.ids for part in known if part.ids is not None]
    chunks = [part.chunk for part in known if part.chunk is not None]
    if len(known) < len(parts) or len(ids) > 1 or len(chunks) > 1:
        return None
    left, right = (min_bound(side) for side in zip(*(part[:2] for part in known), strict=True))
    remapped = any(part.remapped for part in known)
    return Pattern(left, right, chunks[0] if chunks else None, ids[0] if ids else None, remapped)


def min_bound(bounds: tuple[int | None, ...]) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)


def token_mask(tokens: Tensor, keys: int) -> onchip.Mask | None:
    """The mask that hides the keys which are no tokens; None when there are none. tokens (batch, positions) bool."""
    tokens = torch.nn.functional.pad(tokens[:, :keys], (0, max(0, keys - tokens.shape[1])))
    if tokens.all():
        return None
    lengths = tokens.sum(-1)
    if torch.equal(tokens, torch.arange(keys, device=tokens.device) < lengths[:, None]):
        return onchip.padding(lengths)
    return onchip.where(lambda batch, head, q, k, tokens: tokens[batch, k], tokens)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function (transformers fixes its signature).

    query (batch, heads_q, seqlen_q, dim), key and value (batch, heads_k, seqlen_k, dim) -> (batch, seqlen_q, heads_q,
    dim) and None for the attention weights, which are never stored. Beside a mask is_causal says nothing, as in
    transformers' own eager and sdpa (Moonshine then passes False). Raises NotImplementedError naming any argument
    that would change the result and is not supported.
    """
    for name, given in kwargs.items():
        if name not in UNRELATED and given is not None and given is not False:
            raise NotImplementedError(
                f"onchip: {type(module).__name__} passes {name}, which is not supported"
            )
    bias = position_bias
    if attention_mask is None:
        mask = implied_mask(module, query.shape[2], key.shape[2], is_causal, sliding_window)
    elif isinstance(attention_mask, Visible):
        mask = attention_mask.mask
        if key.shape[2] != attention_mask.shape[3]:
            raise NotImplementedError(
                f"onchip: a mask for {attention_mask.shape[3]} keys, but {key.shape[2]} keys"
            )
        key, value = key[:, :, : attention_mask.keys], value[:, :, : attention_mask.keys]
    elif attention_mask.ndim != 4:
        raise NotImplementedError(
            f"onchip: attention_mask of shape {tuple(attention_mask.shape)}; expected 4 dimensions"
        )
    elif attention_mask.dtype == torch.bool:
        mask = onchip.dense(attention_mask)
    else:  # an additive mask
        mask, bias = None, attention_mask if bias is None else bias + attention_mask
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        packed = packed_mask(module, cu_seq_lens_q, cu_seq_lens_k)
        mask = packed if mask is None else mask & packed
    scored = softcap is not None or bias is not None or s_aux is not None
    out = onchip.attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        mask=mask,
        score=onchip.Score(softcap=softcap, bias=bias, sink=s_aux) if scored else None,
        scale=scaling,
        dropout=dropout,
    )
    return cast(Tensor, out), None


def packed_mask(module: torch.nn.Module, starts_q: Tensor | None, starts_k: Tensor | None) -> onchip.Mask:
    """The sequences of one row, by their boundaries (0, ..., seqlen)."""
    if starts_q is None or starts_k is None or not (starts_q is starts_k or torch.equal(starts_q, starts_k)):
        raise NotImplementedError(
            f"onchip: {type(module).__name__} passes cu_seq_lens_q without cu_seq_lens_k, or different ones"
        )
    return onchip.documents(cu_seqlens=starts_q)


def implied_mask(
    module: torch.nn.Module, seqlen_q: int, seqlen_k: int, is_causal: bool | None, sliding_window: int | None
) -> onchip.Mask | None:
    """The mask of a model that passes none (it makes no use of transformers' masks): causal or nothing."""
    name = type(module).__name__
    if sliding_window is not None and sliding_window < seqlen_k:
        raise NotImplementedError(f"onchip: {name} passes sliding_window={sliding_window} without a mask")
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if seqlen_q == 1 or causal is False:
        return None
    if causal is None or seqlen_q != seqlen_k:
        raise NotImplementedError(
            f"onchip: {name} passes no mask, is_causal={causal}, {seqlen_q} queries, {seqlen_k} keys: ambiguous"
        )
    return onchip.causal()
