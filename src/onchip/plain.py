"""Plain functions: the small language in which users write masks and score modifications.

A plain function is straight-line Python arithmetic on its arguments, with the builtins ``min max abs`` and the
names below. The same function runs on torch tensors (`on_tensors`), can be differentiated (`derivative`), and
can be compiled into a kernel.
"""

import builtins
import functools
import hashlib
import inspect
import linecache
import math
import operator
import re
import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["derivative", "exp", "floor", "log", "on_tensors", "sqrt", "tanh", "where"]


def _unary(name: str) -> Callable[[Any], Any]:
    def apply(x):
        if isinstance(x, torch.Tensor):
            return getattr(torch, name)(x)
        if isinstance(x, _Symbolic):
            return x.apply(name)
        return getattr(math, name)(x)

    apply.__name__ = name
    apply.__doc__ = f"``{name}`` of a tensor or a number."
    return apply


exp, log, tanh, sqrt, floor = (_unary(name) for name in ("exp", "log", "tanh", "sqrt", "floor"))


def where(condition, a, b):
    """``a`` where the condition holds, else ``b``."""
    for x in (condition, a, b):
        if isinstance(x, _Symbolic):
            return x.choose(condition, a, b)
    if not isinstance(condition, torch.Tensor):
        return a if condition else b
    if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
        a = on_device(a, condition.device)
    return torch.where(condition, a, b)


def on_device(value: Any, device: torch.device) -> torch.Tensor:
    """What a function returned, as a tensor there. A number is filled in: no copy from the host, which would wait."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return torch.full((), value, device=device)


def _as_tensor(number, like: torch.Tensor) -> torch.Tensor:
    """A number in the tensor's dtype where that can hold it: 0.1 beside float64 is not float32's 0.1."""
    holds = like.is_floating_point() or (isinstance(number, int) and like.dtype is not torch.bool)
    return torch.full((), number, dtype=like.dtype if holds else None, device=like.device)


def _pairwise(name: str) -> Callable[..., Any]:
    reduce_two = {"min": torch.minimum, "max": torch.maximum}[name]
    builtin = getattr(builtins, name)

    def two(a, b):
        if isinstance(a, _Symbolic) or isinstance(b, _Symbolic):
            return (a if isinstance(a, _Symbolic) else b).pairwise(name, a, b)
        if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            return builtin(a, b)
        like = a if isinstance(a, torch.Tensor) else b
        return reduce_two(*(x if isinstance(x, torch.Tensor) else _as_tensor(x, like) for x in (a, b)))

    return lambda *values: functools.reduce(two, values)


_ELEMENTWISE = {"min": _pairwise("min"), "max": _pairwise("max")}


@functools.lru_cache(maxsize=256)
def on_tensors(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with ``min`` and ``max`` taken element by element, so that it runs on tensors."""
    if not isinstance(fn, types.FunctionType):
        return fn
    names = {**fn.__globals__, **_ELEMENTWISE}
    clone = types.FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__)
    clone.__kwdefaults__ = fn.__kwdefaults__
    return clone


class _Symbolic:
    """A traced value around a sympy expression: comparisons stay symbolic and truth tests are errors."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expr: Any):
        self.expr = expr

    def __bool__(self):
        raise TypeError(
            "it branches on a value (if, and, or, not, a chained comparison); use where(), & and |"
        )

    def __abs__(self):
        return _Symbolic(_sympy().Abs(_number(self)))

    def __invert__(self):
        return _Symbolic(_sympy().Not(_condition(self)))

    def apply(self, name: str):
        return _Symbolic(getattr(_sympy(), name)(_number(self)))

    def choose(self, condition, a, b):
        return _Symbolic(_sympy().Piecewise((_number(a), _condition(condition)), (_number(b), True)))

    def pairwise(self, name: str, a, b):
        return _Symbolic(getattr(_sympy(), name.capitalize())(_number(a), _number(b)))


class _Indexable:
    """Stands for a tensor argument while tracing: an index gives one opaque real value."""

    def __init__(self, name: str):
        self.base: Any = _sympy().IndexedBase(name, real=True)

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        return _Symbolic(self.base[tuple(_number(i) for i in index)])


def _sympy():
    import sympy  # torch depends on it; imported late because it takes a third of a second

    return sympy


def _unwrap(x):
    return x.expr if isinstance(x, _Symbolic) else _sympy().sympify(x)


def _number(x):
    """The expression as a number: a condition counts 1 where it holds, as in torch."""
    sympy, expr = _sympy(), _unwrap(x)
    return expr if isinstance(expr, sympy.Expr) else sympy.Piecewise((1, expr), (0, True))


def _condition(x):
    """The expression as a condition: an entry of a bool table is one; numbers would be meant bit by bit."""
    sympy, expr = _sympy(), _unwrap(x)
    if isinstance(expr, sympy.Indexed):
        return sympy.Ne(expr, 0)
    if isinstance(expr, sympy.Expr):
        raise TypeError(f"it takes {expr} for a condition; &, |, ^ and ~ join comparisons only")
    return expr


def _overload(method: str, build: Callable[[Any, Any], Any], convert: Callable[[Any], Any] = _number) -> None:
    setattr(_Symbolic, f"__{method}__", lambda a, b: _Symbolic(build(convert(a), convert(b))))
    setattr(_Symbolic, f"__r{method}__", lambda a, b: _Symbolic(build(convert(b), convert(a))))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _overload(_name, getattr(operator, _name))
for _name in ("and", "or", "xor"):
    _overload(_name, lambda a, b, _kind=_name.capitalize(): getattr(_sympy(), _kind)(a, b), _condition)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _overload(_name, lambda a, b, _kind=_name.capitalize(): getattr(_sympy(), _kind)(a, b))
_Symbolic.__neg__ = lambda a: _Symbolic(-_number(a))  # type: ignore[attr-defined]


def as_constant(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Under torch.compile, run while the graph is made; what it returns is a constant of the graph.

    As torch.compiler.assume_constant_result, which would import all of Dynamo, for seconds.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


@as_constant
def check_closed(name: str, fn: Callable[..., Any]) -> None:
    """Raise ValueError where fn reads a tensor that is no argument: a change of it, or its gradient, would be lost."""
    if not isinstance(fn, types.FunctionType):
        return
    outside = {n: fn.__globals__.get(n) for n in fn.__code__.co_names}
    for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        outside[variable] = cell.cell_contents
    for variable, value in outside.items():
        if isinstance(value, torch.Tensor):
            raise ValueError(
                f"{name}: the function reads the tensor {variable!r} from outside; pass it: {name}(fn, {variable})"
            )


@functools.lru_cache(maxsize=256)
def derivative(fn: Callable[..., Any], n_tensors: int) -> Callable[..., Any]:
    """d fn / d score of a plain ``fn(score, batch, head, q, k, *tensors)``, as a plain function of the same form.

    Raises ValueError when fn is not plain arithmetic; the caller then has to bring the derivative.
    """
    sympy = _sympy()
    names = ["score", "batch", "head", "q", "k", *(f"tensor{i}" for i in range(n_tensors))]
    score = sympy.Symbol("score", real=True)
    indices = [_Symbolic(sympy.Symbol(name, integer=True, nonnegative=True)) for name in names[1:5]]
    tensors = [_Indexable(name) for name in names[5:]]
    label = getattr(fn, "__name__", repr(fn))
    try:
        value = on_tensors(fn)(_Symbolic(score), *indices, *tensors)
        slope = sympy.diff(_number(value), score)
        body = _to_source(slope)
    except Exception as error:
        raise ValueError(
            f"mod: cannot derive the derivative of {label}: {error}. Write it with arithmetic, min, max, abs and "
            "onchip.plain's exp, log, tanh, sqrt, where; or pass grad=fn(score, batch, head, q, k, *tensors)"
        ) from error
    name = re.sub(r"\W", "_", f"{getattr(fn, '__name__', type(fn).__name__)}_grad")
    return _compile(f"def {name}({', '.join(names)}):\n    return {body}\n", name)


@as_constant
def check_derivable(fn: Callable[..., Any], n_tensors: int) -> None:
    """Raise ValueError where `derivative` does."""
    derivative(fn, n_tensors)


def _compile(source: str, name: str) -> Callable[..., Any]:
    """A function from source text that inspect.getsource can read back, as kernel compilers need."""
    filename = f"<onchip derivative {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    vocabulary = {"exp": exp, "log": log, "tanh": tanh, "sqrt": sqrt, "floor": floor, "where": where}
    exec(compile(source, filename, "exec"), vocabulary)
    function = vocabulary[name]
    assert inspect.isfunction(function)
    return function


def _to_source(expr: Any) -> str:
    """A sympy expression as plain Python over this module's names."""
    from sympy.printing.str import StrPrinter

    class Source(StrPrinter):
        def _print_Piecewise(self, e):
            *cases, (last, _) = e.args
            text = self._print(last)
            if e.args[-1].cond != True:  # noqa: E712  (sympy's true is not Python's)
                cases, text = list(e.args), "0.0"
            for value, condition in reversed(cases):
                text = f"where({self._print(condition)}, {self._print(value)}, {text})"
            return text

        def _print_Relational(self, e):
            return f"({self._print(e.lhs)} {e.rel_op} {self._print(e.rhs)})"

        def _print_And(self, e):
            return "(" + " & ".join(self._print(a) for a in e.args) + ")"

        def _print_Or(self, e):
            return "(" + " | ".join(self._print(a) for a in e.args) + ")"

        def _print_Not(self, e):
            return f"(({self._print(e.args[0])}) == 0)"

        def _print_Heaviside(self, e):
            return f"where({self._print(e.args[0])} > 0, 1.0, 0.0)"

        def _print_sign(self, e):
            x = self._print(e.args[0])
            return f"where({x} > 0, 1.0, where({x} < 0, -1.0, 0.0))"

        def _print_Abs(self, e):
            return f"abs({self._print(e.args[0])})"

        def _print_Min(self, e):
            return "min(" + ", ".join(self._print(a) for a in e.args) + ")"

        def _print_Max(self, e):
            return "max(" + ", ".join(self._print(a) for a in e.args) + ")"

        def _print_Mod(self, e):
            return f"({self._print(e.args[0])} % {self._print(e.args[1])})"

        def _print_Exp1(self, e):
            return repr(math.e)

        def _print_Derivative(self, e):
            raise ValueError(f"no closed form for {e}")

        def _print_Subs(self, e):
            raise ValueError(f"no closed form for {e}")

    return Source({"full_prec": False}).doprint(expr)
