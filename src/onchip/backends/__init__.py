"""Implementations of one interface (`Backend`); `onchip.select` chooses among them."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from onchip.problem import Grads, Operands, Output, Problem, Saved
from onchip.tiles import Tiles


class Backend(Protocol):
    """A module that computes attention. It never falls back: what it cannot do, it refuses with a reason.

    A module may besides have: `BACKWARD`, the name of the backend that runs its backward pass; `yields(problem)`,
    why it is not chosen unless named, though it could; `refuse_on(problem, device)`, the same as `refuse` on a
    known GPU that is not here; `append(layout, q, k_cache, v_cache, k, v, rotary)`, which writes new keys into a cache;
    `again(problem, operands)`, the forward pass of other plain dense calls of the same facts (see `onchip.kept`);
    `sweeps`, `copies` and `status`, what `plan` and `onchip doctor` ask.
    """

    def refuse(self, problem: Problem) -> str | None:
        """Why it cannot serve the problem; None when it can."""
        ...

    def tiles(self, problem: Problem) -> Tiles: ...

    def extra_memory(
        self, problem: Problem, operands: Operands, step: str, needs: Iterable[str], device: str | None = None
    ) -> int:
        """Peak bytes that its pass, "forward" or "backward", takes beyond inputs and results; see `Traffic`.

        operands: their q, k and v may be without storage. needs: the gradients that are wanted. device: the known GPU
        that is meant, if not this one.
        """
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
