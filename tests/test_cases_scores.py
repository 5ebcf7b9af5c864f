"""Cases c63 to c71: softcap, dropout, scale, and gradients of one input at a time."""

import re
from functools import partial

import pytest
import torch

import onchip
import oracle
from checks import check, check_varlen, qkv


def survivors(backend, shape, dropout, seed):
    """The dropout keep mask (batch, heads, seqlen_q, seqlen_k), read off an output with v the identity."""
    batch, heads, seqlen_q, seqlen_k = shape
    q = torch.zeros(batch, seqlen_q, heads, 4)
    k = torch.zeros(batch, seqlen_k, heads, 4)
    v = torch.eye(seqlen_k)[None, :, None, :].expand(batch, -1, heads, -1)
    out = onchip.attention(q, k, v, dropout=dropout, seed=seed, backend=backend)
    return out.transpose(1, 2) != 0


@pytest.mark.parametrize("causal", [False, True])
def test_c63_softcap_of_large_logits(backend, causal):
    q, k, v = qkv(2, 65, 130, 4, 2, dim=16)
    largest = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)).abs().max()
    q *= 4 * 150 / largest  # logits of up to 150
    check(
        backend,
        q,
        k,
        v,
        mask=onchip.causal() if causal else None,
        visible=oracle.band(65, 130, None, 0) if causal else None,
        score=lambda: onchip.Score(softcap=15.0),
        softcap=15.0,
    )


def test_c63_softcap_by_finite_differences(backend):
    q, k, v = (t.requires_grad_() for t in qkv(1, 5, 7, 2, 1, dim=4, dtype=torch.float64))
    call = partial(
        onchip.attention,
        mask=onchip.causal(),
        score=onchip.Score(softcap=2.0),
        scale=3.0,
        return_lse=True,
        backend=backend,
    )
    assert torch.autograd.gradcheck(call, (q, k, v))


def test_c64_softcap_of_packed_sequences(backend):
    q, k, v = (t[0] for t in qkv(1, 345, 345, 4, 2, dim=16))
    q *= 10
    cu = [0, 128, 345]
    check_varlen(
        backend,
        q,
        k,
        v,
        cu,
        cu,
        mask=onchip.causal(),
        score=onchip.Score(softcap=15.0),
        softcap=15.0,
        options=lambda i, seqlen_q, seqlen_k: {"visible": oracle.band(seqlen_q, seqlen_k, None, 0)},
    )


def test_c66_dropout_differs_and_repeats(backend):
    q, k, v = qkv(1, 40, 70, 2, dim=8)
    call = partial(onchip.attention, q, k, v, dropout=0.5, backend=backend)
    torch.manual_seed(1)
    first, second = call(), call()
    torch.manual_seed(1)
    assert not torch.equal(first, second)
    assert torch.equal(first, call())
    assert torch.equal(second, call())
    assert torch.equal(call(seed=7), call(seed=7))
    assert not torch.equal(call(seed=7), call(seed=8))


def test_c66_forward_and_backward_drop_the_same(backend):
    q, k, v = qkv(2, 40, 70, 4, 2, dim=8)
    keep = survivors(backend, (2, 4, 40, 70), 0.5, seed=11)
    check(
        backend,
        q,
        k,
        v,
        mask=onchip.causal(),
        visible=oracle.band(40, 70, None, 0),
        dropout=0.5,
        seed=11,
        keep=keep,
    )


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_c66_the_kept_share(backend, dropout):
    keep = survivors(backend, (2, 4, 150, 150), dropout, seed=None)
    # Seven standard deviations of the mean of 180,000 draws: 3e-12.
    share = keep.double().mean()
    assert abs(share - (1 - dropout)) < 7 * (dropout * (1 - dropout) / keep.numel()) ** 0.5
    for axis in range(4):
        first, *others = keep.unbind(axis)
        # 1200 bits and more, of which two draws have one in common with 0.82 at most.
        assert not any(torch.equal(first, other) for other in others), f"the same draws along axis {axis}"


def test_c66_the_same_bits_on_every_backend_and_layout(backend):
    q, k, v = qkv(2, 40, 70, 4, 2, dim=8)
    bits = survivors("reference", (2, 4, 40, 70), 0.3, seed=5)
    assert torch.equal(survivors(backend, (2, 4, 40, 70), 0.3, seed=5), bits)
    bshd = onchip.attention(q, k, v, dropout=0.3, seed=5, backend=backend)
    swapped = (t.transpose(1, 2) for t in (q, k, v))
    bhsd = onchip.attention(*swapped, dropout=0.3, seed=5, layout="bhsd", backend=backend)
    torch.testing.assert_close(bhsd.transpose(1, 2), bshd)


def test_c67_dropout_by_finite_differences(backend):
    q, k, v = (t.requires_grad_() for t in qkv(1, 5, 7, 2, 1, dim=4, dtype=torch.float64))
    call = partial(onchip.attention, dropout=0.3, seed=3, return_lse=True, backend=backend)
    assert torch.autograd.gradcheck(call, (q, k, v))


def test_c67_dropout_in_dtype(backend):
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = qkv(2, 33, 130, 4, 2, dim=16, dtype=dtype)
        keep = survivors(backend, (2, 4, 33, 130), 0.3, seed=9)
        check(backend, q, k, v, dropout=0.3, seed=9, keep=keep)


def test_c68_everything_dropped(backend):
    q, k, v = qkv(1, 20, 30, 2, 1, dim=8)
    call = partial(onchip.attention, dropout=1.0, return_lse=True, backend=backend)
    found = oracle.outputs_and_grads(call, {"q": q, "k": k, "v": v}, torch.randn(1, 20, 2, 8))
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(found[name], torch.zeros_like(found[name])), name
    _, lse = onchip.attention(q, k, v, return_lse=True, backend=backend)
    torch.testing.assert_close(found["lse"], lse)


@pytest.mark.parametrize("dropout", [1.5, -0.1, float("nan"), float("inf"), 1e30])
def test_c68_dropout_outside_0_to_1(backend, dropout):
    with pytest.raises(ValueError, match=re.escape(f"dropout: got {dropout}")):
        onchip.attention(*qkv(1, 3, 3, 1), dropout=dropout, backend=backend)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "alibi", "sink"])
def test_c69_one_gradient_at_a_time(backend, wanted):
    q, k, v = qkv(2, 17, 40, 4, 2, dim=8)
    tensors = {"q": q, "k": k, "v": v}
    tensors |= {"bias": torch.randn(1, 4, 17, 40), "alibi": torch.rand(4), "sink": torch.randn(4)}
    tensors[wanted].requires_grad_()
    score = onchip.Score(**{n: tensors[n] for n in ("bias", "alibi", "sink")})
    out, lse = onchip.attention(q, k, v, mask=onchip.causal(), score=score, return_lse=True, backend=backend)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    torch.autograd.backward([out, lse], [dout, dlse])
    assert [name for name, t in tensors.items() if t.grad is not None] == [wanted]

    exact = {n: t.detach().double().requires_grad_(n == wanted) for n, t in tensors.items()}
    add = exact["bias"] + oracle.alibi(exact["alibi"], 17, 40)
    roots = oracle.attention(
        exact["q"], exact["k"], exact["v"], add=add, sink=exact["sink"], visible=oracle.band(17, 40, None, 0)
    )
    loss = sum((root * upstream).sum() for root, upstream in zip(roots, (dout, dlse), strict=True))
    (expected,) = torch.autograd.grad(loss, exact[wanted])
    torch.testing.assert_close(tensors[wanted].grad.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 40), (1, 4, 17, 1), (2, 1, 1, 1), (17, 40), (40,), (2, 4, 17, 40)]
)
def test_c69_broadcast_bias_alone(backend, shape):
    q, k, v = qkv(2, 17, 40, 4, 2, dim=8)
    bias = torch.randn(shape, requires_grad=True)
    out = onchip.attention(q, k, v, score=onchip.Score(bias=bias), backend=backend)
    dout = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, bias, dout)
    exact = bias.detach().double().requires_grad_()
    truth, _ = oracle.attention(q.double(), k.double(), v.double(), add=exact)
    (expected,) = torch.autograd.grad(truth, exact, dout.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [-0.5, 0.0, -3.0, 2, 1e-8])
def test_c71_any_finite_scale(backend, scale):
    q, k, v = qkv(2, 17, 40, 4, 2, dim=8)
    check(backend, q, k, v, mask=onchip.causal(), visible=oracle.band(17, 40, None, 0), scale=scale)


def test_c71_scale_zero_gives_the_mean_of_v(backend):
    q, k, v = qkv(2, 17, 40, 2, dim=8)
    found = check(backend, q, k, v, scale=0.0)
    torch.testing.assert_close(found["out"], v.mean(1, keepdim=True).expand(2, 17, 2, 8))
    assert not found["dq"].any() and not found["dk"].any()
