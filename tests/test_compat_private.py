"""The private entry points of flash_attn's interface that other libraries import."""

import pytest
import torch

import onchip
import onchip.compat.flash_attn as flash_attn
from checks import qkv
from onchip import select
from onchip.backends import cpu
from onchip.compat import flash_attn_interface as fa3
from onchip.compat.flash_attn import flash_attn_interface as fa
from onchip.compat.flash_attn.cute import interface as cute
from test_compat_flash_attn import CU_K, CU_Q, cu


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_private_forward_and_backward_agree_with_autograd(dropout_p):
    q, k, v = (x.requires_grad_() for x in qkv(2, 9, 13, 4, 2))
    slopes = torch.rand(4)
    common = (dropout_p, 0.3, True, 5, 0, 2.0, slopes)
    torch.manual_seed(5)
    out, lse, probs, rng = fa._flash_attn_forward(q, k, v, *common, dropout_p > 0)
    assert not out.requires_grad and rng.shape == (2,)
    assert probs.shape == ((2, 4, 9, 13) if dropout_p else (0,))
    torch.manual_seed(5)
    want = flash_attn.flash_attn_func(q, k, v, dropout_p, 0.3, True, (5, 0), 2.0, slopes)
    assert torch.equal(out, want.detach())
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(want, (q, k, v), dout)
    given = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    delta = fa._flash_attn_backward(dout, q, k, v, out, lse, *(x.detach() for x in given), *common, True, rng)
    for ours, truth in zip(given, grads, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(delta, (dout * out).sum(-1).transpose(1, 2))


def test_private_varlen_forward_and_backward_agree_with_autograd():
    q, k, v = (torch.randn(n, h, 16, requires_grad=True) for n, h in ((12, 4), (17, 2), (17, 2)))
    lengths = (cu(CU_Q), cu(CU_K), 7, 7)
    out, lse, _, rng = fa._flash_attn_varlen_forward(q, k, v, *lengths, 0.2, 0.3, True)
    dout = torch.randn_like(out)
    given = [torch.empty_like(x).detach() for x in (q, k, v)]
    delta = fa._flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *given, *lengths, 0.2, 0.3, True, -1, -1, 0.0, None, False, rng
    )
    want = onchip_varlen(q, k, v, int(rng[0]))
    for ours, truth in zip(given, torch.autograd.grad(want, (q, k, v), dout), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-5)
    assert delta.shape == (4, 12)


def onchip_varlen(q, k, v, seed):
    return onchip.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=cu(CU_Q),
        cu_seqlens_k=cu(CU_K),
        mask=onchip.causal(),
        scale=0.3,
        dropout=0.2,
        seed=seed,
    )


def test_private_backward_of_a_part_of_the_keys():
    """Ring attention: gradients of each part of the keys, from the whole's out and lse."""
    q, k, v = (x.requires_grad_() for x in qkv(1, 10, 12, 2))
    whole = flash_attn.flash_attn_func(q, k, v)
    dout = torch.randn_like(whole)
    grads = torch.autograd.grad(whole, (q, k, v), dout)
    out, lse, *_ = fa._flash_attn_forward(q, k, v, 0.0, 0.25, False, -1, -1, 0.0, None, False)
    dq = torch.zeros_like(q)
    for part in (slice(0, 5), slice(5, 12)):
        given = [torch.empty_like(x).detach() for x in (q, k[:, part], v[:, part])]
        fa._wrapped_flash_attn_backward(
            dout, q, k[:, part], v[:, part], out, lse, *given, 0.0, 0.25, False, -1, -1, 0.0, None, False
        )
        dq += given[0]
        torch.testing.assert_close(given[1], grads[1][:, part], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(given[2], grads[2][:, part], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dq, grads[0], rtol=1e-5, atol=1e-5)


def test_private_backward_takes_an_lse_of_any_strides():
    q, k, v = qkv(2, 9, 13, 4, 2)
    common = (0.0, 0.25, True, -1, -1, 0.0, None)
    out, lse, *_ = fa._flash_attn_forward(q, k, v, *common, False)
    dout, grads = torch.randn_like(out), []
    for rows in (lse, lse.mT.contiguous().mT, torch.stack([lse, lse], -1)[..., 0]):
        grads.append([torch.empty_like(x) for x in (q, k, v)])
        fa._flash_attn_backward(dout, q, k, v, out, rows, *grads[-1], *common, True)
        torch.testing.assert_close(grads[-1], grads[0], rtol=0, atol=0)


def test_private_backward_of_a_backend_that_leaves_it_to_another(monkeypatch):
    """As the Hopper kernels leave their backward pass to Triton."""
    q, k, v = qkv(1, 5, 7, 2)
    common = (0.0, 0.25, False, -1, -1, 0.0, None)
    out, lse, *_ = fa._flash_attn_forward(q, k, v, *common, False)
    dout, grads = torch.randn_like(out), []
    for left in (False, True):
        if left:
            monkeypatch.setattr(cpu, "BACKWARD", "reference", raising=False)
            monkeypatch.setattr(cpu, "backward", None)
            monkeypatch.setattr(select, "choose", lambda problem, name=None: "cpu")
        grads.append([torch.empty_like(x) for x in (q, k, v)])
        fa._flash_attn_backward(dout, q, k, v, out, lse, *grads[-1], *common, True)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", [2, 3, 4])
def test_private_entry_points_take_and_give_no_gradient(version):
    """Whatever requires one: what they are given, and what they fill."""
    q, k, v, dout = (torch.randn(2, 5, 4, 16, requires_grad=True) for _ in "qkvd")
    given = [torch.full_like(q, torch.nan).requires_grad_() for _ in "qkvo"]
    common = (0.0, 0.25, True, -1, -1, 0.0, None)
    if version == 2:
        found = fa._flash_attn_forward(q, k, v, *common, False)
        delta = fa._flash_attn_backward(dout, q, k, v, *found[:2], *given[:3], *common, True)
    elif version == 3:
        found = fa3._flash_attn_forward(q, k, v, out_=given[3], causal=True)
        targets = dict(zip(("dq", "dk", "dv"), given, strict=False))
        delta = fa3._flash_attn_backward(dout, q, k, v, *found[:2], **targets, is_causal=True)
    else:
        found = cute._flash_attn_fwd(q, k, v, out=given[3], causal=True)
        targets = dict(zip(("dq", "dk", "dv"), given, strict=False))
        (delta, *_) = cute._flash_attn_bwd(q, k, v, found[0], dout, found[1], causal=True, **targets)
    want = flash_attn.flash_attn_func(q, k, v, causal=True)
    torch.testing.assert_close(found[0], want)
    for ours, truth in zip(given, torch.autograd.grad(want, (q, k, v), dout), strict=False):
        torch.testing.assert_close(ours.detach(), truth, rtol=1e-5, atol=1e-5)
    assert delta.grad_fn is None and found[0].grad_fn is None


def test_private_pages_and_refusals():
    pages = torch.randn(2, 9, 4, 2, 16)
    table = torch.tensor([[5, 1, 7], [0, 2, 3], [8, 6, 4]], dtype=torch.int32)
    q, used = torch.randn(12, 4, 16), cu([7, 3, 11])
    args = (cu(CU_Q), cu([0, 12, 24, 36]), 7, 12, 0.0, 0.25, True)
    out, lse, _, _ = fa._flash_attn_varlen_forward(
        q, *pages, *args, block_table=table, seqused_k=used, zero_tensors=True, num_splits=2
    )
    k, v = (torch.cat([p[table[b]].flatten(0, 1)[:n] for b, n in enumerate(used)]) for p in pages)
    want = fa._flash_attn_varlen_forward(q, k, v, cu(CU_Q), cu([0, 7, 10, 21]), 7, 11, 0.0, 0.25, True)
    torch.testing.assert_close((out, lse), want[:2])
    learned = fa._flash_attn_varlen_forward(  # as without pages: no gradient, asked for or not
        q.clone().requires_grad_(), *pages, *args, block_table=table, seqused_k=used
    )
    torch.testing.assert_close(learned[:2], (out, lse))
    assert not learned[0].requires_grad
    with pytest.raises(NotImplementedError, match="leftpad_k"):
        fa._flash_attn_varlen_forward(q, k, v, *args, leftpad_k=used)
    with pytest.raises(NotImplementedError, match="return_softmax"):
        fa._flash_attn_varlen_forward(q, *pages, *args, block_table=table, return_softmax=True)
    dense = qkv(1, 3, 3, 1)
    with pytest.raises(ValueError, match="rng_state"):
        fa._flash_attn_backward(*dense[:1], *dense, dense[0], torch.zeros(1, 1, 3), None, None, None, 0.5, 1.0,
                                False, -1, -1, 0.0, None, False)  # fmt: skip


def test_helpers():
    assert fa.round_multiple(5, 4) == 8 and fa.round_multiple(8, 4) == 8
    x = torch.randn(3, 4).t()
    assert fa.maybe_contiguous(x).is_contiguous() and fa.maybe_contiguous(None) is None
    with pytest.raises(AttributeError):
        _ = fa.nothing
