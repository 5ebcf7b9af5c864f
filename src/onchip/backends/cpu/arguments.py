"""What a call of the native kernels is told: `kernels/call.h` in Python, each field of 8 bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from onchip import dropout, schedule
from onchip.backends.cpu import looks
from onchip.backends.cpu.looks import elements
from onchip.layout import Cache, Varlen
from onchip.mask import Blocks, Dense, Mask, Region
from onchip.problem import Operands, Problem
from onchip.rules import Band
from onchip.score import Score

_TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_INT, _DOUBLE, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_UNBOUNDED = 2**62 - 1
# Pairs shown to the kernels at once, a byte each: many, since the backward pass prepares all rows for them.
_SHOWN = 1 << 25
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _fields() -> list[tuple[str, Any]]:
    strided = [
        (name + part, _INT if part else _POINTER)
        for name in _TENSORS
        for part in ("", "_batch", "_row", "_head")
    ]
    names = """
        *lse *rest *delta *dlse row_batch row_head
        dtype batch heads_q heads_k dim dim_v seqlen_q seqlen_k
        n_members *members *q_start *q_len *k_start *k_len *k_index *pages pages_row page_size q_from q_to k_from k_to
        left right top_left top_right *lo *hi interval_batch *seen seen_batch seen_head seen_q seen_k
        *blocks blocks_batch blocks_head blocks_row block_m block_n
        .scale .softcap *alibi alibi_batch alibi_head *bias bias_dtype bias_batch bias_head bias_q bias_k *sink
        drops threshold seed .keep_scale
        *dbias *dalibi dbias_chunk dbias_batch dbias_head dbias_q dbias_k join_batch join_heads
        splits chunks *dq_parts last threads recomputed
    """
    kinds = {"*": _POINTER, ".": _DOUBLE}
    return strided + [(name.lstrip("*."), kinds.get(name[0], _INT)) for name in names.split()]


class Call(ctypes.Structure):
    _fields_ = _fields()


def place(call: Call, name: str, tensor: Tensor) -> None:
    """State a tensor (batch, seqlen, heads, dim), or (total, heads, dim) of packed sequences."""
    size = tensor.element_size()
    *batch, row, head, _ = tensor.stride()
    setattr(call, name, tensor.data_ptr())
    setattr(call, name + "_batch", batch[0] * size if batch else 0)
    setattr(call, name + "_row", row * size)
    setattr(call, name + "_head", head * size)


def sized(problem: Problem, seqlen_q: int, seqlen_k: int) -> Call:
    """A call of these longest sequences, without tensors."""
    return Call(
        dtype=_DTYPES[problem.dtype],
        batch=problem.batch,
        heads_q=problem.heads_q,
        heads_k=problem.heads_k,
        dim=problem.dim,
        dim_v=problem.dim_v,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        n_members=problem.batch,
        q_to=seqlen_q,
        k_to=seqlen_k,
        scale=problem.scale,
        splits=problem.num_splits,
        threads=torch.get_num_threads(),
    )


def state(problem: Problem, operands: Operands, keep: list) -> Call:
    """Everything but the results. `keep` receives the tensors that must outlive the call."""
    q, k, v = (unit(x, keep) for x in (operands.q, operands.k, operands.v))
    call = sized(problem, *_longest(problem, operands))
    call.recomputed = recomputed(operands)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        place(call, name, tensor)
    _state_layout(call, operands.layout, keep)
    _state_band(call, operands.mask.band)
    if problem.score_parts:
        _state_score(call, problem, operands.score, keep)
    if problem.dropout:
        call.drops, call.threshold = 1, dropout.threshold(problem.dropout)
        call.seed = operands.seed - (1 << 64) * (operands.seed >= 1 << 63)
        call.keep_scale = 1.0 / (1.0 - problem.dropout) if problem.dropout < 1 else 0.0
    return call


def made(keep: list, operands: Operands) -> int:
    """Bytes of what a call keeps that is not a tensor of the caller: lengths, slopes and the like in other dtypes."""
    layout, score = operands.layout, operands.score
    given = [*operands[:3], *operands.mask.tensors(), score.bias, score.alibi, score.sink]
    given += [getattr(layout, field.name) for field in fields(layout)]
    owned = {x.data_ptr() for x in given if isinstance(x, Tensor)}
    return sum(x.numel() * x.element_size() for x in keep if x.data_ptr() not in owned)


def _longest(problem: Problem, operands: Operands) -> tuple[int, int]:
    """The longest sequences, by which kernels share out their work: a caller's bounds may be far above them."""
    layout = operands.layout
    if isinstance(layout, Varlen):
        return max(layout.q_lens, default=0), max(layout.k_lens, default=0)
    return problem.seqlen_q, problem.seqlen_k


def recomputed(operands: Operands) -> bool:
    """Whether a backward pass may follow. Its weights are only as good as lse is of the very scores it computes."""
    q, k, v, _, _, score, _ = operands
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    if not score.names:
        return False
    return any(t is not None and t.requires_grad for t in (score.bias, score.alibi, score.sink))


def unit(tensor: Tensor, keep: list) -> Tensor:
    """The tensor, or a copy of it where its last dim is not contiguous."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        tensor = tensor.contiguous()
    keep.append(tensor)
    return tensor


def pointer(tensor: Tensor | None, dtype: torch.dtype, keep: list) -> int | None:
    if tensor is None:
        return None
    tensor = tensor.to(dtype).contiguous()
    keep.append(tensor)
    return tensor.data_ptr()


def _state_layout(call: Call, layout: Any, keep: list) -> None:
    if isinstance(layout, Varlen):
        for side, cu, used in (
            ("q", layout.cu_seqlens_q, layout.used_q),
            ("k", layout.cu_seqlens_k, layout.used_k),
        ):
            setattr(call, side + "_start", pointer(cu, torch.int64, keep))
            setattr(call, side + "_len", pointer(cu.diff() if used is None else used, torch.int64, keep))
    elif isinstance(layout, Cache):
        call.k_start = pointer(layout.leftpad, torch.int64, keep)
        call.k_len = pointer(layout.lengths, torch.int64, keep)
        call.k_index = pointer(layout.index, torch.int64, keep)
        if layout.page_table is not None:
            call.pages = pointer(layout.page_table, torch.int32, keep)
            call.pages_row, call.page_size = layout.page_table.shape[1], layout.page_size


def _state_band(call: Call, band: Band | None) -> None:
    for name, bound in zip(Band._fields, band or Band(), strict=True):
        setattr(call, name, _UNBOUNDED if bound is None else max(-_UNBOUNDED, min(bound, _UNBOUNDED)))


def _state_score(call: Call, problem: Problem, score: Score, keep: list) -> None:
    call.softcap = score.softcap or 0.0
    if score.alibi is not None:
        call.alibi = pointer(score.alibi, torch.float32, keep)
        call.alibi_head, call.alibi_batch = 1, problem.heads_q * (score.alibi.dim() - 1)
    call.sink = pointer(score.sink, torch.float32, keep)
    if score.bias is not None:
        bias = score.bias if score.bias.dtype in _DTYPES else score.bias.float()
        keep.append(bias)
        call.bias, call.bias_dtype = bias.data_ptr(), _DTYPES[bias.dtype]
        bias = bias.view((1,) * (4 - bias.dim()) + bias.shape)
        for axis, name in enumerate(("bias_batch", "bias_head", "bias_q", "bias_k")):
            setattr(call, name, bias.stride(axis) * bias.element_size() if bias.shape[axis] > 1 else 0)


def state_mask(call: Call, problem: Problem, operands: Operands, keep: list) -> None:
    """Intervals and blocks of a mask; and a dense mask where it stands alone, read in place."""
    mask = operands.mask
    if mask.rows:
        lo, hi = schedule.keep(
            problem, operands.layout, mask, ("intervals",), lambda: _intervals(problem, operands)
        )
        keep += (lo, hi)
        call.lo, call.hi = lo.data_ptr(), hi.data_ptr()
        call.interval_batch = lo.stride(0) if lo.shape[0] > 1 else 0
    if mask.blocks:
        _state_blocks(call, mask.blocks[0], keep)
    parts = elements(mask)
    if len(parts) == 1 and isinstance(parts[0], Dense):
        show(call, parts[0].visible)
        keep.append(parts[0].visible)


def shown_in_place(mask: Mask) -> bool:
    """Whether no tile bits need computing."""
    parts = elements(mask)
    return not parts or (len(parts) == 1 and isinstance(parts[0], Dense))


def show(call: Call, visible: Tensor) -> None:
    """Bool, broadcastable to (members, heads_q, queries from q_from, keys from k_from); its bytes are 0 or 1."""
    call.seen = visible.data_ptr()
    for axis, name in enumerate(("seen_batch", "seen_head", "seen_q", "seen_k")):
        setattr(call, name, visible.stride(axis) if visible.shape[axis] > 1 else 0)


def _state_blocks(call: Call, blocks: Blocks, keep: list) -> None:
    visible = blocks.visible.contiguous()
    keep.append(visible)
    call.blocks = visible.data_ptr()
    call.block_m, call.block_n = blocks.tile_m, blocks.tile_n
    call.blocks_batch = visible.stride(0) if visible.shape[0] > 1 else 0
    call.blocks_head = visible.stride(1) if visible.shape[1] > 1 else 0
    call.blocks_row = visible.stride(2)


def by_lengths(problem: Problem, operands: Operands) -> dict[tuple[int, int], list[int]]:
    """Sequences of equal lengths."""
    groups: dict[tuple[int, int], list[int]] = {}
    layout = operands.layout
    for b, lengths in enumerate(zip(layout.q_lens, layout.k_lens, strict=True)):
        groups.setdefault(lengths, []).append(b)
    return groups


def _numbers(members: list[int]) -> Tensor:
    return torch.tensor(members, device="cpu")


def _intervals(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """Keys [lo, hi) that the Rows parts leave each query: int32 (batch | 1, longest q_len)."""
    mask, groups = operands.mask, by_lengths(problem, operands)
    shared = len(groups) == 1 and not any(rows.dependence(problem)[0] for rows in mask.rows)
    longest = max((q_len for q_len, _ in groups), default=0)
    lo = torch.zeros(1 if shared else problem.batch, longest, dtype=torch.int32, device="cpu")
    hi = torch.zeros_like(lo)
    for (q_len, k_len), members in groups.items():
        batch = _numbers(members[:1] if shared else members)
        region = Region(batch, 0, 1, 0, q_len, 0, k_len, q_len, k_len)
        first, last = (torch.full((1, 1, 1, 1), end, device="cpu") for end in (0, k_len))
        for rows in mask.rows:
            low, high = rows.bounds(region)
            first = first if low is None else first.clamp(min=low)
            last = last if high is None else last.clamp(max=high)
        size = (len(batch), 1, q_len, 1)
        for total, bound in ((lo, first), (hi, last)):
            total[0 if shared else batch, :q_len] = bound.clamp(0, k_len).expand(size)[:, 0, :, 0].int()
    return lo, hi


def pieces(problem: Problem, operands: Operands, rows: bool) -> Iterator[tuple[list[int], Region]]:
    """Stretches of queries (rows) or keys, each with its sequences and the region whose tile bits serve them all."""
    by_batch, by_head = mask_dependence(problem, operands.mask)
    heads = problem.heads_q if by_head else 1
    for (q_len, k_len), members in by_lengths(problem, operands).items():
        along, across = (q_len, k_len) if rows else (k_len, q_len)
        at_once = max(_SHOWN // max(64 * across * heads, 1), 1) if by_batch else len(members)
        for first in range(0, len(members), at_once):
            own = members[first : first + at_once]
            asked = _numbers(own if by_batch else own[:1])
            step = max(_SHOWN // max(across * heads * len(asked), 1) // 64 * 64, 64)
            for start in range(0, max(along, 1), step):
                stop = min(start + step, along)
                ends = (start, stop, 0, k_len) if rows else (0, q_len, start, stop)
                yield own, Region(asked, 0, heads, *ends, q_len, k_len)


def mask_dependence(problem: Problem, mask: Mask) -> tuple[bool, bool]:
    """Whether what is shown pair by pair differs between sequences, and between heads."""
    found = [part.dependence(problem) for part in elements(mask)]
    return any(b for b, _ in found), any(h for _, h in found)


def take_region(call: Call, members: list[int], region: Region, keep: list) -> None:
    """State a piece: its sequences, and its part of them."""
    numbers = _numbers(members)
    keep.append(numbers)
    call.members, call.n_members = numbers.data_ptr(), len(members)
    call.q_from, call.q_to, call.k_from, call.k_to = region.q0, region.q1, region.k0, region.k1


def show_region(call: Call, mask: Mask, region: Region, keep: list) -> None:
    """State what the mask says of a piece's pairs."""
    if region.q0 < region.q1 and region.k0 < region.k1:
        visible = looks.looked_at(mask, region)
        keep.append(visible)
        show(call, visible)
