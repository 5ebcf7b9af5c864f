"""Dropout's bits: keyed by the element alone, so the same in every tile, layout and head arrangement."""

import pytest
import torch

import onchip
from contract_masks import Shape
from contract_run import Case, survivors
from onchip import dropout as dropouts
from onchip.backends import cpu
from onchip.mask import Region
from onchip.tiles import Tiles


def philox(key, counter):
    """Philox4x32-10 word by word, as the paper states it (Salmon et al. 2011, section 3.3): L' = hi, R' = lo."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def true_keep(shape, heads, probability, seed):
    """The keep mask of (batch, heads, seqlen_q, seqlen_k): four neighbouring keys share one Philox block."""
    batch, _, seqlen_q, seqlen_k = shape
    keep = torch.zeros(shape, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for q in range(seqlen_q):
                for four in range(-(-seqlen_k // 4)):
                    words = philox((seed % 2**32, seed >> 32), (four, q, b * heads + h, 0))
                    for i, word in enumerate(words[: seqlen_k - 4 * four]):
                        keep[b, h, q, 4 * four + i] = word >= round(probability * 2**32)
    return keep


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**64 - 1])
def test_bits_are_philoxs(backend, seed):
    shape = Shape((5, 5), (11, 11), heads_q=3)
    for probability in (0.1, 0.5):
        found = survivors(Case(dropout=probability, seed=seed), shape, backend)
        assert torch.equal(found, true_keep((2, 3, 5, 11), 3, probability, seed))


def region(batch, heads, q, k, lengths=(100, 100)):
    return Region(torch.tensor(batch), *heads, *q, *k, *lengths)


def test_bits_of_any_rectangle():
    """Any cut of sequences, heads, queries and keys, at starts that are no multiple of 4."""
    whole = dropouts.keep(region([0, 1, 2], (0, 6), (0, 100), (0, 100)), 6, 0.3, 77)
    for _ in range(200):
        q, k = (sorted(torch.randint(0, 101, (2,)).tolist()) for _ in "qk")
        heads = sorted(torch.randint(0, 7, (2,)).tolist())
        batch = torch.randperm(3)[: int(torch.randint(1, 4, ()))].sort().values
        part = dropouts.keep(region(batch.tolist(), heads, q, k), 6, 0.3, 77)
        expected = whole[batch][:, slice(*heads), slice(*q), slice(*k)]
        assert torch.equal(part.expand(expected.shape), expected)


def test_bits_do_not_depend_on_the_lengths():
    long = dropouts.keep(region([3], (0, 2), (0, 50), (0, 60), (500, 600)), 2, 0.5, 9)
    short = dropouts.keep(region([3], (0, 2), (0, 50), (0, 60), (50, 60)), 2, 0.5, 9)
    assert torch.equal(long, short)


@pytest.mark.parametrize("seed", [0, 11, 2**31, 2**63 - 1, 2**63 + 9, 2**64 - 1])
def test_a_seed_in_a_tensor_is_the_number(seed):
    where = region([0, 1], (0, 3), (0, 5), (2, 13))
    tensor = torch.tensor([seed if seed < 2**63 else seed - 2**64])
    assert torch.equal(dropouts.keep(where, 3, 0.5, tensor), dropouts.keep(where, 3, 0.5, seed))
    q = torch.randn(1, 20, 2, 8)
    outs = [onchip.attention(q, q, q, dropout=0.5, seed=x) for x in (seed, tensor)]
    assert torch.equal(*outs)


@pytest.mark.parametrize("tile", [(1, 1), (3, 5), (16, 16), (7, 64), (512, 512)])
def test_the_same_bits_in_every_tile(tile, monkeypatch):
    shape = Shape((37,) * 2, (53,) * 2, heads_q=4)
    expected = survivors(Case(dropout=0.4, seed=5), shape)
    monkeypatch.setattr(cpu, "tiles", lambda problem: Tiles(*tile))
    assert torch.equal(survivors(Case(dropout=0.4, seed=5), shape, "cpu"), expected)


def test_the_same_bits_packed_and_dense():
    q_lens, k_lens = (5, 0, 17, 1), (9, 4, 17, 30)
    dense = survivors(Case(dropout=0.4, seed=5), Shape(q_lens, k_lens, heads_q=2))
    q, k = torch.zeros(sum(q_lens), 2, 4), torch.zeros(sum(k_lens), 2, 4)
    cu_q, cu_k = (torch.nn.functional.pad(torch.tensor(n).cumsum(0), (1, 0)) for n in (q_lens, k_lens))
    v = torch.cat([torch.eye(30)[:n] for n in k_lens])[:, None].expand(-1, 2, -1)
    for backend in ("cpu", "reference"):
        lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        out = onchip.attention_varlen(q, k, v, **lengths, dropout=0.4, seed=5, backend=backend)
        for b, (m, n) in enumerate(zip(q_lens, k_lens, strict=True)):
            own = out[cu_q[b] : cu_q[b + 1]].transpose(0, 1) != 0
            assert torch.equal(own[:, :, :n], dense[b, :, :m, :n])


def test_grouped_heads_draw_as_expanded_ones():
    q, k, v = torch.randn(2, 20, 6, 8), torch.randn(2, 30, 2, 8), torch.randn(2, 30, 2, 8)
    wide = [x.repeat_interleave(3, 2) for x in (k, v)]
    grouped = onchip.attention(q, k, v, dropout=0.3, seed=3)
    torch.testing.assert_close(grouped, onchip.attention(q, *wide, dropout=0.3, seed=3))


def test_bits_do_not_depend_on_mask_score_or_dtype():
    q = torch.zeros(1, 40, 1, 4)
    v = torch.eye(40)[None, :, None]
    expected = survivors(Case(dropout=0.4, seed=5), Shape((40,), (40,)))[0, 0]
    visible = torch.ones(40, 40, dtype=torch.bool).tril()
    score = onchip.Score(softcap=3.0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensors = (x.to(dtype) for x in (q, q, v))
        out = onchip.attention(*tensors, mask=onchip.causal(), score=score, dropout=0.4, seed=5)
        assert torch.equal(out[0, :, 0] != 0, expected & visible)


@pytest.mark.parametrize("probability", [0.0, 1e-3, 0.1, 0.5, 0.9, 1 - 1e-3, 1.0])
def test_the_kept_share(probability):
    """Within five standard deviations, in all, and along each axis by chi-square's mean of 1."""
    keep = dropouts.keep(
        region([0, 1, 2], (0, 4), (0, 200), (0, 300), (200, 300)), 4, probability, 2**40 + 17
    ).double()
    keep = keep.expand(3, 4, 200, 300)
    if probability in (0.0, 1.0):
        assert keep.mean() == 1 - probability
        return
    variance = probability * (1 - probability)
    assert abs(keep.mean() - (1 - probability)) < 5 * (variance / keep.numel()) ** 0.5
    for axis in range(4):
        means = keep.mean([i for i in range(4) if i != axis])
        z = (means - (1 - probability)) / (variance / (keep.numel() / means.numel())) ** 0.5
        assert z.square().mean() < 1 + 5 * (2 / means.numel()) ** 0.5, f"axis {axis}"


def test_neighbours_seeds_and_heads_are_independent():
    keep = dropouts.keep(region([0, 1], (0, 4), (0, 200), (0, 256), (200, 256)), 4, 0.5, 11).double() * 2 - 1
    other = dropouts.keep(region([0, 1], (0, 4), (0, 200), (0, 256), (200, 256)), 4, 0.5, 12).double() * 2 - 1
    pairs = {
        "next key": (keep[..., 1:], keep[..., :-1]),
        "key of the next block": (keep[..., 4:], keep[..., :-4]),
        "next query": (keep[:, :, 1:], keep[:, :, :-1]),
        "next head": (keep[:, 1:], keep[:, :-1]),
        "next sequence": (keep[1:], keep[:-1]),
        "next seed": (keep, other),
    }
    for name, (a, b) in pairs.items():
        assert abs((a * b).mean()) < 5 / a.numel() ** 0.5, name


def test_nothing_and_everything():
    q, k, v = (torch.randn(2, 33, 2, 8, requires_grad=True) for _ in "qkv")
    assert torch.equal(onchip.attention(q, k, v, dropout=0.0, seed=3), onchip.attention(q, k, v))
    out, lse = onchip.attention(q, k, v, dropout=1.0, return_lse=True)
    assert not out.any() and torch.equal(lse, onchip.attention(q, k, v, return_lse=True)[1])
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not any(grad.any() or grad.isnan().any() for grad in grads)


def test_thresholds():
    assert dropouts.threshold(0.0) == 0 and dropouts.threshold(1.0) == 2**32
    assert dropouts.threshold(0.5) == 2**31


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, "x"])
def test_seeds_out_of_range(seed):
    q = torch.randn(1, 3, 1, 4)
    with pytest.raises((ValueError, TypeError), match="seed"):
        onchip.attention(q, q, q, dropout=0.5, seed=seed)
