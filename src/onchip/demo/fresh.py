"""Run a part of the demo in a process of its own, so that its peak memory is its own, and read what it reports.

    for record in stream("train", attention="onchip", steps=100): ...

`python -m onchip.demo.fresh train '{"attention": "onchip", "steps": 100}'` does the same by hand: the part is the
module's generator function `run`, and each record that it yields becomes one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PARTS = ("embed", "train", "scaling")


def stream(part: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Yield the records of `part` as they come; RuntimeError with its last words when it fails."""
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    # Idle threads must sleep: where they spin, another program on the same two cores made a step 4 times slower.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "onchip.demo.fresh", part, json.dumps(options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        with process.stdout as lines:
            for line in lines:
                yield json.loads(line)
    finally:  # also when the reader stops early, as at Ctrl-C
        if process.poll() is None:
            process.terminate()
        status = process.wait()
    if status:
        raise RuntimeError(f"the demo's part {part!r} ended with status {status}; its error is above")


def attention_named(name: str) -> Callable[..., Any]:
    """Causal attention(q, k, v) on (batch, seqlen, heads, dim): "dense" or "onchip"."""
    if name == "dense":
        from onchip.demo import dense

        return dense.attention
    import onchip

    return lambda q, k, v: onchip.attention(q, k, v, mask=onchip.causal())


def resident() -> tuple[int, int]:
    """Bytes of memory this process holds (now, at most so far).

    Linux tells both per process image; getrusage there would report the parent's peak when that is higher. macOS
    tells only the peak, which then stands for both: what is freed again before the measurement hides growth.
    """
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmRSS"].split()[0]) * 1024, int(fields["VmHWM"].split()[0]) * 1024
    if sys.platform == "win32":
        return resident_windows()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, peak


def resident_windows() -> tuple[int, int]:
    import ctypes

    class Counters(ctypes.Structure):  # PROCESS_MEMORY_COUNTERS of psapi.h
        _fields_ = [("cb", ctypes.c_uint32), ("faults", ctypes.c_uint32)] + [
            (name, ctypes.c_size_t)
            for name in ("peak", "now", "pp", "p", "np", "n", "pagefile", "peak_pagefile")
        ]

    windll: Any = getattr(ctypes, "windll")  # noqa: B009 - absent from the type stubs of other systems
    counters = Counters(cb=ctypes.sizeof(Counters))
    windll.kernel32.GetCurrentProcess.restype = ctypes.c_void_p
    handle = ctypes.c_void_p(windll.kernel32.GetCurrentProcess())
    if not windll.psapi.GetProcessMemoryInfo(handle, ctypes.byref(counters), counters.cb):
        raise OSError("GetProcessMemoryInfo failed")
    return counters.now, counters.peak


if __name__ == "__main__":
    if sys.argv[1] not in PARTS:
        sys.exit(f"unknown part {sys.argv[1]!r}; expected one of {', '.join(PARTS)}")
    for record in importlib.import_module(f"onchip.demo.{sys.argv[1]}").run(**json.loads(sys.argv[2])):
        print(json.dumps(record), flush=True)
