"""CPU backend: a tiled loop of torch operations."""

from onchip.backends.cpu.tiled import backward, extra_memory, forward, refuse, tiles
from onchip.backends.cpu.trace import Trace, trace

__all__ = ["Trace", "backward", "extra_memory", "forward", "refuse", "tiles", "trace"]
