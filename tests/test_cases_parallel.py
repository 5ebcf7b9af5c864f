"""Cases c41 to c46: what goes wrong when keys are spread over ranks, simulated by merging shards in one process."""

from functools import partial

import pytest
import torch

import onchip
import oracle
from checks import qkv


def ring(backend, q, k, v, shards, visible=None, own=None):
    """out, lse of the queries `own` (default: all) over key shards (index tensors), merged one hop at a time."""
    own = torch.arange(q.shape[1]) if own is None else own
    state = None
    for keys in shards:
        mask = None if visible is None else onchip.dense(visible[own][:, keys])
        part = onchip.attention(
            q[:, own], k[:, keys], v[:, keys], mask=mask, return_lse=True, backend=backend
        )
        state = part if state is None else onchip.merge(*state, *part)
    return state


def zigzag(seqlen, ranks):
    """Balanced shards: rank r holds chunks r and 2*ranks - 1 - r, which evens out causal work."""
    chunks = torch.arange(seqlen).chunk(2 * ranks)
    return [torch.cat([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks)]


def test_c41_odd_lengths_keep_their_last_token(backend):
    q, k, v = qkv(1, 10, 10, 2, dim=8)
    k[:, 7:] = v[:, 7:] = float("nan")
    ids = torch.tensor([0] * 4 + [1] * 3 + [2] * 3)
    real = torch.arange(10) < 7
    visible = (ids[:, None] == ids) & real & oracle.band(10, 10, None, 0)
    exact = oracle.attention(*(t.double() for t in (q, k, v)), visible=visible)
    out, lse = ring(backend, q, k, v, torch.arange(10).split(5), visible)
    torch.testing.assert_close(out.double(), exact[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-5, atol=1e-5)
    assert out[:, 6].any() and not out[:, 7:].any()


def test_c41_odd_lengths_of_packed_sequences(backend):
    cu = torch.tensor([0, 4, 7], dtype=torch.int32)
    q, k, v = (t[0] for t in qkv(1, 7, 7, 2, dim=8))
    exact, exact_lse = oracle.varlen(q.double(), k.double(), v.double(), cu, cu)
    state = None
    # The first rank holds two keys of each sequence, the second what is left: two of four, and one of three.
    for keys, ends in (([0, 1, 4, 5], [0, 2, 4]), ([2, 3, 6], [0, 2, 3])):
        part = onchip.attention_varlen(
            q,
            k[keys],
            v[keys],
            cu_seqlens_q=cu,
            cu_seqlens_k=torch.tensor(ends, dtype=torch.int32),
            return_lse=True,
            backend=backend,
        )
        state = part if state is None else onchip.merge(*state, *part)
    torch.testing.assert_close(state[0].double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[1].double(), exact_lse, rtol=1e-5, atol=1e-5)


def test_c44_error_does_not_grow_with_the_ring(backend):
    halves = qkv(1, 1024, 1024, 1, dim=32, dtype=torch.bfloat16)
    exact, _ = oracle.attention(*(t.double() for t in halves))
    errors = {}
    for ranks in (1, 2, 4, 8):
        out, _ = ring(backend, *(t.float() for t in halves), torch.arange(1024).chunk(ranks))
        errors[ranks] = (out.bfloat16().double() - exact).abs().max().item()
    assert max(errors.values()) <= 2 * errors[1], errors


def test_c44_half_precision_partials_merged_at_once(backend):
    """The errors of the partials by their weights, and one rounding of the result: no more, in any element."""
    q, k, v = qkv(1, 1024, 1024, 1, dim=32, dtype=torch.bfloat16)
    exact, exact_lse = oracle.attention(q.double(), k.double(), v.double())
    for ranks in (2, 4, 8):
        parts, carried = [], torch.zeros_like(exact)
        for keys in torch.arange(1024).chunk(ranks):
            parts.append(onchip.attention(q, k[:, keys], v[:, keys], return_lse=True, backend=backend))
            own, own_lse = oracle.attention(q.double(), k[:, keys].double(), v[:, keys].double())
            weight = (own_lse - exact_lse).exp().transpose(1, 2)[..., None]
            carried += weight * (parts[-1][0].double() - own).abs()
        out, _ = onchip.merge(parts)
        rounding = torch.finfo(torch.bfloat16).eps / 2 * (exact.abs() + carried)
        # The weights are of lse in float32: values of up to 5 by a few of its roundings, 6e-8 each.
        assert ((out.double() - exact).abs() <= carried + rounding + 1e-5).all()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_c45_balanced_shards_with_and_without_causal(backend, ranks, causal):
    q, k, v = qkv(2, 48, 48, 4, 2, dim=8)
    visible = oracle.band(48, 48, None, 0) if causal else None
    exact, exact_lse = oracle.attention(*(t.double() for t in (q, k, v)), visible=visible)
    shards = zigzag(48, ranks)
    for own in shards:
        out, lse = ring(backend, q, k, v, shards, visible, own)
        torch.testing.assert_close(out.double(), exact[:, own], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), exact_lse[:, :, own], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_c46_gradients_reach_the_keys_of_every_hop(backend, ranks, causal):
    tensors = dict(zip("qkv", qkv(2, 24, 24, 4, 2, dim=8), strict=True))
    visible = oracle.band(24, 24, None, 0) if causal else None
    shards = torch.arange(24).chunk(ranks)

    def all_ranks(q, k, v):
        # Starting at the next rank's shard: with causal, the first hops of a row are all empty.
        orders = [shards[r + 1 :] + shards[: r + 1] for r in range(ranks)]
        parts = [
            ring(backend, q, k, v, order, visible, own) for order, own in zip(orders, shards, strict=True)
        ]
        return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)

    dout, dlse = torch.randn(2, 24, 4, 8), torch.randn(2, 4, 24)
    found = oracle.outputs_and_grads(all_ranks, tensors, dout, dlse)
    exact = oracle.outputs_and_grads(
        partial(oracle.attention, visible=visible), {n: t.double() for n, t in tensors.items()}, dout, dlse
    )
    for name, value in found.items():
        torch.testing.assert_close(value.double(), exact[name], rtol=1e-4, atol=1e-4)
