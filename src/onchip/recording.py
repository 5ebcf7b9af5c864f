"""Recording the workloads of a running model, for `onchip bench` to repeat."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from onchip import capture
from onchip.autograd import Call
from onchip.bench import files
from onchip.bench.cases import Case, mask_text, snapshot
from onchip.layout import Cache, Varlen
from onchip.mask import Mask
from onchip.observe import observing


@dataclass
class Recorder:
    """The distinct workloads of the calls seen, each with how often it came, the most frequent first."""

    _seen: dict[tuple, tuple[Case, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # calls come from any thread

    @property
    def cases(self) -> list[Case]:
        found = [_named(case, i, n) for i, (case, n) in enumerate(self._seen.values())]
        return sorted(found, key=lambda case: -case.calls)

    def save(self, path: str | Path) -> None:
        """Write the cases as JSON for ``onchip bench --cases``, and what tensors their masks hold to path + ".pt".

        ValueError where a mask holds a function.
        """
        files.save(self.cases, Path(path))

    def called(self, call: Call, out: Tensor, lse: Tensor, seconds: float) -> None:
        layout = call.operands.layout
        if not out.numel() or not any(q and k for q, k in zip(layout.q_lens, layout.k_lens, strict=True)):
            return  # nothing to measure
        case = _case(call, out.requires_grad)
        recorded = capture.capturing(call.problem.device)  # into a CUDA graph: a tensor cannot be looked at
        key = (replace(case, mask=""), case.mask_text, () if recorded else _shares(case.mask))
        with self._lock:
            if key not in self._seen:
                kept = case.mask if recorded or isinstance(case.mask, str) else snapshot(case.mask)
                self._seen[key] = (replace(case, mask=kept), 0)
            first, count = self._seen[key]
            self._seen[key] = (first, count + 1)


def _named(case: Case, number: int, calls: int) -> Case:
    """Its number in the order of first calls, and its sizes, by which a table's reader knows it."""
    sizes = replace(case, name="", without=()).label
    return replace(case, calls=calls, name=f"call {number}: {sizes}")


def _shares(mask: str | Mask) -> tuple[float, ...]:
    """What is visible of each bool tensor, to a tenth: layers of other densities are other workloads."""
    tensors = () if isinstance(mask, str) else mask.tensors()
    bools = (t for t in tensors if t.dtype is torch.bool and t.numel())
    return tuple(round(float(t.float().mean()), 1) for t in bools)


def _case(call: Call, trains: bool) -> Case:
    problem, operands, layout = call.problem, call.operands, call.operands.layout
    try:
        mask: str | Mask = mask_text(operands.mask)
    except ValueError:  # it has no expression
        mask = operands.mask
    packed, cache = isinstance(layout, Varlen), isinstance(layout, Cache)
    q_lens, k_lens = tuple(layout.q_lens), tuple(layout.k_lens)
    # A mask of tensors may cover a cache's slots, used or not.
    longest = problem.seqlen_k if cache and isinstance(mask, Mask) else max(k_lens)
    own = k_lens != q_lens if packed else cache and {*k_lens} != {longest}
    return Case(
        batch=problem.batch,
        seqlen_q=max(q_lens),
        seqlen_k=longest,
        heads_q=problem.heads_q,
        heads_k=problem.heads_k,
        dim=problem.dim,
        dim_v=problem.dim_v,
        dtype=str(problem.dtype).removeprefix("torch."),
        mask=mask,
        softcap=operands.score.softcap,
        dropout=problem.dropout,
        what="both" if trains else "forward",
        cache=cache,
        lengths=q_lens if packed else (),
        lengths_k=k_lens if own else (),
        without=tuple(part for part in problem.score_parts if part != "softcap"),
    )


@contextmanager
def record() -> Iterator[Recorder]:
    """Note the sizes, mask and dtype of every call inside the block, backward passes where one is to come.

    >>> with onchip.record() as seen:
    ...     model(batch).loss.backward()
    >>> seen.save("cases.json")  # then: onchip bench --cases cases.json

    Masks are kept as they are. Those made anew at each call, of the same parts and shapes and visible to the same
    tenth, are one workload, with the tensors of the first.
    Cases are without ALiBi, biases, sinks and score functions: each lists in `without`, and its label says, what its
    calls had of them. They have the default scale, and of a paged cache its lengths. Calls without a query or key are
    left out.
    """
    recorder = Recorder()
    with observing(recorder):
        yield recorder
