"""Implementations of one interface (`Backend`); `onchip.select` chooses among them."""

from typing import Protocol

from torch import Tensor

from onchip.problem import Grads, Operands, Output, Problem, Saved
from onchip.schedule import Tiles


class Backend(Protocol):
    """A module that computes attention. It never falls back: what it cannot do, it refuses with a reason.

    A module may besides have: `BACKWARD`, the name of the backend that runs its backward pass; `yields(problem)`,
    why it is not chosen unless named, though it could; `append(layout, q, k_cache, v_cache, k, v, rotary)`, which
    writes new keys into a cache; `sweeps`, `copies` and `status`, what `plan` and `onchip doctor` ask.
    """

    def refuse(self, problem: Problem) -> str | None:
        """Why it cannot serve the problem; None when it can."""
        ...

    def tiles(self, problem: Problem) -> Tiles: ...

    def extra_memory(self, problem: Problem, tiles: Tiles) -> int:
        """Estimated peak bytes of forward and backward beyond inputs, outputs and gradients."""
        ...

    def forward(self, problem: Problem, operands: Operands, tiles: Tiles) -> Output: ...

    def backward(
        self,
        problem: Problem,
        operands: Operands,
        saved: Saved,
        dout: Tensor,
        dlse: Tensor | None,
        tiles: Tiles,
    ) -> Grads: ...
