"""Fixtures of every test: fresh random data, and each backend in turn."""

import os
import random
import re

import pytest
import torch

import onchip

NATIVE_REFUSES = re.compile("native: (it has no kernels for float64|a score mod is a Python function)")


@pytest.fixture(autouse=True)
def fresh_seed():
    """Other random data in every run, from a seed that a failing test prints; ONCHIP_SEED repeats it."""
    seed = int(os.environ.get("ONCHIP_SEED") or random.SystemRandom().getrandbits(32))
    print(f"ONCHIP_SEED={seed}")
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors here are small: a second thread costs more than it brings, above all beside other workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_dynamo():
    """No compiled graphs and no counts of them, from before or for after."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Of the backends in turn, the native one may refuse in words what it has no kernels for."""
    try:
        return (yield)
    except NotImplementedError as error:
        parameters = getattr(getattr(pyfuncitem, "callspec", None), "params", {})
        if parameters.get("backend") != "native" or not NATIVE_REFUSES.search(str(error)):
            raise
        return True


@pytest.fixture(params=["native", "cpu", "cpu in small tiles", "reference"])
def backend(request, monkeypatch):
    """The name of a backend. Small tiles let short sequences cross many of them, as long ones do."""
    if request.param == "native" and onchip.backends.cpu.isa.load().isa is None:
        pytest.skip(onchip.backends.cpu.isa.status())
    if request.param != "cpu in small tiles":
        return request.param
    from onchip.backends import cpu
    from onchip.tiles import Tiles

    monkeypatch.setattr(cpu, "tiles", lambda problem: Tiles(32, 64))
    return "cpu"
