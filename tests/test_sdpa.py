"""onchip.sdpa against torch's scaled_dot_product_attention, and replace_sdpa on modules."""

import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import oracle
from onchip.integrations.sdpa import replace_sdpa, sdpa

rand = torch.randn
TORCH = F.scaled_dot_product_attention


def compare(q, k, v, attn_mask=None, **options):
    """Outputs and gradients, the mask's too, equal torch's in shape and value."""
    tensors = [x.requires_grad_() for x in (q, k, v)]
    if attn_mask is not None and attn_mask.is_floating_point() and type(attn_mask) is torch.Tensor:
        tensors.append(attn_mask.requires_grad_())
    outs = [f(q, k, v, attn_mask, **options) for f in (TORCH, sdpa)]
    assert outs[0].shape == outs[1].shape
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)
    up = torch.randn_like(outs[0])
    for theirs, ours in zip(*(torch.autograd.grad(o, tensors, up) for o in outs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "q, k, v",
    [
        ((5, 8), (7, 8), (7, 6)),
        ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
        ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
        ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)),
        ((2, 4, 5, 8), (1, 4, 7, 8), (2, 1, 7, 8)),  # leading dimensions broadcast
        ((4, 5, 8), (2, 1, 7, 8), (1, 7, 8)),
        ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_shapes(q, k, v, is_causal):
    compare(rand(q), rand(k), rand(v), is_causal=is_causal)


@pytest.mark.parametrize("lead", [(), (2,), (3, 2)])
def test_enable_gqa(lead):
    compare(rand(*lead, 4, 5, 8), rand(*lead, 2, 7, 8), rand(*lead, 2, 7, 8), enable_gqa=True)
    compare(rand(*lead, 4, 5, 8), rand(*lead, 2, 7, 8), rand(*lead, 2, 7, 8), rand(4, 5, 7), enable_gqa=True)


@pytest.mark.parametrize("heads_k, heads_v", [(2, 3), (6, 1), (3, 6)])
def test_enable_gqa_with_other_heads_of_keys_than_of_values(heads_k, heads_v):
    compare(rand(2, 6, 5, 8), rand(2, heads_k, 7, 8), rand(2, heads_v, 7, 4), enable_gqa=True)
    compare(rand(6, 5, 8), rand(heads_k, 7, 8), rand(heads_v, 7, 4), enable_gqa=True)


@pytest.mark.parametrize("kind", [bool, float])
@pytest.mark.parametrize(
    "lead, mask", [((2, 4), (5, 7)), ((2, 4), (2, 1, 5, 7)), ((3,), (1, 7)), ((), (5, 7))]
)
def test_attn_mask_beside_is_causal(lead, mask, kind):
    """Both hold. Torch's fused CPU kernel does so without gradients; its others refuse what one mask can say."""
    q, k = rand(*lead, 5, 8), rand(*lead, 7, 8)
    attn_mask, below, tensors = rand(mask), torch.ones(5, 7).tril().bool(), [q, k]
    if kind is bool:
        attn_mask = attn_mask > -0.5
        attn_mask[..., 0] = True
    else:
        tensors.append(attn_mask)
    for x in tensors:
        x.requires_grad_()
    both = attn_mask & below if kind is bool else attn_mask.masked_fill(~below, -math.inf)
    theirs, ours = TORCH(q, k, k, both), sdpa(q, k, k, attn_mask, is_causal=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    up = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(out, tensors, up) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    if len(lead) == 2:
        with torch.no_grad():
            fused = TORCH(q, k, k, attn_mask.detach(), is_causal=True)
            torch.testing.assert_close(fused, ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [bool, float])
@pytest.mark.parametrize(
    "q, mask",
    [
        ((2, 4, 5, 8), (2, 4, 5, 7)),
        ((2, 4, 5, 8), (2, 1, 5, 7)),
        ((2, 4, 5, 8), (4, 5, 7)),
        ((2, 4, 5, 8), (5, 7)),
        ((2, 4, 5, 8), (1, 7)),
        ((3, 5, 8), (3, 5, 7)),
        ((3, 5, 8), (5, 7)),
        ((5, 8), (5, 7)),
        ((2, 3, 4, 5, 8), (3, 1, 5, 7)),
    ],
)
def test_attn_mask(q, mask, kind):
    attn_mask = rand(mask)
    if kind is bool:
        attn_mask = attn_mask > -0.5
        attn_mask[..., 0] = True
    k = (*q[:-2], 7, 8)
    compare(rand(q), rand(k), rand(k), attn_mask)


def test_masks_of_minus_infinity_and_rows_without_keys():
    q, k = rand(2, 4, 5, 8), rand(2, 4, 7, 8)
    seen = rand(5, 7) > 0
    seen[2] = False
    for mask in (seen, torch.zeros(5, 7).masked_fill(~seen, -torch.inf)):
        out = sdpa(q, k, k, mask)
        assert not out[:, :, 2].any()
        torch.testing.assert_close(out, TORCH(q, k, k, mask).nan_to_num(0.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [causal_upper_left, causal_lower_right])
def test_causal_biases_of_torch(build):
    q, k = rand(2, 4, 5, 8), rand(2, 4, 7, 8)
    want = TORCH(q, k, k, build(5, 7))
    torch.testing.assert_close(sdpa(q, k, k, build(5, 7)), want, rtol=1e-4, atol=1e-5)


def test_scale():
    compare(rand(2, 4, 5, 8), rand(2, 4, 7, 8), rand(2, 4, 7, 8), scale=0.3)
    q, k, v = rand(2, 4, 5, 8), rand(2, 4, 7, 8), rand(2, 4, 7, 8)
    assert torch.equal(sdpa(q, k, v, scale=torch.tensor(0.5)), sdpa(q, k, v, scale=0.5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    q, k, v = (rand(2, 4, n, 16).to(dtype) for n in (9, 13, 13))
    out = sdpa(q, k, v, is_causal=True)
    rows = (x.transpose(1, 2) for x in (q, k, v))
    oracle.assert_close_as_torch(
        {"out": out.transpose(1, 2)}, *rows, visible=oracle.band(9, 13, None, 0, shift=0)
    )


def test_dropout():
    q = rand(1, 2, 64, 8)
    v = torch.eye(64).expand(1, 2, -1, -1)
    torch.manual_seed(1)
    once = sdpa(q, q, v, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(sdpa(q, q, v, dropout_p=0.5), once)
    assert 0.4 < (once == 0).float().mean() < 0.6


@pytest.mark.parametrize(
    "options, error, named",
    [
        ({"attn_mask": torch.ones(5, 7).long()}, TypeError, "attn_mask: has dtype"),
        ({"attn_mask": torch.ones(5, 6).bool()}, ValueError, "(2, 4, 5, 7)"),
        ({"dropout_p": 1.5}, ValueError, "dropout"),
        ({"key": rand(3, 4, 7, 8)}, ValueError, "leading dimensions (2, 4), (3, 4)"),
        ({"key": rand(2, 2, 7, 8), "value": rand(2, 2, 7, 8)}, ValueError, "enable_gqa=True"),
        ({"value": [1.0]}, TypeError, "value: got list"),
        ({"key": rand(8)}, ValueError, "key: has shape (8,)"),
        (
            {"query": rand(5, 8), "key": rand(7, 8), "value": rand(7, 8), "enable_gqa": True},
            ValueError,
            "enable_gqa",
        ),
    ],
)
def test_errors(options, error, named):
    inputs = {"query": rand(2, 4, 5, 8), "key": rand(2, 4, 7, 8), "value": rand(2, 4, 7, 8)}
    with pytest.raises(error) as raised:
        sdpa(**{**inputs, **options})
    assert named in str(raised.value)


@pytest.mark.parametrize(
    "q, k", [((0, 4, 5, 8), (0, 4, 7, 8)), ((2, 4, 5, 8), (2, 4, 0, 8)), ((0, 5, 8), (0, 5, 8))]
)
def test_empty_inputs(q, k):
    out = sdpa(rand(q), rand(k), rand(k))
    assert out.shape == q and not out.any()


def test_nested_tensors_are_refused():
    x = torch.nested.nested_tensor([rand(2, 3, 8), rand(2, 5, 8)], layout=torch.jagged)
    with pytest.raises(NotImplementedError, match="attention_varlen"):
        sdpa(x, x, x)


@pytest.fixture
def calls(monkeypatch):
    from onchip.integrations import sdpa as module

    seen, attention = [], module.attention
    monkeypatch.setattr(module, "attention", lambda *a, **kw: seen.append(kw) or attention(*a, **kw))
    return seen


def test_masks_stay_as_small_as_they_are(calls):
    """With fewer key heads, too: a mask that is the same for all heads is sorted into tiles once."""
    seen = rand(5, 7) > -0.5
    out = sdpa(rand(2, 4, 5, 8), rand(2, 2, 7, 8), rand(2, 2, 7, 8), seen, enable_gqa=True)
    assert out.shape == (2, 4, 5, 8)
    assert calls[0]["mask"].tensors()[0].numel() == 35


def test_replace_reaches_every_caller(calls):
    from torch.nn.functional import scaled_dot_product_attention as imported  # noqa: F401

    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = rand(2, 9, 16)
    with torch.no_grad():  # where torch takes its fused path, which calls no SDPA
        want = layer(x)
        with replace_sdpa():
            got = layer(x)
    assert len(calls) == 1
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    with replace_sdpa():
        thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(x, x, x))
        thread.start()
        thread.join()
        globals()["TORCH"](x, x, x)  # this module's own name for torch's function
    assert len(calls) == 3
    F.scaled_dot_product_attention(x, x, x)
    TORCH(x, x, x)
    assert len(calls) == 3 and F.scaled_dot_product_attention is TORCH


def test_a_module_imported_meanwhile_gets_torchs_function_back(tmp_path, monkeypatch):
    (tmp_path / "imported_meanwhile.py").write_text(
        "from torch.nn.functional import scaled_dot_product_attention as attend\nfrom onchip import sdpa\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    torchs = F.scaled_dot_product_attention
    with replace_sdpa():
        import imported_meanwhile

        assert imported_meanwhile.attend is not torchs
    assert imported_meanwhile.attend is torchs and imported_meanwhile.sdpa is sdpa
    assert F.scaled_dot_product_attention is torchs


def test_replace_is_undone_after_an_error():
    before = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(KeyError), replace_sdpa():
        raise KeyError
    assert F.scaled_dot_product_attention is TORCH and torch.backends.mha.get_fastpath_enabled() == before


def test_replace_can_be_nested(calls):
    x = rand(1, 2, 5, 8)
    with replace_sdpa():
        with replace_sdpa():
            F.scaled_dot_product_attention(x, x, x)
        F.scaled_dot_product_attention(x, x, x)
    assert len(calls) == 2
