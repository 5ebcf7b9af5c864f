"""Counting the tiles that the CPU loop loads and stores."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor

from onchip.mask import Region
from onchip.stored import own_sizes


@dataclass
class Trace:
    """Numbers (elements) and tiles moved, by tensor name; one tile of one head of one sequence counts once.

    A tile has the query heads of a key head as rows. What a bias or a mask has in common for these heads, or for some
    queries or keys, is one number of the tile; tiles that are computed side by side each read their own.
    """

    loads: dict[str, int] = field(default_factory=dict)
    stores: dict[str, int] = field(default_factory=dict)
    tiles_loaded: dict[str, int] = field(default_factory=dict)
    tiles_stored: dict[str, int] = field(default_factory=dict)


_current: ContextVar[Trace | None] = ContextVar("onchip_cpu_trace", default=None)


@contextmanager
def trace() -> Iterator[Trace]:
    """Count the tile loads and stores of every CPU call inside the block, backward passes too.

    Native kernels do not count, so they refuse every call that is stated inside it.

    >>> with onchip.backends.cpu.trace() as t:
    ...     onchip.attention(q, k, v)
    >>> t.loads["k"]
    """
    counts = Trace()
    token = _current.set(counts)
    try:
        yield counts
    finally:
        _current.reset(token)


def tracing() -> bool:
    """Whether a `trace` block is open."""
    return _current.get() is not None


def load(name: str, tile: Tensor, heads: int) -> None:
    """Note that a tile of `heads` (sequence, head) pairs was read."""
    if (counts := _current.get()) is not None:
        _add(counts.loads, counts.tiles_loaded, name, tile, heads)


def store(name: str, tile: Tensor, heads: int) -> None:
    if (counts := _current.get()) is not None:
        _add(counts.stores, counts.tiles_stored, name, tile, heads)


def load_pairs(name: str, tensor: Tensor, region: Region, group: int) -> None:
    """Note that a region of a tensor that broadcasts to (batch, heads, seqlen_q, seqlen_k) was read.

    group: query heads of a key head, which are one tile.
    """
    if (counts := _current.get()) is not None:
        _add_pairs(counts.loads, counts.tiles_loaded, name, tensor, region, group)


def store_pairs(name: str, tensor: Tensor, region: Region, group: int) -> None:
    if (counts := _current.get()) is not None:
        _add_pairs(counts.stores, counts.tiles_stored, name, tensor, region, group)


def _add(numbers: dict[str, int], tiles: dict[str, int], name: str, tile: Tensor, heads: int) -> None:
    numbers[name] = numbers.get(name, 0) + tile.numel()
    tiles[name] = tiles.get(name, 0) + heads


def _add_pairs(
    numbers: dict[str, int], tiles: dict[str, int], name: str, tensor: Tensor, region: Region, group: int
) -> None:
    _, heads, rows, keys = (n > 1 for n in own_sizes(tensor))
    count = region.batch.numel() * (region.head1 - region.head0) // (1 if heads else group)
    tile = (region.q1 - region.q0 if rows else 1) * (region.k1 - region.k0 if keys else 1)
    numbers[name] = numbers.get(name, 0) + count * tile
    tiles[name] = tiles.get(name, 0) + count
