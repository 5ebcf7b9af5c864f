"""The arithmetic of attention's rules, in Python that CPython, triton.jit and gluon.jit all accept.

Plain functions only: ``+ - * // min max & | <= ==``, ``is None`` and attributes. They run on ints, on torch
tensors, and inside kernels. Every division acts on a non-negative value: Triton truncates where CPython floors.

Indices: ``q`` and ``k`` count from the start of their own sequence; ``q_len`` and ``k_len`` are its lengths.
A band is a range of diagonals: key ``k`` is visible to query ``q`` iff first <= k - q <= last.
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


def bounded(band):
    """Whether the band hides keys to the left, and to the right."""
    return (band.left, band.top_left) != (None, None), (band.right, band.top_right) != (None, None)


def flip(band):
    """The band with queries and keys exchanged: the query tiles of a key tile are `spans` of it."""
    return Band(band.right, band.left, band.top_right, band.top_left)


def first_diagonal(q_len, k_len, band):
    """Least visible k - q, of a band that is bounded to the left."""
    first = 0
    if band.top_left is None:
        first = k_len - q_len - band.left
    elif band.left is None:
        first = 0 - band.top_left
    else:
        first = max(k_len - q_len - band.left, 0 - band.top_left)
    return first


def last_diagonal(q_len, k_len, band):
    """Greatest visible k - q, of a band that is bounded to the right."""
    last = 0
    if band.top_right is None:
        last = k_len - q_len + band.right
    elif band.right is None:
        last = band.top_right + 0
    else:
        last = min(k_len - q_len + band.right, band.top_right)
    return last


def allow(q, k, q_len, k_len, band, lo, hi):
    """Whether query q may see key k: inside both sequences, the band, and the row's interval [lo, hi)."""
    ok = (q < q_len) & (k < k_len)
    if (band.left is not None) or (band.top_left is not None):
        ok = ok & (first_diagonal(q_len, k_len, band) <= k - q)
    if (band.right is not None) or (band.top_right is not None):
        ok = ok & (k - q <= last_diagonal(q_len, k_len, band))
    if lo is not None:
        ok = ok & (lo <= k)
    if hi is not None:
        ok = ok & (k < hi)
    return ok


def spans(i, tile_q, tile_k, q_len, k_len, band):
    """Key tiles of query tile i under a band: [lo, full_lo) and [full_hi, hi) partial, [full_lo, full_hi) full.

    A tile is full when every pair that exists in it is visible: the tail past either sequence does not count.
    The same function with q and k exchanged and the band flipped gives the query tiles of a key tile.
    """
    top = i * tile_q
    bottom = min(top + tile_q, q_len) - 1
    lo_key = 0
    full_lo_key = 0
    hi_key = k_len
    full_hi_key = k_len
    shut = k_len <= 0
    if (band.left is not None) or (band.top_left is not None):
        first = first_diagonal(q_len, k_len, band)
        lo_key = max(top + first, 0)
        full_lo_key = max(bottom + first, 0)
        if (band.right is not None) or (band.top_right is not None):
            shut = shut | (last_diagonal(q_len, k_len, band) < first)
    if (band.right is not None) or (band.top_right is not None):
        last = last_diagonal(q_len, k_len, band)
        hi_key = max(min(bottom + last + 1, k_len), 0)
        full_hi_key = max(min(top + last + 1, k_len), 0)
    shut = shut | (hi_key <= lo_key)
    hi = (hi_key + tile_k - 1) // tile_k
    lo = min(lo_key // tile_k + shut * hi, hi)
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
