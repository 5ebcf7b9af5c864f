"""`watch`: a training run's attention, checked against float64 now and then, and counted."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
# A look takes 0.6 us (0.6 to 2.6 on the hosts measured), a check of 4 rows 0.7 to 10 ms (on a GPU, some 700 small
# kernels): 1 to 5 us a call together. benchmarks/watch.py measures all of it beside training steps and bare calls.
EVERY = 5000


def _worse(a: float, b: float) -> float:
    """The greater error; NaN, which no number undoes, is the greatest."""
    return a if a != a or a > b else b


@dataclass(slots=True)
class Tally:
    """Calls of one backend. Tokens are query rows; seconds are host time inside calls."""

    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        self.calls += other.calls
        self.tokens += other.tokens
        self.seconds += other.seconds


@dataclass
class Watch:
    """What a `watch` block has seen."""

    every: int = EVERY
    rows: int = 4
    calls: int = 0
    checks: int = 0
    failures: int = 0  # checks whose error was above the rounding of the dtype
    worst: float = 0.0  # greatest error of a checked row, in roundings of its dtype
    tallies: dict[str, Tally] = field(default_factory=dict)  # of each backend
    # "backend: reason" -> problems, each counted once.
    refusals: Counter[str] = field(default_factory=Counter)
    # First (batch, head, row) with NaN or inf -> calls.
    bad: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    _problems: set[Problem] = field(default_factory=set)
    _changes: set[tuple[str, str]] = field(default_factory=set)
    # Of the last call: its problem, its backend, whose tally, and its tokens where the problem says them.
    _problem: Problem | None = None
    _module: Any = None
    _name: str = ""
    _tally: Tally = field(default_factory=Tally)
    _tokens: int | None = None
    _lock: Any = field(default_factory=threading.RLock)  # calls come from any thread
    # To be logged once the lock is free, as a handler may take others.
    _told: deque[tuple] = field(default_factory=deque)
    _generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def tokens(self) -> int:
        """Query rows."""
        return sum(tally.tokens for tally in tuple(self.tallies.values()))

    @property
    def seconds(self) -> float:
        """Host time inside calls."""
        return sum(tally.seconds for tally in tuple(self.tallies.values()))

    @property
    def backends(self) -> Counter[str]:
        """Calls of each."""
        return Counter({name: tally.calls for name, tally in tuple(self.tallies.items())})

    def called(self, call: Call, out: Tensor, lse: Tensor, seconds: float) -> None:
        try:
            with self._lock:
                if call.problem is not self._problem or call.backend is not self._module:
                    self._met(call)
                tally = self._tally
                tally.calls += 1
                tally.seconds += seconds
                tally.tokens += out.shape[0] if self._tokens is None else self._tokens
                self.calls += 1
                if (self.calls - 1) % self.every == 0:
                    self._check(call, out.detach(), lse.detach())
        finally:
            if self._told:
                self._tell()

    def _tell(self) -> None:
        """Log what waits. Of several threads each takes what is next, whoever found it."""
        while True:
            try:
                level, text, *values = self._told.popleft()
            except IndexError:
                return
            log.log(level, text, *values)

    def _met(self, call: Call) -> None:
        """Another problem or backend than the last call's: a new change is told, a new problem's refusals counted."""
        name = call.backend.__name__.rsplit(".", 1)[-1]  # type: ignore[attr-defined]
        change = (self._name, name)
        if self._module is not None and call.backend is not self._module and change not in self._changes:
            self._changes.add(change)  # told once: layers of two kinds change it at every step
            reason = select.refusals(call.problem).get(self._name, "another was named")
            self._told.append((logging.WARNING, "backend changed from %s to %s: %s", *change, reason))
        problem = call.problem
        self._problem, self._module, self._name = problem, call.backend, name
        self._tally = self.tallies.setdefault(name, Tally())
        # Of packed sequences a problem holds the greatest length only.
        self._tokens = None if problem.layout == "varlen" else problem.batch * problem.seqlen_q
        if problem in self._problems:
            return
        if len(self._problems) >= 4096:  # a run with ever new lengths
            self._problems.clear()
        self._problems.add(problem)
        for refused, reason in select.refusals(problem).items():
            if refused != name and refused in select.AUTOMATIC:
                self.refusals[f"{refused}: {reason}"] += 1

    def _check(self, call: Call, out: Tensor, lse: Tensor) -> None:
        if out.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self.checks += 1
        problem, operands = call.problem, call.operands
        starts = operands.layout.cu_seqlens_q if isinstance(operands.layout, Varlen) else None
        bad = exact.first_bad(out, starts)
        if bad is not None:
            self.bad[bad] += 1
            text = "call %d: out holds NaN or inf, first at (batch, head, row) = %s"
            self._told.append((logging.ERROR, text, self.calls, bad))
        with torch.no_grad():
            for place in exact.sample(problem, operands, self.rows, self._generator):
                self._compare(problem, exact.row(problem, operands, place), out, lse, operands, place)
        self._told.append((logging.INFO, str(self)))

    def _compare(
        self, problem: Problem, truth: tuple, out: Tensor, lse: Tensor, operands: Any, place: Any
    ) -> None:
        found = exact.given(problem, operands, out, lse, place)
        error = exact.roundings(found[0], truth[0], problem.dtype)
        if not error <= exact.allowed(problem.seqlen_k):  # NaN too
            self.failures += 1
            text = "call %d: row (batch %d, head %d, row %d) is off by %.3g roundings of %s against float64"
            where = place.batch, place.head, place.row
            self._told.append((logging.ERROR, text, self.calls, *where, error, problem.dtype))
        self.worst = _worse(self.worst, error)

    def add(self, other: Watch) -> None:
        """Count what another has seen as well."""
        with other._lock:
            self.calls += other.calls
            self.checks += other.checks
            self.failures += other.failures
            for name, tally in other.tallies.items():
                self.tallies.setdefault(name, Tally()).add(tally)
            self.refusals.update(other.refusals)
            self.bad.update(other.bad)
            self.worst = _worse(self.worst, other.worst)

    def __str__(self) -> str:
        with self._lock:
            return self._summary()

    def _summary(self) -> str:
        backends = ", ".join(f"{name} {n}" for name, n in self.backends.items()) or "none"
        refusals = ", ".join(f"{why} ({n})" for why, n in self.refusals.items()) or "none"
        return (
            f"{self.calls} calls ({backends}), {self.tokens} tokens, {self.seconds:.3f} s; {self.checks} checks, "
            f"{self.failures} failed, worst {self.worst:.2g} roundings; {sum(self.bad.values())} with NaN or inf; "
            f"refused: {refusals}"
        )


class Exporter:
    """The counters of all `watch` blocks of the process for Prometheus, added up when it asks: a call pays nothing.

    As a collector of its own it is not seen under PROMETHEUS_MULTIPROC_DIR.
    """

    _made: Exporter | None = None
    _making = threading.Lock()

    def __init__(self, core: Any) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._watches: list[Watch] = []
        self._ended = Watch()  # the sum of those that are over
        core.REGISTRY.register(self)

    @classmethod
    def made(cls) -> Exporter | None:
        """One a process, in the default registry; None where prometheus_client is not installed."""
        with cls._making:
            if cls._made is None and importlib.util.find_spec("prometheus_client") is not None:
                cls._made = cls(importlib.import_module("prometheus_client.core"))
            return cls._made

    @contextmanager
    def counting(self, seen: Watch) -> Iterator[None]:
        """Until the block ends as it stands, then as it ended."""
        with self._lock:
            self._watches.append(seen)
        try:
            yield
        finally:
            with self._lock:
                self._watches = [other for other in self._watches if other is not seen]
                self._ended.add(seen)

    def collect(self) -> Iterator[Any]:
        """The protocol of a collector: the families of counters as they stand."""
        total = Watch()
        with self._lock:
            for seen in (self._ended, *self._watches):
                total.add(seen)
        counters = {
            "onchip_calls": ("attention calls", {name: t.calls for name, t in total.tallies.items()}),
            "onchip_tokens": ("query rows", {name: t.tokens for name, t in total.tallies.items()}),
            "onchip_seconds": (
                "host seconds in calls",
                {name: t.seconds for name, t in total.tallies.items()},
            ),
            "onchip_refusals": ("problems that a backend refused", _by_backend(total.refusals)),
        }
        for name, (meaning, values) in counters.items():
            family = self._core.CounterMetricFamily(name, meaning, labels=["backend"])
            for backend, value in values.items():
                family.add_metric([backend], value)
            yield family
        yield self._core.CounterMetricFamily(
            "onchip_nonfinite_calls", "checked calls with NaN or inf", value=sum(total.bad.values())
        )
        yield self._core.GaugeMetricFamily(
            "onchip_worst_roundings",
            "greatest error of a checked row, in roundings; NaN ever after one",
            value=total.worst,
        )


def _by_backend(refusals: Counter[str]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for reason, count in refusals.items():
        found[reason.partition(":")[0]] += count
    return found


@contextmanager
def watch(every: int = EVERY, rows: int = 4) -> Iterator[Watch]:
    """Look on at every call inside the block; every so many calls, the first included, check one.

    >>> with onchip.watch() as seen:
    ...     train()
    >>> print(seen)

    A check compares `rows` random query rows with float64 and looks for NaN and inf in out. At the default `every` the
    looks and checks take under 1 % of a training step (added up, 0.1 % of a small one on a CPU, less than 0.4 % on an
    H200), and 1 to 5 us a call. What is found goes to the logger "onchip.watch" (errors and backend changes as they
    come, a summary at each check and at the end), to the returned `Watch`, and to prometheus_client's default registry
    where that is installed, there without what other threads still compute when the block ends.
    Calls under torch.compile and functorch transforms are not seen.
    """
    for name, value in (("every", every), ("rows", rows)):
        if type(value) is not int:
            raise TypeError(f"{name}: got {type(value).__name__}, expected an int")
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")
    seen, exporter = Watch(every=every, rows=rows), Exporter.made()
    with nullcontext() if exporter is None else exporter.counting(seen), observing(seen):
        try:
            yield seen
        finally:
            seen._tell()
            log.info("%s", str(seen))
