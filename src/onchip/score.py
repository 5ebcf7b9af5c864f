"""What happens to a score before the softmax: `Score(softcap, alibi, bias, sink, mod)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from onchip.plain import check_closed, check_derivable, derivative, on_device, on_tensors

if TYPE_CHECKING:
    from onchip.mask import Region
    from onchip.problem import Problem


@dataclass(frozen=True, eq=False)
class Mod:
    """A plain function of the score and its derivative; build it with `mod`."""

    fn: Callable[..., Any]
    grad: Callable[..., Any] | None  # None: it is derived
    args: tuple[Tensor, ...]

    @cached_property
    def slope_fn(self) -> Callable[..., Any]:
        """d fn / d score, of fn's arguments."""
        return self.grad or derivative(self.fn, len(self.args))

    def __call__(self, score: Tensor, region: Region) -> Tensor:
        return self._run(self.fn, score, region)

    def slope(self, score: Tensor, region: Region) -> Tensor:
        return self._run(self.slope_fn, score, region)

    def _run(self, fn: Callable[..., Any], score: Tensor, region: Region) -> Tensor:
        try:
            value = on_tensors(fn)(score, region.b, region.h, region.q, region.k, *self.args)
            return on_device(value, score.device).to(score.dtype).expand_as(score)
        except Exception as error:  # whatever the user's function does
            label = getattr(fn, "__name__", repr(fn))
            raise ValueError(f"mod: {label} failed on a tile of scores and indices: {error}") from error


def mod(fn: Callable[..., Any], *tensors: Tensor, grad: Callable[..., Any] | None = None) -> Mod:
    """A modification of the score: ``fn(score, batch, head, q, k, *tensors)``, plain Python arithmetic.

    Its derivative by the score is derived, or given as ``grad`` with the same arguments. Besides operators, fn may
    use min, max, abs and `onchip.plain`'s exp, log, tanh, sqrt, where. The tensors are read by index
    (``table[head, q]``) and get no gradient: a learned additive term is ``Score(bias=...)``.

    Indices divided by one another are float32, as in torch, also where the score is float64.

    Raises ValueError where the derivative cannot be derived and grad is not given, or a tensor requires grad.
    """
    for name, function in (("fn", fn), ("grad", grad)):
        if function is not None and not callable(function):
            raise TypeError(f"mod: {name} is {type(function).__name__}, expected a function")
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"mod: tensors[{i}] is {type(tensor).__name__}, expected a tensor")
        if tensor.requires_grad:
            raise ValueError(
                f"mod: tensors[{i}] requires grad, expected none; detach it or use Score(bias=...)"
            )
    check_closed("mod", fn)
    if grad is None:
        check_derivable(fn, len(tensors))
    return Mod(fn, grad, tensors)


@dataclass(frozen=True, eq=False)
class Score:
    """Modifications of ``s = scale * q.k``, in this order: softcap, ALiBi, bias, mod; then mask, then sink.

    softcap: float > 0, ``softcap * tanh(s / softcap)``.
    alibi: slopes (heads_q,) or (batch, heads_q); ``s - slope * |q + seqlen_k - seqlen_q - k|``.
    bias: at most 4 dims, broadcastable to (batch, heads_q, seqlen_q, seqlen_k).
    sink: (heads_q,) logits that join the denominator of every row.
    mod: `onchip.mod(fn, *tensors)`, or a plain function.
    alibi, bias and sink are floating point, of any precision, and get gradients.
    """

    softcap: float | None = None
    alibi: Tensor | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None
    mod: Mod | Callable[..., Any] | None = None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What is set."""
        return tuple(
            name for name in ("softcap", "alibi", "bias", "sink", "mod") if getattr(self, name) is not None
        )

    def __post_init__(self) -> None:
        if self.softcap is not None:
            if isinstance(self.softcap, bool) or not isinstance(self.softcap, int | float):
                raise TypeError(f"softcap: got {type(self.softcap).__name__}, expected a float")
            if not 0 < self.softcap < float("inf"):
                raise ValueError(
                    f"softcap: got {self.softcap}, expected a finite number above 0 (None for none)"
                )
            object.__setattr__(
                self, "softcap", float(self.softcap)
            )  # kernels are compiled for one or the other
        for name in ("alibi", "bias", "sink"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Tensor) or not value.is_floating_point()):
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(f"{name}: got {kind}, expected a floating point tensor")
        if self.mod is not None and not isinstance(self.mod, Mod):
            if not callable(self.mod):
                raise TypeError(
                    f"mod: got {type(self.mod).__name__}, expected onchip.mod(fn, *tensors) or a function"
                )
            object.__setattr__(self, "mod", mod(self.mod))

    def check(self, problem: Problem) -> None:
        """Raise ValueError where a tensor does not fit the problem's shapes or device."""
        for name in ("alibi", "bias", "sink"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.device.type != problem.device:
                raise ValueError(f"{name}: is on {tensor.device}, expected {problem.device} as for q")
        heads = problem.heads_q
        if self.alibi is not None and tuple(self.alibi.shape) not in ((heads,), (problem.batch, heads)):
            raise ValueError(
                f"alibi: slopes have shape {tuple(self.alibi.shape)}, expected ({heads},) or ({problem.batch}, {heads})"
            )
        if self.sink is not None and tuple(self.sink.shape) != (heads,):
            raise ValueError(f"sink: has shape {tuple(self.sink.shape)}, expected ({heads},)")
        if self.bias is not None:
            problem.check_broadcast("bias", self.bias)
