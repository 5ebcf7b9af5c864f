"""Cases c24 to c30, c39, c40 and c72 to c78: alignment, windows, lengths and block lists."""

from functools import partial

import pytest
import torch

import onchip
import oracle
from checks import assert_empty, check, check_varlen, qkv, visible_pairs


def test_c24_causal_is_bottom_right_aligned(backend):
    wide = visible_pairs(backend, onchip.causal(), 2, 5)[0, 0]
    assert wide.tolist() == [[True] * 4 + [False], [True] * 5]
    tall = visible_pairs(backend, onchip.causal(), 5, 2)[0, 0]
    assert tall.tolist() == [[False, False]] * 3 + [[True, False], [True, True]]


def test_c24_top_left_by_name(backend):
    mask = onchip.causal(align="top_left")
    assert visible_pairs(backend, mask, 2, 5)[0, 0].tolist() == [
        [True] + [False] * 4,
        [True, True] + [False] * 3,
    ]
    tall = visible_pairs(backend, mask, 5, 2)[0, 0]
    assert tall.tolist() == [[True, False]] + [[True, True]] * 4


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(2, 5), (5, 2), (65, 200), (200, 65), (1, 300), (300, 1)])
def test_c24_both_alignments_with_gradients(backend, seqlen_q, seqlen_k):
    q, k, v = qkv(1, seqlen_q, seqlen_k, 2, dim=8)
    check(backend, q, k, v, mask=onchip.causal(), visible=oracle.band(seqlen_q, seqlen_k, None, 0))
    top_left = oracle.band(seqlen_q, seqlen_k, None, 0, shift=0)
    check(backend, q, k, v, mask=onchip.causal(align="top_left"), visible=top_left)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(8, 4), (4, 8), (100, 40), (40, 100)])
@pytest.mark.parametrize(
    "left, right", [(None, 1000), (1000, None), (1000, 1000), (None, None), (10**9, 10**9)]
)
def test_c26_windows_wider_than_the_sequence(backend, seqlen_q, seqlen_k, left, right):
    q, k, v = qkv(1, seqlen_q, seqlen_k, 1, dim=8)
    check(backend, q, k, v, mask=onchip.window(left, right))


def test_c27_equivalent_windows(backend):
    q, k, v = qkv(2, 64, 64, 2, dim=16)
    causal = onchip.attention(q, k, v, mask=onchip.causal(), backend=backend)
    for left in (None, 64, 63, 10**6):
        out = onchip.attention(q, k, v, mask=onchip.window(left, 0), backend=backend)
        torch.testing.assert_close(out, causal, rtol=1e-6, atol=1e-6)
        again = onchip.attention(q, k, v, mask=onchip.window(left, 0), backend=backend)
        assert torch.equal(out, again)


def test_c29_unbounded_left_is_causal(backend):
    for seqlen_q, seqlen_k in ((7, 7), (3, 9), (9, 3)):
        expected = oracle.band(seqlen_q, seqlen_k, None, 0)
        for mask in (
            onchip.causal(),
            onchip.window(None, 0),
            onchip.causal() & onchip.window(None, 0),
            onchip.causal() & onchip.window(None, None),
        ):
            assert torch.equal(visible_pairs(backend, mask, seqlen_q, seqlen_k)[0, 0], expected)


@pytest.mark.parametrize("left, right", [(-1, 0), (0, -1), (-1, -1), (-5, None)])
def test_c29_a_negative_bound_is_refused(backend, left, right):
    q, k, v = qkv(1, 4, 4, 1)
    with pytest.raises(ValueError, match=r"(left|right).*-(1|5)"):
        onchip.attention(q, k, v, mask=onchip.causal() & onchip.window(left, right), backend=backend)


def test_c30_a_window_of_four_tokens(backend):
    seen = visible_pairs(backend, onchip.window(3, 0), 6, 6)[0, 0]
    assert seen.sum(1).tolist() == [1, 2, 3, 4, 4, 4]
    assert torch.equal(seen, oracle.band(6, 6, 3, 0))


@pytest.mark.parametrize(
    "left, right", [(0, 0), (3, 0), (0, 3), (31, 32), (63, 0), (64, 0), (65, 1), (7, None)]
)
def test_c30_every_bound_exactly(backend, left, right):
    for seqlen_q, seqlen_k in ((130, 130), (70, 150), (150, 70)):
        seen = visible_pairs(backend, onchip.window(left, right), seqlen_q, seqlen_k)[0, 0]
        assert torch.equal(seen, oracle.band(seqlen_q, seqlen_k, left, right))


def test_c39_key_lengths_of_each_sequence(backend):
    lengths = torch.tensor([4, 16, 1])
    q, k, v = qkv(3, 16, 16, 4, 2, dim=8)
    keys = (torch.arange(16) < lengths[:, None])[:, None, None]
    check(backend, q, k, v, mask=onchip.padding(lengths), visible=keys)
    causal = oracle.band(16, 16, None, 0)
    check(backend, q, k, v, mask=onchip.padding(lengths) & onchip.causal(), visible=keys & causal)
    zero = torch.tensor([0, 16, 3])
    found = check(
        backend, q, k, v, mask=onchip.padding(zero), visible=(torch.arange(16) < zero[:, None])[:, None, None]
    )
    assert_empty(found["out"][0], found["lse"][0])


def test_c39_key_lengths_of_packed_sequences(backend):
    q, k, v = (t[0] for t in qkv(1, 48, 48, 4, 2, dim=8))
    cu = [0, 16, 32, 48]
    check_varlen(backend, q, k, v, cu, cu, seqused_k=[4, 16, 1])
    check_varlen(backend, q, k, v, cu, cu, seqused_k=[0, 16, 1], seqused_q=[16, 3, 0])


def test_c39_causal_is_aligned_to_the_used_lengths(backend):
    q, k, v = (t[0] for t in qkv(1, 16, 40, 2, dim=8))
    used = {"seqused_q": [5, 8], "seqused_k": [3, 17]}
    check_varlen(
        backend,
        q,
        k,
        v,
        [0, 8, 16],
        [0, 20, 40],
        mask=onchip.causal(),
        **used,
        options=lambda i, seqlen_q, seqlen_k: {"visible": oracle.band(seqlen_q, seqlen_k, None, 0)},
    )


def test_c40_a_length_beyond_the_keys(backend):
    q, k, v = qkv(1, 4, 10, 1)
    with pytest.raises(ValueError, match=r"padding.*20.*10"):
        onchip.attention(q, k, v, mask=onchip.padding(20), backend=backend)


@pytest.mark.parametrize("lengths", [[20], [3, 11]])
def test_c40_lengths_beyond_the_keys(backend, lengths):
    q, k, v = qkv(len(lengths), 4, 10, 1)
    with pytest.raises(ValueError, match=r"padding.*(20|11).*10"):
        onchip.attention(q, k, v, mask=onchip.padding(torch.tensor(lengths)), backend=backend)


def test_c40_seqused_beyond_the_sequence(backend):
    q, k, v = (t[0] for t in qkv(1, 4, 10, 1))
    lengths = {"cu_seqlens_q": torch.tensor([0, 4]), "cu_seqlens_k": torch.tensor([0, 10])}
    for name, length in (("seqused_k", 20), ("seqused_q", 5)):
        with pytest.raises(ValueError, match=rf"{name}.*{length}"):
            used = {name: torch.tensor([length], dtype=torch.int32)}
            onchip.attention_varlen(q, k, v, **lengths, **used, backend=backend)


def test_c40_cache_lengths_beyond_the_cache(backend):
    q, k, v = qkv(1, 1, 10, 1)
    for lengths in (20, torch.tensor([11])):
        with pytest.raises(ValueError, match=r"cache_seqlens.*(20|11).*10"):
            onchip.attention_with_cache(q, k, v, cache_seqlens=lengths, backend=backend)


def test_c72_a_dense_mask_and_causal_are_both_applied(backend):
    q, k, v = qkv(2, 40, 70, 2, dim=8)
    keep = torch.rand(2, 2, 40, 70) < 0.5
    visible = keep & oracle.band(40, 70, None, 0)
    check(backend, q, k, v, mask=onchip.dense(keep) & onchip.causal(), visible=visible)
    check(backend, q, k, v, mask=onchip.causal() & onchip.dense(keep), visible=visible)


def test_c72_either_of_two_masks(backend):
    q, k, v = qkv(2, 40, 70, 2, dim=8)
    keep = torch.rand(2, 1, 40, 70) < 0.1
    visible = keep | oracle.band(40, 70, 5, 0)
    check(backend, q, k, v, mask=onchip.dense(keep) | onchip.window(5, 0), visible=visible)


def test_c73_no_mask_means_no_mask_in_backward_too(backend):
    q, k, v = qkv(2, 65, 65, 4, 2, dim=16)
    plain = check(backend, q, k, v)
    causal = check(backend, q, k, v, mask=onchip.causal(), visible=oracle.band(65, 65, None, 0))
    assert not torch.allclose(plain["dk"], causal["dk"], atol=1e-2)


def test_c75_modified_scores_under_a_mask_at_an_odd_length(backend):
    mod = onchip.mod(lambda score, batch, head, q, k: score + (q - k))
    for seqlen in (1025, 129):
        q, k, v = qkv(1, seqlen, seqlen, 1, dim=64)
        distance = (torch.arange(seqlen)[:, None] - torch.arange(seqlen)).float()[None, None]
        visible = oracle.band(seqlen, seqlen, None, 0)
        check(
            backend,
            q,
            k,
            v,
            mask=onchip.causal(),
            visible=visible,
            score=lambda: onchip.Score(mod=mod),
            modify=lambda s, d=distance: s + d.to(s.dtype),
        )


def expand(blocks, tile, seqlen_q, seqlen_k):
    """The element mask of a block map: (..., nq, nk) bool to (..., seqlen_q, seqlen_k)."""
    rows = torch.arange(seqlen_q) // tile[0]
    keys = torch.arange(seqlen_k) // tile[1]
    return blocks[..., rows, :][..., keys]


@pytest.mark.parametrize("tile", [(16, 16), (32, 64), (64, 32), (128, 128), (33, 17)])
@pytest.mark.parametrize("lead", [(), (4,), (2, 4)])
def test_c77_blocks_alone_are_a_mask(backend, tile, lead):
    seqlen_q, seqlen_k = 150, 200
    blocks = torch.rand(*lead, -(-seqlen_q // tile[0]), -(-seqlen_k // tile[1])) < 0.5
    visible = expand(blocks, tile, seqlen_q, seqlen_k)
    q, k, v = qkv(2, seqlen_q, seqlen_k, 4, 2, dim=8)
    check(backend, q, k, v, mask=onchip.block_sparse(blocks, tile=tile), visible=visible)


@pytest.mark.parametrize("dim", [64, 128])
def test_c78_causal_as_a_block_list(backend, dim):
    tensors = dict(zip("qkv", qkv(1, 256, 256, 2, dim=dim), strict=True))
    coarse = torch.ones(4, 4, dtype=torch.bool).tril()
    single = torch.ones(256, 256, dtype=torch.bool).tril()
    dout = torch.randn(1, 256, 2, dim)
    for mask in (
        onchip.causal(),
        onchip.block_sparse(coarse, tile=(64, 64)) & onchip.causal(),
        onchip.block_sparse(single, tile=(1, 1)),
    ):
        call = partial(onchip.attention, mask=mask, return_lse=True, backend=backend)
        found = oracle.outputs_and_grads(call, tensors, dout)
        oracle.assert_close_as_torch(found, **tensors, dout=dout, visible=oracle.band(256, 256, None, 0))
