"""A library's flash-attention code, unchanged, with onchip.compat behind the names that it imports: transformers'."""

import importlib
import sys

import pytest
import torch

utils = pytest.importorskip("transformers.modeling_flash_attention_utils")

import oracle  # noqa: E402
from onchip.compat import MODULES  # noqa: E402

VERSIONS = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn"}


@pytest.fixture(params=VERSIONS)
def forward(request, monkeypatch):
    """transformers' `_flash_attention_forward` on a machine where it finds this version of flash_attn."""
    for version in VERSIONS:
        found = version == request.param
        monkeypatch.setattr(
            utils, f"is_flash_attn_{version}_available", lambda *args, found=found, **kw: found
        )
    name = VERSIONS[request.param]
    for part in MODULES[name]:
        monkeypatch.setitem(sys.modules, name + part, importlib.import_module(f"onchip.compat.{name}{part}"))
    for state in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn",
                  "_unpad_fn", "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"):  # fmt: skip
        monkeypatch.setattr(utils, state, None)

    def call(q, k, v, mask=None, **options):
        implementation = f"flash_attention_{request.param}"
        return utils._flash_attention_forward(
            q, k, v, mask, q.shape[1], attn_implementation=implementation, **{"is_causal": True, **options}
        )

    return call


def qkv(batch=3, seqlen=12):
    q, k, v = (torch.randn(batch, seqlen, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    return q, k, v


def compare(got, q, k, v, visible, rows=None, **options):
    """Outputs at `rows` and gradients."""
    want = oracle.attention(q, k, v, visible=visible, **options)[0]
    rows = torch.ones(q.shape[:2], dtype=torch.bool) if rows is None else rows
    torch.testing.assert_close(got[rows], want[rows], rtol=1e-5, atol=1e-5)
    up = torch.randn_like(want[rows])
    ours, theirs = (torch.autograd.grad(x[rows], (q, k, v), up, retain_graph=True) for x in (got, want))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options, left",
    [({}, None), ({"sliding_window": 4}, 3), ({"softcap": 2.0, "softmax_scale": 0.5}, None)],
)
def test_equal_lengths(forward, options, left):
    q, k, v = qkv()
    truth = {"softcap": 2.0, "scale": 0.5} if "softcap" in options else {}
    compare(forward(q, k, v, **options), q, k, v, oracle.band(12, 12, left, 0), **truth)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(forward, side):
    """Through unpad_input and pad_input."""
    q, k, v = qkv()
    tokens = torch.arange(12) < torch.tensor([[12], [7], [3]])
    tokens = tokens.flip(1) if side == "left" else tokens
    out = forward(q, k, v, tokens, sliding_window=5)
    visible = oracle.band(12, 12, 4, 0) & tokens[:, None, None]
    compare(out, q, k, v, visible, tokens)
    assert not out[~tokens].any()


def test_decoding_one_token_of_a_padded_batch(forward):
    q, k, v = qkv()
    tokens = torch.arange(12) >= torch.tensor([[0], [4], [9]])
    last = q[:, -1:].detach().requires_grad_()
    compare(forward(last, k, v, tokens), last, k, v, tokens[:, None, None])


def test_packed_by_position_ids(forward):
    """max_seqlen comes as a 0-d tensor here."""
    q, k, v = qkv(batch=1)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    ids = torch.tensor([0] * 5 + [1] * 7)
    compare(
        forward(q, k, v, position_ids=positions),
        q,
        k,
        v,
        oracle.band(12, 12, None, 0) & (ids[:, None] == ids),
    )


def test_encoder(forward):
    q, k, v = qkv()
    compare(forward(q, k, v, is_causal=False), q, k, v, torch.ones(12, 12, dtype=torch.bool))
