"""torch.autograd.gradcheck in float64: every mask, every score part, lse included, dense and packed."""

from functools import partial

import pytest
import torch

import onchip
from contract_masks import MASKS, Shape
from contract_scores import SCORES
from onchip.backends import cpu
from onchip.tiles import Tiles


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that a handful of rows crosses tiles."""
    monkeypatch.setattr(cpu, "tiles", lambda problem: Tiles(3, 4))


def gradcheck(call, shape, scored, *tensors, fast=True):
    """out and lse by finite differences in every input; rows of lse at -inf are left out, as they do not move."""
    names = ["q", "k", "v", *scored.tensors]
    extra = [t.double() for t in scored.tensors.values()]
    hidden = {name: t == float("-inf") for name, t in scored.tensors.items()}
    leaves = [t.double().nan_to_num(neginf=0.0).requires_grad_() for t in (*tensors, *extra)]

    def run(*leaves):
        given = dict(zip(names, leaves, strict=True))
        given |= {name: given[name].masked_fill(where, float("-inf")) for name, where in hidden.items()}
        q, k, v = (given.pop(name) for name in "qkv")
        out, lse = call(q, k, v, score=scored.score(given), return_lse=True)
        return out, lse.masked_fill(lse == float("-inf"), 0.0)

    assert torch.autograd.gradcheck(run, tuple(leaves), fast_mode=fast, nondet_tol=0.0)


def dense_case(mask, score, m=8, n=10, heads=(4, 2), fast=True, **options):
    shape = Shape((m, m), (n, n), heads[0])
    scored = SCORES[score].make(shape)
    q, k, v = torch.randn(2, m, heads[0], 3), torch.randn(2, n, heads[1], 3), torch.randn(2, n, heads[1], 5)
    q, k = (SCORES[score].apart(x) for x in (q, k))
    call = partial(onchip.attention, mask=MASKS[mask](shape).mask, **options)
    gradcheck(call, shape, scored, q, k, v, fast=fast)


def packed_case(mask, score, **options):
    shape = Shape((4, 0, 7, 1, 3), (6, 2, 5, 0, 3), 2)
    scored = SCORES[score].make(shape)
    q, k, v = torch.randn(sum(shape.q_lens) + 2, 2, 3), torch.randn(sum(shape.k_lens) + 1, 1, 3), None
    v = torch.randn(k.shape[0], 1, 4)
    q, k = (SCORES[score].apart(x) for x in (q, k))
    cu_q, cu_k = (
        torch.nn.functional.pad(torch.tensor(n).cumsum(0), (1, 0)) for n in (shape.q_lens, shape.k_lens)
    )
    cu_q[-1] += 2  # unused rows of the last sequence
    cu_k[-1] += 1
    used = {"seqused_q": torch.tensor(shape.q_lens), "seqused_k": torch.tensor(shape.k_lens)}
    call = partial(onchip.attention_varlen, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **used, **options)
    gradcheck(partial(call, mask=MASKS[mask](shape).mask), shape, scored, q, k, v)


@pytest.mark.parametrize("mask", MASKS)
def test_mask(mask):
    dense_case(mask, "none")
    dense_case(mask, "everything", m=10, n=8)


@pytest.mark.parametrize("mask", MASKS)
def test_mask_of_packed_sequences(mask):
    packed_case(mask, "sink")


@pytest.mark.parametrize("score", SCORES)
def test_score(score):
    dense_case("none", score)
    dense_case("causal", score, m=10, n=8)


@pytest.mark.parametrize("score", SCORES)
def test_score_of_packed_sequences(score):
    packed_case("causal", score)


@pytest.mark.parametrize("score", ["none", "softcap_and_sink", "bias_HQ1", "everything"])
def test_every_derivative_of_a_small_case(score):
    """The whole Jacobian, where fast mode looks at a random projection."""
    dense_case("window_left", score, m=3, n=5, heads=(2, 1), fast=False)


@pytest.mark.parametrize("score", ["none", "everything"])
def test_dropout(score):
    dense_case("causal", score, dropout=0.4, seed=11)
    packed_case("causal", score, dropout=0.4, seed=11)


@pytest.mark.parametrize("scale", [0.0, -1.3, 2.0])
def test_scale(scale):
    dense_case("causal", "none", scale=scale)
    dense_case("causal", "everything", scale=scale)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_bhsd_and_each_backend(backend):
    q, k, v = (torch.randn(1, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7))
    call = partial(onchip.attention, layout="bhsd", mask=onchip.causal(), return_lse=True, backend=backend)
    assert torch.autograd.gradcheck(call, (q, k, v))


def test_merge():
    q, k, v = (torch.randn(1, n, 2, 3, dtype=torch.float64, requires_grad=True) for n in (5, 8, 8))

    def halves(q, k, v):
        parts = [onchip.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(3), slice(3, 8))]
        return onchip.merge(parts)

    assert torch.autograd.gradcheck(halves, (q, k, v))


@pytest.mark.parametrize("score", ["none", "everything"])
def test_backends_agree_on_every_gradient(score):
    """The tiled formulas and torch's own differentiation of the dense lines, to the last digits of float64."""
    shape = Shape((9, 9), (13, 13), 4)
    scored = SCORES[score].make(shape)
    tensors = [torch.randn(2, n, h, 3) for n, h in ((9, 4), (13, 2), (13, 2))]
    leaves = [t.double().requires_grad_() for t in (*tensors, *scored.tensors.values())]
    found = []
    for backend in ("cpu", "reference"):
        extra = dict(zip(scored.tensors, leaves[3:], strict=True))
        out, lse = onchip.attention(
            *leaves[:3],
            mask=onchip.causal() & onchip.window(5, 0),
            score=scored.score(extra),
            dropout=0.2,
            seed=4,
            return_lse=True,
            backend=backend,
        )
        found.append(torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
