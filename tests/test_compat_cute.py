"""onchip.compat.flash_attn.cute (FlashAttention-4's names) against the dense float64 oracle."""

import pytest
import torch

import oracle
from checks import qkv
from onchip.compat.flash_attn.cute import interface as fa4
from onchip.compat.flash_attn.cute.block_sparsity import (
    BlockSparseTensorsTorch,
    ceildiv,
    fast_sampling,
    is_block_sparsity_enabled,
)


def cu(values):
    return torch.tensor(values, dtype=torch.int32)


def compare(call, q, k, v, sink=None, **truth):
    dout = torch.randn(*q.shape[:-1], v.shape[-1])
    tensors = {"q": q, "k": k, "v": v, "sink": sink}
    dlse = torch.randn(call(**{n: t for n, t in tensors.items() if t is not None})[1].shape)
    actual = oracle.outputs_and_grads(call, tensors, dout, dlse)
    oracle.assert_close_as_torch(actual, q, k, v, sink=sink, dout=dout, dlse=dlse, **truth)


def test_dense_with_sink():
    q, k, v = qkv(2, 9, 13, 4, 2)
    compare(
        lambda q, k, v, sink: fa4.flash_attn_func(
            q, k, v, softmax_scale=0.5, causal=True, window_size=(5, None), softcap=2.0, learnable_sink=sink,
            deterministic=True,
        ),
        q, k, v, sink=torch.randn(4), scale=0.5, softcap=2.0, visible=oracle.band(9, 13, 5, 0),
    )  # fmt: skip


def test_score_mod_and_mask_mod():
    q, k, v = qkv(2, 9, 13, 4, 2)
    table, ids = torch.randn(4), torch.randint(0, 2, (2, 13))
    options = {
        "score_mod": lambda s, b, h, q, k, table, ids: s + table[h] * (q - k),
        "mask_mod": lambda b, h, q, k, table, ids: (ids[b, k] == 1) | (k <= q),
        "aux_tensors": [table, ids],
    }
    distance = torch.arange(9)[:, None] - torch.arange(13)
    compare(
        lambda q, k, v: fa4.flash_attn_func(q, k, v, **options),
        q, k, v, add=table.view(1, 4, 1, 1) * distance,
        visible=((ids == 1)[:, None, None] | (distance >= 0)),
    )  # fmt: skip
    derivative = {"score_mod": lambda s, b, h, q, k: s * s, "score_mod_bwd": lambda s, b, h, q, k: 2.0 * s}
    derived = fa4.flash_attn_func(q.requires_grad_(), k, v, score_mod=derivative["score_mod"])[0]
    given = fa4.flash_attn_func(q, k, v, **derivative)[0]
    grads = [torch.autograd.grad(x.sum(), q)[0] for x in (derived, given)]
    torch.testing.assert_close(*grads)


def test_qv_adds_its_product_with_v():
    q, k, v = qkv(2, 9, 13, 4, 2)
    qv = torch.randn(2, 9, 4, 16)
    out, lse = fa4.flash_attn_func(q, k, v, qv)
    want = oracle.attention(torch.cat([q, qv], -1), torch.cat([k, v], -1), v)
    torch.testing.assert_close((out, lse), want, rtol=1e-5, atol=1e-5)


def test_block_sparse_tensors():
    """Full blocks are visible; in mask blocks mask_mod decides; block lists may be longer than their counts."""
    q, k, v = qkv(1, 40, 48, 2)
    partial, full = torch.rand(1, 2, 3, 3) < 0.5, torch.rand(1, 2, 3, 3) < 0.3

    def lists(blocks):
        order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True).int()
        return blocks.sum(-1).int(), order

    tensors = BlockSparseTensorsTorch(*lists(partial), *lists(full), block_size=(16, 16))
    assert is_block_sparsity_enabled(tensors)

    def expand(x):
        return x.repeat_interleave(16, 2).repeat_interleave(16, 3)[:, :, :40]

    inside = torch.arange(40)[:, None] >= torch.arange(48)
    rule = fast_sampling(lambda b, h, q, k: q >= k)
    for mask_mod, visible in (
        (rule, expand(partial) & inside | expand(full)),
        (None, expand(partial | full)),
    ):
        compare(
            lambda q, k, v, mask_mod=mask_mod: fa4.flash_attn_func(
                q, k, v, mask_mod=mask_mod, block_sparse_tensors=tensors
            ),
            q, k, v, visible=visible,
        )  # fmt: skip
    both = fa4.flash_attn_func(q, k, v, block_sparse_tensors=tensors, block_sparse_tensors_bwd=tensors)[0]
    assert torch.equal(both, fa4.flash_attn_func(q, k, v, block_sparse_tensors=tensors)[0])
    no_full = BlockSparseTensorsTorch(*lists(partial), block_size=(16, 16))
    compare(
        lambda q, k, v: fa4.flash_attn_func(q, k, v, mask_mod=rule, block_sparse_tensors=no_full),
        q, k, v, visible=expand(partial) & inside,
    )  # fmt: skip
    assert ceildiv(40, 16) == 3


@pytest.mark.parametrize("sides", ["both", "q", "k", "none"])
def test_varlen_of_packed_and_dense_sides(sides):
    """Each side packed, or dense with seqused; lse follows the queries' layout."""
    q, k, v = qkv(3, 6, 8, 4, 2)
    used_q, used_k = cu([6, 0, 4]), cu([8, 5, 0])
    wanted = oracle.varlen(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu([0, 6, 12, 18]), cu([0, 8, 16, 24]), seqused_q=used_q,
        seqused_k=used_k, options=lambda i, sq, sk: {"visible": oracle.band(sq, sk, None, 0)},
    )  # fmt: skip
    options = {"seqused_q": used_q, "seqused_k": used_k, "causal": True}
    if sides in ("both", "q"):
        q, options["cu_seqlens_q"] = q.flatten(0, 1), cu([0, 6, 12, 18])
    if sides in ("both", "k"):
        k, v, options["cu_seqlens_k"] = k.flatten(0, 1), v.flatten(0, 1), cu([0, 8, 16, 24])
    out, lse = fa4.flash_attn_varlen_func(q, k, v, **options)
    if sides in ("k", "none"):
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    torch.testing.assert_close((out, lse), wanted, rtol=1e-5, atol=1e-5)


def test_pages():
    pages = torch.randn(2, 12, 5, 2, 16)
    table = torch.randperm(12).view(3, 4).int()
    q, lengths, starts = torch.randn(12, 4, 16), cu([9, 20, 7]), cu([0, 5, 5, 12])
    sink = torch.randn(4)
    out, lse = fa4.flash_attn_varlen_func(
        q, *pages, cu_seqlens_q=starts, max_seqlen_q=7, seqused_k=lengths, page_table=table, causal=True,
        learnable_sink=sink, num_splits=2,
    )  # fmt: skip
    k, v = (torch.cat([p[table[b]].flatten(0, 1)[:n] for b, n in enumerate(lengths)]) for p in pages)
    want = fa4.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=starts, cu_seqlens_k=cu([0, 9, 29, 36]), causal=True, learnable_sink=sink
    )
    torch.testing.assert_close((out, lse), want)


def sparse(x, **options):
    counts, blocks = torch.ones(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int()
    return fa4.flash_attn_func(
        x, x, x, block_sparse_tensors=BlockSparseTensorsTorch(counts, blocks, **options)
    )


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda x: fa4.flash_attn_func(x, x, x, gather_kv_indices=x), "gather_kv_indices"),
        (lambda x: fa4.flash_attn_func(x, x, x, aux_scalars=(1,)), "aux_scalars"),
        (lambda x: fa4.flash_attn_varlen_func(x, x, x, block_sparse_tensors=()), "block_sparse_tensors"),
        (lambda x: sparse(x), "without block_size"),
        (lambda x: sparse(x, block_size=(2, 2), cu_total_m_blocks=cu([0])), "packed sequences"),
        (lambda x: fa4.flash_attn_varlen_func(x, x, x, page_table=cu([0]), seqused_q=cu([1])), "seqused_q"),
        (lambda x: fa4.flash_attn_combine(x, x, seqused=cu([1])), "seqused"),
        (lambda x: fa4.flash_attn_combine(x, x, virtual_batch_idx=cu([1])), "virtual_batch_idx"),
        (lambda x: fa4._flash_attn_fwd(None, None, x, x), "q, k: None"),
        (lambda x: fa4._flash_attn_bwd(*[x] * 6, block_sparse_tensors=()), "block_sparse_tensors"),
    ],
)
def test_refuses_by_name(call, named):
    with pytest.raises(NotImplementedError, match=named):
        call(torch.randn(1, 2, 1, 8))


def test_combine_and_metadata():
    q, k, v = qkv(2, 9, 13, 4, 2)
    parts = [fa4.flash_attn_func(q, k[:, p], v[:, p]) for p in (slice(0, 4), slice(4, 13))]
    out = torch.stack([o for o, _ in parts])
    lse = torch.stack([s for _, s in parts]).transpose(-1, -2)
    got, got_lse = fa4.flash_attn_combine(out, lse, cu_seqlens=cu([0, 9]))
    want, want_lse = fa4.flash_attn_func(q, k, v)
    torch.testing.assert_close((got, got_lse.transpose(-1, -2)), (want, want_lse))
    assert fa4.flash_attn_combine(out, lse, return_lse=False)[1] is None
    metadata = fa4.get_scheduler_metadata(9, 13, 4, 2, 16, 1)
    hinted = fa4.flash_attn_varlen_func(q, k, v, scheduler_metadata=metadata, num_splits=3, pack_gqa=True)
    torch.testing.assert_close(hinted, (want, want_lse))


def test_private_forward_and_backward():
    q, k, v = (x.requires_grad_() for x in qkv(2, 9, 13, 4, 2))
    sink = torch.randn(4)
    options = {
        "causal": True,
        "softcap": 2.0,
        "learnable_sink": sink,
        "mask_mod": lambda b, h, q, k: k % 3 != h,
    }
    out, lse = fa4.flash_attn_func(q, k, v, **options)
    made = torch.empty_like(out), torch.empty_like(lse)
    got = fa4._flash_attn_fwd(q, k, v, **options, return_lse=True, out=made[0].detach(), lse=made[1].detach())
    torch.testing.assert_close(got[:2], (out.detach(), lse.detach()))
    assert got[2:] == (None, None) and not got[0].requires_grad
    torch.testing.assert_close(made[0].detach(), out.detach())
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    truth = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    grads = fa4._flash_attn_bwd(q, k, v, got[0], dout, got[1], **options, dlse=dlse)
    torch.testing.assert_close(grads, truth, rtol=1e-5, atol=1e-5)
    given = torch.empty_like(q).detach()
    assert fa4._flash_attn_bwd(q, k, v, got[0], dout, got[1], **options, dq=given)[0] is given
    scaled = [x.detach().to(torch.float8_e4m3fn) for x in (q, k, v)]
    halves = torch.full((2, 2), 0.5)
    half = fa4._flash_attn_fwd(*scaled, q_descale=halves, k_descale=halves, v_descale=halves)[0]
    want = fa4._flash_attn_fwd(*(x.to(torch.bfloat16) / 2 for x in scaled))[0]
    torch.testing.assert_close(half, want)
