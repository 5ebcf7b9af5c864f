"""Which backend runs a problem, and why the others do not."""

from __future__ import annotations

import importlib
from functools import cache
from typing import cast

from onchip.backends import Backend
from onchip.problem import Problem

# Every backend, fastest first. The reference is dense: it runs only by name.
BACKENDS = {
    "hopper": "onchip.backends.hopper",
    "triton": "onchip.backends.triton",
    "native": "onchip.backends.cpu.native",
    "cpu": "onchip.backends.cpu",
    "reference": "onchip.backends.reference",
}
AUTOMATIC = ("hopper", "triton", "native", "cpu")


@cache
def load(name: str) -> Backend:
    """The module of a backend."""
    return cast(Backend, importlib.import_module(BACKENDS[name]))


def backward_of(backend: Backend) -> Backend:
    """Who runs the backward pass of a forward pass there."""
    name = getattr(backend, "BACKWARD", None)
    return backend if name is None else load(name)


def _reason(name: str, problem: Problem, automatic: bool, device: str | None) -> str | None:
    """Why a backend does not run a problem; None where it does."""
    backend = load(name)
    elsewhere = None if device is None else getattr(backend, "refuse_on", None)
    reason = backend.refuse(problem) if elsewhere is None else elsewhere(problem, device)
    if reason is None and automatic and hasattr(backend, "yields"):
        return backend.yields(problem)  # type: ignore[attr-defined]
    return reason


def check_name(name: object) -> None:
    if name is not None and (not isinstance(name, str) or name not in BACKENDS):
        raise ValueError(f"backend: got {name!r}, expected None or one of {', '.join(map(repr, BACKENDS))}")


def refusals(problem: Problem, device: str | None = None) -> dict[str, str]:
    """Backend -> reason, for every backend that would not run this problem by itself: here, or on a known GPU."""
    reasons = {name: _reason(name, problem, True, device) for name in BACKENDS}
    reasons["reference"] = reasons["reference"] or "it is dense, N x N, and runs only by name"
    if problem.device == "cpu":
        reasons["triton"] = reasons["triton"] or "it is interpreted, and runs only by name"
    return {name: reason for name, reason in reasons.items() if reason is not None}


def choose(problem: Problem, name: str | None = None, device: str | None = None) -> str:
    """The named backend, or the first that serves the problem: on this machine, or on a known GPU that is not here.

    NotImplementedError with the reasons if it refuses.
    """
    if name is not None:
        check_name(name)
        candidates = (name,)
    else:  # Triton's interpreter runs only by name
        candidates = ("native", "cpu") if problem.device == "cpu" else AUTOMATIC
    reasons = {}
    for candidate in candidates:
        reason = _reason(candidate, problem, name is None, device)
        if reason is None:
            return candidate
        reasons[candidate] = reason
    report = "; ".join(f"{candidate}: {reason}" for candidate, reason in reasons.items())
    where = "" if device is None else f" on the {device}"
    what = (
        f"no backend serves this problem{where}" if name is None else f"backend {name!r} refuses this problem"
    )
    raise NotImplementedError(f"{what} ({report})")
