"""FlashAttention-2's `flash_attn.bert_padding`: between padded (batch, seqlen, ...) and packed (total, ...)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from onchip.compat.missing import refuse

__getattr__ = refuse(__name__, "IndexFirstAxis", "IndexPutFirstAxis", "IndexFirstAxisResidual")


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows `indices` of the first axis."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) with values at `indices`, 0 elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The rows, and the input itself for a residual connection."""
    return input[indices], input.detach()


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """The tokens of a padded batch.

    hidden_states (batch, seqlen, ...); attention_mask (batch, seqlen), 1 at tokens; unused_mask, 1 at places that are
    kept in the packed tensor but do not count. Returns the packed rows, their indices in the flattened batch,
    cu_seqlens int32 (batch + 1,), the longest length, and the tokens of each sequence, int32 (batch,).
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    return *_select(hidden_states, kept, lengths), attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """`unpad_input` where row b of attention_mask_in_length (batch, seqlen) lists the lengths of the short sequences
    that follow one another in it, then zeros; returns the first four results."""
    total = attention_mask_in_length.sum(-1, keepdim=True)
    kept = torch.arange(attention_mask_in_length.shape[1], device=total.device) < total
    lengths = attention_mask_in_length.flatten()
    return _select(hidden_states, kept, lengths[lengths != 0])


def _select(hidden_states: Tensor, kept: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states, indices, batch, seqlen):
    """Packed rows (total, ...) back at `indices` of (batch, seqlen, ...), 0 elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
