"""In which order programs take tiles of unequal length: in sections of heads, the longest tiles of each first."""

from __future__ import annotations


def section(size: int, heads: int, together: int, room: float) -> int:
    """Heads (of all sequences) whose tiles are taken in turn: as large a divisor of `heads` as fits the L2 cache.

    size: bytes that the tiles of a head read, those of `together` heads the same ones; room: bytes for a section's. The
    longest tiles of few heads leave the end to short ones, and do not read from HBM what others have just read.
    """
    most = int(max(room // max(size, 1), 1)) * together
    return max(n for n in range(1, min(heads, most) + 1) if heads % n == 0)
