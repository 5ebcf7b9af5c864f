"""`watch`: a training run's attention, checked against float64 now and then, and counted."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onchip import exact, select
from onchip.autograd import Call
from onchip.layout import Varlen
from onchip.observe import observing
from onchip.problem import Problem

log = logging.getLogger("onchip.watch")
# A call costs 1 us (1.6 where prometheus_client counts, too), a check of 4 rows 4 ms (1024 keys, 1 core): 3 us a call,
# 1 % of one that takes 0.3 ms. What a check does grows as N x dim, a call as N x N: benchmarks/watch.py measures both.
EVERY = 2000


@dataclass
class Watch:
    """What a `watch` block has seen. Tokens are query rows; seconds are host time inside calls."""

    every: int = EVERY
    rows: int = 4
    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0
    checks: int = 0
    failures: int = 0  # checks whose error was above the rounding of the dtype
    worst: float = 0.0  # greatest error of a checked row, in roundings of its dtype
    backends: Counter[str] = field(default_factory=Counter)  # calls of each
    # "backend: reason" -> problems, each counted once.
    refusals: Counter[str] = field(default_factory=Counter)
    # First (batch, head, row) with NaN or inf -> calls.
    bad: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    _problems: set[Problem] = field(default_factory=set)
    _changes: set[tuple[str, str]] = field(default_factory=set)
    _problem: Problem | None = None
    _module: Any = None
    _name: str = ""
    _metrics: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)  # calls come from any thread
    _generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def called(self, call: Call, out: Tensor, lse: Tensor, seconds: float) -> None:
        with self._lock:
            self._called(call, out, lse, seconds)

    def _called(self, call: Call, out: Tensor, lse: Tensor, seconds: float) -> None:
        if call.problem is not self._problem or call.backend is not self._module:
            self._met(call)
        shape = out.shape
        tokens = shape[0] * shape[1] if len(shape) == 4 else shape[0]
        self.calls += 1
        self.seconds += seconds
        self.tokens += tokens
        self.backends[self._name] += 1
        if self._metrics is not None:
            self._metrics.count(self._name, tokens, seconds)
        if (self.calls - 1) % self.every == 0:
            self._check(call, out.detach(), lse.detach())

    def _met(self, call: Call) -> None:
        """Another problem or backend than the last call's: a new change is told, a new problem's refusals counted."""
        name = call.backend.__name__.rsplit(".", 1)[-1]  # type: ignore[attr-defined]
        change = (self._name, name)
        if self._module is not None and call.backend is not self._module and change not in self._changes:
            self._changes.add(change)  # told once: layers of two kinds change it at every step
            reason = select.refusals(call.problem).get(self._name, "another was named")
            log.warning("backend changed from %s to %s: %s", *change, reason)
        self._problem, self._module, self._name = call.problem, call.backend, name
        if call.problem in self._problems:
            return
        if len(self._problems) >= 4096:  # a run with ever new lengths
            self._problems.clear()
        self._problems.add(call.problem)
        for refused, reason in select.refusals(call.problem).items():
            if refused != name and refused in select.AUTOMATIC:
                self.refusals[f"{refused}: {reason}"] += 1
                if self._metrics is not None:
                    self._metrics.refused(refused)

    def _check(self, call: Call, out: Tensor, lse: Tensor) -> None:
        if out.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self.checks += 1
        problem, operands = call.problem, call.operands
        starts = operands.layout.cu_seqlens_q if isinstance(operands.layout, Varlen) else None
        bad = exact.first_bad(out, starts)
        if bad is not None:
            self.bad[bad] += 1
            log.error("call %d: out holds NaN or inf, first at (batch, head, row) = %s", self.calls, bad)
        with torch.no_grad():
            for place in exact.sample(problem, operands, self.rows, self._generator):
                self._compare(problem, exact.row(problem, operands, place), out, lse, operands, place)
        if self._metrics is not None:
            self._metrics.checked(self.worst, bad is not None)
        log.info("%s", self)

    def _compare(
        self, problem: Problem, truth: tuple, out: Tensor, lse: Tensor, operands: Any, place: Any
    ) -> None:
        found = exact.given(problem, operands, out, lse, place)
        error = exact.roundings(found[0], truth[0], problem.dtype)
        if not error <= exact.allowed(problem.seqlen_k):  # NaN too
            self.failures += 1
            log.error(
                "call %d: row (batch %d, head %d, row %d) is off by %.3g roundings of %s against float64",
                self.calls, place.batch, place.head, place.row, error, problem.dtype,
            )  # fmt: skip
        self.worst = error if error != error else max(self.worst, error)

    def __str__(self) -> str:
        backends = ", ".join(f"{name} {n}" for name, n in self.backends.items()) or "none"
        refusals = ", ".join(f"{why} ({n})" for why, n in self.refusals.items()) or "none"
        return (
            f"{self.calls} calls ({backends}), {self.tokens} tokens, {self.seconds:.3f} s; {self.checks} checks, "
            f"{self.failures} failed, worst {self.worst:.2g} roundings; {sum(self.bad.values())} with NaN or inf; "
            f"refused: {refusals}"
        )


class _Metrics:
    """The same counters for Prometheus, in its default registry, made once a process."""

    _made: _Metrics | None = None

    def __init__(self, client: Any) -> None:
        self.calls = client.Counter("onchip_calls", "attention calls", ["backend"])
        self.tokens = client.Counter("onchip_tokens", "query rows", ["backend"])
        self.seconds = client.Counter("onchip_seconds", "host seconds in calls", ["backend"])
        self.refusals = client.Counter("onchip_refusals", "problems that a backend refused", ["backend"])
        self.bad = client.Counter("onchip_nonfinite_calls", "checked calls with NaN or inf")
        self.of_backend: dict[str, list[Any]] = {}
        self.worst = client.Gauge("onchip_worst_roundings", "greatest error of a checked row, in roundings")

    @classmethod
    def made(cls) -> _Metrics | None:
        """None where prometheus_client is not installed."""
        if cls._made is None:
            if importlib.util.find_spec("prometheus_client") is None:
                return None
            cls._made = cls(importlib.import_module("prometheus_client"))
        return cls._made

    def count(self, backend: str, tokens: int, seconds: float) -> None:
        found = self.of_backend.get(backend)
        if found is None:  # to look them up by label takes longer than to count
            parts = (self.calls, self.tokens, self.seconds)
            found = self.of_backend[backend] = [part.labels(backend) for part in parts]
        calls, rows, time = found
        calls.inc()
        rows.inc(tokens)
        time.inc(seconds)

    def refused(self, backend: str) -> None:
        self.refusals.labels(backend).inc()

    def checked(self, worst: float, bad: bool) -> None:
        self.worst.set(worst)
        if bad:
            self.bad.inc()


@contextmanager
def watch(every: int = EVERY, rows: int = 4) -> Iterator[Watch]:
    """Look on at every call inside the block; every so many calls, the first included, check one.

    >>> with onchip.watch() as seen:
    ...     train()
    >>> print(seen)

    A check compares `rows` random query rows with float64 and looks for NaN and inf in out. At the default `every` all
    of it costs under 1 % of calls that take 0.3 ms or more. What it finds goes to the
    logger "onchip.watch" (errors and backend changes as they come, a summary at each check and at the end), to the
    returned `Watch`, and to prometheus_client's default registry where that is installed.
    Calls under torch.compile and functorch transforms are not seen.
    """
    for name, value in (("every", every), ("rows", rows)):
        if type(value) is not int:
            raise TypeError(f"{name}: got {type(value).__name__}, expected an int")
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")
    seen = Watch(every=every, rows=rows, _metrics=_Metrics.made())
    with observing(seen):
        try:
            yield seen
        finally:
            log.info("%s", seen)
