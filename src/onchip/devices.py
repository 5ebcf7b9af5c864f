"""Memory hierarchies and peak rates of devices, each number with its source; "cpu" is measured on first use."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True)
class Level:
    """A level of memory. bandwidth: bytes/s to or from the cores, None where no source states one."""

    name: str  # "SRAM", "L2", "HBM" (the device's main memory) or "host"
    bytes: int
    bandwidth: float | None
    source: str


@dataclass(frozen=True)
class Device:
    """levels: the fastest and smallest first. peak: FLOP/s of dense products by dtype name, "vector" of all else."""

    name: str
    units: int  # multiprocessors, compute units or cores
    unit_sram: int  # bytes of fast memory of one of them: a tile must fit there
    levels: tuple[Level, ...]
    peak: dict[str, float]
    sources: dict[str, str] = field(default_factory=dict)  # of units, unit_sram and peak
    capability: int = 0  # major CUDA compute capability; 0 for all else

    def level(self, name: str) -> Level | None:
        return next((level for level in self.levels if level.name == name), None)

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the main memory."""
        level = self.level("HBM")
        assert level is not None and level.bandwidth is not None
        return level.bandwidth

    def rate(self, dtype: torch.dtype) -> float:
        """FLOP/s of dense matrix products in this dtype."""
        name = str(dtype).removeprefix("torch.")
        if name not in self.peak:
            raise ValueError(
                f"device: {self.name} has no stated rate for {name}, expected one of {', '.join(self.peak)}"
            )
        return self.peak[name]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "units": self.units,
            "unit_sram": self.unit_sram,
            "levels": [vars(level) for level in self.levels],
            "peak": self.peak,
            "sources": self.sources,
        }


def _gpu(
    name: str,
    units: int,
    unit_kib: int,
    sram: tuple[float, str],
    l2: tuple[int, float | None, str],
    hbm: tuple[float, float, str],
    host: tuple[float, str],
    peak: dict[str, float],
    sources: dict[str, str],
    capability: int = 0,
) -> Device:
    """Sizes in KiB, MiB and GB, bandwidths in TB/s (host: GB/s), rates in TFLOP/s."""
    tera = 1e12
    levels = (
        Level("SRAM", units * unit_kib * KIB, sram[0] * tera, sram[1]),
        Level("L2", l2[0] * MIB, None if l2[1] is None else l2[1] * tera, l2[2]),
        Level("HBM", int(hbm[0] * 1e9), hbm[1] * tera, hbm[2]),
        Level("host", 10**12, host[0] * 1e9, f"{host[1]}; 1 TB stands for a server's memory"),
    )
    rates = {dtype: rate * tera for dtype, rate in peak.items()}
    return Device(name, units, unit_kib * KIB, levels, rates, sources, capability)


def _tensor(half: float, vector: float, double: float) -> dict[str, float]:
    return {
        "float16": half,
        "bfloat16": half,
        "float32": vector,
        "float64": double,
        "vector": vector,
    }


_HOPPER = {
    "units": "NVIDIA H100 Tensor Core GPU Architecture whitepaper",
    "unit_sram": "the same: 256 KiB of L1 and shared memory a multiprocessor, of which a kernel may take 227",
    "peak": "NVIDIA H100 datasheet, SXM, dense (without sparsity); float32 outside the tensor cores",
}
_FA3 = "FlashAttention-3 (arXiv 2407.08608), table of the H100's memory hierarchy"
_PCIE4, _PCIE5 = "PCI Express 4.0 x16, one direction", "PCI Express 5.0 x16, one direction"

_KNOWN: dict[str, Device] = {
    "A100": _gpu(
        "A100",
        108,
        192,
        (19.0, "FlashAttention (arXiv 2205.14135), figure 1"),
        (40, 7.2, "NVIDIA A100 Tensor Core GPU Architecture whitepaper: 5120 bytes a clock at 1.41 GHz"),
        (80, 2.039, "NVIDIA A100 datasheet, 80 GB SXM (the first paper used the 40 GB one, 1.555 TB/s)"),
        (31.5, _PCIE4),
        _tensor(312, 19.5, 19.5),
        {
            "units": "NVIDIA A100 Tensor Core GPU Architecture whitepaper",
            "unit_sram": "the same: 192 KiB of L1 and shared memory a multiprocessor, of which a kernel may take 163",
            "peak": "NVIDIA A100 datasheet, dense; float32 outside the tensor cores, float64 on them",
        },
        8,
    ),
    "H100": _gpu(
        "H100",
        132,
        256,
        (31.0, _FA3),
        (50, 12.0, _FA3),
        (80, 3.35, "NVIDIA H100 datasheet, SXM"),
        (63.0, _PCIE5),
        _tensor(989.4, 66.9, 66.9),
        _HOPPER,
        9,
    ),
    "H200": _gpu(
        "H200",
        132,
        256,
        (31.0, f"{_FA3}; the H200 has the same chip"),
        (50, 12.0, f"{_FA3}; the H200 has the same chip"),
        (141, 4.8, "NVIDIA H200 datasheet, SXM"),
        (63.0, _PCIE5),
        _tensor(989.4, 66.9, 66.9),
        {**_HOPPER, "peak": "NVIDIA H200 datasheet, SXM, dense; float32 outside the tensor cores"},
        9,
    ),
    "B200": _gpu(
        "B200",
        148,
        256,
        (35.2, "computed: 128 bytes a clock and multiprocessor at the 1.86 GHz that its dense rate implies"),
        (126, None, "NVIDIA Blackwell Tuning Guide; no bandwidth is stated"),
        (180, 8.0, "NVIDIA HGX B200 datasheet"),
        (63.0, _PCIE5),
        _tensor(2250, 75, 37),
        {
            "units": "CUDA device properties of the B200",
            "unit_sram": "NVIDIA Blackwell Tuning Guide: 256 KiB of L1 and shared memory a multiprocessor",
            "peak": "NVIDIA HGX B200 datasheet, one of eight, dense; float32 and float64 outside half precision",
        },
        10,
    ),
    "RTX 4090": _gpu(
        "RTX 4090",
        128,
        128,
        (41.3, "computed: 128 bytes a clock and multiprocessor at 2.52 GHz"),
        (72, None, "NVIDIA Ada GPU Architecture whitepaper; no bandwidth is stated"),
        (24, 1.008, "NVIDIA Ada GPU Architecture whitepaper"),
        (31.5, _PCIE4),
        _tensor(165.2, 82.6, 1.29),
        {
            "units": "NVIDIA Ada GPU Architecture whitepaper",
            "unit_sram": "the same: 128 KiB of L1 and shared memory a multiprocessor, of which a kernel may take 99",
            "peak": "the same: dense, sums in float32",
        },
        8,
    ),
    "MI300X": _gpu(
        "MI300X",
        304,
        64,
        (81.7, "computed: 128 bytes a clock and compute unit (CDNA 3 whitepaper) at 2.1 GHz"),
        (256, 17.2, "AMD CDNA 3 whitepaper: Infinity Cache, the last level before HBM"),
        (192, 5.3, "AMD Instinct MI300X datasheet"),
        (63.0, _PCIE5),
        _tensor(1307.4, 163.4, 163.4),
        {
            "units": "AMD Instinct MI300X datasheet",
            "unit_sram": "AMD CDNA 3 whitepaper: 64 KiB of local data share a compute unit",
            "peak": "AMD Instinct MI300X datasheet, dense; float32 and float64 by matrix instructions",
        },
    ),
}
NAMES = (*_KNOWN, "cpu")


def device(name: str | None = None) -> Device:
    """The device of this name (`NAMES`, any case; or "this CPU"); None: this machine's first GPU, else its CPU.

    Raises ValueError for another name, and where this machine's GPU is not a known one.
    """
    if name is None:
        return current()
    if not isinstance(name, str):
        raise TypeError(f"device: got {type(name).__name__}, expected one of {', '.join(NAMES)}")
    if is_cpu(name):
        return this_cpu()
    for known, found in _KNOWN.items():
        if _plain(name) == _plain(known):
            return found
    raise ValueError(f"device: got {name!r}, expected one of {', '.join(NAMES)}")


def is_cpu(name: str) -> bool:
    return _plain(name) in ("cpu", "thiscpu")


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "").replace("_", "")


def current() -> Device:
    """This machine's first GPU, else its CPU; ValueError where the GPU is not a known one."""
    if not torch.cuda.is_available():
        return this_cpu()
    name = torch.cuda.get_device_name(0)
    found = recognized(name)
    if found is None:
        raise ValueError(
            f"device: this GPU is {name!r}, whose figures are not known; name one of {', '.join(NAMES)}"
        )
    return found


def recognized(name: str) -> Device | None:
    """The known device that a GPU's own name means: "NVIDIA A100-SXM4-80GB" is an A100; a GH200, an H100 PCIe none."""
    if re.search(
        r"pcie|nvl|40gb|laptop|\bd$", name, re.IGNORECASE
    ):  # chips alike, with slower memory or clocks
        return None
    words = re.sub(r"[-_ ]", " ", name).upper()
    return next((d for known, d in _KNOWN.items() if re.search(rf"\b{known.upper()}\b", words)), None)


def this_gpu() -> str | None:
    """The name of the known device that this machine's first GPU is."""
    found = recognized(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None
    return None if found is None else found.name


@lru_cache(maxsize=1)
def this_cpu() -> Device:
    """This machine's CPU: rates and bandwidths measured now (about a second), sizes as the system states them."""
    threads = torch.get_num_threads()
    caches = _caches()
    sram, last = caches.get(2, MIB), caches.get(3, 8 * MIB)
    measured = f"measured on this machine, {threads} threads, torch {torch.__version__}"
    levels = (
        Level(
            "SRAM",
            sram * threads,
            threads * _one_core(sram // 2),
            f"L2 caches; one core's read rate, {measured}",
        ),
        Level(
            "L2", last, threads * _one_core(last // 4), f"last-level cache; one core's read rate, {measured}"
        ),
        Level("HBM", _memory(), _read_rate(256 * MIB), f"main memory; read rate {measured}"),
    )
    peak = {
        str(t).removeprefix("torch."): _product_rate(t)
        for t in (torch.float32, torch.bfloat16, torch.float64)
    }
    # Units of fp16 are rare, and torch.mm in fp16 is a loop of single products without them: kernels widen it.
    peak |= {"float16": peak["float32"], "vector": peak["float32"]}
    sources = {
        "units": "threads of torch",
        "unit_sram": "L2 cache of one core, from the system",
        "peak": f"torch.mm of 1024 x 1024 (fp16: of fp32, to which it is widened), {measured}",
    }
    return Device("cpu", threads, sram, levels, peak, sources)


def cpu_name() -> str:
    """The model name of this CPU, else its architecture."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _best(call: Callable[[], object], work: float, seconds: float = 0.08) -> float:
    """Work per second of the fastest of the calls that fit in this time, four at least."""
    call()
    best, began, runs = float("inf"), time.perf_counter(), 0
    while runs < 4 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        call()
        best, runs = min(best, time.perf_counter() - start), runs + 1
    return work / max(best, 1e-9)


def _product_rate(dtype: torch.dtype, n: int = 1024) -> float:
    a, b = (torch.ones(n, n, dtype=dtype, device="cpu") for _ in range(2))
    return _best(lambda: torch.mm(a, b), 2.0 * n**3)


def _read_rate(size: int) -> float:
    x = torch.ones(max(size // 4, 1 << 12), device="cpu")
    return _best(lambda: x.sum(), 4.0 * x.numel())


def _one_core(size: int) -> float:
    """One thread's read rate: two would wait for each other longer than a cache's worth takes to read."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _read_rate(size)
    finally:
        torch.set_num_threads(threads)


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 8 * GIB


def available(device: str) -> int:
    """Bytes of main memory that a process may still take there; on a CPU within its control group's limit."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        found = int(re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())[1]) * KIB  # type: ignore[index]
    except (OSError, TypeError):
        found = _memory()
    for group, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            left = int(Path(group, limit).read_text()) - int(Path(group, used).read_text())
            found = min(found, max(left, 0))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return found


def _caches() -> dict[int, int]:
    """Bytes of the unified caches of core 0 by level; empty where the system does not say."""
    found: dict[int, int] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            size = (index / "size").read_text().strip()
            scale = {"K": KIB, "M": MIB, "G": GIB}.get(size[-1], 1)
            found[int((index / "level").read_text())] = int(size.rstrip("KMG")) * scale
        except (OSError, ValueError):
            continue
    return found
