"""Keys that no query sees, under masks that are more than a band: their values must not reach the products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onchip import schedule
from onchip.capture import capturing
from onchip.layout import Varlen
from onchip.mask import Mask, Region
from onchip.problem import Operands, Problem
from onchip.schedule import FULL, PARTIAL
from onchip.tiles import Tiles

_LOOK = 1 << 22  # pairs of a mask looked at at once


def unseen(problem: Problem, operands: Operands) -> Tensor | None:
    """Keys that no query of their sequence sees, bool, shaped as v without its dim; None where every key is seen."""
    mask, layout = operands.mask, operands.layout
    by_batch, by_head = mask.dependence(problem)
    hidden = torch.zeros(operands.v.shape[:-1], dtype=torch.bool, device=operands.v.device)
    starts = layout.cu_seqlens_k.tolist() if isinstance(layout, Varlen) else None
    known: dict[Any, Tensor] = {}  # sequences of equal lengths often see the same
    for b, lengths in enumerate(zip(layout.q_lens, layout.k_lens, strict=True)):
        key = b if by_batch else lengths
        if key not in known:
            known[key] = ~_seen(problem, mask, b, *lengths, by_head)
        own = hidden[b] if starts is None else hidden[starts[b] : starts[b] + lengths[1]]
        own.copy_(known[key].mT)  # [k_len, heads_k]
    return hidden if bool(hidden.any()) else None


def _seen(problem: Problem, mask: Mask, b: int, q_len: int, k_len: int, by_head: bool) -> Tensor:
    """[heads_k | 1, k_len]: which keys of sequence b some query sees."""
    heads = problem.heads_q if by_head else 1
    batch = torch.tensor([b], device=problem.device)
    seen = torch.zeros(heads, k_len, dtype=torch.bool, device=problem.device)
    at_once = max(_LOOK // max(heads * k_len, 1), 1)
    for q0 in range(0, q_len, at_once):
        region = Region(batch, 0, heads, q0, min(q0 + at_once, q_len), 0, k_len, q_len, k_len)
        seen |= mask.allow(region).any(2)[0]
    return seen.unflatten(0, (problem.heads_k, -1)).any(1) if heads > 1 else seen


def hides(problem: Problem, operands: Operands, tiles: Tiles) -> bool:
    """Whether `unseen` finds any: by the schedule, with a look only at keys that no full tile holds."""
    groups = schedule.build(problem, operands.layout, operands.mask, tiles).groups
    return any(
        _hides(problem, operands.mask, group, tiles, j)
        for group in groups
        for j in range(group.kinds.shape[1])
    )


def _hides(problem: Problem, mask: Mask, group: schedule.Group, tiles: Tiles, n_block: int) -> bool:
    """Whether some key of a column of tiles is seen by no query."""
    column = group.kinds[:, n_block]
    if bool((column == FULL).any()):
        return False
    k0, k1 = n_block * tiles.tile_n, min((n_block + 1) * tiles.tile_n, group.k_len)
    seen = torch.zeros(1, dtype=torch.bool, device=column.device)
    for m_block in (column == PARTIAL).nonzero().flatten().tolist():
        q0, q1 = m_block * tiles.tile_m, min((m_block + 1) * tiles.tile_m, group.q_len)
        lengths = group.q_len, group.k_len
        visible = mask.allow(Region(group.batch, group.head0, group.head1, q0, q1, k0, k1, *lengths)).any(2)
        if visible.shape[1] > 1:
            visible = visible.unflatten(1, (-1, problem.group)).any(2)
        seen = seen | visible  # [g | 1, key heads | 1, keys]
        if bool(seen.all()):
            return False
    return True


def unseen_now(problem: Problem, operands: Operands) -> Tensor:
    """The same for dense sequences by work on the device alone: a CUDA graph looks at the mask in each replay."""
    seen = _seen_now(problem, operands)
    by_key_head = seen.unflatten(1, (problem.heads_k, -1)).any(2) if seen.shape[1] > 1 else seen
    return ~by_key_head.mT


def _seen_now(problem: Problem, operands: Operands) -> Tensor:
    """[batch | 1, heads_q | 1, keys]"""
    mask = operands.mask
    q_len, k_len = problem.seqlen_q, problem.seqlen_k
    if problem.mask_parts == ("blocks",) and len(mask.blocks) == 1:  # 4.4 ms less at N = 16384 (H200)
        (blocks,) = mask.blocks
        return blocks.visible.any(2).repeat_interleave(blocks.tile_n, 2)[..., :k_len]
    by_batch, by_head = mask.dependence(problem)
    heads = problem.heads_q if by_head else 1
    batch = torch.arange(problem.batch if by_batch else 1, device=operands.v.device)
    seen = torch.zeros(len(batch), heads, k_len, dtype=torch.bool, device=batch.device)
    at_once = max(_LOOK // max(seen.numel(), 1), 1)
    for q0 in range(0, q_len, at_once):
        region = Region(batch, 0, heads, q0, min(q0 + at_once, q_len), 0, k_len, q_len, k_len)
        seen |= mask.allow(region).any(2)
    return seen


def without_unseen(problem: Problem, operands: Operands) -> Tensor:
    """v, with zeros at the keys that nobody sees: 0 * NaN is NaN. A copy, only where there are such keys."""
    key = ("unseen",)
    if capturing(problem.device) and problem.layout == "dense":
        known = schedule.lasting(problem, operands.layout, operands.mask, key)
        hidden = unseen_now(problem, operands) if known is None else known[0]
    else:
        make = lambda: (unseen(problem, operands),)  # noqa: E731
        (hidden,) = schedule.keep(problem, operands.layout, operands.mask, key, make)
    return operands.v if hidden is None else operands.v.masked_fill(hidden[..., None], 0)
