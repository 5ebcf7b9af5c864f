"""What needs a GPU: sizes past 32 bits, grids past 65535, graphs, repeated bits, and what is compiled how often."""

import pytest
import torch

import onchip
from onchip.backends.triton import backward_kernels, forward_kernels

KERNELS = (forward_kernels.forward_kernel, backward_kernels.dkdv_kernel, backward_kernels.dq_kernel)


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, dtype=dtype, device="cuda")


def truth(q, k, v, visible=None):
    """float64 attention of q (rows, dim) on k, v (keys, dim)."""
    s = q.double() @ k.double().t() * q.shape[-1] ** -0.5
    s = s if visible is None else s.masked_fill(~visible, -torch.inf)
    return s.softmax(-1) @ v.double()


def close(found, exact):
    torch.testing.assert_close(found.double(), exact, atol=2e-2, rtol=2e-2)


def test_c51_a_dense_mask_of_more_than_2_to_32_elements():
    n = 65537
    q, k, v = (randn(1, n, 1, 64) for _ in range(3))
    visible = torch.ones(n, n, dtype=torch.bool, device="cuda").tril_()
    by_mask = onchip.attention(q, k, v, mask=onchip.dense(visible), backend="triton")
    by_rule = onchip.attention(q, k, v, mask=onchip.causal(), backend="triton")
    torch.testing.assert_close(by_mask, by_rule, atol=2e-3, rtol=1e-2)
    close(by_rule[0, -8:, 0], truth(q[0, -8:, 0], k[0, :, 0], v[0, :, 0], visible[-8:]))


def test_c54_a_large_batch_of_single_queries():
    q, k, v = (randn(8300, 1, 16, 128).requires_grad_() for _ in range(3))
    out = onchip.attention(q, k, v, backend="triton")
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    torch.testing.assert_close(out, v)
    assert all(g.isfinite().all() for g in grads)


def test_c55_more_than_2_to_31_elements():
    sequences, length = 513, 512
    q, k, v = (randn(sequences * length, 32, 256) for _ in range(3))
    assert q.numel() > 2**31
    cu = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * length
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": length, "max_seqlen_k": length}
    out = onchip.attention_varlen(q, k, v, mask=onchip.causal(), backend="triton", **options)
    rows = slice((sequences - 1) * length, sequences * length)
    causal = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
    close(out[rows, 31], truth(q[rows, 31], k[rows, 31], v[rows, 31], causal))


@pytest.mark.parametrize("shape", [(65536, 1, 1, 8), (1, 1, 65536, 8), (300, 1, 300, 8)])
def test_c56_grids_past_65535(shape):
    q, k, v = (randn(*shape).requires_grad_() for _ in range(3))
    out = onchip.attention(q, k, v, backend="triton")
    torch.testing.assert_close(out, v)
    (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(dv, torch.ones_like(v))


def test_c56_eighty_thousand_packed_sequences():
    n = 80_000
    cu = torch.arange(n + 1, device="cuda", dtype=torch.int32)
    q, k, v = (randn(n, 1, 16) for _ in range(3))
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 1, "max_seqlen_k": 1}
    torch.testing.assert_close(onchip.attention_varlen(q, k, v, backend="triton", **options), v)


@pytest.mark.parametrize("heads_k", [4, 1])
def test_c89_fifty_repeats_have_the_same_bits(heads_k):
    q, k, v = (randn(2, 777, h, 64).requires_grad_() for h in (4, heads_k, heads_k))
    dout = randn(2, 777, 4, 64)

    def once():
        out = onchip.attention(q, k, v, mask=onchip.causal(), dropout=0.1, seed=5, backend="triton")
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    first = once()
    for _ in range(49):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


def test_c91_what_differs_in_a_number_alone_is_honoured():
    q, k, v = (randn(1, 256, 2, 64, dtype=torch.float32) for _ in range(3))
    for options in (
        {"scale": 1.0},
        {"scale": 0.5},
        {"mask": onchip.window(1, 0)},
        {"mask": onchip.window(17, 0)},
        {"score": onchip.Score(softcap=1.0)},
        {"score": onchip.Score(softcap=7.0)},
    ):
        found = onchip.attention(q, k, v, backend="triton", **options)
        torch.testing.assert_close(
            found, onchip.attention(q, k, v, backend="reference", **options), atol=1e-4, rtol=1e-4
        )


def test_a_captured_decoding_step_follows_its_tensors():
    k_cache, v_cache = randn(4, 4096, 2, 64), randn(4, 4096, 2, 64)
    q, k, v = randn(4, 1, 8, 64), randn(4, 1, 2, 64), randn(4, 1, 2, 64)
    lengths = torch.tensor([3, 17, 0, 99], device="cuda", dtype=torch.int32)
    angles = torch.outer(torch.arange(4096, device="cuda"), 1e4 ** -torch.arange(0, 1, 1 / 32, device="cuda"))
    rotary = onchip.Rotary(angles.cos(), angles.sin())

    def step():
        return onchip.attention_with_cache(
            q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths, rotary=rotary, mask=onchip.causal()
        )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    lengths.copy_(torch.tensor([4000, 1, 2, 2048], device="cuda"))
    q.normal_()
    graph.replay()
    torch.testing.assert_close(captured, step(), atol=0, rtol=0)


def test_a_new_length_or_batch_compiles_nothing():
    def run(batch, seqlen):
        q, k, v = (randn(batch, seqlen, 4, 64).requires_grad_() for _ in range(3))
        out, lse = onchip.attention(q, k, v, mask=onchip.causal(), return_lse=True, backend="triton")
        torch.autograd.grad(out.float().sum() + lse.sum(), (q, k, v))

    def compiled():
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in KERNELS]

    run(200, 1000)  # enough heads that no choice of split keys differs
    before = compiled()
    for batch, seqlen in ((100, 1024), (123, 999), (160, 640), (64, 2049)):
        run(batch, seqlen)
    assert compiled() == before


def test_an_unaligned_tensor_after_an_aligned_one_of_the_same_shape():
    shape = (1, 100, 2, 64)
    aligned = [randn(*shape) for _ in range(3)]
    shifted = [
        torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(shape).copy_(x) for x in aligned
    ]
    for _ in range(2):
        first = onchip.attention(*aligned, backend="triton")
        second = onchip.attention(*shifted, backend="triton")
        torch.testing.assert_close(first, second, atol=2e-2, rtol=2e-2)


def test_append_never_writes_outside_of_the_cache():
    """On a GPU the caller vouches for lengths; wrong ones must not reach other memory."""
    whole = randn(3, 64, 2, 64)
    k_cache, v_cache = whole[1:2], randn(1, 64, 2, 64)
    before = whole.clone()
    q, k, v = randn(1, 1, 4, 64), randn(1, 4, 2, 64), randn(1, 4, 2, 64)
    lengths = torch.tensor([62], device="cuda", dtype=torch.int32)  # two of the four fit
    onchip.attention_with_cache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths, mask=onchip.causal())
    torch.cuda.synchronize()
    assert torch.equal(whole[0], before[0]) and torch.equal(whole[2], before[2])
    assert torch.equal(whole[1, 62:], k[0, :2])
