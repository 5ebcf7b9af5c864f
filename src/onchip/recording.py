"""Recording the workloads of a running model, for `onchip bench` to repeat."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from onchip.autograd import Call
from onchip.bench import cases
from onchip.bench.cases import Case
from onchip.layout import Cache, Varlen
from onchip.observe import observing


@dataclass
class Recorder:
    """The distinct workloads of the calls seen, each with how often it came, the most frequent first."""

    _seen: dict[tuple, tuple[Case, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # calls come from any thread

    @property
    def cases(self) -> list[Case]:
        found = [replace(case, calls=n, name=f"call {i}") for i, (case, n) in enumerate(self._seen.values())]
        return sorted(found, key=lambda case: -case.calls)

    def save(self, path: str | Path) -> None:
        """Write the cases as JSON for ``onchip bench --cases``; ValueError where a mask holds a tensor or function."""
        cases.save(self.cases, Path(path))

    def called(self, call: Call, out: Tensor, lse: Tensor, seconds: float) -> None:
        layout = call.operands.layout
        if not out.numel() or not any(q and k for q, k in zip(layout.q_lens, layout.k_lens, strict=True)):
            return  # nothing to measure
        case = _case(call, out.requires_grad)
        # Masks made anew at each call are one by what they print.
        key = (replace(case, mask=""), case.mask_text)
        with self._lock:
            _, count = self._seen.get(key, (case, 0))
            self._seen[key] = (case, count + 1)


def _case(call: Call, trains: bool) -> Case:
    problem, operands, layout = call.problem, call.operands, call.operands.layout
    mask: Any = operands.mask
    # A mask without an expression stays as it is: measured in this process, not written to a file.
    with suppress(ValueError):
        mask = cases.mask_text(mask)
    packed, cache = isinstance(layout, Varlen), isinstance(layout, Cache)
    q_lens, k_lens = tuple(layout.q_lens), tuple(layout.k_lens)
    own = k_lens != q_lens if packed else cache and len(set(k_lens)) > 1
    return Case(
        batch=problem.batch,
        seqlen_q=max(q_lens),
        seqlen_k=max(k_lens),
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

    Cases are without ALiBi, biases, sinks and score functions: each lists in `without`, and its label says, what its
    calls had of them. They have the default scale, and of a paged cache its lengths. Calls without a query or key are
    left out.
    """
    recorder = Recorder()
    with observing(recorder):
        yield recorder
