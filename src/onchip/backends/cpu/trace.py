"""Counting the tiles that the CPU loop loads and stores."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Trace:
    """Numbers (elements) and tiles moved, by tensor name; one tile of one head of one sequence counts once."""

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


def _add(numbers: dict[str, int], tiles: dict[str, int], name: str, tile: Tensor, heads: int) -> None:
    numbers[name] = numbers.get(name, 0) + tile.numel()
    tiles[name] = tiles.get(name, 0) + heads
