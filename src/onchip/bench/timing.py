"""Times of calls taken in turn: medians and their spread, cool (idle before each) or sustained (back to back)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Regime:
    """repeats: measurements of each call. pause: idle seconds before each, 0 for sustained. least: seconds of one."""

    repeats: int = 7
    pause: float = 0.0
    least: float = 0.02

    def __str__(self) -> str:
        how = (
            f"cool, {self.pause} s idle before each measurement" if self.pause else "sustained, back to back"
        )
        return f"{how}; {self.repeats} measurement{'s' * (self.repeats > 1)} of each in turn"


@dataclass
class Times:
    """Seconds a call."""

    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the range of the middle half of the samples, as a share of the median."""
        if len(self.samples) < 4:
            return (max(self.samples) - min(self.samples)) / 2 / self.median
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / 2 / self.median


def measure(
    calls: dict[str, Callable[[], object]],
    device: str,
    regime: Regime,
    tick: Callable[[int], None] | None = None,
) -> dict[str, Times]:
    """The times of each call; tick(rounds done) after each round, in which every call had its turn.

    A measurement is as many calls as take `regime.least` seconds, so that the clock's grain does not show.
    """
    clock = _gpu_seconds if device == "cuda" else _seconds
    times = {name: Times() for name in calls}
    counts = {}
    for name, call in calls.items():
        call()
        counts[name] = max(1, min(1000, round(regime.least / max(clock(call, 1), 1e-7))))
    order = list(calls)
    for i in range(regime.repeats if calls else 0):
        for name in order[i % len(order) :] + order[: i % len(order)]:  # no call always after the same one
            if regime.pause:
                time.sleep(regime.pause)
                calls[name]()  # wakes clocks and caches, outside the measurement
            times[name].samples.append(clock(calls[name], counts[name]) / counts[name])
        if tick is not None:
            tick(i + 1)
    return times


def _seconds(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start


def _gpu_seconds(call: Callable[[], object], count: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3
