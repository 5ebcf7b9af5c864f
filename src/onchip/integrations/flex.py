"""FlexAttention's callables and BlockMask: `flex_attention` with torch's arguments, and `to_mask`, `to_mod` alone.

Functions of FlexAttention read tensors from their surroundings; onchip's plain functions get them as arguments, which
is how changes are seen and how kernels load them. An adapted function is a copy whose tensors come as arguments. On
the CPU it may use elementwise torch; a kernel takes plain arithmetic only. The tensors get no gradient.
"""

from __future__ import annotations

import copy
import functools
import operator
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, noop_mask

import onchip


class Adapted:
    """A FlexAttention callable as an onchip function: fn of its own inputs, then the tensors that it reads."""

    def __init__(self, fn: Callable[..., Any], inputs: int, tensors: tuple[Tensor, ...] = ()):
        self.fn, self.inputs, self.tensors = fn, inputs, tensors
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, *args: Any) -> Any:
        own, given = args[: self.inputs], args[self.inputs :]
        try:
            return self.bound(given)(*own)
        except (TypeError, IndexError, AttributeError) as error:
            if any(isinstance(x, Tensor) for x in own):
                raise
            raise TypeError(
                f"it is no plain arithmetic ({error}); a kernel takes operators, min, max, abs and onchip.plain"
            ) from error

    def bound(self, given: tuple[Any, ...]) -> Callable[..., Any]:
        """fn that reads these instead of its tensors."""
        changes = {id(t): g for t, g in zip(self.tensors, given, strict=True) if g is not t}
        return _replaced(self.fn, changes, _names(self.fn)) if changes else self.fn


class Slope(Adapted):
    """d score_mod / d score by torch's own differentiation."""

    def __call__(self, score: Tensor, *args: Any) -> Tensor:
        if not isinstance(score, Tensor):
            raise TypeError("its derivative is torch's, of tensors")
        own, given = args[: self.inputs - 1], args[self.inputs - 1 :]
        with torch.enable_grad():
            leaf = score.detach().requires_grad_()
            value = self.bound(given)(leaf, *own)
            if not isinstance(value, Tensor) or not value.requires_grad:
                return torch.zeros_like(score)
            return torch.autograd.grad(value.expand_as(leaf).sum(), leaf)[0]


Names = frozenset[str]


def tensors_of(fn: Any) -> list[Tensor]:
    """The tensors that a function, and the functions that it calls, read from closures, globals, partials, containers
    and the attributes of objects, an nn.Module's parameters and buffers included."""
    found: dict[int, Tensor] = {}
    seen: set[tuple[int, Names]] = set()

    def visit(value: Any, names: Names) -> None:
        if (id(value), names) in seen:
            return
        seen.add((id(value), names))
        if isinstance(value, Tensor):
            found[id(value)] = value
        for part in _parts(value, names).values():
            visit(part, _inside(part, names))

    visit(fn, _names(fn))
    return list(found.values())


def _replaced(value: Any, changes: dict[int, Any], names: Names, path: tuple[int, ...] = ()) -> Any:
    """A function, or what it reads, with other tensors: a copy where anything changes."""
    if id(value) in changes:
        return changes[id(value)]
    if id(value) in path:  # a function that calls itself
        return value
    parts, path = _parts(value, names), (*path, id(value))
    made = {key: _replaced(part, changes, _inside(part, names), path) for key, part in parts.items()}
    if all(made[key] is part for key, part in parts.items()):
        return value
    if isinstance(value, tuple | list):
        return type(value)(made.values())
    if isinstance(value, dict):
        return made
    if isinstance(value, functools.partial):
        keywords = {key[1]: part for key, part in made.items() if isinstance(key, tuple)}
        return functools.partial(made["func"], *(made[i] for i in range(len(value.args))), **keywords)
    if isinstance(value, types.MethodType):
        return types.MethodType(made["func"], made["self"])
    if isinstance(value, types.FunctionType):
        cells = tuple(types.CellType(made[i]) for i in range(len(value.__closure__ or ())))
        scope = {**value.__globals__, **{key: part for key, part in made.items() if isinstance(key, str)}}
        return types.FunctionType(value.__code__, scope, value.__name__, value.__defaults__, cells or None)
    changed = copy.copy(value)
    vars(changed).update(made)  # goes before an nn.Module's own look-up of parameters
    return changed


def _parts(value: Any, names: Names) -> dict[Any, Any]:
    """What a value holds that code using these names may read."""
    if type(value) in (tuple, list):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return value if type(value) is dict else {}
    if isinstance(value, functools.partial):
        keywords = {("keyword", name): part for name, part in value.keywords.items()}
        return {"func": value.func, **dict(enumerate(value.args)), **keywords}
    if isinstance(value, types.MethodType):
        return {"func": value.__func__, "self": value.__self__}
    if isinstance(value, types.FunctionType):
        cells = dict(enumerate(cell.cell_contents for cell in value.__closure__ or ()))
        scope = value.__globals__
        return {**cells, **{name: scope[name] for name in _names(value) if name in scope}}
    if isinstance(value, type | types.ModuleType | Tensor) or not hasattr(value, "__dict__"):
        return {}
    held = vars(value)
    if isinstance(value, torch.nn.Module):
        held = {**held["_modules"], **held["_buffers"], **held["_parameters"], **held}
    methods = (getattr(type(value), name, None) for name in names)
    names = names.union(*(_names(m) for m in methods if isinstance(m, types.FunctionType)))
    return {name: held[name] for name in names if name in held}


def _inside(part: Any, names: Names) -> Names:
    """The names that may be read of a part. A module that is held is read by attribute, or it would be a layer."""
    return names if isinstance(part, torch.nn.Module) else names | _names(part)


def _names(value: Any) -> Names:
    """The names in the code of a function, method or callable object, and in the functions inside it."""
    if not isinstance(value, types.FunctionType | types.MethodType):
        value = getattr(type(value), "forward" if isinstance(value, torch.nn.Module) else "__call__", None)
    todo: list[Any] = [getattr(value, "__code__", None)]
    names: set[str] = set()
    for code in todo:
        if isinstance(code, types.CodeType):
            names.update(code.co_names)
            todo.extend(code.co_consts)
    return frozenset(names)


_masks: weakref.WeakKeyDictionary[BlockMask, dict[tuple, onchip.Mask]] = weakref.WeakKeyDictionary()
_mods: dict[tuple, tuple[Any, tuple[Tensor, ...], onchip.Mod]] = {}
_KEEP = 16  # score_mods whose derivation is kept, with the tensors that they read


def to_mask(mask: BlockMask | Callable[..., Any], seqlen_q: int, seqlen_k: int) -> onchip.Mask:
    """The onchip mask of a BlockMask, or of a mask_mod(batch, head, q, k).

    That of a BlockMask is kept with it, and its schedules are, while its lists stay unchanged.
    """
    if not isinstance(mask, BlockMask):
        return _function_mask(mask)
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    key = (
        seqlen_q,
        seqlen_k,
        *(None if t is None or t.is_inference() else (id(t), t._version) for t in lists),
    )
    kept = _masks.setdefault(mask, {})
    if key not in kept:
        inside = None if mask.mask_mod is noop_mask else _function_mask(mask.mask_mod)
        shape = (-(-seqlen_q // mask.BLOCK_SIZE[0]), -(-seqlen_k // mask.BLOCK_SIZE[1]))
        full = None if lists[2] is None or lists[3] is None else listed_blocks(lists[2], lists[3], shape)
        partial = listed_blocks(mask.kv_num_blocks, mask.kv_indices, shape)
        kept[key] = lists_to_mask(partial, full, mask.BLOCK_SIZE, inside)
    return kept[key]


def _function_mask(fn: Callable[..., Any]) -> onchip.Mask:
    name = getattr(fn, "__qualname__", "")
    if isinstance(fn, types.FunctionType) and fn.__module__ == BlockMask.__module__ and fn.__closure__:
        parts = fn.__closure__[0].cell_contents  # of torch's and_masks and or_masks: the functions
        if name.startswith("and_masks.") and parts:
            return functools.reduce(operator.and_, map(_function_mask, parts))
        if name.startswith("or_masks.") and parts:
            return functools.reduce(operator.or_, map(_function_mask, parts))
    tensors = tuple(tensors_of(fn))
    if isinstance(fn, types.FunctionType) and not tensors:
        return onchip.where(fn)
    return onchip.where(Adapted(fn, 4, tensors), *tensors)


def listed_blocks(counts: Tensor, indices: Tensor, shape: tuple[int, int]) -> Tensor:
    """Lists of key blocks, counts (batch, heads, blocks_q) and indices (..., blocks_k), as bool (..., *shape)."""
    order = torch.arange(indices.shape[-1], device=indices.device)
    blocks_k = max(shape[1], indices.shape[-1])
    places = torch.where(order < counts[..., None], indices.long(), blocks_k)
    visible = torch.zeros(*indices.shape[:-1], blocks_k + 1, dtype=torch.bool, device=indices.device)
    return visible.scatter_(-1, places, True)[..., : shape[0], : shape[1]]


def lists_to_mask(
    partial: Tensor, full: Tensor | None, block_size: tuple[int, int], inside: onchip.Mask | None
) -> onchip.Mask:
    """All of the full blocks, and what `inside` shows of the partial ones (None: all)."""
    if inside is None:
        return onchip.block_sparse(partial if full is None else partial | full, block_size)
    mask = onchip.block_sparse(partial, block_size) & inside
    if full is None or not full.any():
        return mask
    return mask | onchip.block_sparse(full, block_size)


def to_mod(score_mod: Callable[..., Any]) -> onchip.Mod:
    """The onchip modification of a score_mod(score, batch, head, q, k): its derivative is torch's where the function
    is no plain arithmetic. ValueError where a tensor that it reads requires grad: a learned term is Score(bias=...)."""
    tensors = tuple(tensors_of(score_mod))
    key = (id(score_mod), *map(id, tensors))  # of things that are kept: an object may have no hash
    if key in _mods:
        return _mods[key][2]
    plain = isinstance(score_mod, types.FunctionType) and not tensors
    fn = score_mod if plain else Adapted(score_mod, 5, tensors)
    try:
        made = onchip.mod(fn, *tensors)
    except ValueError:
        made = onchip.mod(Adapted(score_mod, 5, tensors), *tensors, grad=Slope(score_mod, 5, tensors))
    _mods[key] = score_mod, tensors, made
    while len(_mods) > _KEEP:
        _mods.pop(next(iter(_mods)), None)
    return made


@torch.compiler.disable(
    reason="to_mask and to_mod read a function's surroundings: make them outside of one graph"
)
def _adapted(
    score_mod: Callable[..., Any] | None, block_mask: BlockMask | None, seqlen_q: int, seqlen_k: int
) -> tuple[onchip.Mask | None, onchip.Score | None]:
    mask = None if block_mask is None else to_mask(block_mask, seqlen_q, seqlen_k)
    return mask, None if score_mod is None else onchip.Score(mod=to_mod(score_mod))


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """torch.nn.attention.flex_attention.flex_attention, computed by onchip; kernel_options are taken and ignored.

    query (batch, heads_q, seqlen_q, dim), key and value (batch | 1, heads_k, seqlen_k, dim | dim_v). Returns out
    (batch, heads_q, seqlen_q, dim_v), with return_lse or return_aux=AuxRequest(lse=True) also lse (batch, heads_q,
    seqlen_q). Raises ValueError for fewer key heads without enable_gqa, NotImplementedError for max_scores.

    Under torch.compile the functions are adapted between two graphs. For one graph (fullgraph=True), call
    `onchip.attention` with `to_mask(block_mask, ...)` and `to_mod(score_mod)` made outside.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(f"{name}: has shape {tuple(x.shape)}, expected (batch, heads, seqlen, dim)")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"enable_gqa: is False, expected True for {query.shape[1]} query and {key.shape[1]} key heads"
        )
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError("return_aux: max_scores is not supported")
    key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    mask = score = None
    if score_mod is not None or block_mask is not None:
        mask, score = _adapted(score_mod, block_mask, query.shape[2], key.shape[2])
    out, lse = onchip.attention(
        query, key, value, mask=mask, score=score, scale=scale, layout="bhsd", return_lse=True
    )
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (out, lse) if return_lse else out
