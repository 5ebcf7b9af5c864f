"""`onchip.rules`, compiled: the same functions as triton.jit functions that may call one another."""

import types

import triton
import triton.language as tl

from onchip import rules as plain_rules

_NAMES = ("first_diagonal", "last_diagonal", "allow", "spans", "modify", "modify_grad", "dropout_counter")


def _compile() -> dict[str, triton.JITFunction]:
    compiled: dict[str, triton.JITFunction] = {}
    for name in _NAMES:  # a function only calls those before it
        fn = getattr(plain_rules, name)
        clone = types.FunctionType(
            fn.__code__, {**fn.__globals__, "tl": tl, **compiled}, fn.__name__, fn.__defaults__
        )
        clone.__module__ = fn.__module__
        compiled[name] = triton.jit(clone)
    return compiled


_compiled = _compile()
first_diagonal = _compiled["first_diagonal"]
last_diagonal = _compiled["last_diagonal"]
allow = _compiled["allow"]
spans = _compiled["spans"]
modify = _compiled["modify"]
modify_grad = _compiled["modify_grad"]
dropout_counter = _compiled["dropout_counter"]


@triton.jit
def tanh(x):
    """By the exponential, and near 0, where that cancels, by its series (error below 2e-8 for |x| < 0.3)."""
    y = tl.abs(x)
    t = tl.math.exp2(y * -2.8853900817779268)
    large = (1.0 - t) / (1.0 + t)
    z = x * x
    small = x * (1.0 + z * (-0.3333333333 + z * (0.1333333333 + z * (-0.05396825397 + z * 0.02186948854))))
    return tl.where(y < 0.3, small, tl.where(x < 0, -large, large))
