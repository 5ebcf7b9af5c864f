"""The float64 truth of single rows and whole heads, and `verify`, which finds what is wrong and where."""

import dataclasses

import pytest
import torch

import onchip
from checks import qkv
from onchip import devices, exact, select
from onchip.bench.cases import Case
from onchip.observe import observing
from onchip.verifying import verify


class Grab:
    def called(self, call, out, lse, seconds):
        self.call, self.out, self.lse = call, out, lse


def grabbed(run):
    grab = Grab()
    with observing(grab):
        run()
    return grab


def calls():
    """Every layout, every kind of score, and dropout, in float64: the reference is then the truth, to roundings."""
    q, k, v = (x.double() for x in qkv(2, 33, 70, 4, 2, dim=8, dim_v=24))
    score = onchip.Score(
        softcap=3.0,
        alibi=torch.rand(2, 4).double(),
        bias=torch.randn(4, 1, 70).double(),
        sink=torch.randn(4).double(),
        mod=onchip.mod(lambda s, b, h, q, k: s + 0.1 * (q - k)),
    )
    yield lambda: onchip.attention(
        q, k, v, mask=onchip.window(20, 3), score=score, dropout=0.3, seed=5, backend="reference"
    )
    yield lambda: onchip.attention(
        q, k, v, mask=onchip.dense(torch.rand(2, 4, 33, 70) < 0.01), backend="reference"
    )
    yield lambda: onchip.attention(q, k, v, dropout=1.0, backend="reference")
    p, pk = torch.randn(60, 4, 8).double(), torch.randn(60, 2, 8).double()
    cu = torch.tensor([0, 20, 20, 60])
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "mask": onchip.causal(), "backend": "reference"}
    yield lambda: onchip.attention_varlen(p, pk, pk, **options)
    cache = torch.randn(2, 50, 2, 8).double()
    yield lambda: onchip.attention_with_cache(
        q[:, :3],
        cache,
        cache.clone(),
        cache_seqlens=torch.tensor([7, 0]),
        mask=onchip.causal(),
        backend="reference",
    )


@pytest.mark.parametrize("number", range(5))
def test_rows_and_heads_are_the_reference_s(number):
    grab = grabbed(list(calls())[number])
    problem, operands = grab.call.problem, grab.call.operands
    for place in exact.sample(problem, operands, 20):
        truth = exact.row(problem, operands, place)
        for found, expected in zip(
            exact.given(problem, operands, grab.out, grab.lse, place), truth, strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for b, head_k in exact.key_heads(problem, operands):
        found = exact.whole(problem, operands, b, head_k, None)
        expected = exact.part(problem, operands, grab.out, "out", b, head_k)
        torch.testing.assert_close(found["out"], expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_whole_heads(monkeypatch):
    """In chunks of a few rows, as the reference differentiates it."""
    monkeypatch.setattr(exact, "_PAIRS", 500)
    q, k, v = (x.double().requires_grad_() for x in qkv(2, 33, 70, 4, 2, dim=8, dim_v=24))
    dout = torch.randn(2, 33, 4, 24).double()
    grab = grabbed(
        lambda: onchip.attention(q, k, v, mask=onchip.causal(), dropout=0.2, seed=1, backend="reference")
    )
    grads = torch.autograd.grad(grab.out, (q, k, v), dout)
    problem, operands = grab.call.problem, grab.call.operands
    for b, head_k in exact.key_heads(problem, operands):
        found = exact.whole(problem, operands, b, head_k, dout)
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            expected = exact.part(problem, operands, grad, name, b, head_k)
            torch.testing.assert_close(found[name], expected, rtol=1e-11, atol=1e-11)


def test_nan_out_of_sight_does_not_reach_the_truth():
    q, k, v = qkv(1, 5, 9, 2)
    k[:, 7:], v[:, 7:] = float("nan"), float("inf")
    grab = grabbed(lambda: onchip.attention(q, k, v, mask=onchip.padding(7)))
    for place in exact.sample(grab.call.problem, grab.call.operands, 6):
        assert all(x.isfinite().all() for x in exact.row(grab.call.problem, grab.call.operands, place))


def test_roundings():
    truth = torch.tensor([1.0, -2.0, float("-inf")], dtype=torch.float64)
    off = truth.clone()
    off[0] += 2 * 3 * torch.finfo(torch.float32).eps
    assert exact.roundings(off, truth, torch.float32) == pytest.approx(3)
    assert exact.roundings(truth, truth, torch.float32) == 0
    for wrong in (float("nan"), 1.0):
        broken = truth.clone()
        broken[2] = wrong
        assert exact.roundings(broken, truth, torch.float32) == float("inf")
    broken[0] = float("nan")
    assert not exact.roundings(broken, broken.nan_to_num(nan=0.0), torch.float32) <= 1e9
    assert exact.roundings(truth[:0], truth[:0], torch.float32) == 0


def test_first_bad_row():
    out = torch.zeros(2, 5, 3, 4)
    assert exact.first_bad(out) is None
    out[1, 0, 0, 0], out[0, 4, 1, 2], out[0, 2, 1, 3] = float("nan"), float("inf"), float("nan")
    assert exact.first_bad(out) == (0, 1, 2)
    packed, starts = torch.zeros(9, 3, 4), torch.tensor([0, 2, 2, 6, 9], dtype=torch.int32)
    assert exact.first_bad(packed, starts) is None
    packed[7, 0], packed[4, 2, 1], packed[5, 1, 3] = float("nan"), float("inf"), float("nan")
    assert exact.first_bad(packed, starts) == (2, 1, 3)


CASES = [
    Case(seqlen_q=70, heads_q=4, heads_k=2, dim=16, mask="causal", what="both"),
    Case(
        seqlen_q=33, seqlen_k=90, heads_q=2, dim=16, dim_v=8, dtype="bf16", mask="window(20, 5)", what="both"
    ),
    Case(lengths=(20, 1, 50), heads_q=2, dim=16, mask="causal", softcap=5.0, dropout=0.1, what="both"),
    Case(batch=2, seqlen_q=2, seqlen_k=60, heads_q=4, heads_k=1, dim=16, cache=True, mask="causal"),
    # Softmax of one key: dq and dk are 0, by cancellation.
    Case(seqlen_q=40, heads_q=2, mask="window(0, 0)", what="both"),
    Case(seqlen_q=40, heads_q=2, dtype="fp64", mask="window(0, 0)", what="both"),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_verify_passes_what_is_right(number):
    case, told = CASES[number], []
    worst = verify(case, tick=lambda done, total: told.append((done, total)))
    assert [w.name for w in worst] == (["out", "lse"] if case.cache else ["out", "lse", "dq", "dk", "dv"])
    assert all(w.ok for w in worst), worst
    if "window(0" not in case.mask:
        # float32 is not float64: an error of 0 would mean that nothing was compared.
        assert all(w.error > 0 or w.name == "lse" for w in worst)
    assert told[-1][0] == told[-1][1] == len(told)


@pytest.mark.parametrize("name, place", [("out", (1, 40, 3, 5)), ("lse", (0, 2, 33)), ("k", (1, 17, 1, 7))])
def test_verify_finds_what_is_wrong(monkeypatch, name, place):
    """One element off, in the middle of a tensor: its tensor fails, and the place is named."""
    module = select.load("cpu")
    step = "backward" if name == "k" else "forward"
    plain = getattr(module, step)

    def broken(*args):
        found = plain(*args)
        getattr(found, name)[place] += 0.5
        return found

    monkeypatch.setattr(module, step, broken)
    case = Case(batch=2, seqlen_q=70, heads_q=4, heads_k=2, dim=16, what="both")
    found = {w.name: w for w in verify(case, backend="cpu")}
    label = "dk" if name == "k" else name
    assert not found[label].ok
    sequence, row, head, column = place if name != "lse" else (place[0], place[2], place[1], 0)
    assert found[label].at == (sequence, head, row, column)[: 3 if name == "lse" else 4]
    assert found[label].error == pytest.approx(0.5, rel=1e-3)
    assert abs(found[label].found - found[label].truth) == pytest.approx(found[label].error)


def test_verify_raises_what_the_call_raises():
    with pytest.raises(NotImplementedError, match="triton"):
        verify(Case(seqlen_q=16), backend="triton")
    with pytest.raises(ValueError, match="padding"):
        verify(Case(seqlen_q=16, mask="padding(99)"))


def test_verify_refuses_what_the_memory_does_not_hold(monkeypatch):
    """In words, before anything is made; and no case that fits."""
    for backend, case in (
        (None, Case(seqlen_q=10**9)),
        (None, Case(seqlen_q=16, seqlen_k=2**31 - 1, what="forward")),
        (None, Case(lengths=(5, 10**9), heads_q=1)),
        ("reference", Case(seqlen_q=10**7, heads_q=1, dim=1)),
    ):
        with pytest.raises(ValueError, match="takes at least .* GiB .* expected at most .* free on cpu"):
            verify(case, backend=backend)
    fits = Case(batch=2, seqlen_q=2, seqlen_k=60, lengths_k=(40, 60), heads_q=1, dim=16, cache=True)
    assert verify(fits)[0].ok
    monkeypatch.setattr(devices, "available", lambda device: 2**18)
    with pytest.raises(ValueError, match="MiB with its float64 truth, expected at most the 0.2 MiB"):
        verify(Case(seqlen_q=512, heads_q=1, what="both"))


def test_worst_is_a_plain_record():
    worst = verify(Case(seqlen_q=8, heads_q=1))[0]
    assert set(dataclasses.asdict(worst)) == {
        "name",
        "error",
        "roundings",
        "greatest",
        "at",
        "found",
        "truth",
        "ok",
    }
