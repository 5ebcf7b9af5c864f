"""onchip.compat.flash_attn (FlashAttention-2's names) against the dense float64 oracle."""

import numpy as np
import pytest
import torch

import onchip.compat.flash_attn as flash_attn
import oracle
from checks import assert_empty, qkv

CU_Q, CU_K = [0, 5, 5, 12], [0, 7, 10, 17]


def cu(values):
    return torch.tensor(values, dtype=torch.int32)


def compare(call, q, k, v, **truth):
    """out, lse and gradients of `call(q, k, v) -> (out, lse, ...)` agree with the oracle."""
    dout = torch.randn(*q.shape[:-1], v.shape[-1])
    dlse = torch.randn(call(q, k, v)[1].shape)
    actual = oracle.outputs_and_grads(lambda q, k, v: call(q, k, v)[:2], {"q": q, "k": k, "v": v}, dout, dlse)
    oracle.assert_close_as_torch(actual, q, k, v, dout=dout, dlse=dlse, **truth)


@pytest.mark.parametrize(
    "options, left, right",
    [
        ({}, None, None),
        ({"causal": True}, None, 0),
        ({"window_size": (3, 2)}, 3, 2),
        ({"window_size": (3, -1)}, 3, None),
        ({"window_size": (0, 0)}, 0, 0),
        ({"window_size": (3, 3), "causal": True}, 3, 0),  # how transformers asks for a sliding window of 4
        ({"window_size": (-1, 0), "causal": True}, None, 0),
        ({"window_size": (-1, 1000)}, None, 1000),
    ],
)
@pytest.mark.parametrize("seqlens", [(9, 13), (13, 9)])
def test_masks(options, left, right, seqlens):
    q, k, v = qkv(2, *seqlens, 4, 2)
    compare(
        lambda q, k, v: flash_attn.flash_attn_func(q, k, v, **options, return_attn_probs=True),
        q, k, v, visible=oracle.band(*seqlens, left, right),
    )  # fmt: skip


def test_softmax_scale_and_softcap():
    q, k, v = qkv(2, 9, 13, 4, 2)
    compare(
        lambda q, k, v: flash_attn.flash_attn_func(
            q, k, v, softmax_scale=0.7, softcap=1.5, deterministic=True, return_attn_probs=True
        ),
        q, k, v, scale=0.7, softcap=1.5,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_alibi_slopes(shape):
    q, k, v = qkv(2, 9, 13, 4, 2)
    slopes = torch.rand(shape)
    distance = (torch.arange(9)[:, None] + 4 - torch.arange(13)).abs()
    add = -slopes.expand(2, 4)[:, :, None, None] * distance
    compare(
        lambda q, k, v: flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True),
        q, k, v, add=add,
    )  # fmt: skip


def test_packed_tensors():
    q, k, v = qkv(2, 9, 9, 4)
    qkv_packed, kv = torch.stack([q, k, v], 2), torch.stack([k, v], 2)
    want = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv_packed, causal=True), want)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, kv, causal=True), want)
    leaf = qkv_packed.clone().requires_grad_()
    flash_attn.flash_attn_qkvpacked_func(leaf).sum().backward()
    assert leaf.grad.abs().amax((0, 1, 3, 4)).min() > 0


@pytest.mark.parametrize("wrap", [int, torch.tensor], ids=["int", "0-d tensor"])
def test_varlen(wrap):
    q, k, v = (torch.randn(n, heads, 16) for n, heads in ((12, 4), (17, 2), (17, 2)))
    compare(
        lambda q, k, v: flash_attn.flash_attn_varlen_func(
            q, k, v, cu(CU_Q), cu(CU_K), wrap(7), wrap(7), causal=True, return_attn_probs=True
        ),
        q, k, v, fn=oracle.varlen, cu_seqlens_q=cu(CU_Q), cu_seqlens_k=cu(CU_K),
        options=lambda i, sq, sk: {"visible": oracle.band(sq, sk, None, 0)},
    )  # fmt: skip


def test_varlen_packed_tensors():
    q, k, v = torch.randn(3, 12, 2, 16)
    want = flash_attn.flash_attn_varlen_func(q, k, v, cu(CU_Q), cu(CU_Q), 7, 7, window_size=(2, 0))
    got = flash_attn.flash_attn_varlen_qkvpacked_func(
        torch.stack([q, k, v], 1), cu(CU_Q), 7, window_size=(2, 0)
    )
    assert torch.equal(got, want)
    kv = torch.stack([k, v], 1)
    got = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu(CU_Q), cu(CU_Q), 7, 7, window_size=(2, 0))
    assert torch.equal(got, want)


def test_errors_are_onchip_s():
    q, k, v = torch.randn(3, 12, 2, 16)
    with pytest.raises(ValueError, match="max_seqlen_q: got 3"):
        flash_attn.flash_attn_varlen_func(q, k, v, cu(CU_Q), cu(CU_Q), 3, 7)
    with pytest.raises(ValueError, match="k: has shape"):
        flash_attn.flash_attn_func(q[None], k, v)
    with pytest.raises(ValueError, match="dropout"):
        flash_attn.flash_attn_func(q[None], k[None], v[None], dropout_p=1.5)
    with pytest.raises(TypeError):
        flash_attn.flash_attn_func(q[None], k[None], v[None], window_size=(3, 0, 1))
    with pytest.raises(ValueError, match="cache_seqlens: sequence 0"):  # whatever else is given
        flash_attn.flash_attn_with_kvcache(
            q[None], k[None], v[None], k[None], v[None], q[:, 0, :8], q[:, 0, :8], cache_leftpad=cu([1])
        )


@pytest.mark.parametrize("packed", [False, True])
def test_packed_tensors_of_another_shape(packed):
    x = torch.randn(2, 5, 4, 2, 16)
    lengths = (cu([0, 2]), 2) if packed else ()
    pair = (cu([0, 2]), cu([0, 2]), 2, 2) if packed else ()
    x, rows = (x[0], x[0, :2, :, 0]) if packed else (x, x[:, :, :, 0])
    functions = (
        (flash_attn.flash_attn_varlen_qkvpacked_func, flash_attn.flash_attn_varlen_kvpacked_func)
        if packed
        else (flash_attn.flash_attn_qkvpacked_func, flash_attn.flash_attn_kvpacked_func)
    )
    with pytest.raises(ValueError, match=r"qkv: has shape .* expected \(.*, 3, heads, dim\)"):
        functions[0](x, *lengths)
    with pytest.raises(ValueError, match=r"kv: has shape .* expected \(.*, 2, heads_k, dim\)"):
        functions[1](rows, x, *pair)


@pytest.mark.parametrize("window", [(None, None), (3, None), (None, 0), (3, 0)])
@pytest.mark.parametrize("rotary", [False, True])
def test_a_side_of_a_window_may_be_none(window, rotary):
    """None for -1, of every public function that has a window; rotary embedding asks whether there is one."""
    numbers = tuple(-1 if side is None else side for side in window)
    q, k, v = qkv(2, 3, 3, 2)
    starts, rows = cu([0, 3, 6]), [x.flatten(0, 1) for x in (q, k, v)]
    tables = (torch.rand(9, 4), torch.rand(9, 4)) if rotary else (None, None)
    old = torch.randn(2, 2, 9, 2, 16)

    def outputs(window_size):
        options, caches = {"window_size": window_size}, old.clone()
        yield flash_attn.flash_attn_with_kvcache(
            q, *caches, k, v, *tables, cache_seqlens=cu([4, 6]), **options
        )
        if rotary:
            return
        yield flash_attn.flash_attn_func(q, k, v, **options)
        yield flash_attn.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **options)
        yield flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options)
        yield flash_attn.flash_attn_varlen_func(*rows, starts, starts, 3, 3, **options)
        yield flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack(rows, 1), starts, 3, **options)
        packed = (rows[0], torch.stack(rows[1:], 1))
        yield flash_attn.flash_attn_varlen_kvpacked_func(*packed, starts, starts, 3, 3, **options)

    for found, want in zip(outputs(window), outputs(numbers), strict=True):
        assert torch.equal(found, want)


def test_numbers_of_numpy():
    """Bindings take them; so do configurations and data loaders give them."""
    q, k, v = qkv(2, 9, 9, 4)
    want = flash_attn.flash_attn_func(q, k, v, softmax_scale=0.5, window_size=(3, 0), softcap=2.0)
    numbers = {
        "softmax_scale": np.float32(0.5),
        "window_size": (np.int64(3), np.int32(0)),
        "softcap": np.float32(2),
    }
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, **numbers), want)
    starts, rows = cu([0, 9, 18]), [x.flatten(0, 1) for x in (q, k, v)]
    limits = (np.int64(9), np.int32(9))
    out = flash_attn.flash_attn_varlen_func(*rows, starts, starts, *limits, **numbers)
    torch.testing.assert_close(out.view_as(want), want)
    cached = flash_attn.flash_attn_with_kvcache(q, k, v, **numbers)
    torch.testing.assert_close(cached, want)


def test_dropout_repeats_with_the_generator():
    q, k, v = qkv(1, 40, 40, 2)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(flash_attn.flash_attn_func(q, k, v, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("dropout_p", [0.0, 0.4, 1.0])
def test_attn_probs_are_the_weights_with_dropped_ones_negative(dropout_p):
    q, k, v = qkv(2, 9, 150, 4, 2)
    out, _, probs = flash_attn.flash_attn_func(q, k, v, dropout_p, causal=True, return_attn_probs=True)
    assert probs.shape == (2, 4, 9, 150)
    visible = oracle.band(9, 150, None, 0)
    s = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) / 4
    torch.testing.assert_close(
        probs.abs(), s.masked_fill(~visible, -torch.inf).softmax(-1), rtol=1e-5, atol=1e-6
    )
    kept = torch.where(probs > 0, probs, 0.0) / max(1 - dropout_p, 1e-9)
    torch.testing.assert_close(
        torch.einsum("bhqk,bkhd->bqhd", kept, v.repeat_interleave(2, 2)), out, rtol=1e-5, atol=1e-5
    )
    share = (probs < 0).sum() / visible.expand_as(probs).sum()
    assert abs(share.item() - dropout_p) < 0.05


def test_attn_probs_of_packed_sequences():
    q, k, v = torch.randn(12, 4, 16), torch.randn(17, 2, 16), torch.randn(17, 2, 16)
    out, _, probs = flash_attn.flash_attn_varlen_func(
        q, k, v, cu(CU_Q), cu(CU_K), torch.tensor(9), 8, 0.3, causal=True, return_attn_probs=True
    )
    assert probs.shape == (3, 4, 9, 8)
    kept = torch.where(probs > 0, probs, 0.0) / 0.7
    for i in range(3):
        rows, keys = slice(CU_Q[i], CU_Q[i + 1]), slice(CU_K[i], CU_K[i + 1])
        weights = kept[i, :, : rows.stop - rows.start, : keys.stop - keys.start]
        want = torch.einsum("hqk,khd->qhd", weights, v[keys].repeat_interleave(2, 1))
        torch.testing.assert_close(out[rows], want, rtol=1e-5, atol=1e-5)
        assert not probs[i, :, rows.stop - rows.start :].any()


def cache(batch, capacity, heads=2, dim=16):
    return torch.randn(batch, capacity, heads, dim), torch.randn(batch, capacity, heads, dim)


def test_kvcache_appends_and_attends():
    k_cache, v_cache = cache(2, 20)
    before = k_cache.clone()
    q, k, v = qkv(2, 3, 3, 4, 2)
    lengths = torch.tensor([4, 0], dtype=torch.int32)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True
    )
    for b, n in enumerate(lengths.tolist()):
        assert torch.equal(k_cache[b, n : n + 3], k[b]) and torch.equal(k_cache[b, :n], before[b, :n])
        assert torch.equal(k_cache[b, n + 3 :], before[b, n + 3 :])
        keys, values = k_cache[b : b + 1, : n + 3], v_cache[b : b + 1, : n + 3]
        oracle.assert_close_as_torch(
            {"out": out[b : b + 1], "lse": lse[b : b + 1]}, q[b : b + 1], keys, values,
            visible=oracle.band(3, n + 3, None, 0),
        )  # fmt: skip


def test_kvcache_options():
    """Everything that only chooses slots or scores: pages, rows, left padding, windows, slopes, splits."""
    k_cache, v_cache = cache(3, 20)
    q = torch.randn(2, 1, 4, 16)
    lengths, rows, pad = (torch.tensor(x, dtype=torch.int32) for x in ([9, 14], [2, 0], [1, 3]))
    slopes = torch.rand(4)
    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, cache_batch_idx=rows, cache_leftpad=pad, window_size=(4, 0),
        softcap=2.0, alibi_slopes=slopes, softmax_scale=0.5, num_splits=2,
    )  # fmt: skip
    for b in range(2):
        at = slice(int(pad[b]), int(lengths[b]))
        want = flash_attn.flash_attn_func(
            q[b : b + 1], k_cache[rows[b], at][None], v_cache[rows[b], at][None], softmax_scale=0.5,
            window_size=(4, 0), softcap=2.0, alibi_slopes=slopes,
        )  # fmt: skip
        torch.testing.assert_close(out[b : b + 1], want)
    pages = k_cache.view(12, 5, 2, 16), v_cache.view(12, 5, 2, 16)
    table = torch.arange(12, dtype=torch.int32).view(3, 4)[[2, 0]]
    paged = flash_attn.flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, block_table=table)
    direct = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, cache_batch_idx=rows
    )
    torch.testing.assert_close(paged, direct)
    whole = flash_attn.flash_attn_with_kvcache(q, k_cache[:2], v_cache[:2])
    torch.testing.assert_close(whole, flash_attn.flash_attn_func(q, k_cache[:2], v_cache[:2]))


def turned(x, cos, sin, start, interleaved):
    """Rotary embedding by complex numbers, x (seqlen, heads, dim) from position `start`; start per row if a list."""
    half = cos.shape[1]
    at = start if isinstance(start, list) else list(range(start, start + x.shape[0]))
    turn = torch.complex(cos[at], sin[at])[:, None]
    head = x[..., : 2 * half]
    pairs = (head[..., ::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    z = torch.complex(*(p.contiguous() for p in pairs)) * turn
    mixed = torch.stack([z.real, z.imag], -1).flatten(-2) if interleaved else torch.cat([z.real, z.imag], -1)
    return torch.cat([mixed, x[..., 2 * half :]], -1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("new", [3, 2])
@pytest.mark.parametrize("pad", [None, [1, 0]])
def test_kvcache_rotary(interleaved, causal, new, pad):
    k_cache, v_cache = cache(2, 20)
    q, k, v = qkv(2, 3, new, 2)
    angle = torch.rand(20, 4) * 6
    cos, sin = angle.cos(), angle.sin()
    lengths = [4, 6]
    leftpad = None if pad is None else cu(pad)
    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, cache_seqlens=cu(lengths), causal=causal, cache_leftpad=leftpad,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    for b, n in enumerate(lengths):
        start, first = (0 if pad is None else pad[b]), n - (0 if pad is None else pad[b])
        torch.testing.assert_close(k_cache[b, n : n + new], turned(k[b], cos, sin, first, interleaved))
        spread = turned(q[b], cos, sin, first if causal else [first] * 3, interleaved)
        want = flash_attn.flash_attn_func(
            spread[None],
            k_cache[b : b + 1, start : n + new],
            v_cache[b : b + 1, start : n + new],
            causal=causal,
        )
        torch.testing.assert_close(out[b : b + 1], want, rtol=1e-5, atol=1e-5)


def test_kvcache_outside_of_no_grad():
    """As in flash_attn: it runs, rotary embedding and appending included, and the result requires no gradient."""
    k_cache, v_cache = cache(2, 20)
    q, k, v = (x.requires_grad_() for x in qkv(2, 3, 3, 4, 2))
    tables, pad = (torch.ones(20, 4), torch.zeros(20, 4)), torch.tensor([1, 2], dtype=torch.int32)
    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, *tables, cache_seqlens=5, cache_leftpad=pad
    )
    assert not out.requires_grad and not k_cache.requires_grad
    assert torch.equal(k_cache[:, 5:8], k.detach())


def test_kvcache_refusals():
    k_cache, v_cache = cache(2, 20)
    q = torch.randn(2, 1, 4, 16)
    with pytest.raises(NotImplementedError, match="rotary_cos: without k"):
        flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, rotary_cos=torch.ones(20, 4), rotary_sin=torch.ones(20, 4), cache_seqlens=3
        )
    with pytest.raises(ValueError, match="capacity 20"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=21)


def test_block_table_of_packed_queries():
    pages = torch.randn(2, 9, 4, 2, 16)
    table = torch.tensor([[5, 1, 7], [0, 2, 3], [8, 6, 4]], dtype=torch.int32)
    q = torch.randn(12, 4, 16)
    lengths = torch.tensor([7, 3, 11])
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    out = flash_attn.flash_attn_varlen_func(
        q, *pages, cu(CU_Q), starts, 7, 11, causal=True, block_table=table
    )
    k, v = (torch.cat([p[table[b]].flatten(0, 1)[:n] for b, n in enumerate(lengths)]) for p in pages)
    want = flash_attn.flash_attn_varlen_func(q, k, v, cu(CU_Q), starts, 7, 11, causal=True)
    torch.testing.assert_close(out, want)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        flash_attn.flash_attn_varlen_func(q, *pages, cu(CU_Q), starts, 7, 11, 0.1, block_table=table)
    with pytest.raises(NotImplementedError, match="q: requires grad"):
        leaf = q.clone().requires_grad_()
        flash_attn.flash_attn_varlen_func(leaf, *pages, cu(CU_Q), starts, 7, 11, block_table=table)
    with pytest.raises(ValueError, match="max_seqlen_q: got 4"):
        flash_attn.flash_attn_varlen_func(q, *pages, cu(CU_Q), starts, 4, 11, block_table=table)


def test_empty_rows():
    q, k, v = qkv(1, 6, 3, 2)
    out, lse, probs = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert_empty(out[:, :3], lse[:, :, :3])
    assert not probs[:, :, :3].any()
    out, lse, probs = flash_attn.flash_attn_func(q, k[:, :0], v[:, :0], return_attn_probs=True)
    assert_empty(out, lse)
    assert probs.shape == (1, 2, 6, 0)


@pytest.mark.parametrize("module", ["self", "cross"])
def test_modules(module):
    from onchip.compat.flash_attn.modules.mha import FlashCrossAttention, FlashSelfAttention

    q, k, v = qkv(2, 9, 9, 4)
    more = {"softmax_scale": 0.3, "alibi_slopes": torch.rand(4), "deterministic": True}
    want = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(3, 0), **more)
    packed = torch.stack([q, k, v], 2)
    starts = cu([0, 9, 18])
    if module == "self":
        layer = FlashSelfAttention(causal=True, window_size=(3, 0), attention_dropout=0.5, **more).eval()
        assert torch.equal(layer(packed), want)
        assert torch.equal(layer(packed.flatten(0, 1), cu_seqlens=starts, max_seqlen=9), want.flatten(0, 1))
        assert torch.equal(
            layer(packed, causal=False), flash_attn.flash_attn_func(q, k, v, window_size=(3, 0), **more)
        )
        assert not torch.equal(layer.train()(packed), want)
    else:
        layer = FlashCrossAttention(causal=True, window_size=(3, 0), **more).eval()
        kv = packed[:, :, 1:]
        assert torch.equal(layer(q, kv), want)
        flat = layer(q.flatten(0, 1), kv.flatten(0, 1), None, starts, 9, starts, 9)
        assert torch.equal(flat, want.flatten(0, 1))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("version", [2, 3])
def test_rotary_tables_that_end_too_early(causal, seqlen_q, version):
    """An error wherever q and k are turned, never the last row again; tables that just reach are taken."""
    from onchip.compat import flash_attn_interface as fa3

    call = (flash_attn if version == 2 else fa3).flash_attn_with_kvcache
    q, new = torch.randn(2, seqlen_q, 2, 16), torch.randn(2, 2, 2, 16)
    last = 6 + max(2, seqlen_q if causal else 1) - 1  # the second sequence has 6 keys
    for positions in (last, last + 1):
        cache, table = torch.zeros(2, 20, 2, 16), torch.randn(positions, 8)
        options = {"rotary_cos": table, "rotary_sin": table, "causal": causal, "cache_seqlens": cu([4, 6])}
        if positions > last:
            call(q, cache, cache.clone(), new, new, **options)
            continue
        with pytest.raises(ValueError, match=f"cos has {positions} positions, expected at least {last + 1}"):
            call(q, cache, cache.clone(), new, new, **options)
        assert not cache.any()
