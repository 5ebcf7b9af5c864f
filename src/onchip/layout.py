"""Where the sequences of a call live in its tensors: dense, packed (varlen), or a cache.

Lengths, pages and offsets are here, never in a mask. Each layout answers the same questions:

- `batch`; `seqlen_q`, `seqlen_k`: the longest sequence that there may be.
- `q_lens`, `k_lens`: the length of each sequence, read from the device where they are there; `device_lengths()`: the
  same without a read, an int for all or a tensor [batch, 1, 1, 1].
- `tensors()`: what must not change before a backward pass.
- `read_q`, `read_k`, `write_q`, `write_k`: the rows of some sequences and heads as [sequences, heads, length, dim].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def _slots(batch: Tensor) -> slice | Tensor:
    """Consecutive sequence numbers as a slice, which reads without a copy."""
    first, n = int(batch[0]), batch.numel()
    return slice(first, first + n) if int(batch[-1]) - first == n - 1 else batch


@dataclass(frozen=True, eq=False)
class Dense:
    """(batch, seqlen, heads, dim): every sequence fills its row."""

    batch: int
    seqlen_q: int
    seqlen_k: int

    @property
    def q_lens(self) -> list[int]:
        return [self.seqlen_q] * self.batch

    @property
    def k_lens(self) -> list[int]:
        return [self.seqlen_k] * self.batch

    def read_q(self, tensor: Tensor, batch: Tensor, heads: slice, length: int) -> Tensor:
        return tensor[_slots(batch), :length, heads].transpose(1, 2)

    def write_q(self, tensor: Tensor, batch: Tensor, heads: slice, rows: Tensor) -> None:
        tensor[_slots(batch), : rows.shape[2], heads] = rows.transpose(1, 2).to(tensor.dtype)

    read_k, write_k = read_q, write_q

    def device_lengths(self) -> tuple[int | Tensor, int | Tensor]:
        return self.seqlen_q, self.seqlen_k

    def tensors(self) -> tuple[Tensor, ...]:
        return ()


@dataclass(frozen=True, eq=False)
class Varlen:
    """(total, heads, dim): sequence b is rows cu_seqlens[b] up to cu_seqlens[b + 1], of which seqused[b] count."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    used_q: Tensor | None
    used_k: Tensor | None
    seqlen_q: int
    seqlen_k: int

    @property
    def batch(self) -> int:
        return self.cu_seqlens_q.numel() - 1

    def tensors(self) -> tuple[Tensor, ...]:
        found = (self.cu_seqlens_q, self.cu_seqlens_k, self.used_q, self.used_k)
        return tuple(t for t in found if t is not None)

    @cached_property
    def q_lens(self) -> list[int]:
        return (self.cu_seqlens_q.diff() if self.used_q is None else self.used_q).tolist()

    @cached_property
    def k_lens(self) -> list[int]:
        return (self.cu_seqlens_k.diff() if self.used_k is None else self.used_k).tolist()

    def device_lengths(self) -> tuple[int | Tensor, int | Tensor]:
        q = self.cu_seqlens_q.diff() if self.used_q is None else self.used_q
        k = self.cu_seqlens_k.diff() if self.used_k is None else self.used_k
        return q.long().view(-1, 1, 1, 1), k.long().view(-1, 1, 1, 1)

    def read_q(self, tensor: Tensor, batch: Tensor, heads: slice, length: int) -> Tensor:
        return _read_packed(tensor, self.cu_seqlens_q, batch, heads, length)

    def read_k(self, tensor: Tensor, batch: Tensor, heads: slice, length: int) -> Tensor:
        return _read_packed(tensor, self.cu_seqlens_k, batch, heads, length)

    def write_q(self, tensor: Tensor, batch: Tensor, heads: slice, rows: Tensor) -> None:
        _write_packed(tensor, self.cu_seqlens_q, batch, heads, rows)

    def write_k(self, tensor: Tensor, batch: Tensor, heads: slice, rows: Tensor) -> None:
        _write_packed(tensor, self.cu_seqlens_k, batch, heads, rows)


def _packed_rows(cu_seqlens: Tensor, batch: Tensor, length: int) -> slice | Tensor:
    if batch.numel() == 1:
        start = int(cu_seqlens[batch[0]])
        return slice(start, start + length)
    return cu_seqlens[batch].long()[:, None] + torch.arange(length, device=batch.device)


def _read_packed(tensor: Tensor, cu_seqlens: Tensor, batch: Tensor, heads: slice, length: int) -> Tensor:
    index = _packed_rows(cu_seqlens, batch, length)
    rows = tensor[:, heads][index]
    return (rows[None] if isinstance(index, slice) else rows).transpose(1, 2)


def _write_packed(tensor: Tensor, cu_seqlens: Tensor, batch: Tensor, heads: slice, rows: Tensor) -> None:
    values = rows.transpose(1, 2).to(tensor.dtype)  # [g, length, heads, dim]
    index = _packed_rows(cu_seqlens, batch, rows.shape[2])
    tensor[index, heads] = values[0] if isinstance(index, slice) else values


@dataclass(frozen=True, eq=False)
class Cache:
    """Queries dense; keys in slots [leftpad, used + new) of a cache row, or of the pages of a page table.

    Contiguous: (batch_cache, capacity, heads_k, dim), row `index[b]`. Paged: (num_pages, page_size, heads_k, dim),
    slot s of sequence b is row s % page_size of page page_table[b, s // page_size].
    What was not given stays None, so that a decoding step on a GPU makes no tensor that its kernel can do without.
    """

    seqlen_q: int
    seqlen_k: int
    used: Tensor  # (batch,) slots in use before this call's keys were appended
    new: int  # keys that the call appends
    pads: Tensor | None  # (batch,)
    rows: Tensor | None  # (batch,) cache row of each sequence; None when paged: sequence b has row b
    page_table: Tensor | None
    page_size: int

    @property
    def batch(self) -> int:
        return self.used.numel()

    @cached_property
    def lengths(self) -> Tensor:
        """(batch,) keys of each sequence."""
        total = self.used.long() + self.new
        return total if self.pads is None else total - self.pads

    @cached_property
    def leftpad(self) -> Tensor:
        return torch.zeros_like(self.lengths) if self.pads is None else self.pads.long()

    @cached_property
    def index(self) -> Tensor:
        return torch.arange(self.batch, device=self.used.device) if self.rows is None else self.rows.long()

    @property
    def q_lens(self) -> list[int]:
        return [self.seqlen_q] * self.batch

    @cached_property
    def k_lens(self) -> list[int]:
        return self.lengths.tolist()

    def device_lengths(self) -> tuple[int | Tensor, int | Tensor]:
        return self.seqlen_q, self.lengths.view(-1, 1, 1, 1)

    def tensors(self) -> tuple[Tensor, ...]:
        return ()  # a cache has no backward pass that would need them unchanged

    def read_q(self, tensor: Tensor, batch: Tensor, heads: slice, length: int) -> Tensor:
        return tensor[_slots(batch), :length, heads].transpose(1, 2)

    def write_q(self, tensor: Tensor, batch: Tensor, heads: slice, rows: Tensor) -> None:
        tensor[_slots(batch), : rows.shape[2], heads] = rows.transpose(1, 2).to(tensor.dtype)

    def read_k(self, tensor: Tensor, batch: Tensor, heads: slice, length: int) -> Tensor:
        if self.page_table is None and batch.numel() == 1:  # a view: no copy of a long cache
            row, start = int(self.index[batch[0]]), int(self.leftpad[batch[0]])
            return tensor[row : row + 1, start : start + length, heads].transpose(1, 2)
        row, slot = self.locate(batch, torch.zeros_like(batch), length)
        return tensor[:, :, heads][row, slot].transpose(1, 2)

    def write_k(self, tensor: Tensor, batch: Tensor, heads: slice, rows: Tensor) -> None:
        raise NotImplementedError("a cache has no gradient")

    def locate(self, batch: Tensor, start: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """(row, slot) [g, length] in the cache tensor of the key indices start + 0 ... length - 1 of each sequence."""
        slot = (self.leftpad[batch] + start)[:, None] + torch.arange(length, device=batch.device)
        if self.page_table is None:
            return self.index[batch][:, None].expand_as(slot), slot
        return self.page_table[batch[:, None], slot // self.page_size].long(), slot % self.page_size


Layout = Dense | Varlen | Cache
