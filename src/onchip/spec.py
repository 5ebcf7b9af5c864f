"""Masks and score functions as text, integers and tensors: what the schema of a torch operator can hold.

`write` is traced by torch.compile, so it is plain: sizes go to a list where they may stay symbolic, not into text.
`read` is its inverse, and gives the same mask object for the same tensors, whose schedules are then kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor

from onchip import masks, rules
from onchip.mask import Blocks, Dense, Documents, Mask, Rows, Union, Where
from onchip.plain import as_constant, derivative
from onchip.score import Mod

Spec = tuple[str, list[int], list[Tensor]]

_functions: list[Callable[..., Any]] = []  # by number; they live as long as graphs that name them may
_INTERVALS = {
    "sinks": masks._first_keys,
    "padding": masks._first_keys,
    "prefix": masks._prefix,
    "chunked": masks._chunk,
    "documents": masks._document,
}
_KEEP = 16  # masks with tensors that are remembered


@as_constant
def _number(fn: Callable[..., Any]) -> int:
    """The number of a user's function, in this process."""
    for number, known in enumerate(_functions):
        if known is fn:
            return number
    _functions.append(fn)
    return len(_functions) - 1


@as_constant
def _number_of_slope(fn: Callable[..., Any], n_tensors: int) -> int:
    return _number(derivative(fn, n_tensors))


def write(mask: Mask | None, mod: Mod | None) -> Spec:
    """(text, integers, tensors) of a mask and a modification of the score."""
    words: list[str] = []
    ints: list[int] = []
    tensors: list[Tensor] = []
    if mask is not None:
        _write_mask(mask, words, ints, tensors)
    if mod is not None:
        words.append(f"mod {len(mod.args)}")
        ints.append(_number(mod.fn))
        ints.append(_number_of_slope(mod.fn, len(mod.args)) if mod.grad is None else _number(mod.grad))
        tensors.extend(mod.args)
    return " ".join(words), ints, tensors


def _write_mask(mask: Mask, words: list[str], ints: list[int], tensors: list[Tensor]) -> None:
    words.append("(")
    if mask.band is not None:
        words.append("band")
        for bound in mask.band:
            words.append("-" if bound is None else "i")
            if bound is not None:
                ints.append(bound)
    for rows in mask.rows:
        words.append(f"rows {rows.name}")
        if isinstance(rows.value, Tensor):
            words.append("t")
            tensors.append(rows.value)
        else:
            words.append("i")
            ints.append(rows.value)
    for part in mask.elements:
        if isinstance(part, Documents):
            words.append("documents 1" if part.ids_q is part.ids_k else "documents 2")
            tensors.append(part.ids_q)
            if part.ids_q is not part.ids_k:
                tensors.append(part.ids_k)
        elif isinstance(part, Dense):
            words.append("dense")
            tensors.append(part.visible)
        else:
            words.append(f"where {len(part.args)}")
            ints.append(_number(part.fn))
            tensors.extend(part.args)
    for blocks in mask.blocks:
        words.append("blocks")
        ints.append(blocks.tile_m)
        ints.append(blocks.tile_n)
        tensors.append(blocks.visible)
    for union in mask.unions:
        words.append("union")
        for inner in union.masks:
            _write_mask(inner, words, ints, tensors)
        words.append("end")
    words.append(")")


_kept: dict[tuple, tuple[tuple, Mask | None, Mod | None]] = {}


def read(text: str, ints: list[int], tensors: list[Tensor]) -> tuple[Mask | None, Mod | None]:
    """The mask and the modification that `write` was given."""
    if not tensors:
        return _read_plain(text, tuple(ints))
    key = (text, tuple(ints), tuple(id(t) for t in tensors))
    found = _kept.get(key)
    if found is not None and all(ref() is t for ref, t in zip(found[0], tensors, strict=True)):
        return found[1], found[2]
    mask, mod = _read(text, ints, tensors)
    _kept[key] = tuple(weakref.ref(t) for t in tensors), mask, mod
    while len(_kept) > _KEEP:
        _kept.pop(next(iter(_kept)), None)
    return mask, mod


@lru_cache(maxsize=256)
def _read_plain(text: str, ints: tuple[int, ...]) -> tuple[Mask | None, Mod | None]:
    return _read(text, list(ints), [])


def _read(text: str, ints: list[int], tensors: list[Tensor]) -> tuple[Mask | None, Mod | None]:
    words, numbers, found = iter(text.split()), iter(ints), iter(tensors)
    mask, mod = None, None
    for word in words:
        if word == "(":
            mask = _read_mask(words, numbers, found)
        else:
            count = int(next(words))
            fn, grad = _function(next(numbers)), _function(next(numbers))
            mod = Mod(fn, grad, tuple(next(found) for _ in range(count)))
    return mask, mod


def _function(number: int) -> Callable[..., Any]:
    if number >= len(_functions):
        raise RuntimeError(
            "onchip: a saved graph names a user's function (where, mod), known only to the process that made it"
        )
    return _functions[number]


def _read_mask(words: Iterator[str], ints: Iterator[int], tensors: Iterator[Tensor]) -> Mask:
    band, parts = None, {"rows": [], "elements": [], "blocks": [], "unions": []}  # in Mask's order
    for word in words:
        if word == ")":
            break
        if word == "band":
            band = rules.Band(*(None if next(words) == "-" else next(ints) for _ in range(4)))
        elif word == "rows":
            name = next(words)
            value = next(tensors) if next(words) == "t" else next(ints)
            parts["rows"].append(Rows(name, _INTERVALS[name], value))
        elif word == "documents":
            first = next(tensors)
            parts["elements"].append(Documents(first, first if next(words) == "1" else next(tensors)))
        elif word == "dense":
            parts["elements"].append(Dense(next(tensors)))
        elif word == "where":
            fn, count = _function(next(ints)), int(next(words))
            parts["elements"].append(Where(fn, tuple(next(tensors) for _ in range(count))))
        elif word == "blocks":
            sides = next(ints), next(ints)
            parts["blocks"].append(Blocks(next(tensors), *sides))
        else:
            inner = []
            while next(words) == "(":
                inner.append(_read_mask(words, ints, tensors))
            parts["unions"].append(Union(tuple(inner)))
    rows, elements, blocks, unions = (tuple(found) for found in parts.values())
    return Mask(band, rows, elements, blocks, unions)
