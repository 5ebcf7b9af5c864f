"""What is installed, which backends are usable here, and why the others are not: one screen."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from contextlib import suppress
from typing import Any

import torch

import onchip
from onchip import devices, select
from onchip.bench.peers import PEERS, importable
from onchip.problem import Problem

# What is imported -> the distributions that may bring it, for its version.
PACKAGES = {
    "triton": ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows"),
    "transformers": ("transformers",),
    "flash_attn": ("flash-attn",),
    "flash_attn_interface": ("flash-attn-3", "flashattn-hopper"),
    "flash_attn.cute": ("flash-attn-4", "flash-attn-cute"),
    "xformers": ("xformers",),
    "matplotlib": ("matplotlib",),
    "rich": ("rich",),
    "prometheus_client": ("prometheus-client",),
}
FLASH = {"flash_attn": 2, "flash_attn_interface": 3, "flash_attn.cute": 4}
ON_GPU = ("hopper", "triton")  # the backends for a GPU; the others need none


def examine() -> dict[str, Any]:
    """{"machine", "packages", "backends", "peers"}: plain strings; a package or backend that is not usable says why."""
    return {
        "machine": _machine(),
        "packages": {name: version(name) for name in PACKAGES},
        "backends": {name: _backend(name) for name in select.BACKENDS},
        "peers": {peer.name: peer.missing(_device()) for peer in PEERS if not peer.name.startswith("onchip")},
    }


def version(module: str) -> str | None:
    """The version installed, "installed" where none is stated, None where it cannot be imported. Nothing is."""
    if not importable(module):
        return None
    for name in PACKAGES.get(module, (module,)):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "installed"


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _machine() -> dict[str, str]:
    found = {
        "onchip": onchip.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "cpu": f"{devices.cpu_name()}, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}",
    }
    if not torch.cuda.is_available():
        found["gpu"] = (
            "none that torch sees" if torch.version.cuda or torch.version.hip else "this torch is a CPU build"
        )
        return found
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        found[f"gpu {i}"] = f"{facts.name}, {facts.major}.{facts.minor}, {facts.total_memory / 2**30:.0f} GiB"
    return found


def _backend(name: str) -> dict[str, str | None]:
    """refused: what this machine lacks for a plain problem, None where it runs. status: what it says of itself."""
    try:
        module = select.load(name)
        status = getattr(module, "status", None)
        said = None if status is None else str(status())
    except Exception as error:  # a backend that cannot even be imported is a finding
        return {"refused": f"{type(error).__name__}: {error}", "status": None}
    tried = {where: _refusal(module, where) for where in ("cuda", "cpu")}
    where = next((w for w, reason in tried.items() if reason is None), None)
    if where is None:  # on the other device it refuses whatever the machine is
        return {"refused": tried["cuda" if name in ON_GPU else "cpu"], "status": said}
    return {"refused": None, "status": said, "device": where}


def _refusal(module: Any, where: str) -> str | None:
    if where == "cuda" and not torch.cuda.is_available():
        return "no GPU found" + ("" if importable("triton") else "; triton is not installed")
    dtype = torch.bfloat16 if where == "cuda" else torch.float32
    plain = Problem("dense", 1, 128, 128, 1, 1, 64, 64, dtype, where, 0.125)
    try:
        return module.refuse(plain)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def lines(found: dict[str, Any]) -> list[str]:
    """The screen as plain text."""
    width = 16
    text = [f"{name:{width}}{value}" for name, value in found["machine"].items()]
    text.append("")
    for name, state in found["backends"].items():
        usable = f"usable on {state['device']}" if state["refused"] is None else f"no: {state['refused']}"
        if name == "reference":
            usable += ", by name only: dense, N x N"
        if name == "cpu":
            usable += ": the tiled loop of torch operations"
        if state["status"] and state["refused"] is None:  # else the refusal has said it
            usable += f"; {state['status']}"
        text.append(f"{'backend ' + name:{width + 2}}{usable}")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted:
        text.append("TRITON_INTERPRET=1 is set: Triton kernels run in its interpreter")
    text.append("")
    names = {name: name + (f" (FlashAttention-{FLASH[name]})" if name in FLASH else "") for name in PACKAGES}
    have = ", ".join(f"{names[name]} {value}" for name, value in found["packages"].items() if value)
    lack = ", ".join(names[name] for name, value in found["packages"].items() if not value)
    text.append(f"{'installed':{width}}{have or 'none of the optional packages'}")
    text.append(f"{'not installed':{width}}{lack or 'nothing'}")
    ready = ", ".join(name for name, why in found["peers"].items() if why is None)
    text.append(f"{'to bench against':{width}}{' '}{ready}")
    return text
