"""Which backend would run a problem on a known GPU that is not here."""

from __future__ import annotations

import importlib.util

import torch

from onchip import devices, select
from onchip.backends import hopper
from onchip.problem import Problem


def this_gpu() -> str | None:
    """The known device that this machine's first GPU is."""
    found = devices.recognized(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None
    return None if found is None else found.name


def choose(problem: Problem, name: str | None, device: str | None) -> tuple[str, dict[str, str]]:
    """The backend, and the reasons why others would not run it: on this machine, or on the known GPU if one is given.

    Only the Hopper backend asks for a certain GPU. NotImplementedError where none serves the problem.
    """
    if device is None:
        return select.choose(problem, name), select.refusals(problem)
    select.check_name(name)
    reasons = select.refusals(problem)
    reasons.pop("hopper", None)
    refused = hopper.refuse_shape(problem)
    if devices.device(device).capability != 9:
        refused = f"the {device} is no Hopper GPU (compute capability 9.0)"
    elif (
        importlib.util.find_spec("triton") is None
    ):  # its tables, and the backward pass's, are in modules that need it
        refused = "triton is not installed"
    reason = refused or hopper.yields(problem)
    if reason is not None:
        reasons["hopper"] = reason
    if name == "hopper" and refused is not None:
        raise NotImplementedError(f"backend 'hopper' refuses this problem (hopper: {refused})")
    if name == "hopper" or (name is None and reason is None):
        return "hopper", reasons
    name = name or next((n for n in select.AUTOMATIC if n not in reasons), None)
    if name is None:
        report = "; ".join(f"{n}: {reasons[n]}" for n in select.AUTOMATIC)
        raise NotImplementedError(f"no backend serves this problem on the {device} ({report})")
    return select.choose(problem, name), reasons
