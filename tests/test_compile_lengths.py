"""One graph for every length: what stands in for other libraries under torch.compile(dynamic=True), with gradients."""

import pytest
import torch
from torch._dynamo.utils import counters

import onchip
from onchip.compat import flash_attn, flash_attn_interface as fa3
from onchip.compat.flash_attn import cute
from onchip.compat.flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def dense(n):
    return torch.randn(2, n, 4, 8), torch.randn(2, n + 3, 2, 8)


def packed(n):
    return torch.randn(n + 5, 4, 8), torch.randn(n + 5, 2, 8), torch.tensor([0, n, n, n + 5]).int()


def heads_first(n):
    return torch.randn(2, 4, n, 8), torch.randn(2, 4, n + 3, 8)


def paged(q, k, starts):
    table = torch.arange(6, dtype=torch.int32).view(3, 2)
    pages = k[: k.shape[0] // 6 * 6].view(6, -1, 2, 8)
    return flash_attn.flash_attn_varlen_func(
        q, pages, pages, starts, torch.tensor([0, 3, 4, 6]).int(), q.shape[0], 3, block_table=table
    )


ROTARY = RotaryEmbedding(8)

# name -> (call, its tensors for a length)
CALLS = {
    "flash_attn_func": (
        lambda q, k: flash_attn.flash_attn_func(q, k, k, causal=True, window_size=(5, 5), softcap=2.0),
        dense,
    ),
    "with slopes": (
        lambda q, k: flash_attn.flash_attn_func(q, k, k, alibi_slopes=q[0, 0, :, 0].abs()),
        dense,
    ),
    "flash_attn_varlen_func": (
        lambda q, k, cu: flash_attn.flash_attn_varlen_func(q, k, k, cu, cu, len(q), len(k), causal=True),
        packed,
    ),
    "with the longest length as a tensor": (
        lambda q, k, cu: flash_attn.flash_attn_varlen_func(
            q, k, k, cu, cu, cu.diff().max(), cu.diff().max(), causal=True
        ),
        packed,
    ),
    "version 3": (lambda q, k: fa3.flash_attn_func(q, k, k, attention_chunk=4, causal=True), dense),
    "version 3, packed": (
        lambda q, k, cu: fa3.flash_attn_varlen_func(
            q, k, k, cu, cu, len(q), len(k), seqused_k=cu.diff(), causal=True
        ),
        packed,
    ),
    "version 4": (lambda q, k: cute.flash_attn_func(q, k, k, causal=True)[0], dense),
    "version 4, packed": (
        lambda q, k, cu: cute.flash_attn_varlen_func(
            q, k, k, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=len(q), causal=True
        )[0],
        packed,
    ),
    "version 4, dense keys that are used in part": (
        lambda q, k: cute.flash_attn_varlen_func(q, k, k, seqused_k=torch.full((len(q),), 2).int())[0],
        dense,
    ),
    "sdpa": (lambda q, k: onchip.sdpa(q, k, k, is_causal=True), heads_first),
    "sdpa with a mask": (
        lambda q, k: onchip.sdpa(q, k, k, q[..., :1] < k[..., 0].unsqueeze(-2)),
        heads_first,
    ),
    "sdpa of three dimensions": (lambda q, k: onchip.sdpa(q[0], k[0], k[0]), heads_first),
    "partial results": (
        lambda q, k: fa3.flash_attn_combine(
            *(torch.stack(x) for x in zip(*(part(q, k[:, i::2]) for i in (0, 1))))
        )[0],
        dense,
    ),
    "rotary embedding": (lambda q, k: apply_rotary_emb(q, k[0, :, 0, :4], k[1, :, 0, :4]), dense),
    "rotary embedding from a position of each sequence": (
        lambda q, k: apply_rotary_emb(
            q, k[0, :, 0, :4], k[1, :, 0, :4], seqlen_offsets=torch.arange(2) % len(q)
        ),
        dense,
    ),
    "RotaryEmbedding": (
        lambda q, k: torch.cat([x.flatten() for x in ROTARY(q, torch.stack([k[:, 3:]] * 2, 2))]),
        dense,
    ),
    "rotary embedding of packed sequences": (
        lambda q, k, cu: apply_rotary_emb(q, k[:, 0, :4], k[:, 1, :4], cu_seqlens=cu, max_seqlen=len(q)),
        packed,
    ),
}
CACHED = {
    "flash_attn_with_kvcache": (
        lambda q, k: flash_attn.flash_attn_with_kvcache(q, k, k + 1, cache_seqlens=3, causal=True),
        dense,
    ),
    "packed queries": (
        lambda q, k, cu: fa3.flash_attn_with_kvcache(
            q, k.expand(3, -1, -1, -1), k + 1, cache_seqlens=torch.full((3,), 8).int(), cu_seqlens_q=cu,
            max_seqlen_q=len(q), causal=True,
        ),
        lambda n: (packed(n)[0], torch.randn(3, n, 2, 8), packed(n)[2]),
    ),
    "pages": (paged, packed),
}  # fmt: skip


def part(q, k):
    out, lse = fa3.flash_attn_func(q, k, k, return_attn_probs=True)
    return out, lse.transpose(1, 2)


@pytest.mark.parametrize("name", [*CALLS, *CACHED])
def test_one_graph_for_every_length(name):
    call, make = {**CALLS, **CACHED}[name]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for seqlen in (9, 14, 33):
        tensors = make(seqlen)
        leaves = [x.requires_grad_() for x in tensors if x.is_floating_point() and name in CALLS]
        with torch.set_grad_enabled(name in CALLS):
            outs = [f(*tensors) for f in (compiled, call)]
        torch.testing.assert_close(*outs)
        if leaves:
            torch.testing.assert_close(
                *(torch.autograd.grad(out.square().sum(), leaves) for out in outs), rtol=1e-4, atol=1e-5
            )
    assert counters["stats"]["unique_graphs"] == 1
