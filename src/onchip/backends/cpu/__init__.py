"""CPU backends: native kernels (`native`), and the tiled loop of torch operations that serves what they refuse."""

from onchip.backends.cpu import isa
from onchip.backends.cpu.tiled import backward, extra_memory, forward, refuse, tiles
from onchip.backends.cpu.trace import Trace, trace

__all__ = ["Trace", "backward", "extra_memory", "forward", "isa", "refuse", "tiles", "trace"]
