"""`extra_memory` of a plan against the peak of what the allocator has given out, in processes of their own."""

import functools
import json
import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import onchip
from onchip import select

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc's malloc")

# From 4 KiB on each block is mapped by itself, and glibc keeps the most bytes that were.
TUNABLES = "glibc.malloc.mmap_threshold=4096:glibc.malloc.mmap_max=1000000:glibc.malloc.top_pad=4096"
SCRIPT = """
    import ctypes, json, os, re, tempfile
    import torch, onchip
    from onchip import problem as problems, select

    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]  # of struct mallinfo2; e: bytes mapped

    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Info

    def most():  # since the process began
        with tempfile.TemporaryFile() as file:
            kept = os.dup(2)
            os.dup2(file.fileno(), 2)
            libc.malloc_stats()
            os.dup2(kept, 2)
            file.seek(0)
            return int(re.search(rb"max mmap bytes\\s*=\\s*(\\d+)", file.read())[1])

    def peak(run, made):  # made: bytes that count, and were there before
        ballast = torch.empty(max(most() - libc.mallinfo2().e, 0))  # what is freed again must not have been the most
        before = libc.mallinfo2().e
        kept = run()
        found = most() - before - sum(x.numel() * x.element_size() for x in kept)
        return found + made

    def randn(*shape, dtype=torch.float32, learned=True):
        return torch.randn(shape, dtype=dtype).requires_grad_(learned)

    def measured(backend, case):
        torch.set_num_threads(2)
        x = torch.randn(1, 40, 2, 16)
        onchip.attention(x, x, x, backend=backend, score=onchip.Score(bias=torch.zeros(40, 40), softcap=3.0))
        onchip.attention_with_cache(x, x, x, cache_seqlens=3, backend=backend)
        holes = [bytearray(3500) for _ in range(1000)]  # in what was freed before
        tensors, options, learned = case()
        plan = onchip.plan(*tensors, **options, backend=backend)
        module, score = select.load(backend), plan.score
        q, k, v = (x.detach() for x in tensors)
        operands = problems.Operands(q, k, v, plan.layout, plan.mask, score)
        outputs = []

        def forward():
            outputs.extend(module.forward(plan.problem, operands, plan.tiles))
            return outputs[:2]

        planned = plan.extra_memory
        with_mask = [x for kept in plan.mask.cache.values() if isinstance(kept, tuple) for x in kept]  # intervals
        before = sum(x.numel() * x.element_size() for x in with_mask if isinstance(x, torch.Tensor))
        found = {"planned": planned, "forward": peak(forward, before)}
        if "backward" in plan.extra_memory:
            out, lse, rest = outputs
            dout = torch.randn_like(out)
            needs = frozenset(("q", "k", "v", *learned))
            saved = problems.Saved(out, lse, rest, needs)

            def backward():
                grads = module.backward(plan.problem, operands, saved, dout, None, plan.tiles)
                return [x for x in grads if x is not None]

            found["backward"] = peak(backward, before + (0 if rest is None else rest.numel() * 4))
        print(json.dumps(found), flush=True)

    def dense(m, n, heads, heads_k, dim, *, batch=1, dtype=torch.float32, learned=(), **options):
        shapes = (batch, m, heads, dim), (batch, n, heads_k, dim), (batch, n, heads_k, dim)
        return [randn(*shape, dtype=dtype) for shape in shapes], options, learned

    def cache(n, heads, heads_k, dim, *, batch=1, page=0, dtype=torch.float32, **options):
        rows = (batch * n // page, page) if page else (batch, n)
        k = randn(*rows, heads_k, dim, dtype=dtype)
        table = {"page_table": torch.arange(rows[0], dtype=torch.int32).view(batch, -1)} if page else {}
        lengths = torch.full((batch,), n)
        return [randn(batch, 1, heads, dim, dtype=dtype), k, k], {"cache_seqlens": lengths, **table, **options}, ()

    def packed(lengths, heads, dim, **options):
        cu = torch.tensor([0, *lengths]).cumsum(0)
        given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, **options}
        return [randn(int(cu[-1]), heads, dim) for _ in "qkv"], given, ()

    def scored(*args, name="bias", tensor=None, dtype=torch.float32):
        learned = {name: tensor}
        return dense(*args, dtype=dtype, score=onchip.Score(**learned), learned=(name,))

    far = onchip.where(lambda b, h, q, k: ((q - k) % 3 == 0) | (abs(q - k) < 64))
    by_head = onchip.where(lambda b, h, q, k: (k <= q) & (q - k <= 64 * (h + 1)))
    table = torch.randn(2, 512, 1024)
    tabled = onchip.where(lambda b, h, q, k, t: t[b, q, k] > 0, table)
    pairs = torch.rand(2, 1, 1024, 1024) < 0.5
    ids = torch.arange(1024) // 100
    half, some = torch.bfloat16, torch.rand(32, 8) < 0.3
    CASES = {
        "plain": lambda: dense(4096, 512, 32, 32, 64),
        "half": lambda: dense(4096, 512, 32, 32, 64, dtype=half),
        "causal": lambda: dense(4096, 1024, 16, 16, 64, mask=onchip.causal()),
        "shared keys": lambda: dense(2048, 2048, 16, 2, 96),
        "one head": lambda: dense(8192, 2048, 1, 1, 128),
        "batch": lambda: dense(512, 256, 8, 8, 64, batch=16),
        "packed": lambda: packed([3000, 500, 500, 500, 1], 8, 64),
        "bias": lambda: scored(1024, 2048, 4, 4, 64, tensor=randn(4, 1024, 2048, dtype=half), dtype=half),
        "bias of keys": lambda: scored(4096, 1024, 4, 4, 64, tensor=randn(1024)),
        "bias of queries": lambda: scored(4096, 1024, 4, 4, 64, tensor=randn(4, 4096, 1)),
        "sink": lambda: scored(8192, 512, 32, 32, 32, name="sink", tensor=randn(32)),
        "slopes": lambda: scored(8192, 512, 32, 32, 32, name="alibi", tensor=randn(32)),
        "softcap": lambda: dense(4096, 1024, 4, 4, 64, score=onchip.Score(softcap=3.0)),
        "blocks": lambda: dense(4096, 1024, 4, 4, 64, mask=onchip.block_sparse(some, tile=(128, 128))),
        "union": lambda: dense(4096, 1024, 4, 4, 64, mask=onchip.causal() | onchip.sinks(4)),
        "where": lambda: dense(1024, 1024, 4, 4, 64, mask=far),
        "where alone": lambda: dense(1024, 2048, 1, 1, 16, mask=onchip.where(lambda b, h, q, k: k <= q)),
        "where by head": lambda: dense(1024, 1024, 4, 2, 64, mask=by_head),
        "where in half": lambda: dense(4096, 4096, 2, 2, 64, dtype=half, mask=far),
        "where of a table": lambda: dense(512, 1024, 2, 2, 64, batch=2, mask=tabled),
        "where, packed": lambda: packed([1500, 500, 500, 1], 4, 64, mask=far),
        "where on a cache": lambda: cache(65536, 8, 8, 64, mask=far),
        "where and blocks": lambda: dense(
            4096, 1024, 4, 4, 64, mask=far & onchip.block_sparse(some, tile=(128, 128))
        ),
        "where and dense": lambda: dense(1024, 1024, 4, 4, 64, batch=2, mask=far & onchip.dense(pairs)),
        "where or sinks": lambda: dense(1024, 1024, 4, 4, 64, mask=far & onchip.causal() | onchip.sinks(4)),
        "documents": lambda: dense(1024, 1024, 4, 4, 64, batch=2, mask=onchip.documents(ids) & onchip.causal()),
        "where in stretches": lambda: dense(1024, 4096, 16, 16, 16, mask=by_head),
        "padding": lambda: dense(8192, 256, 1, 1, 16, batch=32, mask=onchip.padding(torch.arange(32) + 100)),
        "decoding": lambda: cache(65536, 8, 8, 64),
        "decoding in half": lambda: cache(65536, 32, 8, 128, dtype=half),
        "pages": lambda: cache(65536, 8, 8, 64, batch=2, page=16),
        "few": lambda: dense(256, 256, 4, 4, 64, batch=4),
        "packed few": lambda: packed([1000, 200, 1], 4, 64),
        "few pages": lambda: cache(8192, 8, 8, 64, batch=2, page=16),
        "scores": lambda: dense(1024, 1024, 4, 4, 64),
        "half scores": lambda: dense(1024, 2048, 4, 2, 64, dtype=half),
        "dropped scores": lambda: dense(1024, 1024, 4, 4, 64, dropout=0.1),
    }
"""
RUN = """
    for name in NAMES:  # each in a process of its own: the most is never less again
        child = os.fork()
        if not child:
            code = 1
            try:
                measured(BACKEND, CASES[name])
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0, name
"""
NAMES = {
    "native": [
        "plain", "half", "causal", "shared keys", "one head", "batch", "packed", "bias", "bias of keys",
        "bias of queries", "sink", "slopes", "softcap", "blocks", "union", "padding", "decoding in half",
        "pages", "where", "where alone", "where by head", "where in half", "where of a table", "where, packed",
        "where on a cache", "where and blocks", "where and dense", "where or sinks", "documents", "where in stretches",
    ],
    "cpu": [
        "few", "packed few", "scores", "half scores", "dropped scores", "few pages", "where", "where alone",
        "where by head", "where and dense", "where or sinks", "documents", "where, packed", "where of a table",
        "where and blocks", "blocks", "union", "where on a cache", "padding",
    ],
    "reference": ["scores", "where", "where by head", "where alone", "where and dense", "where, packed", "documents"],
}  # fmt: skip


@functools.cache
def found(backend):
    script = "\n".join(
        [textwrap.dedent(SCRIPT), f"BACKEND, NAMES = {backend!r}, {NAMES[backend]!r}", textwrap.dedent(RUN)]
    )
    environment = {
        **os.environ,
        "GLIBC_TUNABLES": TUNABLES,
        "PYTHONPATH": str(Path(onchip.__file__).parents[1]),
    }
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return dict(zip(NAMES[backend], map(json.loads, run.stdout.splitlines()), strict=True))


def passes(backend, name):
    one = found(backend)[name]
    for step, planned in one["planned"].items():
        print(f"{backend} {name} {step}: {one[step]:,} measured, {planned:,} planned")
        yield step, one[step], planned


@pytest.mark.parametrize("name", NAMES["native"])
def test_the_native_kernels_take_what_is_planned(name):
    """To the byte, but for whole pages: each of some twenty buffers of two threads takes them."""
    if select.load("native").refuse(onchip.plan(*((1, 8, 1, 8),) * 3, backend="cpu").problem):
        pytest.skip("no native kernels here")
    for step, measured, planned in passes("native", name):
        assert 0.9 * planned - 2**15 <= measured <= planned + 2**17, step


@pytest.mark.parametrize("name", NAMES["cpu"])
def test_the_tiled_loop_takes_about_what_is_planned(name):
    for step, measured, planned in passes("cpu", name):
        assert 0.7 * planned <= measured <= 1.25 * planned, step


def test_the_reference_takes_about_what_is_planned():
    for step, measured, planned in passes("reference", "scores"):
        assert 0.8 * planned <= measured <= 1.25 * planned, step
