"""Named workloads: sizes, mask, dtype and pass as plain values, from flags, a file (`files.py`) or recorded calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onchip import masks, patterns, problem as problems, spec, stand_ins
from onchip.layout import Layout
from onchip.mask import Mask
from onchip.score import Score

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
PASSES = ("forward", "backward", "both")


@dataclass(frozen=True)
class Case:
    """One workload. mask: an expression of `MASKS`, such as "causal & (window(255, 0) | sinks(4))", or a mask.

    seqlen_k, heads_k, dim_v: as for q where None. lengths: packed sequences, in place of batch and seqlen;
    lengths_k: their keys, if not as many, or the lengths in a cache.
    what: "forward", "backward" (alone) or "both". cache: keys are read from a cache, for decoding.
    """

    name: str = ""
    batch: int = 1
    seqlen_q: int = 1024
    seqlen_k: int | None = None
    heads_q: int = 8
    heads_k: int | None = None
    dim: int = 64
    dim_v: int | None = None
    dtype: str = "float32"
    mask: str | Mask = ""
    softcap: float | None = None
    dropout: float = 0.0
    what: str = "forward"
    cache: bool = False
    lengths: tuple[int, ...] = ()
    lengths_k: tuple[int, ...] = ()
    calls: int = 1  # how often a recording saw it
    without: tuple[
        str, ...
    ] = ()  # what the recorded calls had and the case has not: "alibi", "bias", "sink", "mod"

    def __post_init__(self) -> None:
        self._check_words()
        sizes = {"batch": self.batch, "seqlen_q": self.seqlen_q, "heads_q": self.heads_q, "dim": self.dim}
        sizes |= {
            "seqlen_k": self.seqlen_k,
            "heads_k": self.heads_k,
            "dim_v": self.dim_v,
            "calls": self.calls,
        }
        for name, n in sizes.items():
            if n is not None and (type(n) is not int or not 1 <= n < 2**31):
                raise ValueError(f"{name}: got {n!r}, expected an int of at least 1 and below 2**31")
        self._check_lengths()
        if not isinstance(self.mask, str | Mask):
            raise ValueError(f"mask: got {self.mask!r}, expected an expression")
        p = self.dropout
        if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1:
            raise ValueError(f"dropout: got {p!r}, expected a number in [0, 1]")
        Score(softcap=self.softcap)  # says what is wrong with it
        if self.cache and (self.lengths or self.what != "forward" or self.dropout):
            raise ValueError("cache: given with lengths, dropout or a backward pass, expected none of them")
        self.make_mask()  # an expression that cannot be read fails here

    def _check_words(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"name: got {self.name!r}, expected text")
        if type(self.cache) is not bool:
            raise ValueError(f"cache: got {self.cache!r}, expected true or false")
        dtype = DTYPES.get(self.dtype, self.dtype) if isinstance(self.dtype, str) else self.dtype
        if dtype not in DTYPES.values():
            raise ValueError(f"dtype: got {self.dtype!r}, expected one of {', '.join(DTYPES.values())}")
        object.__setattr__(self, "dtype", dtype)
        if self.what not in PASSES:
            raise ValueError(f"what: got {self.what!r}, expected one of {', '.join(PASSES)}")
        for name in ("lengths", "lengths_k", "without"):
            if not isinstance(getattr(self, name), tuple | list):
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected a list")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not all(isinstance(word, str) for word in self.without):
            raise ValueError(f"without: got {list(self.without)}, expected words")

    def check(self) -> None:
        """Raise what a call on this case raises of its sizes, mask and dtype; nothing is computed."""
        three = stand_ins.tensors(*self.shapes, "bshd", self.torch_dtype)
        q, k, v = three
        kind = "cache" if self.cache else "varlen" if self.lengths else "dense"
        if self.cache:
            lengths = self.lengths_k or self.k_len
            place: Layout = stand_ins.cached((q, k, v), lengths, 0, None, None, None, bounded=False)
        elif self.lengths:
            place = stand_ins.packed((q, k, v), *self.packing().values())
        else:
            place = problems.dense_layout(q, k, v)
        problems.state(q, k, v, place, kind, self.make_mask(), None, dropout=self.dropout, device="cpu")

    def _check_lengths(self) -> None:
        for name in ("lengths", "lengths_k"):
            found = getattr(self, name)
            wrong = [n for n in found if type(n) is not int or not 0 <= n < 2**31]
            if wrong or (found and not any(found)):
                raise ValueError(f"{name}: got {list(found)}, expected ints of at least 0, one above it")
        sequences = self.batch if self.cache else len(self.lengths)
        if self.lengths_k and len(self.lengths_k) != sequences:
            raise ValueError(
                f"lengths_k: has {len(self.lengths_k)}, expected one for each of {sequences} sequences"
            )

    @property
    def k_len(self) -> int:
        return self.seqlen_q if self.seqlen_k is None else self.seqlen_k

    @property
    def kv_heads(self) -> int:
        return self.heads_q if self.heads_k is None else self.heads_k

    @property
    def value_dim(self) -> int:
        return self.dim if self.dim_v is None else self.dim_v

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Of q, k and v."""
        lead_q, lead_k = (self.batch, self.seqlen_q), (self.batch, self.k_len)
        if self.lengths:
            lead_q, lead_k = (sum(self.lengths),), (sum(self.keys),)
        kv = (*lead_k, self.kv_heads)
        return (*lead_q, self.heads_q, self.dim), (*kv, self.dim), (*kv, self.value_dim)

    @property
    def keys(self) -> tuple[int, ...]:
        """Of each packed sequence."""
        return self.lengths_k or self.lengths

    def packing(self, device: str = "cpu") -> dict[str, Any]:
        """cu_seqlens_q and _k as `attention_varlen` and `plan` take them; {} where nothing is packed."""
        if not self.lengths:
            return {}
        both = (("cu_seqlens_q", self.lengths), ("cu_seqlens_k", self.keys))
        return {n: torch.tensor([0, *x], device=device).cumsum(0).to(torch.int32) for n, x in both}

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def mask_text(self) -> str:
        return self.mask if isinstance(self.mask, str) else repr(self.mask)

    @property
    def label(self) -> str:
        """Its name, or one of its sizes."""
        if self.name:
            return self.name + self._lacks
        heads = f"h{self.heads_q}" if self.kv_heads == self.heads_q else f"h{self.heads_q}/{self.kv_heads}"
        seqlen = f"N{self.seqlen_q}" if self.k_len == self.seqlen_q else f"N{self.seqlen_q}x{self.k_len}"
        size = f"{len(self.lengths)} packed" if self.lengths else f"b{self.batch} {seqlen}"
        return f"{size} {heads} d{self.dim} {self.mask_text or 'full'}{self._lacks}"

    @property
    def _lacks(self) -> str:
        return f" (without {', '.join(self.without)})" if self.without else ""

    def make_mask(self, device: str = "cpu") -> Mask | None:
        """The mask; the same one for the same expression and sizes, random block maps included."""
        if isinstance(self.mask, Mask):
            return on(self.mask, device)
        return parse_mask(self.mask, self.seqlen_q, self.k_len, device)

    def to_json(self) -> dict[str, Any]:
        """A dict for a file; ValueError where the mask is not an expression."""
        return {**asdict(replace(self, mask="")), "mask": mask_text(self.mask), "lengths": list(self.lengths)}


MASKS = (
    "causal",
    "window",
    "chunked",
    "sinks",
    "prefix",
    "padding",
    "documents",
    "blocks",
    "local_global",
    "butterfly",
)


def parse_mask(text: str, seqlen_q: int, seqlen_k: int, device: str = "cpu") -> Mask | None:
    """A mask from an expression of names of `MASKS`, ints, None, &, | and parentheses; "" and "full" give None.

    causal, window(left, right), chunked(size), sinks(n), prefix(n), padding(n); documents(n): n of nearly equal length;
    blocks(density, tile): random tiles, at least one a row; local_global(tile) and butterfly(tile): block patterns.
    """
    if text.strip() in ("", "full", "none"):
        return None
    try:
        return _mask(ast.parse(text.strip(), mode="eval").body, text, (seqlen_q, seqlen_k, device))
    except SyntaxError as error:
        raise ValueError(f"mask: cannot read {text!r} ({error.msg})") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"mask: {len(text)} letters are nested too deeply") from None


def _mask(node: ast.expr, text: str, sizes: tuple[int, int, str]) -> Mask:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        left, right = _mask(node.left, text, sizes), _mask(node.right, text, sizes)
        return left & right if isinstance(node.op, ast.BitAnd) else left | right
    name, args, keywords = node, [], {}
    if isinstance(node, ast.Call):
        name = node.func
        try:
            args = [ast.literal_eval(a) for a in node.args]
            keywords = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
        except (ValueError, TypeError):
            raise ValueError(
                f"mask: {text!r} has an argument that is not a number, a string or None"
            ) from None
    if not isinstance(name, ast.Name) or name.id not in MASKS:
        raise ValueError(f"mask: cannot read {text!r}, expected {', '.join(MASKS)}, joined by & and |")
    try:
        return _named(name.id, args, keywords, sizes)
    except TypeError as error:
        takes = re.sub(r"^\w+\(\) ", "", str(error))  # without the name of a function of ours
        raise ValueError(f"mask: {name.id} in {text!r}: {takes}") from None


def _named(name: str, args: list[Any], keywords: dict[str, Any], sizes: tuple[int, int, str]) -> Mask:
    seqlen_q, seqlen_k, device = sizes
    if name == "documents":
        return masks.documents(cu_seqlens=_documents(seqlen_k, args, **keywords).to(device))
    if name == "blocks":
        return _blocks(seqlen_q, seqlen_k, device, *args, **keywords)
    if name in ("local_global", "butterfly"):
        return _pattern(name, seqlen_q, seqlen_k, device, *args, **keywords)
    return getattr(masks, name)(*args, **keywords)


def _documents(seqlen: int, numbers: list[Any]) -> Tensor:
    """Boundaries of as many documents as the one number says, or of documents of these lengths."""
    if any(type(n) is not int or n < 1 for n in numbers):
        raise ValueError(f"mask: documents: got {numbers}, expected ints of at least 1")
    if len(numbers) == 1 and numbers[0] <= seqlen:
        return torch.linspace(0, seqlen, numbers[0] + 1, device="cpu").round().to(torch.int32)
    if len(numbers) < 2 or sum(numbers) != seqlen:
        raise ValueError(
            f"mask: documents: got {numbers}, expected their number, from 1 to seqlen_k = {seqlen}, or lengths that "
            "add up to it"
        )
    return torch.tensor([0, *numbers], device="cpu").cumsum(0).to(torch.int32)


def _blocks(seqlen_q: int, seqlen_k: int, device: str, density: float, tile: int = 64) -> Mask:
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 < density <= 1:
        raise ValueError(f"mask: blocks: density is {density!r}, expected a number in (0, 1]")
    rows, columns = _count(seqlen_q, seqlen_k, tile)
    generator = torch.Generator().manual_seed(0)
    rank = torch.rand(rows, columns, generator=generator, device="cpu").argsort(1).argsort(1)
    return masks.block_sparse((rank < max(round(density * columns), 1)).to(device), tile=(tile, tile))


def _count(seqlen_q: int, seqlen_k: int, tile: int) -> tuple[int, int]:
    """Rows and columns of blocks."""
    if type(tile) is not int or tile < 1:
        raise ValueError(f"mask: tile is {tile!r}, expected an int of at least 1")
    return -(-seqlen_q // tile), -(-seqlen_k // tile)


def _pattern(name: str, seqlen_q: int, seqlen_k: int, device: str, tile: int = 64) -> Mask:
    rows, columns = _count(seqlen_q, seqlen_k, tile)
    if name == "butterfly":
        side = 1 << max(rows, columns, 2).bit_length() - 1
        side = side if side >= max(rows, columns) else 2 * side
        chosen = patterns.butterfly(side, device=device)[:rows, :columns]
    else:
        chosen = patterns.local_global(rows, columns, local=1, global_=1, device=device)
    return masks.block_sparse(chosen, tile=(tile, tile))


def snapshot(mask: Mask) -> Mask:
    """The mask with tensors of its own on the CPU, which later changes in place do not reach."""
    return _with(mask, copied)


def on(mask: Mask, device: str) -> Mask:
    """The mask with its tensors on a device; itself where they are there."""
    if all(tensor.device.type == torch.device(device).type for tensor in mask.tensors()):
        return mask
    return _with(mask, lambda tensor: tensor.to(device))


def _with(mask: Mask, change: Callable[[Tensor], Tensor]) -> Mask:
    text, ints, tensors = spec.write(mask, None)
    changed = spec.read(text, ints, [change(tensor) for tensor in tensors])[0]
    assert changed is not None
    return changed


def copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU that repeats what the tensor repeats, as an expanded mask does, without storing it again."""
    once = tensor.detach()[tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())]
    return once.to("cpu", copy=True).expand(tensor.shape)


def mask_text(mask: str | Mask) -> str:
    """The expression of a mask of bands and of rows that are the same for every sequence; ValueError for others."""
    if isinstance(mask, str):
        return mask
    parts = []
    if mask.band is not None:
        band = mask.band
        if band.left is not None or band.right is not None:
            parts.append(f"window({band.left}, {band.right})")
        if band.top_right == 0 and band.top_left is None:
            parts.append('causal(align="top_left")')
        elif band.top_left is not None or band.top_right is not None:
            raise ValueError(f"mask: {mask!r} has no expression")
    for part in mask.rows:
        if not isinstance(part.value, int):
            raise ValueError(f"mask: {part!r} holds a tensor, which a file of cases cannot")
        parts.append(f"{part.name}({part.value})")
    for part in mask.unions:
        parts.append("(" + " | ".join(f"({mask_text(m)})" for m in part.masks) + ")")
    if mask.elements or mask.blocks:
        raise ValueError(f"mask: {mask!r} holds a tensor or a function, which a file of cases cannot")
    return " & ".join(parts)
