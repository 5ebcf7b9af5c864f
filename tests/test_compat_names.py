"""onchip.compat has the names, parameters and defaults of flash_attn 2, 3 and 4, and imports fast."""

import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import onchip
from mirrored import MIRRORED, OURS, TORCH
from onchip.compat import MODULES, alias
from onchip.compat.missing import REFUSED

IMPORT_SECONDS = 0.3
NAMES = [(module, name) for module, names in MIRRORED.items() for name in names]


def parameters(signature):
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


@pytest.mark.parametrize("module, name", NAMES, ids=".".join)
def test_signature(module, name):
    loaded = importlib.import_module(f"onchip.compat.{module}")
    head, _, method = name.partition(".")
    if head in REFUSED.get(loaded.__name__, ()):
        with pytest.raises(NotImplementedError, match=head):
            getattr(loaded, head)
        return
    ours = getattr(getattr(loaded, head), method) if method else getattr(loaded, head)
    theirs = eval(f"lambda {MIRRORED[module][name]}: None", {"torch": torch})
    assert parameters(inspect.signature(ours)) == parameters(inspect.signature(theirs))


@pytest.mark.parametrize("theirs", OURS)
def test_signature_of_torch_s_functions(theirs):
    module = next(m for m in TORCH if theirs.startswith(m + ".") and theirs[len(m) + 1 :] in TORCH[m])
    text = TORCH[module][theirs[len(module) + 1 :]]
    wanted = parameters(inspect.signature(eval(f"lambda {text}: None")))
    assert parameters(inspect.signature(pkgutil.resolve_name(OURS[theirs]))) == wanted
    original = pkgutil.resolve_name(theirs)
    if hasattr(original, "__code__"):  # a builtin has no signature
        known = parameters(inspect.signature(original))
        # The one default that is ours: weights are made when asked for.
        assert [p if p[0] != "need_weights" else (*p[:2], False) for p in known] == wanted


def test_what_is_refused_is_internal_to_kernels():
    """No function that a model would call is among the refused names."""
    refused = {name for names in REFUSED.values() for name in names}
    public = [n for n in refused if n.startswith(("flash_attn", "apply_", "pad", "unpad", "index_"))]
    assert not public


def test_unknown_names_are_attribute_errors():
    module = importlib.import_module("onchip.compat.flash_attn.flash_attn_interface")
    assert not hasattr(module, "flash_attn_gpu")


def test_ways_of_importing():
    import onchip.compat.flash_attn as flash_attn
    from onchip.compat.flash_attn import flash_attn_func
    from onchip.compat.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input  # noqa: F401
    from onchip.compat.flash_attn.cute import flash_attn_varlen_func  # noqa: F401
    from onchip.compat.flash_attn.layers.rotary import apply_rotary_emb_func  # noqa: F401
    from onchip.compat.flash_attn.ops.triton.rotary import apply_rotary  # noqa: F401

    assert flash_attn.flash_attn_func is flash_attn_func
    assert flash_attn.__version__.startswith("2.")


def run(code):
    env = {**os.environ, "PYTHONPATH": str(Path(onchip.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_alias_serves_every_module():
    code = """
from onchip.compat import alias
alias("flash_attn"); alias("flash_attn_interface")
import flash_attn, flash_attn_interface, onchip.compat.flash_attn
from flash_attn.cute.interface import flash_attn_func as four
from flash_attn.layers.rotary import apply_rotary_emb
assert flash_attn is onchip.compat.flash_attn
assert flash_attn_interface.flash_attn_func is not flash_attn.flash_attn_func is not four
"""
    run(code)
    assert {f"{name}{part}" for name, parts in MODULES.items() for part in parts} >= set(MIRRORED)


def test_alias_takes_known_names_only():
    with pytest.raises(KeyError):
        alias("flash_attn_4")


def test_import_is_cheap():
    code = """
import time, torch
start = time.process_time()
import onchip.compat.flash_attn
print(time.process_time() - start)
"""
    best = float("inf")
    for _ in range(5):  # a busy machine makes single runs slow, never fast
        best = min(best, float(run(code)))
        if best < IMPORT_SECONDS:
            return
    pytest.fail(
        f"import onchip.compat.flash_attn took {best:.2f} s beyond torch, at best of 5; limit {IMPORT_SECONDS}"
    )
