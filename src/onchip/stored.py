"""The tensors of a mask and a score that a pass reads pair by pair: biases, stored masks, ids of documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from onchip.mask import Dense, Documents, Mask, Union
from onchip.problem import Problem
from onchip.score import Mod, Score


@dataclass(frozen=True)
class Stored:
    """A tensor that broadcasts to (batch, heads_q, seqlen_q, seqlen_k): its size in the dims that it has, else 1."""

    shape: tuple[int, ...]
    itemsize: int

    @property
    def numbers(self) -> int:
        return prod(self.shape)

    @property
    def has(self) -> tuple[bool, ...]:
        """Whether it differs between sequences, heads, queries and keys."""
        return tuple(n > 1 for n in self.shape)


def own_sizes(tensor: Tensor) -> tuple[int, ...]:
    """The sizes of a tensor's last four dims, 1 where it is expanded."""
    own = (n if step else 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (1,) * (4 - tensor.dim()) + tuple(own)


def looked_up(mask: Mask) -> Iterator[tuple[str, Tensor]]:
    """What is read where a mask's elements are looked at, in four dims: "mask", a stored one, and documents' "ids"."""
    for part in mask.parts:
        if isinstance(part, Union):
            for other in part.masks:
                yield from looked_up(other)
        elif isinstance(part, Dense):
            yield "mask", part.visible
        elif isinstance(part, Documents):
            yield "ids", part.ids_q[:, None, :, None]
            yield "ids", part.ids_k[:, None, None, :]


def tensors(problem: Problem, mask: Mask, score: Score | None) -> dict[str, tuple[Stored, ...]]:
    """By their names in `orders.TENSORS`. ValueError where the problem has a bias and the score is not given."""
    from onchip.backends.cpu import arguments

    found: dict[str, tuple[Stored, ...]] = {}
    for name, tensor in looked_up(mask):
        found[name] = (*found.get(name, ()), Stored(own_sizes(tensor), tensor.element_size()))
    if "bias" in problem.score_parts:
        bias = None if score is None else score.bias
        if bias is None:
            raise ValueError(
                "score: the problem has a bias, whose shape is counted; give the score that holds it"
            )
        found["bias"] = (Stored(own_sizes(bias), bias.element_size()),)
        shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
        found["dbias"] = (Stored(shape, bias.element_size()),)
    if shown := arguments.elements(mask):
        differs = [part.dependence(problem) for part in shown]
        batch, heads = (any(each) for each in zip(*differs, strict=True))
        leading = problem.batch if batch else 1, problem.heads_q if heads else 1
        found["shown"] = (Stored((*leading, problem.seqlen_q, problem.seqlen_k), 1),)
    return found


def left_out(mask: Mask, score: Score) -> int:
    """Bytes of their other tensors: bounds, lengths, block maps, slopes, sinks, and the tables of functions."""
    found = [*_others(mask), *(t for t in (score.alibi, score.sink) if t is not None)]
    found += score.mod.args if isinstance(score.mod, Mod) else ()
    return sum(prod(own_sizes(t)) * t.element_size() for t in found)


def _others(mask: Mask) -> Iterator[Tensor]:
    for part in mask.parts:
        if isinstance(part, Union):
            for other in part.masks:
                yield from _others(other)
        elif not isinstance(part, Dense | Documents):
            yield from part.tensors()
