"""The native CPU kernels beyond the contract: which library is taken, threads, splits, ways to cut rows."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import onchip
import oracle
from contract_run import Case, Target, check
from onchip.backends import cpu
from onchip.backends.cpu import isa as library, native

BUILT = [isa for isa in library.supported() if library.find(isa)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NATIVE = Target("native", dtypes=("float32", "bfloat16", "float16"))


def run(code, isa=None):
    """Python's last line of output in a fresh process, or its last line of error."""
    environment = {k: v for k, v in os.environ.items() if k != library.VARIABLE}
    environment["PYTHONPATH"] = str(Path(onchip.__file__).parents[1])
    if isa is not None:
        environment[library.VARIABLE] = isa
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    return (done.stdout or done.stderr).strip().splitlines()[-1]


STATUS = "import onchip; print(onchip.backends.cpu.isa.status())"


def test_the_best_library_is_taken():
    assert run(STATUS) == (f"native kernels for {BUILT[0]}" if BUILT else run(STATUS))
    for isa in BUILT:
        assert run(STATUS, isa) == f"native kernels for {isa}"


def test_none_leaves_the_tiled_loop():
    assert run(STATUS, "none") == "no native kernels: ONCHIP_CPU_ISA=none"
    code = """
import onchip
from onchip.backends.cpu import native
print(native.refuse(onchip.plan((1, 8, 1, 8), (1, 8, 1, 8), (1, 8, 1, 8)).problem))
"""
    assert run(code, "none") == "ONCHIP_CPU_ISA=none"


def test_a_wrong_name_is_an_error():
    assert run(STATUS, "sse9").startswith(
        "ValueError: ONCHIP_CPU_ISA: got 'sse9', expected one of avx512_bf16, "
    )
    foreign = "neon" if "neon" not in library.supported() else "avx2"
    assert f"got '{foreign}', which this processor does not run" in run(STATUS, foreign)


def test_no_library_is_said(monkeypatch, tmp_path):
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr(cpu, "__path__", [str(tmp_path)])
    isa, reason = library.chosen()
    assert isa is None and "installed without native kernels" in reason


def test_a_broken_library_is_said(monkeypatch, tmp_path):
    monkeypatch.delenv(library.VARIABLE, raising=False)
    (tmp_path / "lib").mkdir()
    for isa in library.supported():
        (tmp_path / "lib" / f"onchip_{isa}.so").write_text("no library")
    monkeypatch.setattr(cpu, "__path__", [str(tmp_path)])
    found = library.load.__wrapped__()
    assert found.isa is None and "do not load" in found.reason


def attend(q, k, v, **options):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = onchip.attention(*leaves, return_lse=True, backend="native", **options)
    return [out, lse, *torch.autograd.grad(out, leaves, torch.ones_like(out))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, seqlen_q", [((4, 2), 200), ((1, 1), 100), ((4, 1), 3)])
def test_threads_change_no_bit(dtype, heads, seqlen_q):
    """One head of few rows splits its keys, and several chunks of them add to one dq."""
    q, k, v = (
        torch.randn(1, n, h, 24).to(dtype)
        for n, h in ((seqlen_q, heads[0]), (1500, heads[1]), (1500, heads[1]))
    )
    found = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        found.append(attend(q, k, v, mask=onchip.causal()))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("splits", [1, 2, 5, 300])
def test_any_number_of_splits(splits):
    q, cache = torch.randn(2, 1, 4, 32), torch.randn(2, 700, 2, 32)
    lens = torch.tensor([700, 30])
    out = onchip.attention_with_cache(
        q, cache, cache, cache_seqlens=lens, num_splits=splits, backend="native"
    )
    for b in range(2):
        row = cache[b : b + 1, : lens[b]].double()
        exact, _ = oracle.attention(q[b : b + 1].double(), row, row)
        torch.testing.assert_close(out[b : b + 1].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 9, 17, 63, 64, 65])
def test_every_way_to_cut_rows(dtype, rows):
    """Dot products, partly filled vectors, whole tiles; keys over several tiles and a tail."""
    q, k, v = (torch.randn(1, n, h, 33).to(dtype) for n, h in ((rows, 3), (530, 1), (530, 1)))
    found = dict(
        zip(("out", "lse", "dq", "dk", "dv"), attend(q, k, v, mask=onchip.window(300, 5)), strict=True)
    )
    dout = torch.ones_like(found["out"])
    visible = oracle.band(rows, 530, 300, 5)
    oracle.assert_close_as_torch(found, q, k, v, dout=dout, visible=visible)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_far_apart(dtype):
    """A weight far below the smallest float is 0, not a small number, and no difference overflows."""
    q, k = torch.tensor([[[[1.0]]]]).to(dtype), torch.tensor([-6e4, 6e4, -6e4]).view(1, 3, 1, 1).to(dtype)
    v = torch.tensor([float("inf"), 2.0, float("inf")]).view(1, 3, 1, 1).to(dtype)
    out = onchip.attention(q, k, torch.where(v.isinf(), 1e4, v), scale=4.0, backend="native")
    assert out.item() == 2.0


def test_finite_biases_are_no_masks():
    q, k, v = (torch.randn(1, n, 1, 16) for n in (70, 300, 300))
    bias = torch.full((70, 300), -3e38)
    out = onchip.attention(q, k, v, score=onchip.Score(bias=bias), scale=0.0, backend="native")
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out), rtol=1e-4, atol=1e-5)


def test_a_nan_that_is_seen_shows():
    for dtype in DTYPES:
        q, k, v = (torch.randn(1, n, 1, 16).to(dtype) for n in (70, 300, 300))
        k[0, 7] = float("nan")
        out = onchip.attention(q, k, v, backend="native")
        assert out.isnan().all()


def test_what_it_needs_is_linear():
    def need(n):
        return onchip.plan(*((1, n, 8, 64),) * 3, mask=onchip.causal(), backend="native").extra_memory[
            "backward"
        ]

    assert 1.5 < need(32768) / need(16384) < 2.1


def test_refusals():
    plan = onchip.plan((1, 8, 1, 8), (1, 8, 1, 8), (1, 8, 1, 8), backend="reference", dtype=torch.float64)
    assert "float64" in (native.refuse(plan.problem) or "")
    wide = onchip.plan((1, 8, 1, 513), (1, 8, 1, 513), (1, 8, 1, 513), backend="reference")
    assert "513" in (native.refuse(wide.problem) or "")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, keys", [(9, 256), (9, 32), (70, 288), (3, 64)])
def test_keys_beside_the_visible_ones_are_never_read(dtype, rows, keys):
    """Products take keys in pairs: a first visible key at an odd place, a last one at the end of memory's tiles."""
    q, k, v = (torch.randn(1, n, 2, 24).to(dtype) for n in (rows, keys, keys))
    left = keys - rows - 1  # query 0 sees keys 0 ... , shifted by one below
    mask = onchip.window(left - 1, 0)
    visible = oracle.band(rows, keys, left - 1, 0)
    unseen = ~visible.any(0)
    assert unseen.any()
    found = dict(zip(("out", "lse", "dq", "dk", "dv"), attend(q, k, v, mask=mask), strict=True))
    oracle.assert_close_as_torch(found, q, k, v, dout=torch.ones_like(found["out"]), visible=visible)
    k[:, unseen], v[:, unseen] = float("nan"), float("nan")
    hidden = attend(q, k, v, mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(found.values(), hidden, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(8, 80), (80, 8), (1, 65), (33, 34)])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_dims_that_differ(dtype, dims, rows):
    case = Case(dims=dims, dtype=str(dtype)[6:], q_lens=(rows,), k_lens=(90,), heads=(4, 4))
    check(NATIVE, replace(case, seed=int(torch.randint(2**31, ()))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_any_scale(dtype, scale):
    q, k, v = (torch.randn(1, n, 2, 24).to(dtype) for n in (70, 130, 130))
    found = dict(zip(("out", "lse", "dq", "dk", "dv"), attend(q, k, v, scale=scale), strict=True))
    oracle.assert_close_as_torch(found, q, k, v, dout=torch.ones_like(found["out"]), scale=scale)


def test_lse_is_a_tensor_of_its_own():
    q, k, v = (torch.randn(1, n, 2, 8, requires_grad=True) for n in (5, 9, 9))
    out, lse = onchip.attention(q, k, v, return_lse=True, backend="native")
    assert (
        lse.untyped_storage().nbytes() == lse.numel() * 4
        and out.untyped_storage().nbytes() == out.numel() * 4
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (80, 33), (33, 80)])
def test_few_rows_beside_whole_tiles(dtype, dims):
    """Many heads of 65 rows: blocks of 64, and of 1 that takes dot products, go through the keys together."""
    q, k, v = (
        torch.randn(1, n, h, d).to(dtype)
        for n, h, d in ((65, 96, dims[0]), (300, 2, dims[0]), (300, 2, dims[1]))
    )
    visible = torch.rand(65, 300) < 0.5
    found = dict(
        zip(("out", "lse", "dq", "dk", "dv"), attend(q, k, v, mask=onchip.dense(visible)), strict=True)
    )
    oracle.assert_close_as_torch(found, q, k, v, dout=torch.ones_like(found["out"]), visible=visible)
    # Where a backward pass follows there are no dot products: this is where they stand beside whole tiles.
    out, lse = onchip.attention(q, k, v, mask=onchip.dense(visible), return_lse=True, backend="native")
    oracle.assert_close_as_torch({"out": out, "lse": lse}, q, k, v, visible=visible)


@pytest.mark.parametrize("rows", [1, 8, 9, 72])
def test_gradients_of_few_rows_are_as_good_as_of_many(rows):
    """Of one key the weight is 1 and dv is dout: lse must be of the very scores that the backward pass computes."""
    q, k, v = (torch.randn(2, n, 3, 256).requires_grad_() for n in (rows, 1, 1))
    dout = torch.randn(2, rows, 3, 256)
    out = onchip.attention(40 * q, k, v, backend="native")  # scores of about 600
    (dv,) = torch.autograd.grad(out, v, dout)
    exact = dout.double().sum(1, keepdim=True)
    assert (dv.double() - exact).abs().max() <= 5e-7 * dout.abs().sum(1).max()


@pytest.mark.parametrize("backend", ["native", "cpu", "reference"])
@pytest.mark.parametrize("batch, seqlen_q, seqlen_k", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0)])
@pytest.mark.parametrize("mask", ["none", "where", "union"])
def test_gradients_of_empty_problems(backend, batch, seqlen_q, seqlen_k, mask):
    """Every gradient has its tensor's shape and is 0, whatever a bias spreads over."""
    near = onchip.where(lambda b, h, q, k: abs(q - k) < 3)
    chosen = {"none": None, "where": near, "union": near | onchip.sinks(0)}[mask]
    full = (batch, 2, seqlen_q, seqlen_k)
    for kept in range(16):
        shape = tuple(size if kept >> axis & 1 else 1 for axis, size in enumerate(full))
        sizes = (batch, seqlen_q, 2, 8), (batch, seqlen_k, 1, 8), (batch, seqlen_k, 1, 8), shape
        leaves = [torch.randn(size, requires_grad=True) for size in sizes]
        score = onchip.Score(bias=leaves[3])
        out = onchip.attention(*leaves[:3], mask=chosen, score=score, backend=backend)
        for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
            assert grad.shape == leaf.shape and not grad.any()
