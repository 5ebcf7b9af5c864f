"""Is an operation bound by arithmetic or by memory? Its FLOPs a byte beside the device's.

>>> print(roofline("softmax", (4096, 4096), "H200"))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onchip.devices import Device, device as find_device
from onchip.layout import Dense
from onchip.mask import Mask
from onchip.problem import Problem
from onchip.traffic import count

# What each operation does to a number: FLOPs on the vector units, reads and writes in the dtype. An exponential counts
# as one FLOP, though hardware takes longer over it.
ELEMENTWISE = {
    "softmax": (5, 1, 1),  # maximum, difference, exponential, sum, quotient
    "mask": (1, 1, 1),  # a comparison of indices: the mask itself is not read
    "dropout": (2, 1, 1),  # a comparison and a product; the random bits are not counted
    "layer_norm": (7, 1, 1),  # sum, difference, square, sum, product, gain and bias
}
OPS = ("matmul", *ELEMENTWISE, "attention")
ALSO = {"fusedattention": "attention", "flashattention": "attention", "matrixproduct": "matmul"}


@dataclass(frozen=True)
class Roofline:
    """flops and bytes of an operation that reads its inputs once and writes its outputs once."""

    op: str
    shape: tuple[int, ...]
    device: str
    flops: int
    bytes: int
    peak: float  # FLOP/s of the units that do it
    bandwidth: float  # bytes/s of the main memory

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def ridge(self) -> float:
        """The intensity from which on arithmetic is the limit."""
        return self.peak / self.bandwidth

    @property
    def bound(self) -> str:
        return "compute" if self.intensity >= self.ridge else "memory"

    @property
    def attainable(self) -> float:
        """FLOP/s at best."""
        return min(self.peak, self.intensity * self.bandwidth)

    @property
    def seconds(self) -> float:
        return max(self.flops / self.peak, self.bytes / self.bandwidth)

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        return (
            f"{self.op} {shape} on {self.device}: {self.intensity:.1f} FLOP/byte, the ridge is at {self.ridge:.1f}: "
            f"{self.bound}-bound, at least {self.seconds * 1e6:.1f} us"
        )


def roofline(
    op: str,
    shape: tuple[int, ...],
    device: str | Device | None = None,
    *,
    dtype: torch.dtype = torch.float16,
    mask: Mask | None = None,
) -> Roofline:
    """The `Roofline` of an operation on a device (as `onchip.devices.device` takes it; None: this machine's).

    op and shape: "matmul" (m, n, k), inner length k; "softmax", "mask", "dropout" and "layer_norm" of any shape;
    "attention" (batch, seqlen, heads, dim), fused, forward, with `mask` if given. In names of operations, capitals,
    spaces, "-" and "_" do not count; "fused attention" is attention.
    """
    op = _op(op)
    _check_shape(op, shape)
    where = device if isinstance(device, Device) else find_device(device)
    if mask is not None and op != "attention":
        raise ValueError(f"mask: given for {op}, expected only for attention")
    if op in ELEMENTWISE:
        per, reads, writes = ELEMENTWISE[op]
        n = _product(shape)
        rate = where.peak["vector"]
        extra = 2 * shape[-1] if op == "layer_norm" else 0  # gain and bias
        moved = (n * (reads + writes) + extra) * dtype.itemsize
        return Roofline(op, tuple(shape), where.name, per * n, moved, rate, where.bandwidth)
    if op == "matmul":
        m, n, k = shape
        flops, moved = 2 * m * n * k, (m * k + k * n + m * n) * dtype.itemsize
    else:
        batch, seqlen, heads, dim = shape
        problem = Problem(
            "dense", batch, seqlen, seqlen, heads, heads, dim, dim, dtype, "cpu", dim**-0.5,
            mask_parts=() if mask is None else ("band",),
        )  # fmt: skip
        place = Dense(batch, seqlen, seqlen)
        found = count(problem, place, Mask() if mask is None else mask, "minimum")
        flops, moved = found.flops, found.bytes
    return Roofline(op, tuple(shape), where.name, flops, moved, where.rate(dtype), where.bandwidth)


def _op(name: object) -> str:
    """The one of `OPS` that is meant."""
    plain = str(name).lower().translate(str.maketrans("", "", " -_"))
    known = {op.replace("_", ""): op for op in OPS} | ALSO
    if plain not in known:
        raise ValueError(f"op: got {name!r}, expected one of {', '.join(OPS)}")
    return known[plain]


def _check_shape(op: str, shape: object) -> None:
    wanted = {"matmul": 3, "attention": 4}.get(op)
    sizes = isinstance(shape, tuple | list) and all(type(n) is int and n > 0 for n in shape)
    if not sizes or not shape or (wanted is not None and len(shape) != wanted):  # type: ignore[arg-type]
        names = {"matmul": "(m, n, k)", "attention": "(batch, seqlen, heads, dim)"}.get(op, "any shape")
        raise ValueError(f"shape: got {shape!r}, expected {names} of sizes above 0 for {op}")


def _product(sizes: tuple[int, ...]) -> int:
    total = 1
    for n in sizes:
        total *= n
    return total
