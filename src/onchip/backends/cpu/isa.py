"""The native library of this machine: one shared object per instruction set, built when the package was installed."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

VARIABLE = "ONCHIP_CPU_ISA"
# Instruction sets, best first; each name is a file lib/onchip_<name>.
ISAS = ("avx512_bf16", "avx512", "avx2", "neon")


@dataclass(frozen=True, eq=False)
class Library:
    isa: str | None  # of the library in use
    reason: str  # why there is none
    # Each takes a pointer to an `arguments.Call`.
    forward: Any = None
    backward: Any = None
    backward_sizes: Any = None  # and one to two int64: chunks of the keys, floats of dq_parts
    forward_splits: Any = None  # of the keys
    # Bytes of the buffers that forward and backward make.
    forward_memory: Any = None
    backward_memory: Any = None


def supported() -> tuple[str, ...]:
    """The instruction sets that this processor runs, best first."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return ("neon",)
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return ("avx512_bf16",) * torch.cpu._is_avx512_bf16_supported() + ("avx512", "avx2")
    return ("avx2",) if capability == "AVX2" else ()


def chosen() -> tuple[str | None, str]:
    """(instruction set, "") or (None, why none). ValueError where the environment variable holds no known name."""
    forced = os.environ.get(VARIABLE, "")
    if forced not in ("", "none", *ISAS):
        raise ValueError(f"{VARIABLE}: got {forced!r}, expected one of {', '.join((*ISAS, 'none'))}")
    if forced == "none":
        return None, f"{VARIABLE}=none"
    runs = supported()
    if forced and forced not in runs:
        raise ValueError(
            f"{VARIABLE}: got {forced!r}, which this processor does not run; it runs {runs or 'none'}"
        )
    if not runs:
        return None, f"there are no kernels for this processor ({platform.machine()})"
    for isa in (forced,) if forced else runs:
        if find(isa) is not None:
            return isa, ""
    return None, f"the package was installed without native kernels (no lib/onchip_{forced or runs[-1]}.so)"


def find(isa: str) -> Path | None:
    """The library's file: beside this one, or where an editable install keeps what it built."""
    package = sys.modules[__name__.rpartition(".")[0]]
    return next(
        (file for folder in package.__path__ if (file := Path(folder) / "lib" / f"onchip_{isa}.so").exists()),
        None,
    )


@lru_cache(maxsize=1)
def load() -> Library:
    """The library in use; loaded once. Its OpenMP is the one that torch brought into the process."""
    isa, reason = chosen()
    if isa is None:
        return Library(None, reason)
    try:
        dll = ctypes.CDLL(str(find(isa)))
    except OSError as error:
        return Library(None, f"the kernels for {isa} do not load: {error}")
    functions = dll.onchip_forward, dll.onchip_backward, dll.onchip_backward_sizes
    for function, arguments in zip(functions, (1, 1, 2), strict=True):
        function.argtypes, function.restype = [ctypes.c_void_p] * arguments, None
    numbers = dll.onchip_forward_splits, dll.onchip_forward_memory, dll.onchip_backward_memory
    for function in numbers:
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int64
    return Library(isa, "", *functions, *numbers)


def status() -> str:
    """One line: the instruction set in use, or why native kernels are not."""
    library = load()
    return f"native kernels for {library.isa}" if library.isa else f"no native kernels: {library.reason}"
