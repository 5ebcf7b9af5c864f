"""Dropout's random bits: Philox by element, the same on every backend, tile size and layout."""

import torch
from torch import Tensor

from onchip import rules
from onchip.mask import Region


def keep(region: Region, heads_q: int, probability: float, seed: int | Tensor, offset: int = 0) -> Tensor:
    """Which pairs of a region survive: bool [g, heads, queries, keys]."""
    first = region.k0 // 4
    fours = torch.arange(first, (region.k1 + 3) // 4, device=region.batch.device).view(1, 1, 1, -1)
    counter = rules.dropout_counter(region.b, region.h, heads_q, region.q, 4 * fours, offset)
    seed = seed.to(region.batch.device) if isinstance(seed, Tensor) else seed
    words = rules.philox(seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, *counter)  # >> keeps an int64's sign
    start = region.k0 - 4 * first
    bits = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(3)[
        ..., start : start + region.k1 - region.k0
    ]
    return bits >= threshold(probability)


def threshold(probability: float) -> int:
    """A word below it drops its pair; 2^32, above every word, at probability 1."""
    return round(probability * 2**32)
