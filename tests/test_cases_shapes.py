"""Cases c32 to c37, c47 to c62: lengths, zero sizes, strides, large grids and odd head dims."""

from functools import partial

import pytest
import torch

import onchip
import oracle
from checks import check, check_varlen, qkv


def packed(total_q, total_k, heads_q, heads_k, dim=16, dtype=torch.float32):
    """Random q (total_q, heads_q, dim), k and v (total_k, heads_k, dim)."""
    return (t[0] for t in qkv(1, total_q, total_k, heads_q, heads_k, dim, dtype=dtype))


def test_c32_single_queries_between_empty_sequences(backend):
    q, k, v = packed(2, 8, 9, 3)
    check_varlen(backend, q, k, v, [0, 1, 1, 2], [0, 3, 3, 8])
    q, k, v = packed(1, 1, 21, 7, dim=120)
    check_varlen(backend, q, k, v, [0, 0, 0, 0, 1], [0, 0, 0, 0, 1])
    q, k, v = packed(3, 9, 4, 2)
    check_varlen(
        backend,
        q,
        k,
        v,
        [0, 1, 1, 2, 3],
        [0, 0, 4, 9, 9],
        mask=onchip.causal(),
        options=lambda i, m, n: {"visible": oracle.band(m, n, None, 0)},
    )


def test_c32_no_sequences_and_no_tokens(backend):
    for cu in ([0], [0, 0, 0]):
        q, k, v = (t.requires_grad_() for t in packed(0, 0, 2, 1))
        cu = torch.tensor(cu, dtype=torch.int32)
        out, lse = onchip.attention_varlen(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True, backend=backend
        )
        assert out.shape == (0, 2, 16) and lse.shape == (2, 0)
        out.sum().backward()
        assert k.grad.shape == k.shape


def test_c34_a_sequence_longer_than_max_seqlen(backend):
    q, k, v = packed(12, 12, 2, 1)
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        with pytest.raises(ValueError, match=rf"{name}.*4.*7|{name}.*7.*4"):
            onchip.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **{name: 4}, backend=backend)
    call = partial(onchip.attention_varlen, cu_seqlens_q=cu, cu_seqlens_k=cu, backend=backend)
    given = call(q, k, v, max_seqlen_q=7, max_seqlen_k=100)
    assert torch.equal(given, call(q, k, v))


MASKED = {
    "none": lambda nq, nk: None,
    "ids": lambda nq, nk: onchip.documents(torch.arange(nq) // 5, ids_k=torch.arange(nk) // 5),
    "ids of keys": lambda nq, nk: onchip.documents(torch.arange(nk) // 6),
    "boundaries": lambda nq, nk: onchip.documents(cu_seqlens=torch.tensor([0, 9, nk])),
    "dense": lambda nq, nk: onchip.dense((torch.arange(nq)[:, None] + torch.arange(nk)) % 3 > 0),
    "blocks": lambda nq, nk: onchip.block_sparse(torch.ones(-(-nq // 4), -(-nk // 8)) > 0, tile=(4, 8)),
    "where": lambda nq, nk: onchip.where(lambda b, h, q, k, seen: seen[k] > 0, torch.arange(nk) % 3),
    "lengths": lambda nq, nk: onchip.padding(torch.tensor([9, 0, nk])) & onchip.causal(),
}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("mask", MASKED)
def test_masks_and_scores_cover_a_given_max_seqlen(backend, mask, used):
    """As on a GPU, which looks at no lengths: tensors of positions have max_seqlen of them, and what is behind the
    longest sequence counts for nothing."""
    q, k, v = (x.requires_grad_() for x in packed(33, 50, 4, 2))
    options = {"cu_seqlens_q": torch.tensor([0, 12, 12, 33]), "cu_seqlens_k": torch.tensor([0, 20, 23, 50])}
    if used:
        options |= {"seqused_q": torch.tensor([12, 0, 17]), "seqused_k": torch.tensor([4, 3, 25])}
    longest, given = (17, 25) if used else (21, 27), (23, 41)
    near = 1e-4 if q.dtype is torch.float32 else 1e-2
    close = partial(torch.testing.assert_close, rtol=near, atol=near)
    whole = torch.randn(4, *given)

    def run(nq, nk, bias, **limits):
        leaves = [q, k, v] if bias is None else [q, k, v, bias.requires_grad_()]
        visible, score = MASKED[mask](nq, nk), onchip.Score(bias=bias)
        call = partial(onchip.attention_varlen, mask=visible, score=score, return_lse=True, backend=backend)
        out, lse = call(q, k, v, **options, **limits)
        return out, lse, *torch.autograd.grad(out.square().sum() + lse.clamp(min=-9).sum(), leaves)

    for cut in (None, (23, 41), (23, 1), (1, 41)):  # a bias of both, by query, by key
        biases = [
            None if cut is None else whole[:, : min(cut[0], n), : min(cut[1], m)] for n, m in (given, longest)
        ]
        found = run(*given, biases[0], max_seqlen_q=given[0], max_seqlen_k=given[1])
        truth = run(*longest, biases[1])
        close(found[:5], truth[:5])
        for grad, want in zip(found[5:], truth[5:], strict=True):
            rows, keys = want.shape[1:]
            close(grad[:, :rows, :keys], want)
            assert not grad[:, rows:].any() and not grad[:, :, keys:].any()


def test_max_seqlen_bounds_the_rows_that_count(backend):
    q, k, v = packed(33, 50, 4, 2)
    cu_q, cu_k, used = torch.tensor([0, 12, 33]), torch.tensor([0, 23, 50]), torch.tensor([12, 17])
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "seqused_q": used, "seqused_k": used + 8}
    call = partial(onchip.attention_varlen, q, k, v, **options, backend=backend)
    assert torch.equal(call(), call(max_seqlen_q=17, max_seqlen_k=25))
    if q.device.type == "cpu":  # on a GPU the caller vouches for it
        for name, most in (("max_seqlen_q", 17), ("max_seqlen_k", 25)):
            with pytest.raises(ValueError, match=rf"{name}.*{most - 1}.*{most}"):
                call(**{name: most - 1})


@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize(
    "values, dtype, message",
    [
        ([1, 5, 12], torch.int32, r"0.*1|1.*0"),
        ([0, 15, 12], torch.int32, r"decreas.*15.*12"),
        ([0, 5, 11], torch.int32, r"11.*12|12.*11"),
        ([0, 5, 13], torch.int32, r"13.*12|12.*13"),
        ([0.0, 5.0, 12.0], torch.float32, r"float32.*int|int.*float32"),
        ([0, 5, 12], torch.int16, r"int16.*int32|int32.*int16"),
    ],
)
def test_c35_malformed_cu_seqlens(backend, which, values, dtype, message):
    q, k, v = packed(12, 12, 2, 1)
    good = torch.tensor([0, 5, 12], dtype=torch.int32)
    lengths = {"cu_seqlens_q": good, "cu_seqlens_k": good, which: torch.tensor(values, dtype=dtype)}
    with pytest.raises((ValueError, TypeError), match=rf"{which}(?s:.)*({message})"):
        onchip.attention_varlen(q, k, v, **lengths, backend=backend)


def test_c36_position_ids_are_not_document_ids(backend):
    q, k, v = qkv(1, 256, 256, 1)
    with pytest.raises(ValueError, match=r"ids.*\(3, 1, 256\)"):
        ids = torch.arange(256).expand(3, 1, 256)
        onchip.attention(q, k, v, mask=onchip.documents(ids), backend=backend)
    for shape in ((3, 256), (1, 255), (1, 768)):
        with pytest.raises(ValueError, match=r"ids.*(3|255|768).*(1|256)"):
            ids = torch.zeros(shape, dtype=torch.long)
            onchip.attention(q, k, v, mask=onchip.documents(ids), backend=backend)


def test_c36_documents_by_ids_and_by_cu_seqlens(backend):
    q, k, v = qkv(2, 256, 256, 2, dim=8)
    whole = onchip.documents(cu_seqlens=torch.tensor([0, 256], dtype=torch.int32))
    check(backend, q, k, v, mask=whole)
    ids = torch.arange(256) // 100
    visible = ids[:, None] == ids
    cu = onchip.documents(cu_seqlens=torch.tensor([0, 100, 200, 256], dtype=torch.int32))
    for mask in (onchip.documents(ids[None]), onchip.documents(ids.expand(2, 256)), cu):
        check(backend, q, k, v, mask=mask, visible=visible)
    for cu in ([0, 768], [0, 100], [1, 256], [0, 200, 100, 256]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            mask = onchip.documents(cu_seqlens=torch.tensor(cu, dtype=torch.int32))
            onchip.attention(q, k, v, mask=mask, backend=backend)


@pytest.mark.parametrize(
    "batch, seqlen_q, seqlen_k, heads_q, heads_k",
    [(7, 0, 0, 9, 3), (0, 4, 5, 4, 2), (2, 0, 5, 2, 1), (2, 5, 0, 2, 1), (0, 0, 0, 1, 1)],
)
def test_c37_zero_sizes(backend, batch, seqlen_q, seqlen_k, heads_q, heads_k):
    q, k, v = qkv(batch, seqlen_q, seqlen_k, heads_q, heads_k, dim=7)
    for mask in (None, onchip.causal(), onchip.window(3, 3)):
        check(backend, q, k, v, mask=mask)


def test_c37_the_reported_shapes_in_bhsd(backend):
    q, k = torch.randn(7, 9, 0, 7), torch.randn(7, 7, 0, 7)
    with pytest.raises(ValueError, match=r"9.*7"):
        onchip.attention(q, k, k, layout="bhsd", backend=backend)
    k = torch.randn(7, 3, 0, 7)
    assert onchip.attention(q, k, k, layout="bhsd", backend=backend).shape == (7, 9, 0, 7)


def test_c37_zero_head_dims(backend):
    check(backend, *qkv(1, 3, 5, 2, dim=4, dim_v=0))
    with pytest.raises(ValueError, match="dim 0"):
        onchip.attention(*qkv(1, 3, 5, 2, dim=0, dim_v=4), backend=backend)


def strided_views(t):
    """The values of t (batch, seqlen, heads, dim) under other strides."""
    yield t.transpose(1, 2).contiguous().transpose(1, 2)
    yield t.transpose(1, 3).contiguous().transpose(1, 3)
    wide = torch.randn(*t.shape[:3], 2 * t.shape[3] + 3, dtype=t.dtype)
    wide[..., 3::2] = t
    yield wide[..., 3::2]
    yield torch.cat([torch.randn_like(t), t], 1)[:, t.shape[1] :]


def test_c47_non_contiguous_upstream_gradients(backend):
    tensors = dict(zip("qkv", qkv(2, 32, 32, 4, 1, dim=128), strict=True))
    call = partial(onchip.attention, mask=onchip.causal(), return_lse=True, backend=backend)
    dout = torch.randn(2, 32, 4, 128)
    expanded = torch.randn(1, 1, 1, 128).expand(2, 32, 4, 128)
    ones = torch.ones(()).expand(2, 32, 4, 128)
    views = [(view, dout) for view in strided_views(dout)] + [(expanded, expanded), (ones, ones)]
    for view, values in views:
        assert not view.is_contiguous()
        found = oracle.outputs_and_grads(call, tensors, view)
        expected = oracle.outputs_and_grads(call, tensors, values.contiguous())
        for name in ("dq", "dk", "dv"):  # sums in another order may round otherwise
            room = max(1e-5, torch.finfo(expected[name].dtype).eps)
            torch.testing.assert_close(found[name], expected[name], rtol=room, atol=room)


def test_c47_non_contiguous_upstream_gradient_of_lse(backend):
    tensors = dict(zip("qkv", qkv(2, 20, 32, 4, 1, dim=8), strict=True))
    call = partial(onchip.attention, return_lse=True, backend=backend)
    dout = torch.randn(2, 20, 4, 8)
    for dlse in (torch.randn(2, 20, 4).transpose(1, 2), torch.randn(4, 1).expand(2, 4, 20)):
        found = oracle.outputs_and_grads(call, tensors, dout, dlse)
        expected = oracle.outputs_and_grads(call, tensors, dout, dlse.contiguous())
        for name in ("dq", "dk"):
            room = max(1e-5, torch.finfo(expected[name].dtype).eps)
            torch.testing.assert_close(found[name], expected[name], rtol=room, atol=room)


@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
def test_c49_non_contiguous_inputs(backend, which):
    tensors = dict(zip("qkv", qkv(2, 40, 70, 4, 2, dim=16, dtype=torch.float64), strict=True))
    truth = oracle.attention(**tensors, visible=oracle.band(40, 70, 9, 0))
    for views in zip(*(strided_views(tensors[name]) for name in which), strict=True):
        leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
        # The view itself is passed, so that its strides reach the backend; its gradient is compared by value.
        leaves |= {n: view.detach().requires_grad_() for n, view in zip(which, views, strict=True)}
        out, lse = onchip.attention(**leaves, mask=onchip.window(9, 0), return_lse=True, backend=backend)
        torch.testing.assert_close(out, truth[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(lse, truth[1], rtol=1e-9, atol=1e-9)
        plain = {n: t.clone().requires_grad_() for n, t in tensors.items()}
        expected = torch.autograd.grad(
            oracle.attention(**plain, visible=oracle.band(40, 70, 9, 0))[0].sin().sum(), list(plain.values())
        )
        for grad, truth_grad in zip(
            torch.autograd.grad(out.sin().sum(), list(leaves.values())), expected, strict=True
        ):
            torch.testing.assert_close(grad, truth_grad, rtol=1e-9, atol=1e-9)


def test_c49_expanded_inputs(backend):
    q, k, v = qkv(1, 5, 9, 1, dim=8)
    wide = [t.expand(3, -1, 4, -1) for t in (q, k, v)]
    found = onchip.attention(*wide, backend=backend)
    expected = onchip.attention(q, k, v, backend=backend)
    torch.testing.assert_close(found, expected.expand(3, -1, 4, -1))


@pytest.mark.parametrize("batch, heads", [(65536, 1), (1, 65536), (256, 256)])
def test_c56_more_than_65535_of_batch_and_heads(backend, batch, heads):
    if backend == "reference":
        batch = min(batch, 4096)  # it takes one sequence at a time
    q, k, v = qkv(batch, 1, 1, heads, dim=8)
    out, lse = onchip.attention(q, k, v, return_lse=True, backend=backend)
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(lse, (q * k).sum(3).transpose(1, 2) / 8**0.5, rtol=1e-5, atol=1e-5)


def test_c56_eighty_thousand_sequences(backend):
    sequences = 4_000 if backend == "reference" else 80_000
    lengths = torch.randint(0, 3, (sequences,))
    total = int(lengths.sum())
    q, k, v = packed(total, total, 1, 1, dim=8)
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    out = onchip.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, backend=backend)
    kept = torch.arange(2) < lengths[:, None]
    padded = [torch.zeros(sequences, 2, 1, 8) for _ in range(3)]
    for slots, values in zip(padded, (q, k, v), strict=True):
        slots[kept] = values
    expected, _ = oracle.attention(*padded, visible=kept[:, None, None])
    torch.testing.assert_close(out, expected[kept], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [16, 40, 64, 72, 96, 128, 192, 256])
def test_c58_a_signal_in_the_last_dims_only(backend, dim):
    q, k, v = qkv(1, 33, 70, 2, 1, dim=dim)
    for t in (q, k, v):
        t[..., : dim - 8] = 0
        t *= 3
    check(backend, q, k, v)
    check(backend, q, k, torch.randn(1, 70, 1, 24))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 5, 33, 63])
def test_c59_odd_head_dims_keep_their_own_scale(backend, dim, dtype):
    q, k, v = qkv(2, 17, 70, 4, 2, dim=dim, dtype=dtype)
    found = check(backend, q, k, v, mask=onchip.causal(), visible=oracle.band(17, 70, None, 0))
    assert found["out"].shape == (2, 17, 4, dim)
    assert found["dk"].shape == (2, 70, 2, dim)


def test_c62_head_counts_that_do_not_divide(backend):
    for heads_q, heads_k in ((6, 4), (4, 0), (2, 4), (9, 7)):
        q, k, v = qkv(1, 3, 5, heads_q, heads_k)
        with pytest.raises(ValueError, match=rf"heads.*{heads_q}.*{heads_k}|{heads_q}.*{heads_k}.*heads"):
            onchip.attention(q, k, v, backend=backend)
        cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (3, 5))
        with pytest.raises(ValueError, match=rf"heads.*{heads_q}.*{heads_k}|{heads_q}.*{heads_k}.*heads"):
            onchip.attention_varlen(q[0], k[0], v[0], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend=backend)
