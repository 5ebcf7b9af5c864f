"""onchip inside diffusers: tiny random diffusion transformers against torch's attention."""

import pytest
import torch

diffusers = pytest.importorskip("diffusers")

from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn  # noqa: E402

from onchip.integrations import diffusers as integration, sdpa as sdpa_module  # noqa: E402
from onchip.integrations.sdpa import replace_sdpa  # noqa: E402


@pytest.fixture(autouse=True)
def registered():
    integration.register()
    with attention_backend(
        "native"
    ):  # a model's set_attention_backend sets it for all calls: this sets it back
        yield


@pytest.fixture
def calls(monkeypatch):
    seen, attention = [], sdpa_module.attention
    monkeypatch.setattr(sdpa_module, "attention", lambda *a, **kw: seen.append(kw) or attention(*a, **kw))
    return seen


def flux():
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([1.0, 0.3]),
        "img_ids": torch.randint(0, 4, (16, 3)).float(),
        "txt_ids": torch.zeros(6, 3),
    }
    return model, inputs


def dit():
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([1, 7]),
        "class_labels": torch.tensor([3, 5]),
    }
    return model, inputs


def run(model, inputs):
    """Output and every parameter's gradient."""
    model.zero_grad()
    out = model(**inputs).sample
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_near(ours, theirs):
    """Within float32's error on the scale of each; gradients that are 0 but for rounding have none."""
    largest = max(b.abs().max().item() for b in theirs[1:])
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-4 * max(b.abs().max().item(), 1e-2 * largest)


def randomized(model):
    for parameter in model.parameters():  # some start at zero and would hide everything behind them
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def test_set_attention_backend(calls):
    model, inputs = flux()
    theirs = run(randomized(model), inputs)
    assert not calls
    model.set_attention_backend("onchip")
    assert_near(run(model, inputs), theirs)
    assert len(calls) == 2  # a block of both streams, and one of the joined stream


def test_models_that_call_torch_themselves(calls):
    model, inputs = dit()
    theirs = run(randomized(model), inputs)
    with replace_sdpa():
        ours = run(model, inputs)
    assert_near(ours, theirs)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", [bool, float])
@pytest.mark.parametrize("shape", [(2, 9), (2, 1, 1, 9), (7, 9)])
def test_masks(kind, shape):
    q, k, v = torch.randn(2, 7, 4, 8), torch.randn(2, 9, 4, 8), torch.randn(2, 9, 4, 8)
    mask = torch.rand(shape)
    mask = mask > 0.3 if kind is bool else mask
    theirs = dispatch_attention_fn(q, k, v, mask)
    with attention_backend("onchip"):
        ours = dispatch_attention_fn(q, k, v, mask)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_options():
    q, k = torch.randn(2, 7, 4, 8), torch.randn(2, 7, 2, 8)
    theirs = dispatch_attention_fn(q, k, k, is_causal=True, scale=0.3, enable_gqa=True)
    ours = dispatch_attention_fn(q, k, k, is_causal=True, scale=0.3, enable_gqa=True, backend="onchip")
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="context parallelism"):
        dispatch_attention_fn(q, k, k, enable_gqa=True, backend="onchip", parallel_config=object())


def test_registering_twice_and_under_another_name():
    integration.register()
    integration.register("onchip2")
    with attention_backend("onchip2"):
        pass
    names = [member.value for member in diffusers.models.attention_dispatch.AttentionBackendName]
    assert names.count("onchip") == names.count("onchip2") == 1
