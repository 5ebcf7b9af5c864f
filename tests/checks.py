"""What the case tests share: random inputs, and one call of onchip compared with the oracle, gradients included."""

import torch

import onchip
import oracle

# What runs on a CPU by itself: the native kernels where they were built.
ON_CPU = "native" if onchip.backends.cpu.isa.load().isa else "cpu"


DTYPE = torch.float32  # of tensors whose test does not say


def qkv(batch, seqlen_q, seqlen_k, heads_q, heads_k=None, dim=16, dim_v=None, dtype=None):
    """Random q, k, v in the layout "bshd"."""
    dtype = DTYPE if dtype is None else dtype
    heads_k = heads_q if heads_k is None else heads_k
    dim_v = dim if dim_v is None else dim_v
    q = torch.randn(batch, seqlen_q, heads_q, dim).to(dtype)
    k = torch.randn(batch, seqlen_k, heads_k, dim).to(dtype)
    v = torch.randn(batch, seqlen_k, heads_k, dim_v).to(dtype)
    return q, k, v


def check(backend, q, k, v, *, mask=None, score=None, dropout=0.0, seed=None, add=None, sink=None, **truth):
    """onchip.attention's out, lse and every gradient agree with the oracle's, which gets `truth`.

    `score(add=, sink=)` builds the Score from whichever of the two tensors is given. Returns what onchip gave, as
    `oracle.outputs_and_grads` names it.
    """
    scale = truth.get("scale")

    def call(q, k, v, **tensors):
        return onchip.attention(
            q,
            k,
            v,
            mask=mask,
            score=score(**tensors) if score else None,
            scale=scale,
            dropout=dropout,
            seed=seed,
            return_lse=True,
            backend=backend,
        )

    dout = torch.randn(*q.shape[:3], v.shape[3])
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1])
    tensors = {"q": q, "k": k, "v": v, "add": add, "sink": sink}
    actual = oracle.outputs_and_grads(call, tensors, dout, dlse)
    oracle.assert_close_as_torch(
        actual, q, k, v, dout=dout, dlse=dlse, add=add, sink=sink, dropout=dropout, **truth
    )
    return actual


def check_varlen(
    backend, q, k, v, cu_q, cu_k, *, mask=None, score=None, seqused_q=None, seqused_k=None, **truth
):
    """The same for onchip.attention_varlen; `truth` goes to `oracle.varlen`."""
    lengths = {
        "cu_seqlens_q": torch.tensor(cu_q, dtype=torch.int32),
        "cu_seqlens_k": torch.tensor(cu_k, dtype=torch.int32),
        "seqused_q": None if seqused_q is None else torch.tensor(seqused_q, dtype=torch.int32),
        "seqused_k": None if seqused_k is None else torch.tensor(seqused_k, dtype=torch.int32),
    }

    def call(q, k, v):
        return onchip.attention_varlen(
            q, k, v, **lengths, mask=mask, score=score, return_lse=True, backend=backend
        )

    dout = torch.randn(*q.shape[:2], v.shape[2])
    dlse = torch.randn(q.shape[1], q.shape[0])
    actual = oracle.outputs_and_grads(call, {"q": q, "k": k, "v": v}, dout, dlse)
    oracle.assert_close_as_torch(actual, q, k, v, dout=dout, dlse=dlse, fn=oracle.varlen, **lengths, **truth)
    return actual


def visible_pairs(backend, mask, seqlen_q, seqlen_k, heads=1, batch=1):
    """Which keys each query sees under `mask`, read off the output: bool (batch, heads, seqlen_q, seqlen_k)."""
    q = torch.zeros(batch, seqlen_q, heads, 4)
    k = torch.zeros(batch, seqlen_k, heads, 4)
    v = torch.eye(seqlen_k)[None, :, None, :].expand(batch, -1, heads, -1)
    return onchip.attention(q, k, v, mask=mask, backend=backend).transpose(1, 2) > 0


def assert_empty(out, lse):
    """Rows that see no key: out exactly 0, lse exactly -inf."""
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, float("-inf")))
