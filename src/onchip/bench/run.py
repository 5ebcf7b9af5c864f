"""Running cases: every implementation present checked against float64, then timed in turn."""

from __future__ import annotations

import itertools
import os
import platform
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import onchip
from onchip import devices, exact, select, traffic
from onchip.autograd import Call
from onchip.bench import peers
from onchip.bench.cases import Case
from onchip.bench.peers import Inputs, Peer, Unsupported
from onchip.bench.timing import Regime, measure
from onchip.observe import observing

_GRADIENT_PAIRS = 1 << 24  # of one key head: a float64 backward pass of a few seconds


@dataclass(frozen=True)
class Row:
    """One implementation on one case and pass. note: why there is no time.

    error: greatest error against float64, in roundings of the dtype, of `checked`; None where nothing was compared.
    """

    case: Case
    impl: str
    step: str
    seconds: float | None = None
    spread: float | None = None
    flops: int = 0
    bytes: int = 0  # that any algorithm must move
    floor: float | None = None  # least seconds on the device
    error: float | None = None
    checked: str = ""
    ok: bool = True
    peak_memory: int | None = (
        None  # bytes of the call, its results among them: see `_peak` and `_kernels_memory`
    )
    note: str = ""

    @property
    def tflops(self) -> float | None:
        return None if self.seconds is None else self.flops / self.seconds / 1e12

    def to_json(self) -> dict[str, Any]:
        body = {k: v for k, v in vars(self).items() if k != "case"}
        case = {**vars(self.case), "mask": self.case.mask_text, "lengths": list(self.case.lengths)}
        return {**body, "tflops": self.tflops, "case": case, "label": self.case.label}


@dataclass(frozen=True)
class _Ready:
    peer: Peer
    forward: Callable[[], Tensor]
    steps: dict[str, Callable[[], object]]
    error: float | None
    checked: str


class _Grab:
    call: Call | None = None

    def called(self, call: Call, out: Tensor, lse: Tensor, seconds: float) -> None:
        self.call = call


def run(
    cases: Iterable[Case],
    impls: Iterable[str] = (),
    device: str | None = None,
    regime: Regime | None = None,
    tick: Callable[[str, int, int], None] | None = None,
) -> list[Row]:
    """Rows of every case, pass and implementation, each once; impls: names of `peers.PEERS`, all where empty.

    RuntimeError, which names the case, where onchip raises or its inputs do not fit in memory.

    tick(label, done, total) is told of each round of measurements.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    regime = regime or Regime()
    names = list(dict.fromkeys(impls)) or [peer.name for peer in peers.PEERS]
    chosen = [peers.peer(name) for name in names]
    rows: list[Row] = []
    for case in dict.fromkeys(cases):
        rows += _case(case, chosen, device, regime, tick)
    return rows


def about(device: str, regime: Regime) -> dict[str, Any]:
    """What a recorded run says of itself."""
    name = torch.cuda.get_device_name() if device == "cuda" else devices.cpu_name()
    return {
        "date": date.today().isoformat(),
        "device": name if device == "cuda" else f"{name}, {torch.get_num_threads()} threads",
        "versions": {
            "onchip": onchip.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "regime": str(regime),
    }


def _case(case: Case, chosen: list[Peer], device: str, regime: Regime, tick: Any) -> list[Row]:
    try:
        given = peers.inputs(case, device)
        truth = stated(given)
    except (ValueError, TypeError, NotImplementedError, RuntimeError, MemoryError) as error:
        raise RuntimeError(f"{case.label}: {error}") from error
    names = {"forward": ("forward",), "backward": ("backward",), "both": ("forward", "backward")}[case.what]
    rows, ready = [], []
    for i, peer in enumerate(chosen):
        note = peer.missing(device)
        if tick is not None:  # compiling one may take a minute
            tick(f"{case.label}: checks", i, len(chosen))
        try:
            if note is None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns of each reason for which it refuses
                    ready.append(_prepare(peer, given, truth, names))
        except Unsupported as error:
            note = f"does not take {error}"
        except Exception as error:  # whatever another library raises
            note = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120] if str(error) else ''}"
        if note is not None:
            rows.append(Row(case, peer.name, case.what, note=note, ok=not peer.name.startswith("onchip")))
    if tick is not None:
        tick(f"{case.label}: checks", len(chosen), len(chosen))
    for step in names:
        rows += _timed(case, step, ready, truth, device, regime, tick)
    return rows


def stated(given: Inputs) -> Call:
    """The problem and operands of a case, from a call of our own."""
    grab = _Grab()
    with observing(grab), torch.no_grad():
        peers.peer("onchip").forward(given)(given.q, given.k, given.v)
    assert grab.call is not None
    return grab.call


def _prepare(peer: Peer, given: Inputs, truth: Call, names: tuple[str, ...]) -> _Ready:
    call = peer.forward(given)
    q, k, v = given.q, given.k, given.v

    def forward() -> Tensor:
        with torch.no_grad():
            return call(q, k, v)

    out = forward()
    grads = None
    found: dict[str, Callable[[], object]] = {"forward": forward}
    if "backward" in names:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        graph = call(*leaves)

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(graph, leaves, given.dout, retain_graph=True)

        found["backward"] = backward
        grads = backward()
    other_bits = given.case.dropout > 0 and not peer.name.startswith("onchip")
    error, checked = (None, "other random bits") if other_bits else _check(truth, given, out, grads)
    return _Ready(peer, forward, {name: found[name] for name in names}, error, checked)


def _check(truth: Call, given: Inputs, out: Tensor, grads: tuple[Tensor, ...] | None) -> tuple[float, str]:
    """The worst error in roundings, and what was compared: sampled rows of out, and one key head's gradients."""
    problem, operands = truth.problem, truth.operands
    generator = torch.Generator().manual_seed(0)
    lse = out.new_zeros(out.shape[:-1]).transpose(-1, -2)
    worst, rows = 0.0, exact.sample(problem, operands, 8, generator)
    for place in rows:
        found = exact.given(problem, operands, out, lse, place)[0]
        worst = _worse(worst, exact.roundings(found, exact.row(problem, operands, place)[0], problem.dtype))
    checked = f"{len(rows)} rows"
    if grads is not None and problem.seqlen_q * problem.seqlen_k * problem.group <= _GRADIENT_PAIRS:
        b, head_k = next(exact.key_heads(problem, operands))
        exactly = exact.whole(problem, operands, b, head_k, given.dout)
        scale = max(exact.greatest(exactly[f"d{name}"]) for name in "qkv")
        for name, grad in zip("qkv", grads, strict=True):
            part = exact.part(problem, operands, grad, name, b, head_k)
            worst = _worse(worst, exact.roundings(part, exactly[f"d{name}"], problem.dtype, scale))
        checked += ", gradients of one key head"
    return worst, checked


def _worse(a: float, b: float) -> float:
    return b if b != b else max(a, b)


def _timed(
    case: Case, step: str, ready: list[_Ready], truth: Call, device: str, regime: Regime, tick: Any
) -> list[Row]:
    problem, operands = truth.problem, truth.operands
    stated = problem, operands.layout, operands.mask
    least = traffic.count(*stated, "minimum", step, score=operands.score)
    where = devices.recognized(torch.cuda.get_device_name()) if device == "cuda" else devices.this_cpu()
    floor = None if where is None else least.floor(where).seconds
    memory = {
        one.peer.name: max(_peak(one.steps[step], device), _kernels_memory(one.peer, truth, step))
        for one in ready
    }
    told = None if tick is None else (lambda done: tick(f"{case.label}: {step}", done, regime.repeats))
    times = measure({one.peer.name: one.steps[step] for one in ready}, device, regime, told)
    limit = exact.allowed(problem.seqlen_k)
    return [
        Row(
            case, one.peer.name, step, times[one.peer.name].median, times[one.peer.name].spread, least.flops,
            least.bytes, floor, one.error, one.checked, one.error is None or one.error <= limit, memory[one.peer.name],
        )
        for one in ready
    ]  # fmt: skip


def _peak(call: Callable[[], object], device: str) -> int:
    """Peak bytes that torch's allocator gives a call, its results among them."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes of its start to stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    results: Any = seen.profiler.kineto_results  # type: ignore[union-attr]
    events = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    held = itertools.accumulate(size for _, size in sorted(events))
    return max(held, default=0)


def _kernels_memory(peer: Peer, truth: Call, step: str) -> int:
    """Peak bytes of a call of our native kernels, as they state them: their buffers are not of torch's allocator."""
    native = select.load("native")
    if peer.name != "onchip-native" and not (peer.name == "onchip" and truth.backend is native):
        return 0
    problem, operands = truth.problem, truth.operands
    q, k, v = operands.q, operands.k, operands.v
    if step == "forward":
        rows = q.numel() // problem.dim
        results = rows * (problem.dim_v * problem.dtype.itemsize + problem.accumulate.itemsize)  # out, lse
    else:
        results = sum(x.numel() * x.element_size() for x in (q, k, v))
    return results + native.extra_memory(problem, operands, step, ("q", "k", "v"))
