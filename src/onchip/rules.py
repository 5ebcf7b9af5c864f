"""The arithmetic of attention's rules, in Python that CPython, triton.jit and gluon.jit all accept.

Plain functions only: ``+ - * // min max & | <= ==``, ``is None`` and attributes. They run on ints, on torch
tensors, and inside kernels. Every division acts on a non-negative value: Triton truncates where CPython floors.

Indices: ``q`` and ``k`` count from the start of their own sequence; ``q_len`` and ``k_len`` are its lengths.
A band is stated by the diagonals it spans: key ``k`` is visible to query ``q`` iff ``first <= k - q <= last``.
"""

from typing import NamedTuple


class Band(NamedTuple):
    """Window of a query in keys to each side, ``None`` = unbounded; one pair for each alignment.

    ``left``/``right`` count from the diagonal that ends in the bottom right corner (shift = k_len - q_len),
    ``top_left``/``top_right`` from the one that starts in the top left corner.
    """

    left: int | None = None
    right: int | None = None
    top_left: int | None = None
    top_right: int | None = None


def diagonals(q_len, k_len, band):
    """The band's range of ``k - q`` as ``(first, last)``, ``None`` where it is unbounded."""
    first = None
    last = None
    if band.left is not None:
        first = k_len - q_len - band.left
    if band.top_left is not None:
        if first is None:
            first = 0 - band.top_left
        else:
            first = max(first, 0 - band.top_left)
    if band.right is not None:
        last = k_len - q_len + band.right
    if band.top_right is not None:
        if last is None:
            last = band.top_right
        else:
            last = min(last, band.top_right)
    return first, last


def allow(q, k, q_len, k_len, first, last, lo, hi):
    """Whether query q may see key k: inside both sequences, the band, and the row's interval [lo, hi)."""
    ok = (q < q_len) & (k < k_len)
    if first is not None:
        ok = ok & (first <= k - q)
    if last is not None:
        ok = ok & (k - q <= last)
    if lo is not None:
        ok = ok & (lo <= k)
    if hi is not None:
        ok = ok & (k < hi)
    return ok


def spans(i, tile_q, tile_k, q_len, k_len, first, last):
    """Key tiles of query tile i under a band: [lo, full_lo) and [full_hi, hi) partial, [full_lo, full_hi) full.

    A tile is full when every pair that exists in it is visible: the tail past either sequence does not count.
    The same function with q and k exchanged and ``(-last, -first)`` gives the query tiles of a key tile.
    """
    top = i * tile_q
    bottom = min(top + tile_q, q_len) - 1
    lo_key = 0
    full_lo_key = 0
    hi_key = k_len
    full_hi_key = k_len
    if first is not None:
        lo_key = max(top + first, 0)
        full_lo_key = max(bottom + first, 0)
    if last is not None:
        hi_key = max(min(bottom + last + 1, k_len), 0)
        full_hi_key = max(min(top + last + 1, k_len), 0)
    hi = (hi_key + tile_k - 1) // tile_k
    nothing = hi_key <= lo_key
    if first is not None:
        if last is not None:
            nothing = nothing | (last < first)
    lo = min(lo_key // tile_k + nothing * hi, hi)
    full_lo = max(min((full_lo_key + tile_k - 1) // tile_k, hi), lo)
    full_hi = (full_hi_key + (k_len <= full_hi_key) * (tile_k - 1)) // tile_k
    full_hi = min(max(full_hi, full_lo), hi)
    return lo, full_lo, full_hi, hi


def modify(score, tanh, softcap, slope, distance, bias):
    """What happens to a scaled score before the mask: softcap, then ALiBi, then the additive bias.

    ``tanh`` is the backend's own; ``distance`` is |q + k_len - q_len - k|.
    """
    if softcap is not None:
        score = softcap * tanh(score / softcap)
    if slope is not None:
        score = score - slope * distance
    if bias is not None:
        score = score + bias
    return score


def modify_grad(score, tanh, softcap):
    """d modify / d score at a scaled score; ALiBi and bias only add, so the softcap alone counts."""
    capped = tanh(score / softcap)
    return 1.0 - capped * capped


def philox(seed_lo, seed_hi, c0, c1, c2, c3):
    """Philox4x32-10 (Salmon et al., SC 2011): four 32-bit words, each held in a 64-bit integer.

    Products wrap modulo 2^64 on signed 64-bit integers and are exact in CPython; the masks make both agree.
    """
    for _ in range(10):
        p0 = c0 * 0xD2511F53
        p1 = c2 * 0xCD9E8D57
        c0 = ((p1 >> 32) & 0xFFFFFFFF) ^ c1 ^ seed_lo
        c1 = p1 & 0xFFFFFFFF
        c2 = ((p0 >> 32) & 0xFFFFFFFF) ^ c3 ^ seed_hi
        c3 = p0 & 0xFFFFFFFF
        seed_lo = (seed_lo + 0x9E3779B9) & 0xFFFFFFFF
        seed_hi = (seed_hi + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def dropout_counter(batch, head, heads, q, k, offset):
    """Philox counter of the four neighbouring keys 4*(k//4) ... +3 of a query.

    Keyed by the element alone, so tile sizes, layouts and backends draw the same bits. batch * heads stays below 2^32.
    """
    return k // 4, q, batch * heads + head, offset
