"""Cases c89 to c95: the same bits each time, each call's own arguments, and the count of FLOPs."""

import pytest
import torch

import onchip
import oracle
from checks import check, qkv


@pytest.mark.parametrize("threads", [1, 2])
def test_c89_the_same_bits_thirty_times(backend, threads):
    torch.set_num_threads(threads)
    q, k, v = qkv(1, 40, 600, 4, 2, dim=16)
    extra = {"bias": torch.randn(1, 4, 1, 600), "alibi": torch.rand(4), "sink": torch.randn(4)}

    def call(q, k, v, **extra):
        return onchip.attention(
            q,
            k,
            v,
            mask=onchip.causal(),
            score=onchip.Score(**extra),
            dropout=0.1,
            seed=3,
            return_lse=True,
            backend=backend,
        )

    tensors = {"q": q, "k": k, "v": v, **extra}
    dout, dlse = torch.randn(1, 40, 4, 16), torch.randn(1, 4, 40)
    first = oracle.outputs_and_grads(call, tensors, dout, dlse)
    for _ in range(29 if threads == 1 else 4):
        again = oracle.outputs_and_grads(call, tensors, dout, dlse)
        assert all(torch.equal(again[name], value) for name, value in first.items())


def test_c91_each_call_honours_its_own_arguments(backend):
    q, k, v = qkv(1, 33, 33, 2, dim=8)
    for scale in (1.0, 0.5, 1.0):
        check(backend, q, k, v, scale=scale)
    for left in (1, 8, 0):
        check(backend, q, k, v, mask=onchip.window(left, 0), visible=oracle.band(33, 33, left, 0))
    for softcap in (1.0, 5.0):
        check(backend, q, k, v, score=lambda c=softcap: onchip.Score(softcap=c), softcap=softcap)
    parity = torch.arange(33) % 2
    for mod, step in (
        (onchip.mod(lambda score, batch, head, q, k: score + (k % 2)), 1.0),
        (onchip.mod(lambda score, batch, head, q, k: score + 2 * (k % 2)), 2.0),
    ):
        check(
            backend,
            q,
            k,
            v,
            score=lambda mod=mod: onchip.Score(mod=mod),
            modify=lambda s, step=step: s + step * parity,
        )


def test_c94_causal_flops_count_the_visible_pairs(backend):
    plan = onchip.plan((1, 4, 1, 8), (1, 10, 1, 8), (1, 10, 1, 16), mask=onchip.causal(), backend=backend)
    assert (plan.pairs, plan.flops) == (34, 1632)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(4, 10), (10, 4), (130, 130), (200, 77), (1, 300)])
def test_c94_pairs_of_any_mask(backend, seqlen_q, seqlen_k):
    keep = torch.rand(2, 1, seqlen_q, seqlen_k) < 0.5
    masks = [
        (None, oracle.band(seqlen_q, seqlen_k)),
        (onchip.causal(), oracle.band(seqlen_q, seqlen_k, None, 0)),
        (onchip.window(5, 2), oracle.band(seqlen_q, seqlen_k, 5, 2)),
        (onchip.dense(keep) & onchip.causal(), keep & oracle.band(seqlen_q, seqlen_k, None, 0)),
        (onchip.dense(keep) | onchip.window(3, 0), keep | oracle.band(seqlen_q, seqlen_k, 3, 0)),
    ]
    q, k, v = qkv(2, seqlen_q, seqlen_k, 4, 2, dim=8, dim_v=24)
    for mask, visible in masks:
        plan = onchip.plan(q, k, v, mask=mask, backend=backend)
        pairs = int(visible.expand(2, 4, seqlen_q, seqlen_k).sum())
        assert (plan.pairs, plan.flops) == (pairs, 2 * pairs * (8 + 24))


def test_c95_full_attention_in_bhsd(backend):
    shape, device = (1, 12, 64, 64), torch.get_default_device().type
    assert onchip.plan(shape, shape, shape, layout="bhsd", backend=backend, device=device).flops == 12_582_912
    tensors = [torch.randn(shape) for _ in range(3)]
    assert onchip.plan(*tensors, layout="bhsd", backend=backend).flops == 12_582_912
