"""Tile lists follow their mask: its changes, also where torch counts none, and other bounds on the lengths."""

import torch

import onchip

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_mask_made_in_inference_mode_is_followed():
    q, k, v = (torch.randn(1, 40, 2, 16, device=DEVICE) for _ in range(3))
    with torch.inference_mode():
        visible = torch.zeros(40, 40, dtype=torch.bool, device=DEVICE)
        visible[:, :1] = True
        mask = onchip.dense(visible)
        onchip.attention(q, k, v, mask=mask, backend="triton")
        visible[:] = True
        out = onchip.attention(q, k, v, mask=mask, backend="triton")
        torch.testing.assert_close(out, onchip.attention(q, k, v, backend="reference"), atol=1e-5, rtol=1e-4)


def test_few_lists_are_kept():
    mask = onchip.where(lambda b, h, q, k: (q + k) % 3 == 0)
    for n in range(16, 48):
        x = torch.randn(1, n, 1, 16, device=DEVICE)
        onchip.attention(x, x, x, mask=mask, backend="triton")
    assert len(mask.cache) <= 16
