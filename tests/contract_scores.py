"""Every part of a score beside its truth in the oracle's words."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import onchip
import oracle
from contract_masks import Shape, grid


@dataclass(frozen=True)
class Modified:
    """A modification: `fn` in plain arithmetic, and `truth(s, b, heads, q, k, table)` in torch's words."""

    fn: Callable
    truth: Callable
    table: bool = False
    kink: bool = False  # where its derivative jumps, and a rounding of the score would change it: see `apart`


def soften(score, batch, head, q, k):
    return 3 * onchip.plain.tanh(score / 3) + 0.0625 * abs(q - k)


def lean(score, batch, head, q, k):
    return onchip.plain.where(q >= k, score * 1.5, score * (0.5 + 0.125 * batch))


def look_up(score, batch, head, q, k, table):
    return score * score / 8 + table[head, min(abs(q - k), 9)]


def clip(score, batch, head, q, k):
    return min(max(score, -0.885), 0.885) + 0.25 * score


MODS = {
    "mod_tanh": Modified(soften, lambda s, b, h, q, k, table: 3 * (s / 3).tanh() + 0.0625 * (q - k).abs()),
    "mod_where": Modified(
        lean, lambda s, b, h, q, k, table: s * torch.where(q >= k, 1.5, 0.5 + 0.125 * b).to(s.dtype)
    ),
    "mod_table": Modified(
        look_up,
        lambda s, b, h, q, k, table: s * s / 8 + table[h, (q - k).abs().clamp(max=9)].to(s.dtype),
        table=True,
    ),
    "mod_clip": Modified(clip, lambda s, b, h, q, k, table: s.clamp(-0.885, 0.885) + 0.25 * s, kink=True),
}


@dataclass(frozen=True)
class Recipe:
    """What a score is made of. bias and alibi name their dims: "BHQK", "1" where broadcast, trailing ones if fewer."""

    softcap: float | None = None
    alibi: str | None = None
    bias: str | None = None
    hidden: float = 0.0  # share of the bias that is -inf
    sink: bool = False
    mod: str | None = None

    def apart(self, x: Tensor) -> Tensor:
        """q or k, in multiples of 1/2 where the score has a kink.

        Scores are then multiples of scale / 4, of which none is nearer to 0.885 than 3e-4, with the scale of any dim
        up to 256: what rounding does to them, 1e-6, moves none across the kink.
        """
        return (2 * x).round() / 2 if self.mod and MODS[self.mod].kink else x

    def make(self, shape: Shape) -> "Scored":
        sizes = {"B": shape.batch, "H": shape.heads_q, "Q": shape.seqlen_q, "K": shape.seqlen_k, "1": 1}
        tensors = {}
        if self.bias:
            bias = torch.randn([sizes[d] for d in self.bias], device=shape.device)
            tensors["bias"] = bias.masked_fill(torch.rand_like(bias) < self.hidden, float("-inf"))
        if self.alibi:
            tensors["alibi"] = 0.2 * torch.rand([sizes[d] for d in self.alibi], device=shape.device)
        if self.sink:
            tensors["sink"] = torch.randn(shape.heads_q, device=shape.device)
        table = torch.randn(shape.heads_q, 10, device=shape.device)
        return Scored(self, shape, tensors, table)


@dataclass(frozen=True)
class Scored:
    """A score's tensors, drawn; `tensors` are those that get gradients."""

    recipe: Recipe
    shape: Shape
    tensors: dict[str, Tensor]
    table: Tensor

    def score(self, tensors: dict[str, Tensor]) -> onchip.Score | None:
        if self.recipe == Recipe():
            return None
        mod = None
        if self.recipe.mod:
            modified = MODS[self.recipe.mod]
            mod = onchip.mod(modified.fn, *((self.table,) if modified.table else ()))
        return onchip.Score(softcap=self.recipe.softcap, mod=mod, **tensors)

    def add(self, tensors: dict[str, Tensor], b: int, q_len: int, k_len: int) -> Tensor | None:
        """ALiBi and bias of sequence b, broadcastable to (1, heads_q, q_len, k_len); None without either."""
        terms = []
        if "alibi" in tensors:
            slopes = tensors["alibi"]
            terms.append(oracle.alibi(slopes[b : b + 1] if slopes.dim() == 2 else slopes, q_len, k_len))
        if "bias" in tensors:
            bias = tensors["bias"]
            four = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)
            four = four[b : b + 1] if four.shape[0] > 1 else four
            four = four[:, :, :q_len] if four.shape[2] > 1 else four
            terms.append(four[:, :, :, :k_len] if four.shape[3] > 1 else four)
        return sum(terms) if terms else None

    def truth(self, tensors: dict[str, Tensor], b: int, q_len: int, k_len: int) -> dict:
        """`oracle.attention`'s keywords for sequence b alone, on these tensors."""
        options = {"softcap": self.recipe.softcap, "sink": tensors.get("sink")}
        if self.recipe.mod:
            modified, (heads, q, k) = MODS[self.recipe.mod], grid(self.shape, q_len, k_len)
            options["modify"] = lambda s: modified.truth(s, b, heads, q, k, self.table)
        return options | {"add": self.add(tensors, b, q_len, k_len)}

    def sums(self, weights: list[Tensor]) -> dict[str, Tensor]:
        """Of each tensor's gradient the sum of its terms, each its score's weight [1, heads_q, q_len, k_len] large."""
        leaves = {
            name: t.double().nan_to_num(neginf=0.0).requires_grad_() for name, t in self.tensors.items()
        }
        if not leaves:
            return {}
        total = torch.zeros((), dtype=torch.float64, device=self.shape.device)
        for b, weight in enumerate(weights):
            add = self.add(leaves, b, *weight.shape[-2:])
            if add is not None:
                total = total + (add * weight).sum()
            if "sink" in leaves:  # its own weight is at most 1 in each row
                total = total + leaves["sink"].sum() * weight.shape[2]
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, grads, strict=True))


SCORES: dict[str, Recipe] = {
    "none": Recipe(),
    "softcap": Recipe(softcap=1.5),
    "alibi": Recipe(alibi="H"),
    "alibi_batch": Recipe(alibi="BH"),
    "bias_BHQK": Recipe(bias="BHQK"),
    "bias_1HQK": Recipe(bias="1HQK"),
    "bias_B1QK": Recipe(bias="B1QK"),
    "bias_B11K": Recipe(bias="B11K"),
    "bias_HQ1": Recipe(bias="HQ1"),
    "bias_QK": Recipe(bias="QK"),
    "bias_K": Recipe(bias="K"),
    "bias_BH11": Recipe(bias="BH11"),
    "bias_1111": Recipe(bias="1111"),
    "bias_hiding": Recipe(bias="1HQK", hidden=0.6),
    "sink": Recipe(sink=True),
    "mod_tanh": Recipe(mod="mod_tanh"),
    "mod_where": Recipe(mod="mod_where"),
    "mod_table": Recipe(mod="mod_table"),
    "mod_clip": Recipe(mod="mod_clip"),
    "softcap_and_sink": Recipe(softcap=2.0, sink=True),
    "everything": Recipe(softcap=4.0, alibi="BH", bias="B1QK", sink=True, mod="mod_tanh"),
    "everything_else": Recipe(alibi="H", bias="HQ1", sink=True, mod="mod_table"),
}
