"""FlashAttention-4's varlen and private forms: each option gives what the plain function gives."""

import pytest
import torch

from onchip.compat.flash_attn.cute import interface as fa4
from onchip.compat.flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from test_compat_forms import (
    DESCALES,
    HEADS,
    LENGTHS,
    MORE3,
    caches,
    dense,
    each,
    flat,
    same,
    small,
    tensors,
)

TABLE = torch.randn(HEADS)
OPTIONS4 = {
    "softmax_scale": 0.4,
    "causal": True,
    "window_size": (5, None),
    "learnable_sink": torch.randn(HEADS),
    "softcap": 3.0,
    "num_splits": 2,
    "pack_gqa": True,
    "deterministic": True,
    "mask_mod": lambda b, h, q, k, *aux: (q + k) % 3 != h,
    "score_mod": lambda s, b, h, q, k, *aux: s - 0.1 * (q - k) * (q - k),
    "return_lse": True,
}
AUX4 = {
    "score_mod": lambda s, b, h, q, k, table: s * table[h],
    "score_mod_bwd": lambda s, b, h, q, k, table: (
        2.0 * table[h]
    ),  # not the derivative: to see that it is taken
    "aux_tensors": [TABLE],
    "mask_mod": lambda b, h, q, k, table: table[h] * 0 + k <= q,
}
HINTS4 = {
    "min_seqlen_k": 1,
    "scheduler_metadata": torch.empty(0, dtype=torch.int32),
    "seqlen_k_per_split": 4,
    "disable_scheduler_metadata": True,
}
CASES4 = [*each(OPTIONS4), pytest.param(AUX4, id="aux"), pytest.param({"qv": MORE3["qv"]}, id="qv")]


def varlen4(call, leaves, options):
    options = {n: x.flatten(0, 1) if n == "qv" else x for n, x in options.items()}
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dense(*call(*flat(*leaves), **dict(zip(names, LENGTHS)), **options)[:2])


@pytest.mark.parametrize("options", CASES4)
def test_varlen_form_of_version_4(options):
    leaves = tensors()
    same(
        lambda: varlen4(fa4.flash_attn_varlen_func, leaves, {**HINTS4, **options}),
        lambda: fa4.flash_attn_func(*leaves, **options),
        leaves,
    )


def private4(options):
    stated = {n: x for n, x in options.items() if n not in ("window_size", "deterministic", "score_mod_bwd")}
    if "window_size" in options:
        stated["window_size_left"], stated["window_size_right"] = options["window_size"]
    return stated


TILING4 = {
    "tile_mn": (64, 64),
    "mma_pv_is_rs": True,
    "intra_wg_overlap": True,
    "num_threads": 128,
    "_arch": 90,
}
BACKWARD4 = {"m_block_size": 32, "n_block_size": 32, "num_threads": 128, "pack_gqa": True, "num_stages_Q": 1,
             "num_stages_dO": 1, "SdP_swapAB": True, "dKV_swapAB": True, "dQ_swapAB": True, "AtomLayoutMSdP": 1,
             "AtomLayoutNdKV": 1, "AtomLayoutMdQ": 1, "V_in_regs": True}  # fmt: skip


@pytest.mark.parametrize("options", CASES4)
def test_private_forms_of_version_4(options):
    """_flash_attn_fwd and _flash_attn_bwd, dense and with cu_seqlens, against the public function's autograd."""
    leaves = tensors()
    out, lse = fa4.flash_attn_func(*leaves, **options)
    douts = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), leaves, douts)
    stated, inputs = private4(options), [x.detach() for x in leaves]
    found = fa4._flash_attn_fwd(*inputs, **stated, **TILING4, **HINTS4)
    torch.testing.assert_close(found[:2], (out.detach(), lse.detach()), rtol=1e-5, atol=1e-5)
    packed = varlen4(fa4._flash_attn_fwd, inputs, {**stated, **TILING4})
    torch.testing.assert_close(packed, (out.detach(), lse.detach()), rtol=1e-5, atol=1e-5)
    if "qv" in options:
        return
    refused = ("num_splits", "return_lse", "pack_gqa")
    stated = {n: x for n, x in stated.items() if n not in refused}
    if "score_mod_bwd" in options:
        stated["score_mod_bwd"] = options["score_mod_bwd"]
    given = fa4._flash_attn_bwd(
        *inputs,
        out.detach(),
        douts[0],
        lse.detach(),
        dlse=douts[1],
        deterministic=True,
        **BACKWARD4,
        **stated,
    )
    torch.testing.assert_close(given, grads, rtol=1e-4, atol=1e-5)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    rows, row_lse = flat(*inputs, out.detach(), douts[0]), lse.detach().transpose(0, 1).flatten(1)
    given = fa4._flash_attn_bwd(
        *rows, row_lse, dlse=douts[1].transpose(0, 1).flatten(1), **dict(zip(names, LENGTHS)), **stated
    )
    torch.testing.assert_close(tuple(given), tuple(flat(*grads)), rtol=1e-4, atol=1e-5)


def test_private_forms_of_version_4_with_blocks_pages_and_used_lengths():
    """_flash_attn_fwd with block_sparse_tensors, page_table and seqused; _flash_attn_bwd with seqused."""
    q, k, v = leaves = tensors()
    blocks = BlockSparseTensorsTorch(
        torch.tensor([[[1, 2, 1]]]).int(), torch.tensor([[[[0, 1, 2], [1, 2, 0], [2, 0, 1]]]]).int(), block_size=(4, 4)
    )  # fmt: skip
    want = fa4.flash_attn_func(*leaves, block_sparse_tensors=blocks)
    found = fa4._flash_attn_fwd(*(x.detach() for x in leaves), block_sparse_tensors=blocks)
    torch.testing.assert_close(found[:2], tuple(x.detach() for x in want))
    k_pages, v_pages, place, lengths = caches(pages=True)
    found = fa4._flash_attn_fwd(q.detach(), k_pages, v_pages, seqused_k=lengths, **place)
    want = fa4.flash_attn_varlen_func(q.detach(), k_pages, v_pages, seqused_k=lengths, **place)
    torch.testing.assert_close(found[:2], want)
    used = {"seqused_q": torch.tensor([9, 2]).int(), "seqused_k": torch.tensor([3, 9]).int()}
    out, lse = fa4.flash_attn_varlen_func(q, k, v, **used)
    found = fa4._flash_attn_fwd(*(x.detach() for x in leaves), **used)
    torch.testing.assert_close(found[:2], (out.detach(), lse.detach()))
    dout = torch.randn_like(out)
    given = fa4._flash_attn_bwd(*(x.detach() for x in (q, k, v, out)), dout, lse.detach(), **used)
    torch.testing.assert_close(given, torch.autograd.grad(out, leaves, dout))


def test_descales_of_the_private_form_of_version_4():
    """_flash_attn_fwd of float8."""
    parts = small(*tensors())
    want = fa4._flash_attn_fwd(*(x.to(torch.bfloat16) for x in parts))[0]
    one = fa4._flash_attn_fwd(*parts, **{name: torch.ones(2, HEADS) for name in DESCALES})[0]
    assert torch.equal(one, want)
    twice = fa4._flash_attn_fwd(*parts, v_descale=torch.full((2, HEADS), 2.0))[0]
    torch.testing.assert_close(twice, 2 * want)
