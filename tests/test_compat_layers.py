"""flash_attn.bert_padding, layers.rotary and ops.triton.rotary: what they return, and their gradients."""

import pytest
import torch

from onchip.compat.flash_attn import bert_padding
from onchip.compat.flash_attn.layers import rotary
from onchip.compat.flash_attn.ops.triton.rotary import apply_rotary
from test_compat_flash_attn import turned

MASK = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1]])


@pytest.mark.parametrize("tail", [(), (5,), (2, 3)])
def test_unpad_and_pad_are_inverse_at_tokens(tail):
    x = torch.randn(3, 4, *tail, requires_grad=True)
    rows, indices, starts, longest, used = bert_padding.unpad_input(x, MASK)
    assert indices.tolist() == [0, 1, 2, 8, 11]
    assert starts.tolist() == [0, 3, 3, 5] and starts.dtype is torch.int32 and longest == 3
    assert used.tolist() == [3, 0, 2] and used.dtype is torch.int32
    back = bert_padding.pad_input(rows, indices, 3, 4)
    at = MASK.bool().view(3, 4, *(1,) * len(tail))
    assert torch.equal(back, torch.where(at, x, 0.0))
    back.square().sum().backward()
    assert torch.equal(x.grad, torch.where(at, 2 * x.detach(), 0.0))


def test_unpad_keeps_unused_places():
    x = torch.randn(3, 4, 5)
    unused = torch.tensor([[0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]])
    rows, indices, starts, longest, used = bert_padding.unpad_input(x, MASK, unused)
    assert starts.tolist() == [0, 4, 5, 7] and longest == 4 and used.tolist() == [3, 0, 2]
    assert torch.equal(rows, x.flatten(0, 1)[indices])


def test_unpad_concatenated_sequences():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.randn(3, 6, 2)
    rows, indices, starts, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert starts.tolist() == [0, 2, 5, 8, 10, 16] and longest == 6
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, *range(12, 18)]
    assert torch.equal(rows, x.flatten(0, 1)[indices])


def test_index_functions():
    x, at = torch.randn(4, 3, requires_grad=True), torch.tensor([3, 1])
    assert torch.equal(bert_padding.index_first_axis(x, at), x[at])
    put = bert_padding.index_put_first_axis(x[:2], at, 5)
    assert put.shape == (5, 3) and torch.equal(put[at], x[:2]) and not put[[0, 2, 4]].any()
    rows, whole = bert_padding.index_first_axis_residual(x, at)
    assert torch.equal(rows, x[at]) and torch.equal(whole, x)
    assert bert_padding.unpad_input(torch.randn(2, 3), torch.zeros(2, 3))[3] == 0


def tables(positions=20, half=4):
    angle = torch.rand(positions, half) * 6
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "offset", [0, 3, torch.tensor([5, 0]), torch.tensor(2)], ids=["0", "int", "tensor", "0-d tensor"]
)
def test_apply_rotary_emb(interleaved, offset):
    cos, sin = tables()
    x = torch.randn(2, 6, 3, 16, requires_grad=True)
    out = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offset)
    first = torch.as_tensor(offset).expand(2).tolist()
    want = torch.stack([turned(x[b], cos, sin, first[b], interleaved) for b in range(2)])
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    up = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(y, x, up)[0] for y in (out, want))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    # The kernel entry point turns back with conjugate.
    y = apply_rotary(x.detach(), cos, sin, offset, interleaved=interleaved)
    torch.testing.assert_close(y, out.detach())
    back = apply_rotary(y, cos, sin, offset, interleaved=interleaved, inplace=True, conjugate=True)
    assert back is y
    torch.testing.assert_close(y, x.detach(), rtol=1e-5, atol=1e-5)


def test_apply_rotary_emb_of_packed_sequences_and_in_place():
    cos, sin = tables()
    x, starts = torch.randn(9, 3, 16), torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    offsets = torch.tensor([2, 0, 7])
    out = rotary.apply_rotary_emb_func(x, cos, sin, seqlen_offsets=offsets, cu_seqlens=starts, max_seqlen=5)
    torch.testing.assert_close(out[:4], turned(x[:4], cos, sin, 2, False))
    torch.testing.assert_close(out[4:], turned(x[4:], cos, sin, 7, False))
    y = x.clone()
    assert rotary.apply_rotary_emb(y, cos, sin, inplace=True, seqlen_offsets=offsets, cu_seqlens=starts) is y
    assert torch.equal(y, out)
    kernel = apply_rotary(x, cos, sin, offsets, cu_seqlens=starts, max_seqlen=5)
    assert torch.equal(kernel, out)
    with pytest.raises(ValueError, match=r"x: has shape .* with cu_seqlens"):
        rotary.apply_rotary_emb(x[None], cos, sin, cu_seqlens=starts)
    with pytest.raises(ValueError, match=r"x: has shape \(9, 3, 16\), expected \(batch"):
        rotary.apply_rotary_emb(x, cos, sin)
    with pytest.raises(ValueError, match="cos has 20 positions"):
        rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=17, cu_seqlens=starts)


@pytest.mark.parametrize("interleaved", [False, True])
def test_torch_form(interleaved):
    cos, sin = tables(6)
    x = torch.randn(2, 6, 3, 16)
    want = rotary.apply_rotary_emb(x, cos, sin, interleaved)
    torch.testing.assert_close(rotary.apply_rotary_emb_torch(x, cos, sin, interleaved), want)
    own = rotary.apply_rotary_emb_torch(
        x, torch.stack([cos, cos * 0 + 1]), torch.stack([sin, sin * 0]), interleaved
    )
    torch.testing.assert_close(own[0], want[0])
    torch.testing.assert_close(own[1], x[1])
    quarter = rotary.apply_rotary_emb(x, torch.zeros(6, 8), torch.ones(6, 8), interleaved)
    torch.testing.assert_close(quarter, rotary.rotate_half(x, interleaved))


@pytest.mark.parametrize("grouped", [False, True])
def test_qkv_and_kv_in_place(grouped):
    cos, sin = tables()
    own = tables()
    q, k, v = (
        torch.randn(2, 6, 4, 16),
        torch.randn(2, 6, 2 if grouped else 4, 16),
        torch.randn(2, 6, 2 if grouped else 4, 16),
    )
    qkv = torch.cat([q, k, v], 2) if grouped else torch.stack([q, k, v], 2)
    heads = 4 if grouped else None
    leaf = qkv.clone().requires_grad_()
    out = rotary.apply_rotary_emb_qkv_(leaf * 1, cos, sin, *own, seqlen_offsets=2, num_heads_q=heads)
    parts = out.split([4, 2, 2], 2) if grouped else out.unbind(2)
    torch.testing.assert_close(parts[0], rotary.apply_rotary_emb(q, cos, sin, seqlen_offsets=2))
    torch.testing.assert_close(parts[1], rotary.apply_rotary_emb(k, *own, seqlen_offsets=2))
    torch.testing.assert_close(parts[2], v)
    if grouped:
        with pytest.raises(ValueError, match="num_heads_q"):
            rotary.apply_rotary_emb_qkv_(qkv, cos, sin)
    up = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, leaf, up)
    ups, grads = (x.split([4, 2, 2], 2) if grouped else x.unbind(2) for x in (up, grad))
    torch.testing.assert_close(grads[0], apply_rotary(ups[0], cos, sin, 2, conjugate=True))
    torch.testing.assert_close(grads[1], apply_rotary(ups[1], *own, 2, conjugate=True))
    torch.testing.assert_close(grads[2], ups[2])
    kv = torch.stack([k, v], 2)
    assert rotary.apply_rotary_emb_kv_(kv, cos, sin, True, seqlen_offsets=2) is kv
    torch.testing.assert_close(kv[:, :, 0], rotary.apply_rotary_emb(k, cos, sin, True, seqlen_offsets=2))
    assert torch.equal(kv[:, :, 1], v)


def test_rotary_embedding_s_tables_have_flash_attn_s_names():
    """Subclasses in models read them."""
    layer = rotary.RotaryEmbedding(8, base=100.0, device="cpu")
    assert (layer._seq_len_cached, layer._cos_cached, layer._sin_k_cached) == (0, None, None)
    layer._update_cos_sin_cache(9, device=torch.device("cpu"), dtype=torch.float64)
    angle = torch.arange(9)[:, None] / 100.0 ** (torch.arange(0, 8, 2) / 8)
    assert layer._seq_len_cached == 9 and layer._cos_k_cached is None
    torch.testing.assert_close(layer._cos_cached, angle.cos().double())
    torch.testing.assert_close(layer._sin_cached, angle.sin().double())
    kept = layer._cos_cached
    layer._update_cos_sin_cache(5, device=torch.device("cpu"), dtype=torch.float64)
    assert layer._cos_cached is kept
    scaled = rotary.RotaryEmbedding(8, scale_base=512, device="cpu")
    scaled(torch.randn(1, 4, 3, 2, 8))
    assert scaled._cos_k_cached.shape == scaled._sin_k_cached.shape == (4, 4)


def test_rotary_embedding_module():
    layer = rotary.RotaryEmbedding(8, base=100.0, device="cpu")
    angle = torch.arange(9)[:, None] / 100.0 ** (torch.arange(0, 8, 2) / 8)
    q, k, v = torch.randn(3, 2, 6, 4, 16)
    out = layer(torch.stack([q, k, v], 2), seqlen_offset=3)
    torch.testing.assert_close(out[0, :, 0], turned(q[0], angle.cos(), angle.sin(), 3, False))
    torch.testing.assert_close(out[1, :, 1], turned(k[1], angle.cos(), angle.sin(), 3, False))
    got_q, got_kv = layer(q, torch.stack([k, v], 2), seqlen_offset=torch.tensor([3, 0]), max_seqlen=9)
    torch.testing.assert_close(got_q[1], turned(q[1], angle.cos(), angle.sin(), 0, False))
    torch.testing.assert_close(got_kv[0, :, 0], turned(k[0], angle.cos(), angle.sin(), 3, False))
    assert not list(layer.state_dict())
    grouped = layer(torch.cat([q, k[:, :, :2], v[:, :, :2]], 2), num_heads_q=4)
    torch.testing.assert_close(grouped[0, :, :4], turned(q[0], angle.cos(), angle.sin(), 0, False))
    torch.testing.assert_close(grouped[0, :, 4:6], turned(k[0, :, :2], angle.cos(), angle.sin(), 0, False))
    assert torch.equal(grouped[:, :, 6:], v[:, :, :2])
    pairs = rotary.RotaryEmbedding(8, base=100.0, interleaved=True)(torch.stack([q, k, v], 2))
    torch.testing.assert_close(pairs[0, :, 0], turned(q[0], angle.cos(), angle.sin(), 0, True))
    half = rotary.RotaryEmbedding(8, base=100.0).bfloat16()
    angles = half._update_cos_sin_cache(9, torch.device("cpu"), torch.float32)
    torch.testing.assert_close(angles[0], angle.cos())  # the module's cast does not touch its frequencies


def test_rotary_embedding_with_scale_keeps_products_of_equal_positions():
    """XPos scales q and k inversely: the product of a pair at one position is the unscaled one."""
    layer = rotary.RotaryEmbedding(16, scale_base=512)
    q, k, v = torch.randn(3, 1, 6, 2, 16)
    out = layer(torch.stack([q, k, v], 2))
    torch.testing.assert_close((out[:, :, 0] * out[:, :, 1]).sum(-1), (q * k).sum(-1), rtol=1e-4, atol=1e-5)
