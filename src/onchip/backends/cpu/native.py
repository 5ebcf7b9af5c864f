"""Native CPU kernels: tiles of 64 queries by 256 keys, one query a vector lane; the tiled loop serves what they refuse.

Results depend on the problem alone, never on the number of threads. Tensors are read where they lie; one whose last dim
is not contiguous is copied once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from onchip.backends.cpu import arguments, isa as isas, looks
from onchip.backends.cpu.gradients import ScoreGrads
from onchip.backends.cpu.trace import tracing
from onchip.layout import Dense, Varlen
from onchip.mask import Mask
from onchip.problem import Grads, Operands, Output, Problem, Saved
from onchip.rules import Band
from onchip.score import Score
from onchip.tiles import Tiles

status = isas.status  # what `onchip doctor` says

_ROWS, _KEYS = 64, 256  # of a tile: ROWS and KEYS of kernels/
_TILES = Tiles(_ROWS, _KEYS)
_WIDEST = 512
_BANDS = ((), ("band",))  # masks that the kernels compute from lengths alone


def refuse(problem: Problem) -> str | None:
    if problem.device != "cpu":
        return f"the tensors are on {problem.device}; it runs on cpu"
    if isas.load().isa is None:
        return isas.load().reason
    if problem.dtype is torch.float64:
        return "it has no kernels for float64"
    if max(problem.dim, problem.dim_v) > _WIDEST:
        return f"dim {max(problem.dim, problem.dim_v)} is above {_WIDEST}"
    if problem.heads_q == 0:
        return "there are no heads"
    if "mod" in problem.score_parts:
        return "a score mod is a Python function, which the tiled loop runs"
    if tracing():
        return "tile loads are being counted, which the tiled loop does"
    return None


def copies(tensor: Tensor) -> bool:
    """Whether a tensor is copied whole before it is read: its last dim is not contiguous."""
    return tensor.stride(-1) != 1 and tensor.shape[-1] > 1


def tiles(problem: Problem) -> Tiles:
    return _TILES


def shares(problem: Problem) -> int:
    """Of the keys, whose results are joined, for sequences of equal lengths and no backward pass."""
    call = arguments.sized(problem, problem.seqlen_q, problem.seqlen_k)
    return isas.load().forward_splits(ctypes.byref(call))


def extra_memory(
    problem: Problem, operands: Operands, step: str, needs: Iterable[str], device: str | None = None
) -> int:
    """`rest`, the kernels' buffers as they tell of them, and what Python holds: arguments, sums, bytes of a mask and
    what a look at it takes (see `looks.memory`)."""
    library, keep = isas.load(), []
    if library.isa is None or not problem.batch:
        return 0
    call = arguments.state(problem, operands, keep)
    arguments.state_mask(call, problem, operands, keep)
    rest = torch.empty(_row_shape(problem, operands), device="meta")
    own = rest.numel() * 4 + arguments.made(keep, operands)
    if step == "forward":
        return own + _most(call, problem, operands, library.forward_memory, rows=True)
    scores = ScoreGrads(problem, operands.score, Saved(rest, rest, rest, frozenset(needs)), [])
    rooms = scores.rooms(call)
    kernels = _most(call, problem, operands, library.backward_memory, rows=False)
    return own + 4 * sum(map(prod, rooms.values())) + max(kernels, scores.last_steps(rooms))


def _most(call: arguments.Call, problem: Problem, operands: Operands, memory: Any, rows: bool) -> int:
    """Most bytes of the kernels' buffers, and of what they are shown of a mask, over the pieces of a pass."""
    if arguments.shown_in_place(operands.mask):
        return memory(ctypes.byref(call))
    if not rows:
        call.chunks, _ = sizes(call)
        call.dq_parts = 1  # somewhere
    most, looked = 0, {}
    for members, region in arguments.pieces(problem, operands, rows):
        keep: list = []
        arguments.take_region(call, members, region, keep)
        parts = 0 if rows else 4 * sizes(call)[1]
        shown = looks.shown_shape(region)
        if shown not in looked:
            looked[shown] = looks.memory(operands.mask, region)
        most = max(most, max(memory(ctypes.byref(call)), looked[shown]) + parts + prod(shown))
    return most


def forward(problem: Problem, operands: Operands, tiles: Tiles) -> Output:
    run = isas.load().forward
    if (
        problem.layout == "dense"
        and not problem.score_parts
        and not problem.dropout
        and problem.mask_parts in _BANDS
    ):
        return _forward_plain(problem, operands, run)
    keep: list = []
    call = arguments.state(problem, operands, keep)
    out, lse, rest = _results(problem, operands)
    arguments.place(call, "out", out)
    _place_rows(call, lse)
    call.lse, call.rest = lse.data_ptr(), rest.data_ptr()
    arguments.state_mask(call, problem, operands, keep)
    if arguments.shown_in_place(operands.mask):
        run(ctypes.byref(call))
        return Output(out, lse, rest)
    for members, region in arguments.pieces(problem, operands, rows=True):
        kept: list = []
        arguments.take_region(call, members, region, kept)
        arguments.show_region(call, operands.mask, region, kept)
        run(ctypes.byref(call))
    return Output(out, lse, rest)


def _forward_plain(problem: Problem, operands: Operands, run: Any) -> Output:
    """The common case in few steps: all but the addresses is kept from the last call of its kind."""
    q, k, v = operands.q, operands.k, operands.v
    strides = q.stride(), k.stride(), v.stride()
    if not strides[0][3] == strides[1][3] == strides[2][3] == 1:
        keep: list = []
        q, k, v = (arguments.unit(x, keep) for x in (q, k, v))
        strides = q.stride(), k.stride(), v.stride()
    stated, like_out, like_lse = _plain(problem, strides, operands.mask.band)
    call = arguments.Call.from_buffer_copy(stated)
    out = torch.empty_like(like_out)
    # Two tensors: an operator's results share no storage, and a user's lse does not keep rest alive.
    lse, rest = torch.empty_like(like_lse), torch.empty_like(like_lse)
    call.q, call.k, call.v, call.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
    call.lse, call.rest, call.threads = lse.data_ptr(), rest.data_ptr(), torch.get_num_threads()
    call.recomputed = arguments.recomputed(operands)
    run(ctypes.byref(call))
    return Output(out, lse, rest)


@lru_cache(maxsize=256)
def _plain(
    problem: Problem, strides: tuple[tuple[int, ...], ...], band: Band | None
) -> tuple[bytes, Tensor, Tensor]:
    """The call of a dense problem under a band, or no mask, without addresses; what out and lse are made alike."""
    q, k, v = (
        torch.empty(0, dtype=problem.dtype, device="cpu").as_strided((0, *shape), stride)
        for shape, stride in zip(_shapes(problem), strides, strict=True)
    )
    operands = Operands(
        q, k, v, Dense(problem.batch, problem.seqlen_q, problem.seqlen_k), Mask(band), Score()
    )
    call = arguments.state(problem, operands, [])
    size = problem.dtype.itemsize
    call.out_head = problem.dim_v * size
    call.out_row = problem.heads_q * call.out_head
    call.out_batch = problem.seqlen_q * call.out_row
    call.row_head, call.row_batch = problem.seqlen_q, problem.seqlen_q * problem.heads_q
    rows = problem.batch, problem.heads_q, problem.seqlen_q
    out = problem.batch, *_shapes(problem)[0][:2], problem.dim_v
    return bytes(call), _shape_only(out, problem.dtype), _shape_only(rows, torch.float32)


def _shape_only(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of one number, for empty_like: half the host time of new_empty (0.9 and 1.4 us on a Zen 4)."""
    small = torch.empty(shape if 0 in shape else (), dtype=dtype, device="cpu")
    return small.expand(shape)


def _shapes(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """(seqlen, heads, dim) of q, k and v."""
    q, k = (problem.seqlen_q, problem.heads_q), (problem.seqlen_k, problem.heads_k)
    return (*q, problem.dim), (*k, problem.dim), (*k, problem.dim_v)


def _row_shape(problem: Problem, operands: Operands) -> tuple[int, ...]:
    """Of lse and rest."""
    if problem.layout != "varlen":
        return problem.batch, problem.heads_q, problem.seqlen_q
    return problem.heads_q, operands.q.shape[0]


def _results(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Room for out, lse and rest; rows that no sequence uses hold 0, -inf and 0."""
    q, shape = operands.q, _row_shape(problem, operands)
    out, lse = q.new_empty(*q.shape[:-1], problem.dim_v), q.new_empty(shape, dtype=torch.float32)
    rest = torch.empty_like(lse)
    if isinstance(operands.layout, Varlen) and operands.layout.used_q is not None:
        out.zero_()
        lse.fill_(-torch.inf)
        rest.zero_()
    return out, lse, rest


def _place_rows(call: Any, lse: Tensor) -> None:
    """Of lse, rest and the like, which are contiguous."""
    heads, call.row_head = lse.shape[-2:]
    call.row_batch = heads * call.row_head if lse.dim() == 3 else 0


def backward(
    problem: Problem, operands: Operands, saved: Saved, dout: Tensor, dlse: Tensor | None, tiles: Tiles
) -> Grads:
    keep: list = []
    call = arguments.state(problem, operands, keep)
    _place_rows(call, saved.lse)
    for name, rows in (("lse", saved.lse), ("rest", saved.rest), ("dlse", dlse)):
        setattr(call, name, arguments.pointer(rows, torch.float32, keep))
    for name, tensor in (("out", saved.out), ("dout", dout)):
        arguments.place(call, name, arguments.unit(tensor, keep))
    grads = {name: _room(problem, operands, name) for name in "qkv" if name in saved.needs}
    for name, grad in grads.items():
        arguments.place(call, "d" + name, grad)
    arguments.state_mask(call, problem, operands, keep)
    scores = ScoreGrads(problem, operands.score, saved, keep)
    scores.start(call)
    _run_backward(call, problem, operands)
    return Grads(**grads, **scores.finish())


def _room(problem: Problem, operands: Operands, name: str) -> Tensor:
    like = getattr(operands, name)
    layout = operands.layout
    partly = isinstance(layout, Varlen) and (layout.used_q if name == "q" else layout.used_k) is not None
    return like.new_zeros(like.shape) if partly else like.new_empty(like.shape)


def _run_backward(call: arguments.Call, problem: Problem, operands: Operands) -> None:
    run = isas.load().backward
    if arguments.shown_in_place(operands.mask):
        run(ctypes.byref(call))
        return
    call.chunks, _ = sizes(call)  # as many for every stretch of keys
    before, parts = None, torch.empty(0, device="cpu")
    for members, region, last in with_last(arguments.pieces(problem, operands, rows=False)):
        kept: list = []
        arguments.take_region(call, members, region, kept)
        if members != before:  # a new group of sequences: dq is summed over its stretches of keys
            parts = torch.empty(0, device="cpu")  # the last group's go before its own come
            parts = torch.zeros(sizes(call)[1], device="cpu")
            before = members
        arguments.show_region(call, operands.mask, region, kept)
        call.dq_parts, call.last = parts.data_ptr(), last
        run(ctypes.byref(call))


def with_last(pieces: Iterable) -> Iterator:
    """Each piece, and whether it is the last of its sequences."""
    found = list(pieces)
    after = [*(members for members, _ in found[1:]), None]
    for (members, region), following in zip(found, after, strict=False):  # a batch of 0 has no pieces
        yield members, region, members != following


def sizes(call: arguments.Call) -> tuple[int, int]:
    """Chunks of the keys, and floats of dq_parts."""
    found = (ctypes.c_int64 * 2)()
    isas.load().backward_sizes(ctypes.byref(call), found)
    return found[0], found[1]
