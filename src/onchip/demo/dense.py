"""The textbook attention that the demo compares with: every score in memory at once."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax(q k^T / sqrt(dim)) v; all (batch, seqlen, heads, dim), scores (batch, heads, seqlen, seqlen)."""
    seqlen, dim = q.shape[1], q.shape[3]
    future = torch.ones(seqlen, seqlen, dtype=torch.bool, device=q.device).triu(1)
    scores = torch.einsum("bqhd,bkhd->bhqk", q * dim**-0.5, k).masked_fill_(future, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def score_bytes(batch: int, seqlen: int, heads: int) -> int:
    """What forward and backward hold at their peak: scores or probabilities and their gradients, four in fp32."""
    return 4 * 4 * batch * heads * seqlen**2
