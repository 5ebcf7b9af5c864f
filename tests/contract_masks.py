"""Every kind of mask beside its truth, stated element by element and independently of the package."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import onchip


@dataclass(frozen=True)
class Shape:
    """The lengths and heads that a mask or score is made for: one entry of each tuple a sequence."""

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    heads_q: int = 1
    device: str = "cpu"

    @property
    def batch(self) -> int:
        return len(self.q_lens)

    @property
    def seqlen_q(self) -> int:
        return max(self.q_lens, default=0)

    @property
    def seqlen_k(self) -> int:
        return max(self.k_lens, default=0)


class Masked(NamedTuple):
    """A mask, and its visible pairs: (sequence, q_len, k_len) -> bool, broadcastable to (heads_q, q_len, k_len)."""

    mask: onchip.Mask | None
    visible: Callable[[int, int, int], Tensor]


Build = Callable[[Shape], Masked]


def grid(shape: Shape, q_len: int, k_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """Heads [heads_q, 1, 1], queries [1, q_len, 1] and keys [1, 1, k_len]."""
    heads, q, k = (torch.arange(n, device=shape.device) for n in (shape.heads_q, q_len, k_len))
    return heads[:, None, None], q[None, :, None], k[None, None, :]


def full_truth(masked: Masked, shape: Shape) -> list[Tensor]:
    """The visible pairs of each sequence: bool [heads_q, q_len, k_len]."""
    found = []
    for b, (q_len, k_len) in enumerate(zip(shape.q_lens, shape.k_lens, strict=True)):
        found.append(masked.visible(b, q_len, k_len).expand(shape.heads_q, q_len, k_len))
    return found


def by_position(make: Callable[[], onchip.Mask | None], truth: Callable[[Tensor, Tensor], Tensor]) -> Build:
    """A mask of the position p = q + k_len - q_len, which the last query shares with the last key, and of the key."""

    def build(shape: Shape) -> Masked:
        def visible(b, q_len, k_len):
            _, q, k = grid(shape, q_len, k_len)
            return truth(q + (k_len - q_len), k)

        return Masked(make(), visible)

    return build


def window(left: int | None, right: int | None) -> Build:
    def truth(p, k):
        seen = (p == p) & (k == k)
        if left is not None:
            seen = seen & (k >= p - left)
        if right is not None:
            seen = seen & (k <= p + right)
        return seen

    return by_position(lambda: onchip.window(left, right), truth)


def top_left(shape: Shape) -> Masked:
    def visible(b, q_len, k_len):
        _, q, k = grid(shape, q_len, k_len)
        return k <= q

    return Masked(onchip.causal(align="top_left"), visible)


def lengths_of(shape: Shape) -> Tensor:
    """A random length of keys for each sequence, no more than it has."""
    lengths = [int(torch.randint(0, k_len + 1, ())) for k_len in shape.k_lens]
    return torch.tensor(lengths, dtype=torch.int32, device=shape.device)


def padding(shape: Shape) -> Masked:
    lengths = lengths_of(shape)
    return Masked(onchip.padding(lengths), lambda b, m, n: grid(shape, m, n)[2] < lengths[b])


def padding_int(shape: Shape) -> Masked:
    length = shape.seqlen_k // 2
    return Masked(onchip.padding(length), lambda b, m, n: grid(shape, m, n)[2] < length)


def prefix(shape: Shape) -> Masked:
    lengths = lengths_of(shape)

    def visible(b, q_len, k_len):
        _, q, k = grid(shape, q_len, k_len)
        return (k <= q + (k_len - q_len)) | (k < lengths[b])

    return Masked(onchip.prefix(lengths), visible)


def prefix_int(shape: Shape) -> Masked:
    length = shape.seqlen_k // 3

    def visible(b, q_len, k_len):
        _, q, k = grid(shape, q_len, k_len)
        return (k <= q + (k_len - q_len)) | (k < length)

    return Masked(onchip.prefix(length), visible)


def _ids(shape: Shape, batch: int, seqlen: int, kinds: int = 4) -> Tensor:
    return torch.randint(0, kinds, (batch, seqlen), device=shape.device)


def documents(shape: Shape) -> Masked:
    """Ids by key position; a query above the first key has no position, so it sees nothing."""
    if shape.seqlen_q > shape.seqlen_k:  # refused: which of the queries have an id?
        return documents_cross(shape)
    ids = _ids(shape, shape.batch, shape.seqlen_k).sort(1).values

    def visible(b, q_len, k_len):
        _, q, k = grid(shape, q_len, k_len)
        p = q + (k_len - q_len)
        return (p >= 0) & (ids[b, p.clamp(min=0)] == ids[b, k])

    return Masked(onchip.documents(ids), visible)


def documents_cross(shape: Shape) -> Masked:
    ids, ids_k = _ids(shape, shape.batch, shape.seqlen_q), _ids(shape, 1, shape.seqlen_k)

    def visible(b, q_len, k_len):
        return (ids[b, :q_len, None] == ids_k[0, None, :k_len])[None]

    return Masked(onchip.documents(ids, ids_k=ids_k), visible)


def documents_cu(shape: Shape) -> Masked:
    if shape.seqlen_q > shape.seqlen_k:
        return documents_cross(shape)
    cuts = torch.randint(0, shape.seqlen_k + 1, (3,)).sort().values.tolist()
    cu_seqlens = torch.tensor([0, *cuts, shape.seqlen_k], dtype=torch.int32, device=shape.device)

    def visible(b, q_len, k_len):
        _, q, k = grid(shape, q_len, k_len)
        p = q + (k_len - q_len)
        own = [torch.searchsorted(cu_seqlens, x.contiguous().int(), right=True) for x in (p, k)]
        return (p >= 0) & (own[0] == own[1])

    return Masked(onchip.documents(cu_seqlens=cu_seqlens), visible)


def dense(dims: str, share: float = 0.5) -> Build:
    """A random tensor; dims says which of its four are broadcast, as "B1QK"; fewer letters are trailing ones."""

    def build(shape: Shape) -> Masked:
        sizes = {"B": shape.batch, "H": shape.heads_q, "Q": shape.seqlen_q, "K": shape.seqlen_k, "1": 1}
        keep = torch.rand([sizes[d] for d in dims], device=shape.device) < share
        four = keep.view((1,) * (4 - keep.dim()) + keep.shape)

        def visible(b, q_len, k_len):
            own = four[b if four.shape[0] > 1 else 0]
            own = own[:, :q_len] if own.shape[1] > 1 else own
            own = own[:, :, :k_len] if own.shape[2] > 1 else own
            return own.expand(-1, q_len, k_len)

        return Masked(onchip.dense(keep), visible)

    return build


def block_sparse(
    lead: str, tile: tuple[int, int], pattern: Callable[[int, int], Tensor] | None = None
) -> Build:
    """A random block map with these leading dims ("", "H" or "BH"), or the map of a pattern."""

    def build(shape: Shape) -> Masked:
        sizes = {"B": shape.batch, "H": shape.heads_q, "1": 1}
        blocks = (-(-shape.seqlen_q // tile[0]), -(-shape.seqlen_k // tile[1]))
        if pattern:
            chosen = pattern(*blocks).to(shape.device)
        else:
            chosen = torch.rand(*(sizes[d] for d in lead), *blocks, device=shape.device) < 0.5
        four = chosen.view((1,) * (4 - chosen.dim()) + chosen.shape)

        def visible(b, q_len, k_len):
            _, q, k = grid(shape, q_len, k_len)
            own = four[b if four.shape[0] > 1 else 0]
            return own[:, q[0, :, 0] // tile[0]][:, :, k[0, 0] // tile[1]]

        return Masked(onchip.block_sparse(chosen, tile=tile), visible)

    return build


def _local_global(nq: int, nk: int) -> Tensor:
    return onchip.patterns.local_global(max(nq, 1), max(nk, 1), local=1, global_=1)[:nq, :nk]


def _strided(nq: int, nk: int) -> Tensor:
    return onchip.patterns.strided(max(nq, 1), max(nk, 1), stride=2, local=1)[:nq, :nk]


def _butterfly(nq: int, nk: int) -> Tensor:
    return onchip.patterns.butterfly(1 << max(nq, nk, 1).bit_length())[:nq, :nk]


# Plain functions for `where`, at module level so that a compiler can read their source.


def sieve(batch, head, q, k):
    return (q + 2 * k + head) % 3 != batch % 2


def early(batch, head, q, k):
    return k <= 20


def ranked(batch, head, q, k, ranks):
    return ranks[batch, k] <= min(q // 2, 9)


def never(batch, head, q, k):
    return k < 0


def where(fn: Callable, truth: Callable, ranks: bool = False) -> Build:
    """`truth(b, heads, q, k, ranks)` is fn in torch's words."""

    def build(shape: Shape) -> Masked:
        table = torch.randint(0, 20, (shape.batch, shape.seqlen_k), device=shape.device)
        args = (table,) if ranks else ()
        return Masked(onchip.where(fn, *args), lambda b, m, n: truth(b, *grid(shape, m, n), table))

    return build


def both(*parts: Build) -> Build:
    return _combine(parts, lambda a, b: a & b)


def either(*parts: Build) -> Build:
    return _combine(parts, lambda a, b: a | b)


def _combine(parts: tuple[Build, ...], join: Callable) -> Build:
    def build(shape: Shape) -> Masked:
        first, *rest = [part(shape) for part in parts]
        for part in rest:
            truths = (first.visible, part.visible)
            first = Masked(
                join(first.mask, part.mask), lambda b, m, n, t=truths: join(t[0](b, m, n), t[1](b, m, n))
            )
        return first

    return build


causal = by_position(onchip.causal, lambda p, k: k <= p)
sinks = by_position(lambda: onchip.sinks(4), lambda p, k: (k < 4) & (p == p))
chunked = by_position(
    lambda: onchip.chunked(24),
    lambda p, k: torch.div(p, 24, rounding_mode="floor") == torch.div(k, 24, rounding_mode="floor"),
)
where_sieve = where(sieve, lambda b, h, q, k, ranks: (q + 2 * k + h) % 3 != b % 2)
where_ranked = where(
    ranked, lambda b, h, q, k, ranks: ranks[b, k] <= torch.minimum(q // 2, torch.full_like(q, 9)), ranks=True
)

MASKS: dict[str, Build] = {
    "none": by_position(lambda: None, lambda p, k: (p == p) & (k == k)),
    "causal": causal,
    "top_left": top_left,
    "window_left": window(20, 0),
    "window_both": window(5, 9),
    "window_right": window(None, 3),
    "window_diagonal": window(0, 0),
    "sinks": sinks,
    "chunked": chunked,
    "prefix": prefix,
    "prefix_int": prefix_int,
    "documents": documents,
    "documents_cross": documents_cross,
    "documents_cu": documents_cu,
    "padding": padding,
    "padding_int": padding_int,
    "dense_BHQK": dense("BHQK"),
    "dense_1HQ1": dense("1HQ1"),
    "dense_B11K": dense("B11K"),
    "dense_QK": dense("QK", 0.1),
    "dense_none": dense("1", 0.0),
    "blocks": block_sparse("", (16, 16)),
    "blocks_heads": block_sparse("H", (32, 16)),
    "blocks_odd": block_sparse("BH", (7, 13)),
    "blocks_local_global": block_sparse("", (16, 16), _local_global),
    "blocks_strided": both(block_sparse("", (8, 8), _strided), causal),
    "blocks_butterfly": block_sparse("", (16, 32), _butterfly),
    "where": where_sieve,
    "where_key_only": where(early, lambda b, h, q, k, ranks: k <= 20),
    "where_tensor": where_ranked,
    "where_never": where(never, lambda b, h, q, k, ranks: k < 0),
    "causal_and_padding": both(causal, padding),
    "two_windows": both(window(30, 4), window(None, 0), top_left),
    "streaming": both(causal, either(window(15, 0), sinks)),
    "chunks_of_a_decoder": both(chunked, causal),
    "documents_and_causal": both(documents, causal),
    "or_of_three": either(window(2, 2), dense("B11K", 0.1), documents_cu),
    "or_of_bands": either(window(0, 0), by_position(lambda: onchip.window(None, 0), lambda p, k: k <= p)),
    "and_of_ors": both(either(causal, dense("QK", 0.2)), either(padding, where_sieve)),
    "everything": both(
        either(both(causal, padding), block_sparse("H", (16, 32))),
        either(dense("B1QK"), where_ranked),
        window(60, 30),
        documents_cross,
    ),
}
