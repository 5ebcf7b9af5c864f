"""Bytes, FLOPs and seconds in a fit unit, and the names of dtypes."""

from __future__ import annotations

import torch


def size(count: float) -> str:
    """Bytes in MiB; in KiB below a tenth of one, and in GiB from 10 of them on."""
    if count >= 10 * 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.1f} MiB" if not 0 < count < 0.1 * 2**20 else f"{count / 2**10:.1f} KiB"


def operations(count: float) -> str:
    """FLOPs in three digits and a fit unit."""
    for scale, unit in ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count / 1e3:.4g} kFLOP"


def duration(seconds: float) -> str:
    for scale, unit in ((1, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def dtype_name(dtype: torch.dtype) -> str:
    """float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")
