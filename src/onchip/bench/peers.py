"""Implementations of attention to measure side by side, each found where it is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import PathFinder
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import onchip
from onchip.bench.cases import Case
from onchip.mask import Mask, Region

Call = Callable[[], Tensor]


class Unsupported(Exception):
    """Why an implementation does not run a case."""


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case: q, k, v (batch, seqlen, heads, dim), or packed (total, heads, dim)."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: Mask | None
    packing: dict[str, Any]  # as `Case.packing`
    seed: int = 0

    @property
    def device(self) -> str:
        return self.q.device.type

    @property
    def is_causal(self) -> bool:
        """Whether the mask is causal, with both alignments the same."""
        same = self.case.k_len == self.case.seqlen_q
        return (
            self.case.mask_text in ("causal", "causal()", "window(None, 0)")
            and (same or bool(self.case.lengths))
            and not self.case.lengths_k
        )

    def window(self) -> tuple[int, int]:
        """(left, right) as flash_attn has it, -1 for no bound; Unsupported where the mask is no window."""
        mask = self.mask
        if mask is None:
            return -1, -1
        band = mask.band
        if mask.parts or band is None or (band.top_left, band.top_right) != (None, None):
            raise Unsupported(f"mask {self.case.mask_text}")
        return (-1 if band.left is None else band.left), (-1 if band.right is None else band.right)

    def visible(self) -> Tensor | None:
        """The mask as a bool tensor that broadcasts to (batch, heads, seqlen_q, seqlen_k)."""
        if self.mask is None:
            return None
        batch = torch.arange(self.case.batch, device=self.q.device)
        m, n = self.case.seqlen_q, self.case.k_len
        if m * n > 1 << 30:
            raise Unsupported(f"a mask of {m} x {n} elements")
        return self.mask.allow(Region(batch, 0, self.case.heads_q, 0, m, 0, n, m, n)).contiguous()

    def refuse(
        self, *, packed: bool = True, softcap: bool = False, dropout: bool = False, half: bool = False
    ) -> None:
        """Unsupported for what an implementation cannot do: True says that it cannot."""
        case = self.case
        if packed and case.lengths:
            raise Unsupported("packed sequences")
        if case.lengths_k and not case.lengths:
            raise Unsupported("a cache of several lengths")
        if softcap and case.softcap is not None:
            raise Unsupported("softcap")
        if dropout and case.dropout:
            raise Unsupported("dropout")
        if half and case.dtype not in ("float16", "bfloat16"):
            raise Unsupported(case.dtype)


@dataclass(frozen=True)
class Peer:
    """missing: why it cannot be used here, None where it can. forward: q, k, v -> out, all as in `Inputs`."""

    name: str
    missing: Callable[[str], str | None]
    forward: Callable[[Inputs], Callable[[Tensor, Tensor, Tensor], Tensor]]


def inputs(case: Case, device: str, seed: int = 0) -> Inputs:
    """Fresh normal tensors of a case."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.torch_dtype)

    (q_shape, k_shape, v_shape) = case.shapes
    q, dout = draw(*q_shape), draw(*q_shape[:-1], case.value_dim)
    k, v = draw(*k_shape), draw(*v_shape)
    return Inputs(case, q, k, v, dout, case.make_mask(device), case.packing(device), seed)


def _onchip(backend: str | None) -> Callable[[Inputs], Callable[..., Tensor]]:
    def prepare(given: Inputs) -> Callable[..., Tensor]:
        case = given.case
        score = None if case.softcap is None else onchip.Score(softcap=case.softcap)
        options: dict[str, Any] = {"mask": given.mask, "score": score, "backend": backend}
        if case.cache:
            each = case.lengths_k or (case.k_len,) * case.batch
            lengths = torch.tensor(each, dtype=torch.int32, device=given.q.device)
            return lambda q, k, v: onchip.attention_with_cache(q, k, v, cache_seqlens=lengths, **options)  # type: ignore[return-value]
        options |= {"dropout": case.dropout, "seed": given.seed if case.dropout else None}
        if given.packing:
            options |= given.packing | {"max_seqlen_q": max(case.lengths), "max_seqlen_k": max(case.keys)}
            return lambda q, k, v: onchip.attention_varlen(q, k, v, **options)  # type: ignore[return-value]
        return lambda q, k, v: onchip.attention(q, k, v, **options)  # type: ignore[return-value]

    return prepare


def _sdpa(kind: SDPBackend) -> Callable[[Inputs], Callable[..., Tensor]]:
    def prepare(given: Inputs) -> Callable[..., Tensor]:
        given.refuse(softcap=True)
        case = given.case
        grouped = case.kv_heads != case.heads_q
        causal = given.is_causal
        visible = None if causal else given.visible()

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(kind):
                out = F.scaled_dot_product_attention(
                    q, k, v, visible, case.dropout, is_causal=causal, enable_gqa=grouped
                )
            return out.transpose(1, 2)

        return call

    return prepare


def _standard(given: Inputs) -> Callable[..., Tensor]:
    """Standard attention in PyTorch's operations: the N x N matrices are written and read back."""
    given.refuse()
    case, visible = given.case, given.visible()
    if case.batch * case.heads_q * case.seqlen_q * case.k_len * case.torch_dtype.itemsize > 1 << 33:
        raise Unsupported("its score matrix would take more than 8 GiB")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if case.kv_heads != case.heads_q:
            k, v = (x.repeat_interleave(case.heads_q // case.kv_heads, 1) for x in (k, v))
        s = (q @ k.mT) * case.dim**-0.5
        if case.softcap is not None:
            s = case.softcap * torch.tanh(s / case.softcap)
        if visible is not None:
            s = s.masked_fill(~visible, -torch.inf)
        return (F.dropout(s.softmax(-1), case.dropout) @ v).transpose(1, 2)

    return call


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex(given: Inputs) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask

    given.refuse(dropout=True)
    case = given.case
    if given.device == "cpu" and case.what != "forward":
        raise Unsupported("a backward pass on a CPU")
    visible, block_mask = given.visible(), None
    if visible is not None:
        batch, heads = visible.shape[:2]

        def seen(b, h, q, k):
            return visible[b if batch > 1 else 0, h if heads > 1 else 0, q, k]

        sizes = (case.batch if batch > 1 else None, case.heads_q if heads > 1 else None)
        block_mask = create_block_mask(seen, *sizes, case.seqlen_q, case.k_len, device=given.device)
    cap = case.softcap
    mod = None if cap is None else (lambda s, b, h, q, k: cap * torch.tanh(s / cap))
    options: dict[str, Any] = {"score_mod": mod, "block_mask": block_mask}
    options["enable_gqa"] = case.kv_heads != case.heads_q
    flex = _compiled_flex()
    return lambda q, k, v: flex(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)


def _flash_attn(module: str, dropout: bool) -> Callable[[Inputs], Callable[..., Tensor]]:
    """FlashAttention 2 ("flash_attn"), 3 ("flash_attn_interface") or 4 ("flash_attn.cute"); dropout: it has one."""

    def prepare(given: Inputs) -> Callable[..., Tensor]:
        case = given.case
        given.refuse(packed=False, half=True, dropout=not dropout)
        found = importlib.import_module(module)
        if found.flash_attn_func.__module__.startswith("onchip"):
            raise ImportError(f"this {module} is onchip under another name")
        window: tuple[Any, Any] = given.window()
        if module == "flash_attn.cute":
            window = (None if window[0] < 0 else window[0], None if window[1] < 0 else window[1])
        options: dict[str, Any] = {"window_size": window, "softcap": case.softcap or 0.0}
        if dropout:
            options["dropout_p"] = case.dropout
        if not given.packing:
            return lambda q, k, v: _first(found.flash_attn_func(q, k, v, **options))
        options |= given.packing | {"max_seqlen_q": max(case.lengths), "max_seqlen_k": max(case.keys)}
        return lambda q, k, v: _first(found.flash_attn_varlen_func(q, k, v, **options))

    return prepare


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _xformers(given: Inputs) -> Callable[..., Tensor]:
    given.refuse(softcap=True)
    ops = importlib.import_module("xformers.ops")
    if given.case.kv_heads != given.case.heads_q:
        raise Unsupported("grouped heads")
    bias = None
    if given.mask is not None:
        if not given.is_causal:
            raise Unsupported(f"mask {given.case.mask_text}")
        bias = ops.LowerTriangularMask()
    p = given.case.dropout
    return lambda q, k, v: ops.memory_efficient_attention(q, k, v, attn_bias=bias, p=p)


def _here(device: str) -> None:
    return None


def _on_cuda(device: str) -> str | None:
    return None if device == "cuda" else f"it does not run on {device}"


def importable(module: str) -> bool:
    """Whether an import finds it. Nothing is imported, not even what holds a dotted name: that may take seconds."""
    if sys.modules.get(module) is not None:
        return True
    name, *parts = module.split(".")
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    for part in parts:
        if found is None or found.submodule_search_locations is None:
            return False
        name = f"{name}.{part}"
        found = PathFinder.find_spec(name, list(found.submodule_search_locations))
    return found is not None


def _installed(module: str) -> Callable[[str], str | None]:
    def missing(device: str) -> str | None:
        return _on_cuda(device) if importable(module) else f"{module} is not installed"

    return missing


PEERS: tuple[Peer, ...] = (
    Peer("onchip", _here, _onchip(None)),
    Peer("sdpa-flash", _here, _sdpa(SDPBackend.FLASH_ATTENTION)),
    Peer("sdpa-math", _here, _sdpa(SDPBackend.MATH)),
    Peer("sdpa-efficient", _on_cuda, _sdpa(SDPBackend.EFFICIENT_ATTENTION)),
    Peer("sdpa-cudnn", _on_cuda, _sdpa(SDPBackend.CUDNN_ATTENTION)),
    Peer("flex", _here, _flex),
    Peer("fa2", _installed("flash_attn"), _flash_attn("flash_attn", True)),
    Peer("fa3", _installed("flash_attn_interface"), _flash_attn("flash_attn_interface", False)),
    Peer("fa4", _installed("flash_attn.cute"), _flash_attn("flash_attn.cute", False)),
    Peer("xformers", _installed("xformers"), _xformers),
    Peer("standard", _here, _standard),
)


def peer(name: str) -> Peer:
    """The implementation of this name, or "onchip-<backend>" for one of ours; ValueError for another."""
    for found in PEERS:
        if found.name == name:
            return found
    backend = name.removeprefix("onchip-")
    if backend != name and backend in onchip.select.BACKENDS:  # type: ignore[attr-defined]
        return Peer(name, _here, _onchip(backend))
    raise ValueError(
        f"impl: got {name!r}, expected some of {', '.join(p.name for p in PEERS)}, onchip-<backend>"
    )
