"""Recording the workloads of a running model, for `onchip bench` to repeat."""

from __future__ import annotations

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

    @property
    def cases(self) -> list[Case]:
        found = [replace(case, calls=n, name=f"call {i}") for i, (case, n) in enumerate(self._seen.values())]
        return sorted(found, key=lambda case: -case.calls)

    def save(self, path: str | Path) -> None:
        """Write the cases as JSON for ``onchip bench --cases``; ValueError where a mask holds a tensor or function."""
        cases.save(self.cases, Path(path))

    def called(self, call: Call, out: Tensor, lse: Tensor, seconds: float) -> None:
        case = _case(call, out.requires_grad)
        # Masks made anew at each call are one by what they print.
        key = (replace(case, mask=""), case.mask_text)
        _, count = self._seen.get(key, (case, 0))
        self._seen[key] = (case, count + 1)


def _case(call: Call, trains: bool) -> Case:
    problem, operands, layout = call.problem, call.operands, call.operands.layout
    mask: Any = operands.mask
    # A mask without an expression stays as it is: measured in this process, not written to a file.
    with suppress(ValueError):
        mask = cases.mask_text(mask)
    return Case(
        batch=max(problem.batch, 1),
        seqlen_q=max(problem.seqlen_q, 1),
        seqlen_k=max(problem.seqlen_k, 1),
        heads_q=max(problem.heads_q, 1),
        heads_k=max(problem.heads_k, 1),
        dim=problem.dim,
        dim_v=max(problem.dim_v, 1),
        dtype=str(problem.dtype).removeprefix("torch."),
        mask=mask,
        softcap=operands.score.softcap,
        dropout=problem.dropout,
        what="both" if trains else "forward",
        cache=isinstance(layout, Cache),
        lengths=tuple(n for n in layout.q_lens if n) if isinstance(layout, Varlen) else (),
    )


@contextmanager
def record() -> Iterator[Recorder]:
    """Note the sizes, mask and dtype of every call inside the block, backward passes where one is to come.

    >>> with onchip.record() as seen:
    ...     model(batch).loss.backward()
    >>> seen.save("cases.json")  # then: onchip bench --cases cases.json

    ALiBi, biases, sinks and score functions are not recorded: the cases are without them.
    """
    recorder = Recorder()
    with observing(recorder):
        yield recorder
