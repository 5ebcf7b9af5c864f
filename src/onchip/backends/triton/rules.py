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
allow = _compiled["allow"]
spans = _compiled["spans"]
modify = _compiled["modify"]
modify_grad = _compiled["modify_grad"]
dropout_counter = _compiled["dropout_counter"]
