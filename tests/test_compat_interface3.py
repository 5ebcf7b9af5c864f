"""onchip.compat.flash_attn_interface (FlashAttention-3's names) against the dense float64 oracle."""

import pytest
import torch

import onchip
import onchip.compat.flash_attn as fa2
import onchip.compat.flash_attn_interface as fa3
import oracle
from checks import qkv

CU_Q, CU_K = [0, 5, 5, 12], [0, 7, 10, 17]


def cu(values):
    return torch.tensor(values, dtype=torch.int32)


def compare(call, q, k, v, **truth):
    dout = torch.randn(*q.shape[:-1], v.shape[-1])
    dlse = torch.randn(call(q, k, v)[1].shape)
    actual = oracle.outputs_and_grads(call, {"q": q, "k": k, "v": v}, dout, dlse)
    oracle.assert_close_as_torch(actual, q, k, v, dout=dout, dlse=dlse, **truth)


def test_dense():
    q, k, v = qkv(2, 9, 13, 4, 2, dim_v=24)
    compare(
        lambda q, k, v: fa3.flash_attn_func(
            q, k, v, 0.5, True, window_size=(4, -1), softcap=2.0, deterministic=True, return_attn_probs=True
        ),
        q, k, v, scale=0.5, softcap=2.0, visible=oracle.band(9, 13, 4, 0),
    )  # fmt: skip


def test_hints_change_nothing():
    q, k, v = qkv(2, 9, 13, 4, 2)
    want = fa3.flash_attn_func(q, k, v)
    assert torch.equal(fa3.flash_attn_func(q, k, v, num_splits=3, pack_gqa=True, sm_margin=8), want)
    metadata = fa3.get_scheduler_metadata(2, 9, 13, 4, 2, 16, cu([13, 13]))
    assert metadata.dtype is torch.int32
    cached = fa3.flash_attn_with_kvcache(q, k, v, scheduler_metadata=metadata, pack_gqa=False, sm_margin=3)
    torch.testing.assert_close(cached, want)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_chunk(causal):
    q, k, v = qkv(1, 9, 13, 2)
    chunk = (torch.arange(9)[:, None] + 4) // 4 == torch.arange(13) // 4
    compare(
        lambda q, k, v: fa3.flash_attn_func(q, k, v, causal=causal, attention_chunk=4, return_attn_probs=True),
        q, k, v, visible=chunk & oracle.band(9, 13, None, 0) if causal else chunk,
    )  # fmt: skip


def test_qv_adds_its_product_with_v():
    q, k, v = qkv(2, 9, 13, 4, 2, dim_v=24)
    qv = torch.randn(2, 9, 4, 24, requires_grad=True)
    out, lse = fa3.flash_attn_func(q, k, v, qv=qv, return_attn_probs=True)
    s = (torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2))
         + torch.einsum("bqhd,bkhd->bhqk", qv, v.repeat_interleave(2, 2))) * 40**-0.5  # fmt: skip
    torch.testing.assert_close(lse, s.logsumexp(-1), rtol=1e-5, atol=1e-5)
    want = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v.repeat_interleave(2, 2))
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(x.square().sum(), qv, retain_graph=True)[0] for x in (out, want))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads_q", [None, 4])
def test_qkvpacked(heads_q):
    q, k, v = qkv(2, 9, 9, 4, 4 if heads_q is None else 2)
    packed = torch.stack([q, k, v], 2) if heads_q is None else torch.cat([q, k, v], 2)
    out, lse = fa3.flash_attn_qkvpacked_func(packed, causal=True, num_heads_q=heads_q, return_attn_probs=True)
    want = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    torch.testing.assert_close((out, lse), want)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(packed, causal=True, num_heads_q=heads_q), out)
    if heads_q is not None:
        with pytest.raises(ValueError, match="num_heads_q"):
            fa3.flash_attn_qkvpacked_func(packed)
        with pytest.raises(ValueError, match=r"qkv: has shape \(2, 9, 7, 16\)"):
            fa3.flash_attn_qkvpacked_func(packed[:, :, 1:], num_heads_q=heads_q)


def test_varlen_with_seqused():
    q, k, v = (torch.randn(n, h, 16) for n, h in ((12, 4), (17, 2), (17, 2)))
    used = {"seqused_q": cu([5, 0, 4]), "seqused_k": cu([6, 3, 0])}
    k[6], v[16] = torch.nan, torch.nan  # rows that no sequence uses
    compare(
        lambda q, k, v: fa3.flash_attn_varlen_func(
            q, k, v, cu(CU_Q), cu(CU_K), 7, torch.tensor(7), **used, causal=True, return_attn_probs=True
        ),
        q, k, v, fn=oracle.varlen, cu_seqlens_q=cu(CU_Q), cu_seqlens_k=cu(CU_K), **used,
        options=lambda i, sq, sk: {"visible": oracle.band(sq, sk, None, 0)},
    )  # fmt: skip


def test_descales_of_float8():
    """float8 inputs are what their values times their descales are, in bfloat16."""
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv(2, 9, 13, 4, 2))
    dq, dk, dv = torch.rand(3, 2, 2) + 0.5
    out, lse = fa3.flash_attn_func(
        q, k, v, causal=True, q_descale=dq, k_descale=dk, v_descale=dv, return_attn_probs=True
    )
    assert out.dtype is torch.bfloat16
    wide = [
        (x.float() * d.repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None]).bfloat16().double()
        for x, d in ((q, dq), (k, dk), (v, dv))
    ]
    want = oracle.attention(*wide, visible=oracle.band(9, 13, None, 0))
    torch.testing.assert_close(out.double(), want[0], rtol=0.02, atol=0.02)  # bfloat16 has 0.004
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-4, atol=1e-4)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    packed = fa3.flash_attn_varlen_func(
        *flat, cu([0, 9, 18]), cu([0, 13, 26]), 9, 13, causal=True, q_descale=dq, k_descale=dk, v_descale=dv
    )
    torch.testing.assert_close(packed.view_as(out), out)
    for wrong in (torch.tensor(2.0), torch.rand(2, 3)):
        with pytest.raises(ValueError, match="descale: has shape"):
            fa3.flash_attn_func(q, k, v, k_descale=wrong)
    x = qkv(2, 9, 13, 4, 2)
    plain = fa3.flash_attn_func(*x, q_descale=dq)  # for other dtypes FlashAttention-3 reads no descale either
    assert torch.equal(plain, fa3.flash_attn_func(*x))


@pytest.mark.parametrize("packed", [False, True])
def test_combine(packed):
    q, k, v = qkv(2, 9, 13, 4, 2)
    parts = [slice(0, 5), slice(5, 5), slice(5, 13)]
    results = [fa3.flash_attn_func(q, k[:, p], v[:, p], return_attn_probs=True) for p in parts]
    out = torch.stack([o for o, _ in results])
    lse = torch.stack([s for _, s in results]).transpose(-1, -2)
    want, want_lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    want_lse = want_lse.transpose(-1, -2)
    if packed:
        out, lse, want, want_lse = out[:, 0], lse[:, 0], want[0], want_lse[0]
    got, got_lse = fa3.flash_attn_combine(out, lse)
    torch.testing.assert_close((got, got_lse), (want, want_lse))
    assert fa3.flash_attn_combine(out, lse, out_dtype=torch.bfloat16)[0].dtype is torch.bfloat16
    given = torch.empty_like(want)
    assert fa3.flash_attn_combine(out, lse, given)[0] is given
    torch.testing.assert_close(given, want)


def test_kvcache_of_packed_queries():
    """cu_seqlens_q with pages, as serving engines call it: each sequence's last query is at its last key."""
    pages = torch.randn(2, 12, 5, 2, 16)
    table = torch.randperm(12).view(3, 4).int()
    q, lengths = torch.randn(12, 4, 16), cu([9, 20, 7])
    out, lse, *rest = fa3.flash_attn_with_kvcache(
        q, *pages, cache_seqlens=lengths, page_table=table, cu_seqlens_q=cu(CU_Q), max_seqlen_q=7, causal=True,
        window_size=(6, -1), return_softmax_lse=True,
    )  # fmt: skip
    assert [x.numel() for x in rest] == [0, 0]
    k, v = (torch.cat([p[table[b]].flatten(0, 1)[:n] for b, n in enumerate(lengths)]) for p in pages)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    want = fa3.flash_attn_varlen_func(
        q, k, v, cu(CU_Q), starts, 7, 20, causal=True, window_size=(6, -1), return_attn_probs=True
    )
    torch.testing.assert_close((out, lse), want)


def test_kvcache_appends_below_packed_queries():
    k_cache, v_cache = torch.randn(2, 3, 20, 2, 16)
    k, v = torch.randn(2, 3, 2, 2, 16)
    q = torch.randn(12, 4, 16)
    out = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=cu([9, 18, 7]), cu_seqlens_q=cu(CU_Q), max_seqlen_q=7
    )
    assert torch.equal(k_cache[2, 7:9], k[2])
    want = fa3.flash_attn_func(q[5:][None], k_cache[2:, :9], v_cache[2:, :9])
    torch.testing.assert_close(out[5:][None], want)


def test_kvcache_rotary_counts_from_rotary_seqlens():
    from test_compat_flash_attn import turned

    angle = torch.rand(30, 4) * 6
    cos, sin = angle.cos(), angle.sin()
    q, k, v = qkv(2, 3, 3, 2)
    for options, first in (({}, [4, 6]), ({"rotary_seqlens": cu([11, 2])}, [11, 2]),
                           ({"cache_leftpad": cu([1, 2])}, [4, 6])):  # fmt: skip
        k_cache, v_cache = torch.randn(2, 2, 20, 2, 16)
        out = fa3.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k,
            v,
            rotary_cos=cos,
            rotary_sin=sin,
            cache_seqlens=cu([4, 6]),
            causal=True,
            **options,
        )
        for b, n in enumerate([4, 6]):
            start = int(options.get("cache_leftpad", cu([0, 0]))[b])
            torch.testing.assert_close(k_cache[b, n : n + 3], turned(k[b], cos, sin, first[b], True))
            rows = turned(q[b], cos, sin, first[b], True)[None]
            keys = slice(start, n + 3)
            want = fa3.flash_attn_func(rows, k_cache[b : b + 1, keys], v_cache[b : b + 1, keys], causal=True)
            torch.testing.assert_close(out[b : b + 1], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options, spread",
    [
        ({}, False),
        ({"causal": True}, True),
        ({"window_size": (20, -1)}, True),
        ({"window_size": (None, 20)}, True),
        ({"attention_chunk": 20}, True),  # FlashAttention-3 takes chunks for a window
    ],
)
def test_kvcache_rotary_stands_queries_behind_one_another_where_a_mask_is_set(options, spread):
    from test_compat_flash_attn import turned

    angle = torch.rand(30, 4) * 6
    cos, sin = angle.cos(), angle.sin()
    q, k, v = qkv(1, 3, 3, 2)
    k_cache, v_cache = torch.randn(2, 1, 20, 2, 16)
    out = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=cu([6]), **options
    )
    rows = turned(q[0], cos, sin, 6 if spread else [6] * 3, True)[None]
    want = fa3.flash_attn_func(rows, k_cache[:, :9], v_cache[:, :9], **options)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_kvcache_with_qv():
    q, k, v = qkv(2, 1, 13, 4, 1, dim=8, dim_v=24)
    qv = torch.randn(2, 1, 4, 24)
    got = fa3.flash_attn_with_kvcache(q, k, v, qv=qv, cache_seqlens=cu([5, 13]), attention_chunk=4)
    want = fa3.flash_attn_func(q[:1], k[:1, :5], v[:1, :5], qv=qv[:1], attention_chunk=4)
    torch.testing.assert_close(got[:1], want)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"cu_seqlens_k_new": cu([0, 1, 2])}, "cu_seqlens_k_new"),
        (
            {
                "k_cache": torch.randn(2, 13, 2, 16).to(torch.float8_e4m3fn),
                **dict.fromkeys(("q_descale", "k_descale", "v_descale"), torch.ones(2, 2)),
            },
            "float8",
        ),
        ({"qv": torch.randn(2, 1, 4, 16), "k": torch.randn(2, 1, 2, 16)}, "qv: with k"),
        (
            {"cu_seqlens_q": cu([0, 1, 2]), "rotary_cos": torch.ones(20, 4), "rotary_sin": torch.ones(20, 4)},
            "rotary",
        ),
    ],
)
def test_kvcache_refuses_by_name(options, named):
    q, k, v = qkv(2, 1, 13, 4, 2)
    if "cu_seqlens_q" in options:
        q = q[:, 0]
    with pytest.raises(NotImplementedError, match=named):
        fa3.flash_attn_with_kvcache(q, **{"k_cache": k, "v_cache": v, "cache_seqlens": 5, **options})


def test_private_forward():
    q, k, v = qkv(2, 9, 13, 4, 2)
    want = fa3.flash_attn_func(q, k, v, causal=True, softcap=2.0, return_attn_probs=True)
    given = torch.empty_like(want[0])
    got = fa3._flash_attn_forward(q.requires_grad_(), k, v, out_=given, causal=True, softcap=2.0)
    assert got[0] is given and not got[1].requires_grad
    torch.testing.assert_close(got[:2], want)
    q = q.detach()
    # Dense tensors of which so many rows count:
    used = cu([9, 4])
    out, lse, *_ = fa3._flash_attn_forward(q, k, v, seqused_k=used)
    torch.testing.assert_close(
        (out[1:], lse[1:]), fa3.flash_attn_func(q[1:], k[1:, :4], v[1:, :4], return_attn_probs=True)
    )
    cached = fa3._flash_attn_forward(q, k, v, seqused_k=used, kv_batch_idx=cu([1, 0]))[0]
    torch.testing.assert_close(cached[:1], fa3.flash_attn_func(q[:1], k[1:, :9], v[1:, :9]))
    for options, named in (
        ({"seqused_q": used, "kv_batch_idx": cu([1, 0])}, "seqused_q"),
        ({"cu_seqlens_k_new": cu([0, 1, 2])}, "cu_seqlens_k_new"),
        ({"rotary_cos": torch.ones(20, 4), "rotary_sin": torch.ones(20, 4)}, "rotary_cos"),
    ):
        with pytest.raises(NotImplementedError, match=named):
            fa3._flash_attn_forward(q, k, v, **options)


@pytest.mark.parametrize("layout", ["dense", "varlen", "seqused"])
def test_private_backward_agrees_with_autograd(layout):
    used = {}
    lengths = {}
    if layout == "varlen":
        q, k, v = (torch.randn(n, h, 16, requires_grad=True) for n, h in ((12, 4), (17, 2), (17, 2)))
        lengths = {"cu_seqlens_q": cu(CU_Q), "cu_seqlens_k": cu(CU_K), "max_seqlen_q": 7, "max_seqlen_k": 7}
        out, lse = fa3.flash_attn_varlen_func(
            q, k, v, **lengths, softmax_scale=0.3, causal=True, window_size=(5, -1), softcap=2.0,
            return_attn_probs=True,
        )  # fmt: skip
    else:
        q, k, v = (x.requires_grad_() for x in qkv(2, 9, 13, 4, 2))
        if layout == "seqused":
            used = {"seqused_q": cu([9, 2]), "seqused_k": cu([3, 13])}
        from onchip.compat.translate import attend

        out, lse = attend(
            q, k, v, mask=onchip.window(5, 0), score=onchip.Score(softcap=2.0), scale=0.3,
            **{f"used_{name[-1]}": value for name, value in used.items()},
        )  # fmt: skip
    dout = torch.randn_like(out)
    truth = torch.autograd.grad(out, (q, k, v), dout)
    given = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    misspelt = {name.replace("seqused", "sequed"): value for name, value in used.items()}  # theirs
    delta = fa3._flash_attn_backward(
        dout, q, k, v, out.detach(), lse.detach(), dq=given[0].detach(), dk=given[1].detach(), dv=given[2].detach(),
        softmax_scale=0.3, is_causal=True, window_size_left=5, window_size_right=-1, softcap=2.0, deterministic=True,
        sm_margin=4, **lengths, **misspelt,
    )  # fmt: skip
    for ours, theirs in zip(given, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert delta.shape == lse.shape


def test_errors_name_the_argument():
    """Not what torch says of the operation that they break."""
    q, k = (torch.randn(2, n, h, 16).to(torch.float8_e4m3fn) for n, h in ((9, 4), (7, 2)))
    for wrong in (torch.ones(3, 2), torch.ones(2, 3), torch.ones(2)):
        with pytest.raises(ValueError, match="descale: has shape"):
            fa3.flash_attn_func(q, k, k, q_descale=wrong)
    with pytest.raises(TypeError, match="descale: got float"):
        fa3.flash_attn_func(q, k, k, q_descale=2.0)
    for heads in (5, 8, 10):
        with pytest.raises(ValueError, match=r"qkv: has shape \(2, 5, 8, 16\)"):
            fa3.flash_attn_qkvpacked_func(torch.randn(2, 5, 8, 16), num_heads_q=heads)
    with pytest.raises(ValueError, match="lse_partial: has shape"):
        fa3.flash_attn_combine(torch.randn(3, 2, 5, 4, 8), torch.randn(2, 2, 5, 4))


@pytest.mark.parametrize("wrong", [3, (1,), (1, 2, 3), None])
@pytest.mark.parametrize("module", [fa2, fa3])
def test_a_window_that_is_no_pair(module, wrong):
    q, cache = torch.randn(2, 9, 4, 16), torch.randn(2, 32, 4, 16)
    with pytest.raises(TypeError, match="window_size: got .*, expected a pair"):
        module.flash_attn_func(q, q, q, window_size=wrong)
    with pytest.raises(TypeError, match="window_size: got .*, expected a pair"):
        module.flash_attn_with_kvcache(q[:, :1], cache, cache, cache_seqlens=7, window_size=wrong)
