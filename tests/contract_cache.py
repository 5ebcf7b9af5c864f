"""A case of the layout "cache": built, run and held to the oracle, appended keys and untouched slots included."""

import torch
from torch import Tensor

import onchip
import oracle
from contract_masks import Masked, Shape, full_truth
from contract_numerics import relative_rounding
from contract_scores import Scored

SPARE = 3  # slots, rows and pages that no sequence uses


def run_cache(target, case, shape: Shape, masked: Masked, scored: Scored) -> dict[str, Tensor]:
    """The new queries over a cache of k_lens keys, the last `append` of which the call itself stores."""
    (heads_q, heads_k), (dim, dim_v), device = case.heads, case.dims, shape.device
    dtype, batch = getattr(torch, case.dtype), shape.batch
    lens = torch.tensor(shape.k_lens)
    pad = torch.randint(0, 4, (batch,)) if case.leftpad else torch.zeros(batch, dtype=torch.int64)
    q = case.logits * torch.randn(batch, shape.seqlen_q, heads_q, dim, device=device)
    keys = [torch.randn(n, heads_k, dim, device=device) for n in shape.k_lens]
    values = [torch.randn(n, heads_k, dim_v, device=device) for n in shape.k_lens]
    if case.poison is not None:
        _poison(case, shape, masked, keys, values)
    q, keys, values = q.to(dtype), [x.to(dtype) for x in keys], [x.to(dtype) for x in values]
    new = {}
    if case.append:
        new = {"k": _last(keys, case.append), "v": _last(values, case.append)}
    rotary = _rotary(case, int(lens.max()), device)
    turned, turned_keys = q, keys
    if rotary is not None:
        turned = torch.stack([_turn(rotary, x, shape.k_lens[b] - shape.seqlen_q) for b, x in enumerate(q)])
        # Keys already in the cache were turned when they were stored.
        turned_keys = [_turn(rotary, x, 0) for x in keys]
    cache = _Cache(case, shape, pad)
    old = [n - case.append for n in shape.k_lens]
    k_cache, v_cache = cache.store(turned_keys, old), cache.store(values, old)
    k_after, v_after = (
        cache.store(turned_keys, shape.k_lens, k_cache),
        cache.store(values, shape.k_lens, v_cache),
    )
    seqlens = (pad + torch.tensor(old)).to(torch.int32).to(device)
    out, lse = onchip.attention_with_cache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=seqlens,
        **new,
        **cache.options(),
        rotary=rotary,
        mask=masked.mask,
        score=scored.score(scored.tensors),
        scale=case.scale,
        return_lse=True,
        backend=target.backend,
    )
    for name, found, expected in (("k_cache", k_cache, k_after), ("v_cache", v_cache, v_after)):
        _same_cache(name, found, expected, exact=rotary is None)
    rows = [(turned[b : b + 1], turned_keys[b][None], values[b][None]) for b in range(batch)]
    truths = []
    for to in (torch.float64, dtype):
        tensors = {n: t.to(torch.float64) if to is torch.float64 else t for n, t in scored.tensors.items()}
        found = []
        for b, row in enumerate(rows):
            options = scored.truth(tensors, b, shape.seqlen_q, shape.k_lens[b])
            visible = masked.visible(b, shape.seqlen_q, shape.k_lens[b])
            found.append(
                oracle.attention(*(x.to(to) for x in row), visible=visible, scale=case.scale, **options)
            )
        truths.append((torch.cat([o for o, _ in found]), torch.cat([x for _, x in found])))
    for name, value, exact, plain in zip(("out", "lse"), (out, lse), *truths, strict=True):
        assert value.dtype == plain.dtype, f"{name}: {value.dtype}, expected {plain.dtype}"
        rho = relative_rounding(turned, k_cache, truths[0][1], case, dtype)
        room = rho * oracle.top(v_cache) if name == "out" else 0.0
        oracle.assert_within(value, exact, plain, dtype, name, room)
    return {"out": out, "lse": lse}


def _last(rows: list[Tensor], n: int) -> Tensor:
    return torch.stack([x[len(x) - n :] for x in rows])


def _poison(case, shape: Shape, masked: Masked, keys: list[Tensor], values: list[Tensor]) -> None:
    for seen, k, v in zip(full_truth(masked, shape), keys, values, strict=True):
        unused = ~seen.any(1).unflatten(0, (case.heads[1], -1)).any(1).t()
        k[unused] = v[unused] = case.poison


class _Cache:
    """Where each key of each sequence lies: in a row of its own or in shuffled pages; NaN everywhere else."""

    def __init__(self, case, shape: Shape, pad: Tensor):
        self.case, self.device = case, shape.device
        self.pad = pad
        capacity = int((pad + torch.tensor(shape.k_lens)).max()) + SPARE
        if case.page_size:
            columns = -(-capacity // case.page_size)
            pages = torch.randperm(shape.batch * columns + SPARE)
            self.table = pages[: shape.batch * columns].view(shape.batch, columns)
            self.sizes = (len(pages), case.page_size)
        else:
            rows = (
                torch.randperm(shape.batch + SPARE) if case.batch_idx else torch.arange(shape.batch + SPARE)
            )
            self.rows = rows[: shape.batch]
            self.sizes = (len(rows), capacity)

    def store(self, sequences: list[Tensor], lengths, cache: Tensor | None = None) -> Tensor:
        """The first lengths[b] rows of each sequence in a cache like this one, or in a copy of the given one."""
        if cache is None:
            cache = sequences[0].new_full((*self.sizes, *sequences[0].shape[1:]), float("nan"))
        cache = cache.clone()
        for b, (rows, length) in enumerate(zip(sequences, lengths, strict=True)):
            slot = torch.arange(length) + self.pad[b]
            if self.case.page_size:
                index = self.table[b][slot // self.case.page_size], slot % self.case.page_size
            else:
                index = self.rows[b].expand(length), slot
            cache[index[0].to(self.device), index[1].to(self.device)] = rows[:length]
        return cache

    def options(self) -> dict:
        found = {}
        if self.case.leftpad:
            found["cache_leftpad"] = self.pad.to(torch.int32).to(self.device)
        if self.case.page_size:
            found["page_table"] = self.table.to(torch.int32).to(self.device)
        elif self.case.batch_idx:
            found["cache_batch_idx"] = self.rows.to(torch.int32).to(self.device)
        return found


def _rotary(case, positions: int, device: str) -> onchip.Rotary | None:
    """Tables for the even part of dim, but not all of it where it is large."""
    half = case.dims[0] // 2 if case.dims[0] < 32 else case.dims[0] // 4
    if case.rotary is None or half == 0:
        return None
    angle = torch.rand(half, device=device) * torch.arange(positions, device=device)[:, None]
    return onchip.Rotary(angle.cos(), angle.sin(), interleaved=case.rotary == "interleaved")


def _turn(rotary: onchip.Rotary, x: Tensor, first: int) -> Tensor:
    """x (length, heads, dim) turned pair by pair, as complex numbers, to the positions first, first + 1, ..."""
    half = rotary.cos.shape[1]
    turn = torch.complex(rotary.cos.double(), rotary.sin.double())[first : first + len(x)][:, None]
    at = torch.arange(half, device=x.device)
    pairs = (2 * at, 2 * at + 1) if rotary.interleaved else (at, at + half)
    z = torch.complex(x[..., pairs[0]].double(), x[..., pairs[1]].double()) * turn
    turned = x.clone()
    turned[..., pairs[0]], turned[..., pairs[1]] = z.real.to(x.dtype), z.imag.to(x.dtype)
    return turned


def _same_cache(name: str, found: Tensor, expected: Tensor, exact: bool) -> None:
    """Every slot as expected, NaN where nothing was stored; turned keys within a rounding."""
    if exact:
        torch.testing.assert_close(
            found, expected, rtol=0, atol=0, equal_nan=True, msg=f"{name} after the call"
        )
        return
    eps = max(torch.finfo(found.dtype).eps, torch.finfo(torch.float32).eps)
    torch.testing.assert_close(
        found, expected, rtol=2 * eps, atol=8 * eps, equal_nan=True, msg=f"{name} after it"
    )
