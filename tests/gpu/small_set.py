"""The fewest small calls that reach every kernel and every way it reads memory, for a memory checker.

    PYTHONPATH=src compute-sanitizer --tool memcheck python tests/gpu/small_set.py [triton|hopper]

Each result is compared with float64 on the CPU. Without a GPU the Triton half runs in its interpreter, if
TRITON_INTERPRET=1 says so.
"""

import os
import sys
from contextlib import nullcontext

# Each tensor gets an allocation of its own, so that a read past its end is one.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch
from few import few_programs

import onchip

NAN = float("nan")
ROOM = {torch.float16: 2e-2, torch.bfloat16: 8e-2, torch.float32: 2e-3}
CASES = {"triton": {}, "hopper": {}}


class Given:
    """Where a case's tensors are made: the same numbers for the kernels and for the truth."""

    def __init__(self, backend, device, dtype, rounded):
        self.backend, self.device, self.dtype, self.rounded = backend, device, dtype, rounded
        self.generator = torch.Generator().manual_seed(0)

    def on_cpu(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.rounded).to(self.dtype)

    def randn(self, *shape):
        return self.on_cpu(*shape).to(self.device)

    def table(self, *shape):
        """float32, or float64 for the truth."""
        x = torch.randn(*shape, generator=self.generator)
        return x.to(self.dtype if self.dtype is torch.float64 else torch.float32).to(self.device)

    def chosen(self, *shape, share=0.5):
        return (torch.rand(*shape, generator=self.generator) < share).to(self.device)

    def ints(self, *values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def case(backend, name, dtype=torch.float16):
    def add(fn):
        CASES[backend][name] = fn, dtype
        return fn

    return add


def results(given, call, leaves, grads=True):
    """out, lse and the gradients of the leaves."""
    if not grads:
        with torch.no_grad():
            out, lse = call()
        return {"out": out, "lse": lse}
    for x in leaves:
        x.requires_grad_()
    out, lse = call()
    upstream = given.randn(*out.shape), given.table(*lse.shape)
    found = torch.autograd.grad((out, lse), leaves, upstream)
    return {"out": out, "lse": lse} | {f"gradient {i}": g for i, g in enumerate(found)}


def dense(given, q, k, dim_v=None, *, grads=True, score=None, extra=(), view=lambda x: x, **options):
    """Of q (batch, seqlen, heads, dim) and k; score: made of the tensors in `extra`, which get gradients too."""
    q, k, v = given.randn(*q), given.randn(*k), given.randn(*k[:3], dim_v or k[3])

    def call():
        made = None if score is None else score(*extra)
        tensors = (view(x) for x in (q, k, v))
        return onchip.attention(*tensors, score=made, return_lse=True, backend=given.backend, **options)

    return results(given, call, (q, k, v, *extra), grads)


def packed(given, heads, dim, *, used=False, grads=True, **options):
    """Sequences of 70, 0, 1 and 133 queries; with `used`, rows that are not are NaN."""
    q_ends, k_ends = (0, 70, 70, 71, 204), (0, 33, 50, 50, 211)
    q = given.randn(q_ends[-1], heads[0], dim)
    k, v = (given.randn(k_ends[-1], heads[1], dim) for _ in range(2))
    seqused = {}
    if used:
        seqused = {"seqused_q": given.ints(61, 0, 1, 133), "seqused_k": given.ints(30, 17, 0, 150)}
        q[61:70] = NAN
        for x in (k, v):
            x[30:33] = NAN
            x[200:] = NAN

    def call():
        return onchip.attention_varlen(
            q, k, v, cu_seqlens_q=given.ints(*q_ends), cu_seqlens_k=given.ints(*k_ends), max_seqlen_q=133,
            max_seqlen_k=161, return_lse=True, backend=given.backend, **seqused, **options,
        )  # fmt: skip

    return results(given, call, (q, k, v), grads)


def told(given):
    """A mask that asks tables about every pair of `packed`, whose sequences have at most 133 queries and 161 keys."""
    ids = given.chosen(4, 133).int()
    return onchip.where(far, given.table(4, 161)) & (
        onchip.documents(ids, ids_k=given.chosen(1, 161).int()) | onchip.window(9, 9)
    )


def shifted(x):
    """The same numbers, at an address that is no multiple of 16 bytes."""
    longer = torch.cat([x.flatten()[:1], x.flatten()])
    return longer[1:].view(x.shape)


def far(b, h, q, k, table):
    return (table[h, k] > 0) & ((q + k) % 3 != 0)


def fade(score, b, h, q, k, table):
    return score - 0.01 * abs(q - k) * table[h]


# Triton: the forward, delta, dkdv, dq, dbias, combine and append kernels.


@case("triton", "dense causal, grouped, odd lengths")
def _(given):
    return dense(given, (2, 131, 4, 64), (2, 157, 2, 64), mask=onchip.causal())


@case("triton", "dense full, float32, unaligned", torch.float32)
def _(given):
    return dense(given, (1, 67, 2, 24), (1, 90, 2, 24), 20, view=shifted)


@case("triton", "dense full, bf16", torch.bfloat16)
def _(given):
    return dense(given, (1, 128, 2, 64), (1, 256, 1, 64))


@case("triton", "packed, an empty sequence, unused rows")
def _(given):
    return packed(given, (4, 2), 64, used=True, mask=onchip.causal())


@case("triton", "packed, where and documents")
def _(given):
    return packed(given, (4, 2), 64, mask=told(given))


@case("triton", "packed, dropout")
def _(given):
    return packed(given, (2, 2), 32, dropout=0.2, seed=11)


@case("triton", "window to both sides")
def _(given):
    return dense(given, (1, 190, 2, 64), (1, 201, 2, 64), mask=onchip.window(33, 5))


@case("triton", "bias with a gradient, dropout, softcap, slopes, sink")
def _(given):
    extra = given.table(1, 4, 131, 157), given.table(4), given.table(4)
    return dense(
        given, (2, 131, 4, 64), (2, 157, 2, 64), mask=onchip.causal(), dropout=0.3, seed=2**40 + 5, extra=extra,
        score=lambda bias, slopes, sink: onchip.Score(softcap=5.0, bias=bias, alibi=slopes, sink=sink),
    )  # fmt: skip


@case("triton", "a bias of keys alone")
def _(given):
    return dense(
        given, (2, 70, 2, 64), (2, 77, 2, 64), extra=(given.table(2, 1, 1, 77),), score=lambda x: onchip.Score(bias=x)
    )  # fmt: skip


@case("triton", "block_sparse")
def _(given):
    mask = onchip.block_sparse(given.chosen(4, 5, 4), tile=(48, 64))
    return dense(given, (1, 231, 4, 64), (1, 250, 2, 64), mask=mask)


@case("triton", "where and causal")
def _(given):
    mask = onchip.where(far, given.table(4, 157)) & onchip.causal()
    return dense(given, (1, 131, 4, 64), (1, 157, 2, 64), mask=mask)


@case("triton", "a stored mask")
def _(given):
    return dense(given, (2, 131, 2, 64), (2, 157, 2, 64), mask=onchip.dense(given.chosen(2, 1, 131, 157)))


@case("triton", "rows and a union")
def _(given):
    mask = onchip.causal() & (onchip.window(20, 0) | onchip.sinks(3)) & onchip.padding(given.ints(140, 99))
    return dense(given, (2, 131, 2, 64), (2, 157, 2, 64), mask=mask)


@case("triton", "a function of the score")
def _(given):
    mod = onchip.mod(fade, given.table(2).abs())
    return dense(
        given, (1, 70, 2, 64), (1, 77, 2, 64), score=lambda: onchip.Score(mod=mod), mask=onchip.causal()
    )


@case("triton", "dim 40, dim_v 72")
def _(given):
    return dense(given, (1, 75, 2, 40), (1, 99, 1, 40), 72, mask=onchip.causal())


@case("triton", "dim 256")
def _(given):
    return dense(given, (1, 75, 2, 256), (1, 140, 1, 256), mask=onchip.causal())


def cached(given, seqlen_q, new, page_size, interleaved, splits, lens=(201, 0, 250)):
    """Decoding: slots that are not in use hold NaN, and so do pages that no sequence has."""
    batch, heads_k, dim, capacity = 3, 2, 64, 272
    rows = (batch * capacity // page_size + 2, page_size) if page_size else (batch + 2, capacity)
    caches = [torch.full((*rows, heads_k, dim), NAN, dtype=given.dtype) for _ in "kv"]
    place = {}
    if page_size:
        order = torch.randperm(rows[0], generator=given.generator)[: batch * capacity // page_size]
        pages = order.view(batch, -1).tolist()
        place["page_table"] = torch.tensor(pages, dtype=torch.int32, device=given.device)
    else:
        place["cache_batch_idx"], place["cache_leftpad"] = given.ints(3, 0, 4), given.ints(5, 0, 17)
    for b, length in enumerate(lens):
        for at in range(length):
            row, slot = (pages[b][at // page_size], at % page_size) if page_size else ((3, 0, 4)[b], at)
            for cache in caches:
                cache[row, slot] = given.on_cpu(heads_k, dim)
    caches = [cache.to(given.device) for cache in caches]
    q, k, v = (given.randn(batch, n, h, dim) for n, h in ((seqlen_q, 8), (new, heads_k), (new, heads_k)))
    angles = given.table(capacity + 9, 24)
    rotary = onchip.Rotary(angles.cos(), angles.sin(), interleaved)
    out, lse = onchip.attention_with_cache(
        q, *caches, k=k, v=v, cache_seqlens=given.ints(*lens), rotary=rotary, num_splits=splits, mask=onchip.causal(),
        return_lse=True, backend=given.backend, **place,
    )  # fmt: skip
    return {"out": out, "lse": lse} | {n: x.nan_to_num(7.0) for n, x in zip(("k", "v"), caches)}


@case("triton", "pages, split keys, append, rotary")
def _(given):
    return cached(given, 1, 1, 16, False, 3)


@case("triton", "cache rows, left padding, several new keys")
def _(given):
    return cached(given, 5, 5, 0, True, 0)


@case("triton", "cache, split keys by itself")
def _(given):
    q, k, v = given.randn(2, 1, 4, 64), given.randn(2, 300, 2, 64), given.randn(2, 300, 2, 64)
    out, lse = onchip.attention_with_cache(
        q, k, v, cache_seqlens=given.ints(300, 41), return_lse=True, backend=given.backend
    )
    return {"out": out, "lse": lse}


# Hopper: one kernel; the gradients are Triton's.


@case("hopper", "full, a tail, dim 64")
def _(given):
    return dense(given, (2, 200, 3, 64), (2, 173, 3, 64), grads=False)


@case("hopper", "full, whole tiles, dim 128")
def _(given):
    return dense(given, (1, 256, 2, 128), (1, 256, 2, 128), grads=False)


@case("hopper", "full, three groups of warps, dim 64")
def _(given):
    return dense(given, (1, 1100, 1, 64), (1, 140, 1, 64), grads=False)


@case("hopper", "full, dim 256")
def _(given):
    return dense(given, (1, 140, 2, 256), (1, 150, 1, 256), grads=False)


@case("hopper", "causal, grouped, gradients, dim 128")
def _(given):
    return dense(given, (2, 131, 4, 128), (2, 157, 2, 128), mask=onchip.causal())


@case("hopper", "causal, bf16, dim 64", torch.bfloat16)
def _(given):
    return dense(given, (2, 300, 2, 64), (2, 300, 2, 64), mask=onchip.causal(), grads=False)


@case("hopper", "causal, dim 256")
def _(given):
    return dense(given, (1, 131, 2, 256), (1, 157, 2, 256), mask=onchip.causal(), grads=False)


@case("hopper", "causal, three groups of warps, a first tile that lacks rows, dim 64")
def _(given):
    with few_programs() if given.backend == "hopper" else nullcontext():
        return dense(given, (1, 1217, 2, 64), (1, 1217, 1, 64), mask=onchip.causal(), grads=False)


@case("hopper", "causal, a group of warps that sees nothing of a tile's first keys, dim 256")
def _(given):
    with few_programs() if given.backend == "hopper" else nullcontext():
        return dense(given, (1, 300, 3, 256), (1, 331, 1, 256), mask=onchip.causal(), grads=False)


@case("hopper", "window to both sides")
def _(given):
    return dense(given, (1, 290, 2, 64), (1, 301, 2, 64), mask=onchip.window(33, 5), grads=False)


@case("hopper", "more queries than keys")
def _(given):
    return dense(given, (1, 290, 2, 128), (1, 33, 2, 128), mask=onchip.causal(), grads=False)


@case("hopper", "query heads packed into a tile")
def _(given):
    return dense(given, (2, 3, 16, 128), (2, 300, 2, 128), mask=onchip.causal(), grads=False)


@case("hopper", "dim 40, dim_v 72, addresses that are copied")
def _(given):
    return dense(given, (1, 131, 2, 40), (1, 157, 1, 40), 72, view=shifted, grads=False)


@case("hopper", "packed, an empty sequence, gradients")
def _(given):
    return packed(given, (4, 2), 64, mask=onchip.causal())


@case("hopper", "packed, unused rows, dim 128")
def _(given):
    return packed(given, (4, 2), 128, used=True, grads=False)


@case("hopper", "packed, where and documents")
def _(given):
    return packed(given, (4, 2), 64, mask=told(given), grads=False)


@case("hopper", "packed, dim 256")
def _(given):
    return packed(given, (2, 1), 256, mask=onchip.causal(), grads=False)


@case("hopper", "block_sparse")
def _(given):
    mask = onchip.block_sparse(given.chosen(4, 5, 4), tile=(48, 64))
    return dense(given, (1, 231, 4, 64), (1, 250, 2, 64), mask=mask, grads=False)


@case("hopper", "block_sparse of whole tiles")
def _(given):
    blocks = given.chosen(2, 3)
    blocks[1] = False
    mask = onchip.block_sparse(blocks, tile=(128, 128))
    return dense(given, (1, 200, 2, 128), (1, 384, 1, 128), mask=mask, grads=False)


@case("hopper", "where and causal, a key that nobody sees")
def _(given):
    table = given.table(4, 157)
    table[:, 100] = -1
    mask = onchip.where(far, table) & onchip.causal()
    return dense(given, (1, 131, 4, 128), (1, 157, 2, 128), mask=mask, grads=False)


@case("hopper", "rows")
def _(given):
    mask = onchip.causal() & onchip.padding(given.ints(140, 99))
    return dense(given, (2, 131, 2, 64), (2, 157, 2, 64), mask=mask, grads=False)


@case("hopper", "a function of the score")
def _(given):
    mod = onchip.mod(fade, given.table(2).abs())
    return dense(
        given, (1, 140, 2, 64), (1, 177, 2, 64), score=lambda: onchip.Score(mod=mod), mask=onchip.causal(), grads=False
    )  # fmt: skip


@case("hopper", "softcap, slopes, sink, a negative scale")
def _(given):
    slopes, sink = given.table(4), given.table(4)
    return dense(
        given, (1, 140, 4, 128), (1, 177, 2, 128), mask=onchip.causal(), scale=-0.1, grads=False,
        score=lambda: onchip.Score(softcap=5.0, alibi=slopes, sink=sink),
    )  # fmt: skip


def wrong(found, exact, dtype):
    """What is not as it should be, by name."""
    bad = []
    for name, truth in exact.items():
        x, truth = found[name].detach().double().cpu(), truth.detach().double()
        if x.isnan().any():
            bad.append(f"{name} holds NaN")
            continue
        atol = ROOM[dtype] * max(float(truth[truth.isfinite()].abs().max()), 1.0)
        try:
            torch.testing.assert_close(x, truth, atol=atol, rtol=0)
        except AssertionError as error:
            bad.append(f"{name}: {' '.join(str(error).split())[:200]}")
    return bad


def main(halves):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = failed = 0
    for half in halves:
        for name, (fn, dtype) in CASES[half].items():
            if device == "cpu" and dtype is torch.bfloat16:
                print(f"{half}: {name}: left out, the interpreter has no bfloat16", flush=True)
                continue
            found = fn(Given(half, device, dtype, dtype))
            if device == "cuda":
                torch.cuda.synchronize()
            bad = wrong(found, fn(Given("reference", "cpu", torch.float64, dtype)), dtype)
            print(f"{half}: {name}: {'; '.join(bad) or 'ok'}", flush=True)
            run, failed = run + 1, failed + bool(bad)
    print(f"{run} cases" + (f", {failed} wrong" if failed else ""))
    return 1 if failed or not run else 0


if __name__ == "__main__":
    asked = sys.argv[1:] or list(CASES)
    if set(asked) - set(CASES):
        sys.exit(f"got {' '.join(asked)}, expected triton or hopper")
    sys.exit(main(asked))
