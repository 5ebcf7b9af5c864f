"""Cases c01 to c23: rows without keys, NaN and inf in what nobody sees, and the lse."""

from functools import partial

import pytest
import torch

import onchip
import oracle
from checks import assert_empty, check, check_varlen, qkv, visible_pairs

NEG_INF = float("-inf")


def test_c01_no_keys_at_all(backend):
    for batch, seqlen_q, heads in ((1, 3, 1), (2, 70, 3)):
        q, k, v = qkv(batch, seqlen_q, 0, heads, dim=8)
        found = check(backend, q, k, v)
        assert_empty(found["out"], found["lse"])
        assert not found["dq"].any()
    check_varlen(backend, *[t[0] for t in qkv(1, 5, 4, 2, dim=8)], [0, 3, 5], [0, 0, 4])


def test_c01_no_keys_with_a_sink(backend):
    q, k, v = qkv(2, 3, 0, 2, dim=8)
    sink = torch.randn(2)
    out, lse = onchip.attention(q, k, v, score=onchip.Score(sink=sink), return_lse=True, backend=backend)
    assert not out.any()
    torch.testing.assert_close(lse, sink[None, :, None].expand(2, 2, 3))


def test_c02_more_queries_than_keys(backend):
    q, k, v = qkv(1, 6, 3, 2, dim=8)
    found = check(backend, q, k, v, mask=onchip.causal(), visible=oracle.band(6, 3, None, 0))
    assert_empty(found["out"][:, :3], found["lse"][:, :, :3])
    assert not found["dq"][:, :3].any()
    torch.testing.assert_close(found["out"][:, 3], v[:, 0])
    assert visible_pairs(backend, onchip.causal(), 6, 3).sum(3).tolist() == [[[0, 0, 0, 1, 2, 3]]]


def test_c02_a_whole_tile_row_is_empty(backend):
    q, k, v = qkv(1, 300, 20, 2, dim=8)
    check(backend, q, k, v, mask=onchip.causal(), visible=oracle.band(300, 20, None, 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_c04_single_key(backend, dtype):
    q, k, v = (3 * t for t in qkv(1, 1, 1, 1, dim=16, dtype=dtype))
    ones = torch.ones(1, 1, 1, 16, dtype=dtype)
    call = partial(onchip.attention, return_lse=True, backend=backend)
    found = oracle.outputs_and_grads(call, {"q": q, "k": k, "v": v}, dout=ones)
    # P * v / P, where P need not be 1: three roundings of float32, of which half precision keeps none.
    torch.testing.assert_close(found["out"], v, rtol=2 * torch.finfo(torch.float32).eps, atol=0)
    torch.testing.assert_close(found["dv"], ones, rtol=1e-5, atol=0)
    for name in ("dq", "dk"):
        # The exact value is 0, the difference of two sums of 16 products rounded in float32.
        assert found[name].abs().max() <= 1e-4, name
    expected = (q.double() * k.double()).sum() / 4
    torch.testing.assert_close(found["lse"].double().squeeze(), expected, rtol=1e-5, atol=1e-5)


def test_c05_all_false_row_of_a_dense_mask(backend):
    q, k, v = qkv(1, 6, 10, 2, dim=8)
    keep = torch.rand(6, 10) < 0.7
    keep[:5, 0] = True
    keep[5] = False
    for mask in (keep, keep[None, None].expand(1, 2, 6, 10)):
        found = check(backend, q, k, v, mask=onchip.dense(mask), visible=keep)
        assert_empty(found["out"][:, 5], found["lse"][:, :, 5])


def test_c07_minus_inf_bias_outside_a_band(backend):
    q, k, v = qkv(1, 640, 640, 1, dim=4)
    outside = ~oracle.band(640, 640, 9, 0)
    add = torch.zeros(640, 640).masked_fill(outside, NEG_INF)[None, None]
    check(backend, q, k, v, score=lambda add: onchip.Score(bias=add), add=add)


def test_c07_a_row_of_minus_inf_bias(backend):
    q, k, v = qkv(2, 33, 70, 2, dim=4)
    add = torch.randn(1, 2, 33, 70)
    add[:, :, 7] = NEG_INF
    found = check(backend, q, k, v, score=lambda add: onchip.Score(bias=add), add=add)
    assert_empty(found["out"][:, 7], found["lse"][:, :, 7])


@pytest.mark.parametrize("low", [-1e30, torch.finfo(torch.float32).min])
def test_c07_a_finite_negative_bias_is_no_mask(backend, low):
    q, k, v = qkv(1, 5, 7, 2, dim=4)
    add = torch.full((1, 1, 5, 7), low)
    found = check(backend, q, k, v, score=lambda add: onchip.Score(bias=add), add=add)
    torch.testing.assert_close(found["out"], v.mean(1, keepdim=True).expand(1, 5, 2, 4))


def test_c08_an_empty_row_leaves_other_gradients_alone(backend):
    q, k, v = qkv(2, 9, 12, 2, dim=8)
    keep = torch.rand(2, 1, 9, 12) < 0.6
    keep[..., 0] = True
    keep[1, :, 4] = False
    dout = torch.randn(2, 9, 2, 8)
    dout[1, 4] = 0

    def run(rows):
        mask = onchip.dense(keep[:, :, rows])
        call = partial(onchip.attention, mask=mask, return_lse=True, backend=backend)
        return oracle.outputs_and_grads(call, {"q": q[:, rows], "k": k, "v": v}, dout[:, rows])

    every, rest = torch.arange(9), torch.tensor([0, 1, 2, 3, 5, 6, 7, 8])
    whole, without = run(every), run(rest)
    assert not whole["dq"][1, 4].any()
    without_row = oracle.attention(q[1:, rest], k[1:], v[1:], visible=keep[1:, :, rest])[0]
    torch.testing.assert_close(whole["out"][1:, rest], without_row)
    torch.testing.assert_close(whole["dq"][:, rest], without["dq"])
    # Row 4 of batch 0 is not empty and has its own upstream gradient, so dk and dv are compared in batch 1.
    torch.testing.assert_close(whole["dk"][1], without["dk"][1])
    torch.testing.assert_close(whole["dv"][1], without["dv"][1])


HIDDEN = {
    "dense": (lambda: onchip.dense(torch.arange(70) < 50), lambda: torch.arange(70) < 50),
    "padding": (lambda: onchip.padding(50), lambda: torch.arange(70) < 50),
    "padding and causal": (
        lambda: onchip.padding(50) & onchip.causal(),
        lambda: oracle.band(33, 70, None, 0) & (torch.arange(70) < 50),
    ),
    "window": (lambda: onchip.window(3, 2), lambda: oracle.band(33, 70, 3, 2)),
    "blocks": (
        lambda: onchip.block_sparse(torch.tensor([[True, False, False]] * 2), tile=(32, 32)),
        lambda: torch.arange(70) < 32,
    ),
}


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), NEG_INF])
@pytest.mark.parametrize("kind", HIDDEN)
def test_c12_poison_in_keys_that_nobody_sees(backend, kind, poison):
    make, truth = HIDDEN[kind]
    truth = truth()
    q, k, v = qkv(2, 33, 70, 4, 2, dim=8)
    hidden = ~truth.expand(33, 70).any(0)
    assert hidden.any()
    k[:, hidden] = poison
    v[:, hidden] = poison
    found = check(backend, q, k, v, mask=make(), visible=truth)
    assert not found["dk"][:, hidden].any()
    assert not found["dv"][:, hidden].any()


def test_c12_one_key_of_two(backend):
    for poison in (float("nan"), float("inf")):
        q, k, v = qkv(1, 2, 2, 1, dim=4)
        k[:, 1] = v[:, 1] = poison
        keep = torch.tensor([True, False])
        check(backend, q, k, v, mask=onchip.dense(keep), visible=keep)


def test_c12_poison_in_unused_varlen_rows(backend):
    q, k, v = (t[0] for t in qkv(1, 12, 20, 4, 2, dim=8))
    q[4:5] = float("nan")
    k[6:9] = v[6:9] = float("nan")
    check_varlen(backend, q, k, v, [0, 5, 12], [0, 9, 20], seqused_q=[4, 7], seqused_k=[6, 11])


def test_c19_lse_is_the_natural_log(backend):
    for dtype in (torch.float32, torch.float64):
        q, k, v = qkv(2, 5, 40, 4, 2, dim=16, dtype=dtype)
        _, lse = onchip.attention(q, k, v, return_lse=True, backend=backend)
        s = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(2, 2)) / 4
        assert lse.dtype == dtype
        torch.testing.assert_close(lse.double(), s.logsumexp(3), rtol=1e-5, atol=1e-5)


def test_c19_lse_dtype_of_half_inputs(backend):
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = qkv(1, 5, 40, 2, dim=16, dtype=dtype)
        out, lse = onchip.attention(q, k, v, return_lse=True, backend=backend)
        s = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 4
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        torch.testing.assert_close(lse.double(), s.logsumexp(3), rtol=1e-4, atol=1e-4)


def test_c20_loss_on_lse_and_on_both(backend):
    q, k, v = (t.requires_grad_() for t in qkv(1, 5, 6, 2, 1, dim=4, dtype=torch.float64))
    call = partial(onchip.attention, mask=onchip.causal(), return_lse=True, backend=backend)

    def mixed(q, k, v):
        out, lse = call(q, k, v)
        return (out * lse.transpose(1, 2)[..., None].exp()).sum() + lse.sin().sum()

    assert torch.autograd.gradcheck(lambda q, k: call(q, k, v)[1].square().sum(), (q, k))
    assert torch.autograd.gradcheck(mixed, (q, k, v))


def test_c20_lse_alone_gives_v_no_gradient(backend):
    q, k, v = (t.requires_grad_() for t in qkv(1, 4, 4, 1, dim=4))
    _, lse = onchip.attention(q, k, v, return_lse=True, backend=backend)
    assert lse.requires_grad
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v), allow_unused=True)
    assert dq.any() and dk.any()
    assert dv is None or not dv.any()


def test_c21_block_map_against_a_shorter_sequence(backend):
    blocks = torch.ones(8, 8, dtype=torch.bool).tril()
    mask = onchip.block_sparse(blocks, tile=(64, 64)) & onchip.causal()
    q, k, v = (t.requires_grad_() for t in qkv(1, 500, 500, 1, dim=8))
    out, lse = onchip.attention(q, k, v, mask=mask, return_lse=True, backend=backend)
    grads = torch.autograd.grad((out * lse.transpose(1, 2)[..., None].exp()).sum(), (q, k, v))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, lse = oracle.attention(*exact, visible=oracle.band(500, 500, None, 0))
    truth = torch.autograd.grad((out * lse.transpose(1, 2)[..., None].exp()).sum(), exact)
    # In half precision exp(lse), the upstream gradient, is rounded too: what cancels in dS is not quite alike.
    room = max(1e-4, 4 * torch.finfo(q.dtype).eps)
    for found, expected in zip(grads, truth, strict=True):
        torch.testing.assert_close(
            found.double(), expected, rtol=1e-3, atol=room * expected.abs().max().item()
        )


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(440, 512), (512, 440), (440, 440), (520, 512)])
def test_c21_block_map_of_another_size(backend, seqlen_q, seqlen_k):
    q, k, v = qkv(1, seqlen_q, seqlen_k, 1, dim=8)
    with pytest.raises(ValueError, match=r"blocks.*8"):
        mask = onchip.block_sparse(torch.ones(8, 8, dtype=torch.bool), tile=(64, 64))
        onchip.attention(q, k, v, mask=mask, return_lse=True, backend=backend)


def test_c23_sink_gets_its_gradient(backend):
    q, k, v = qkv(2, 40, 70, 4, 2, dim=8)
    sink = torch.randn(4, requires_grad=True)
    dout = torch.randn(2, 40, 4, 8).to(q.dtype)
    out, lse = onchip.attention(
        q, k, v, mask=onchip.causal(), score=onchip.Score(sink=sink), return_lse=True, backend=backend
    )
    (dsink,) = torch.autograd.grad(out, sink, dout)
    share = torch.exp(sink[None, :, None] - lse)
    delta = (dout.float() * out.float()).sum(3).transpose(1, 2)
    torch.testing.assert_close(dsink, -(share * delta).sum((0, 2)), rtol=1e-4, atol=1e-4)


def test_c23_sink_and_everything_beside_it(backend):
    q, k, v = qkv(2, 40, 30, 4, 2, dim=8)
    visible = oracle.band(40, 30, None, 0)
    found = check(
        backend,
        q,
        k,
        v,
        mask=onchip.causal(),
        score=lambda sink: onchip.Score(sink=sink),
        sink=torch.randn(4),
        visible=visible,
    )
    assert not found["out"][:, :10].any()
    assert found["lse"].isfinite().all()
