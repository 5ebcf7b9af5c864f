"""onchip.nn: MultiheadAttention against torch's, SelfAttention against itself in other forms."""

import re

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import onchip
from onchip.nn import MultiheadAttention, SelfAttention


def pair(**options):
    torch_layer = nn.MultiheadAttention(16, 4, **options)
    for p in torch_layer.parameters():
        nn.init.normal_(p, std=0.3)
    layer = MultiheadAttention(16, 4, **options)
    layer.load_state_dict(torch_layer.state_dict())
    return torch_layer, layer


def compare(layers, *inputs, **options):
    """Output, weights if any, and every gradient, each on the scale of its largest value: some are sums that cancel."""
    found = []
    for layer, extra in zip(layers, ({"need_weights": False}, {}), strict=True):
        out, weights = layer(*inputs, **{**extra, **options})
        out.square().sum().backward()
        found.append([out, *([] if weights is None else [weights]), *(p.grad for p in layer.parameters())])
    for theirs, ours in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()  # float32 has 6e-8


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"batch_first": True}, {"kdim": 12, "vdim": 20}])
def test_equals_torch(options):
    layers = pair(**options)
    q, k, v = (
        torch.randn(5, 2, 16),
        torch.randn(7, 2, options.get("kdim", 16)),
        torch.randn(7, 2, options.get("vdim", 16)),
    )
    inputs = [x.transpose(0, 1) if "batch_first" in options else x for x in (q, k, v)]
    compare(layers, *inputs)


def test_without_a_batch():
    layers = pair()
    compare(layers, torch.randn(5, 16), torch.randn(7, 16), torch.randn(7, 16), need_weights=True)
    padding = torch.arange(7) > 4
    compare(layers, torch.randn(5, 16), torch.randn(7, 16), torch.randn(7, 16), key_padding_mask=padding)


@pytest.mark.parametrize("kind", [bool, float])
@pytest.mark.parametrize("shape", [(5, 7), (8, 5, 7)])
def test_masks(kind, shape):
    layers = pair(batch_first=True)
    inputs = torch.randn(2, 5, 16), torch.randn(2, 7, 16), torch.randn(2, 7, 16)
    hidden = torch.rand(shape) < 0.3
    hidden[..., 0] = False
    padding = torch.arange(7) >= torch.tensor([[7], [4]])
    masks = (hidden, padding)
    if kind is float:
        masks = tuple(torch.zeros(m.shape).masked_fill(m, -torch.inf) for m in masks)
    compare(layers, *inputs, attn_mask=masks[0])
    compare(layers, *inputs, attn_mask=masks[0], key_padding_mask=masks[1])
    compare(layers, *inputs, attn_mask=masks[0], need_weights=True)
    compare(layers, *inputs, attn_mask=masks[0], need_weights=True, average_attn_weights=False)


def test_causal():
    layers = pair(batch_first=True)
    x = torch.randn(2, 7, 16)
    hidden = nn.Transformer.generate_square_subsequent_mask(7)
    compare(layers, x, x, x, attn_mask=hidden, is_causal=True)
    alone = layers[1](x, x, x, is_causal=True)[0]
    torch.testing.assert_close(alone, layers[0](x, x, x, attn_mask=hidden)[0], rtol=1e-4, atol=1e-5)


def test_weights_are_not_made_unasked():
    layer = pair()[1]
    x = torch.randn(5, 2, 16)
    assert layer(x, x, x)[1] is None


def test_weights_of_more_keys_than_kernels_hold_values():
    x, hidden = torch.randn(1, 600, 16), torch.randn(600, 600)
    options = {"attn_mask": hidden, "need_weights": True, "average_attn_weights": False}
    want, got = (layer(x, x, x, **options)[1] for layer in pair(batch_first=True))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    got.square().sum().backward()


def test_dropout_in_training_only():
    layer = MultiheadAttention(16, 4, dropout=0.5)
    x = torch.randn(20, 2, 16)
    assert not torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])
    layer.eval()
    assert torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_refusals(option):
    with pytest.raises(NotImplementedError, match=option):
        MultiheadAttention(16, 4, **{option: True})


@pytest.mark.parametrize(
    "options, error, named",
    [
        ({"key_padding_mask": torch.zeros(7, 2).bool()}, ValueError, "key_padding_mask: has shape (7, 2), expected"),
        ({"key_padding_mask": torch.zeros(2, 6).bool()}, ValueError, "key_padding_mask: has shape (2, 6)"),
        ({"key_padding_mask": torch.zeros(14)}, ValueError, "key_padding_mask: has shape (14,)"),
        ({"key_padding_mask": torch.zeros(2, 7).byte()}, TypeError, "key_padding_mask: got torch.uint8"),
        ({"attn_mask": torch.zeros(7, 5)}, ValueError, "attn_mask: has shape (7, 5), expected (5, 7) or (8, 5, 7)"),
        ({"attn_mask": torch.zeros(1, 7)}, ValueError, "attn_mask: has shape (1, 7)"),
        ({"attn_mask": torch.zeros(4, 5, 7)}, ValueError, "attn_mask: has shape (4, 5, 7)"),
        ({"attn_mask": torch.zeros(5, 7).int()}, TypeError, "attn_mask: got torch.int32"),
        ({"key": torch.zeros(7, 16)}, ValueError, "key: has shape (7, 16), expected 3 dims"),
    ],
)  # fmt: skip
def test_masks_of_other_shapes_or_dtypes_are_errors(options, error, named):
    """None is reshaped to what it is not: (seqlen_k, batch) has as many numbers as (batch, seqlen_k)."""
    inputs = {"query": torch.zeros(5, 2, 16), "key": torch.zeros(7, 2, 16), "value": torch.zeros(7, 2, 16)}
    with pytest.raises(error, match=re.escape(named)):
        MultiheadAttention(16, 4)(**{**inputs, **options})


def test_masks_are_one_graph_for_every_length():
    torch._dynamo.reset()
    layer = MultiheadAttention(16, 4)
    compiled = torch.compile(layer, backend=(seen := CompileCounter()), fullgraph=True, dynamic=True)
    for seqlen_q, seqlen_k in ((5, 7), (9, 12), (11, 8)):
        q, k = torch.randn(seqlen_q, 2, 16), torch.randn(seqlen_k, 2, 16)
        masks = {
            "key_padding_mask": torch.zeros(2, seqlen_k).bool(),
            "attn_mask": torch.randn(8, seqlen_q, seqlen_k),
        }
        masks["key_padding_mask"][1, 5:] = True
        torch.testing.assert_close(compiled(q, k, k, **masks)[0], layer(q, k, k, **masks)[0])
    assert seen.frame_count == 1


LAYERS = {
    "plain": {},
    "grouped": {"heads_k": 2},
    "window": {"heads_k": 1, "window": (3, 0)},
    "no rotary": {"rotary_base": None, "bias": True},
}


@pytest.mark.parametrize("name", LAYERS)
def test_decoding_with_a_cache_equals_the_whole_sequence(name):
    layer = SelfAttention(32, 4, **LAYERS[name])
    x = torch.randn(2, 12, 32)
    want = layer(x)
    cache = layer.cache(batch=2, capacity=15)
    with torch.no_grad():
        steps = [layer(part, cache=cache) for part in x.split([5, 1, 4, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), want, rtol=1e-4, atol=1e-5)
    assert cache.lengths.tolist() == [12, 12]
    with torch.no_grad(), pytest.raises(ValueError, match="capacity 15"):
        layer(x, cache=cache)


@pytest.mark.parametrize("name", LAYERS)
def test_packed_sequences_equal_single_ones(name):
    layer = SelfAttention(32, 4, **LAYERS[name])
    x = torch.randn(12, 32)
    starts = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    out = layer(x, cu_seqlens=starts)
    for part in (slice(0, 5), slice(5, 12)):
        torch.testing.assert_close(out[part], layer(x[part][None])[0], rtol=1e-4, atol=1e-5)


def test_a_shift_of_all_positions_changes_nothing():
    """Rotary embedding makes scores depend on distances alone."""
    layer = SelfAttention(32, 4, window=(3, 0))
    x = torch.randn(1, 12, 32)
    torch.testing.assert_close(layer(x)[:, 6:], layer(x[:, 3:])[:, 3:], rtol=1e-4, atol=1e-5)
    order = torch.tensor([2, 1, 0, *range(3, 12)])
    assert not torch.allclose(layer(x)[:, 3], layer(x[:, order])[:, 3], atol=1e-3)


def test_directions_and_gradients():
    x = torch.randn(2, 9, 32, requires_grad=True)
    later = torch.autograd.grad(SelfAttention(32, 4)(x)[:, 3].sum(), x)[0][:, 4:]
    assert not later.any()
    both = SelfAttention(32, 4, is_causal=False)
    assert torch.autograd.grad(both(x)[:, 3].sum(), x)[0][:, 4:].any()
    both(x).sum().backward()
    assert all(p.grad is not None for p in both.parameters())


@pytest.mark.parametrize(
    "options, named",
    [
        ((30, 4), "dim: got 30"),
        ((32, 4, 3), "heads_k: got 3"),
        ((12, 4), "heads of 3"),
        ((32, 0), "heads: got 0"),
        ((32, -4), "heads: got -4"),
        ((32, 4.0), "heads: got 4.0"),
        ((32, 4, 0), "heads_k: got 0"),
    ],
)
def test_errors(options, named):
    with pytest.raises(ValueError, match=named):
        SelfAttention(*options)


def test_errors_of_a_call():
    layer, x = SelfAttention(32, 4), torch.randn(2, 5, 32)
    with pytest.raises(TypeError, match="window: got 3"):
        SelfAttention(32, 4, window=3)
    with pytest.raises(ValueError, match=r"x: has shape \(5, 32\), expected \(batch"):
        layer(x[0])
    with pytest.raises(ValueError, match=r"x: has shape \(2, 5, 32\), expected \(total"):
        layer(x, cu_seqlens=torch.tensor([0, 5]))
    for rotary_base in (10000.0, None):
        layer = SelfAttention(32, 4, rotary_base=rotary_base)
        with pytest.raises(ValueError, match="cu_seqlens_q: ends at 4, expected the total 5"):
            layer(x[0], cu_seqlens=torch.tensor([0, 2, 4]))


def test_dropout_and_layouts_that_do_not_go_together():
    layer = SelfAttention(32, 4, dropout=0.5)
    x = torch.randn(2, 12, 32)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    with pytest.raises(NotImplementedError, match="cu_seqlens"):
        layer(x, cu_seqlens=torch.tensor([0, 12]), cache=layer.cache(2, 12))
    assert isinstance(onchip.nn.SelfAttention, type)
