"""Plain functions and mask parts as Triton source: what the kernels compile in.

A plain function is run once on symbols that write down each operation, so lambdas, closures and helpers all work.
The same source gives the same compiled function, so that a lambda made anew at each call is not compiled anew.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import itertools
import linecache
import types
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip import plain, rules as plain_rules
from onchip.backends.compiled.rules import allow, tanh
from onchip.mask import Blocks, Dense, Documents, Mask, Part, Rows as RowsPart, Union, Where

Arguments = list[Any]


@triton.jit
def floor_divide(a, b):
    """Python's //: rounds down where Triton truncates."""
    quotient = a // b
    return quotient - ((quotient * b != a) & ((a < 0) != (b < 0))).to(tl.int32)


@triton.jit
def modulo(a, b):
    """Python's %: the sign of the divisor."""
    return a - floor_divide(a, b) * b


@triton.jit
def rows_allow(b, q, k, a):
    """a = (lo | None, hi | None, batch stride, row stride)"""
    ok = k >= 0
    offset = b.to(tl.int64) * a[2] + q.to(tl.int64) * a[3]
    if a[0] is not None:
        ok = ok & (tl.load(a[0] + offset) <= k)
    if a[1] is not None:
        ok = ok & (k < tl.load(a[1] + offset))
    return ok


@triton.jit
def documents_allow(b, q, k, q_len, k_len, a):
    """a = (ids of q, batch stride, row stride, ids of k, batch stride, row stride, whether q counts as a key)"""
    position = q + a[6] * (k_len - q_len)
    own = tl.load(a[0] + b.to(tl.int64) * a[1] + tl.maximum(position, 0).to(tl.int64) * a[2])
    return (position >= 0) & (own == tl.load(a[3] + b.to(tl.int64) * a[4] + k.to(tl.int64) * a[5]))


@triton.jit
def dense_allow(b, h, q, k, a):
    """a = (bool tensor as bytes, its four strides)"""
    offset = b.to(tl.int64) * a[1] + h.to(tl.int64) * a[2]
    return tl.load(a[0] + offset + q.to(tl.int64) * a[3] + k.to(tl.int64) * a[4]) != 0


class _Line:
    """A value of the traced function: the name of the line that computes it."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, trace: Trace, text: str):
        self.trace, self.text = trace, text

    def __bool__(self):
        raise TypeError("it branches on a value (if, and, or, not); use onchip.plain.where(), & and |")

    def __neg__(self):
        return self.trace.add(f"-{self.text}")

    def __invert__(self):
        return self.trace.add(f"{self.text} == 0")

    def __abs__(self):
        return self.trace.add(f"tl.abs({self.text})")

    def __pow__(self, power):
        if not isinstance(power, int) or power < 0:
            raise TypeError(f"it raises to the power {power!r}; kernels take whole powers")
        return self.trace.add(" * ".join([self.text] * power) or "1.0")


class Trace:
    """The lines of one emitted function."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, text: str) -> _Line:
        name = f"x{len(self.lines)}"
        self.lines.append(f"    {name} = {text}")
        return _Line(self, name)

    def run(self, fn: Callable[..., Any], *arguments: Any) -> str:
        """The text of fn's result; fn sees min, max, abs and the words of `onchip.plain` as this trace's."""
        words = {
            word: functools.partial(self._word, word) for word in ("exp", "log", "sqrt", "floor", "tanh")
        }
        words |= {"where": self._where, "min": self._pairwise("minimum"), "max": self._pairwise("maximum")}
        return _text(_rebind(fn, words)(*arguments))

    def _word(self, word: str, x: Any) -> Any:
        return self.add(f"{'' if word == 'tanh' else 'tl.'}{word}(({_text(x)}) * 1.0)")

    def _where(self, condition: Any, a: Any, b: Any) -> Any:
        return self.add(f"tl.where({_text(condition)}, {_text(a)}, {_text(b)})")

    def _pairwise(self, name: str) -> Callable[..., Any]:
        return lambda *values: functools.reduce(
            lambda a, b: self.add(f"tl.{name}({_text(a)}, {_text(b)})"), values
        )


def _text(x: Any) -> str:
    if isinstance(x, _Line):
        return x.text
    if isinstance(x, bool | int | float):
        return f"({x!r})" if x == x and abs(x) != float("inf") else f"float('{x}')"
    raise TypeError(f"it uses a {type(x).__name__}, which is not plain arithmetic")


def _operator(method: str, form: str) -> None:
    def forward(a: _Line, b: Any) -> _Line:
        return a.trace.add(form.format(a.text, _text(b)))

    def reverse(a: _Line, b: Any) -> _Line:
        return a.trace.add(form.format(_text(b), a.text))

    setattr(_Line, f"__{method}__", forward)
    setattr(_Line, f"__r{method}__", reverse)


for _method, _form in (
    ("add", "{} + {}"),
    ("sub", "{} - {}"),
    ("mul", "{} * {}"),
    ("truediv", "{} / {}"),
    ("floordiv", "floor_divide({}, {})"),
    ("mod", "modulo({}, {})"),
    ("and", "{} & {}"),
    ("or", "{} | {}"),
    ("xor", "{} ^ {}"),
    ("lt", "{} < {}"),
    ("le", "{} <= {}"),
    ("gt", "{} > {}"),
    ("ge", "{} >= {}"),
    ("eq", "{} == {}"),
    ("ne", "{} != {}"),
):
    _operator(_method, _form)


class _Table:
    """A tensor argument: an index is a load."""

    def __init__(self, trace: Trace, name: str, dims: int):
        self.trace, self.name, self.dims = trace, name, dims

    def __getitem__(self, index: Any) -> _Line:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != self.dims:
            raise TypeError(f"it reads a tensor of {self.dims} dims by {len(index)} indices")
        terms = [f"({_text(i)}) * {self.name}[{n + 1}]" for n, i in enumerate(index)]
        return self.trace.add(f"tl.load({' + '.join([f'{self.name}[0]', *terms])})")


def _rebind(fn: Callable[..., Any], words: dict[str, Any]) -> Callable[..., Any]:
    """fn with the vocabulary replaced wherever its code names it: globals, closures and onchip.plain's own names."""
    if not isinstance(fn, types.FunctionType):
        return fn
    ours = {getattr(plain, name): name for name in ("exp", "log", "sqrt", "floor", "tanh", "where")}
    names = {**fn.__globals__, **{n: words[n] for n in ("min", "max") if n in words}}
    for name, value in fn.__globals__.items():
        if isinstance(value, types.FunctionType) and value in ours:
            names[name] = words[ours[value]]
        elif value is plain:
            names[name] = types.SimpleNamespace(**words)
        elif getattr(value, "plain", None) is plain:  # the onchip package itself
            names[name] = types.SimpleNamespace(plain=types.SimpleNamespace(**words))
    closure = fn.__closure__
    if closure is not None:
        cells = []
        for cell in closure:
            value = cell.cell_contents
            if isinstance(value, types.FunctionType):
                value = words[ours[value]] if value in ours else value
            cells.append(types.CellType(value))
        closure = tuple(cells)
    return types.FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, closure)


_numbers = itertools.count()


@functools.lru_cache(maxsize=512)
def _compile(header: str, lines: str, result: str) -> triton.JITFunction:
    body = f"{lines}\n    return {result}\n" if lines else f"    return {result}\n"
    # Triton tells functions of one kernel apart by name and argument types alone.
    name = f"plain_{hashlib.sha256((header + body).encode()).hexdigest()[:16]}"
    source = f"def {name}{header}:\n{body}"
    filename = f"<onchip kernel function {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    names = {
        "tl": tl, "tanh": tanh, "floor_divide": floor_divide, "modulo": modulo, "rows_allow": rows_allow,
        "documents_allow": documents_allow, "dense_allow": dense_allow, "allow": allow, "Band": plain_rules.Band,
    }  # fmt: skip
    exec(builtins.compile(source, filename, "exec"), names)
    return triton.jit(names[name])


def mod_function(fn: Callable[..., Any], tensors: tuple[Tensor, ...]) -> triton.JITFunction:
    """fn(score, batch, head, q, k, *tensors) as a compiled fn(score, b, h, q, k, args)."""
    trace = Trace()
    symbols = [_Line(trace, name) for name in ("score", "b", "h", "q", "k")]
    tables = [_Table(trace, f"args[{i}]", t.dim()) for i, t in enumerate(tensors)]
    result = trace.run(fn, *symbols, *tables)
    # A choice never taken gives every result the shape of the score at no cost; score * 0 would be NaN where it is inf.
    return _compile(
        "(score, b, h, q, k, args)", "\n".join(trace.lines), f"tl.where(score < score, score, {result})"
    )


def table(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor argument for a kernel: pointer and strides."""
    return (tensor, *tensor.stride())


def mask_function(
    mask: Mask, bounds: Callable[[RowsPart], tuple[Any, ...]]
) -> tuple[triton.JITFunction | None, tuple]:
    """What a mask asks beyond its band and rows, as a compiled fn(b, h, q, k, q_len, k_len, args), and its args.

    `bounds` gives the (lo, hi, batch stride, row stride) of a rows part.
    """
    parts = (*mask.elements, *mask.blocks, *mask.unions)
    if not parts:
        return None, ()
    trace, args = Trace(), []
    text = " & ".join(_part(part, trace, args, bounds) for part in parts)
    function = _compile("(b, h, q, k, q_len, k_len, args)", "\n".join(trace.lines), text)
    return function, tuple(args)


def _part(part: Part, trace: Trace, args: Arguments, bounds: Callable[[RowsPart], tuple[Any, ...]]) -> str:
    """The text that answers for one part; its tensors join args."""
    here = f"args[{len(args)}]"
    if isinstance(part, RowsPart):
        args.append(bounds(part))
        return f"rows_allow(b, q, k, {here})"
    if isinstance(part, Documents):
        q, k = (_batched(x) for x in (part.ids_q, part.ids_k))
        args.append((*q, *k, int(part.ids_q is part.ids_k)))
        return f"documents_allow(b, q, k, q_len, k_len, {here})"
    if isinstance(part, Dense):
        args.append(_bytes(part.visible))
        return f"dense_allow(b, h, q, k, {here})"
    if isinstance(part, Blocks):
        args.append(_bytes(part.visible))
        return f"dense_allow(b, h, q // {part.tile_m}, k // {part.tile_n}, {here})"
    if isinstance(part, Union):
        return "(" + " | ".join(_whole(mask, trace, args, bounds) for mask in part.masks) + ")"
    assert isinstance(part, Where)
    symbols = [_Line(trace, name) for name in ("b", "h", "q", "k")]
    tables = []
    for tensor in part.args:
        tables.append(_Table(trace, f"args[{len(args)}]", tensor.dim()))
        args.append(table(tensor))
    return f"({trace.run(part.fn, *symbols, *tables)})"


def _whole(mask: Mask, trace: Trace, args: Arguments, bounds: Callable[[RowsPart], tuple[Any, ...]]) -> str:
    texts = [_part(part, trace, args, bounds) for part in mask.parts]
    if mask.band is not None or not texts:
        args.append(mask.band or plain_rules.Band())
        texts.append(f"allow(q, k, q_len, k_len, args[{len(args) - 1}], None, None)")
    return "(" + " & ".join(texts) + ")"


def _batched(ids: Tensor) -> tuple[Any, ...]:
    return ids, ids.stride(0) if ids.shape[0] > 1 else 0, ids.stride(1)


def _bytes(visible: Tensor) -> tuple[Any, ...]:
    strides = (
        0 if size == 1 else stride for size, stride in zip(visible.shape, visible.stride(), strict=True)
    )
    return (visible.view(torch.uint8), *strides)
