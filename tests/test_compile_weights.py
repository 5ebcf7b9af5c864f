"""Softmax weights from a compiled function that is differentiated, and flash_attn's private entry points in a graph."""

import pytest
import torch
from torch import library as registry
from torch._dynamo.utils import counters

import onchip
from onchip import nn, spec
from onchip.backends.cpu import native
from onchip.compat import flash_attn, flash_attn_interface
from onchip.compat.flash_attn import flash_attn_interface as fa

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LAYER = nn.MultiheadAttention(32, 4, batch_first=True)
OPTIONS = {"causal": True, "softcap": 5.0, "return_attn_probs": True}


def boundaries(seqlen):
    return torch.tensor([0, seqlen, seqlen, seqlen + 5], dtype=torch.int32)


def limit(x):
    """max_seqlen as callers have it: a size, here of a tensor that is as long as all sequences together."""
    return x.shape[0]


# name -> (a call that can return weights, its tensors for a length)
CALLS = {
    "flash_attn_func": (
        lambda q, k, v, **o: flash_attn.flash_attn_func(q, k, v, **o),
        lambda n: (torch.randn(2, n, 4, 8), torch.randn(2, n + 3, 2, 8), torch.randn(2, n + 3, 2, 8)),
    ),
    "flash_attn_kvpacked_func": (
        lambda q, kv, **o: flash_attn.flash_attn_kvpacked_func(q, kv, **o),
        lambda n: (torch.randn(2, n, 4, 8), torch.randn(2, n + 3, 2, 2, 8)),
    ),
    "flash_attn_qkvpacked_func": (
        lambda qkv, **o: flash_attn.flash_attn_qkvpacked_func(qkv, **o),
        lambda n: (torch.randn(2, n, 3, 4, 8),),
    ),
    "flash_attn_varlen_func": (
        lambda q, k, v, cu, **o: flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, limit(q), limit(k), **o),
        lambda n: (torch.randn(n + 5, 4, 8), *torch.randn(2, n + 5, 2, 8), boundaries(n)),
    ),
    "flash_attn_varlen_kvpacked_func": (
        lambda q, kv, cu, **o: flash_attn.flash_attn_varlen_kvpacked_func(
            q, kv, cu, cu, limit(q), limit(kv), **o
        ),
        lambda n: (torch.randn(n + 5, 4, 8), torch.randn(n + 5, 2, 2, 8), boundaries(n)),
    ),
    "flash_attn_varlen_qkvpacked_func": (
        lambda qkv, cu, **o: flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, limit(qkv), **o),
        lambda n: (torch.randn(n + 5, 3, 4, 8), boundaries(n)),
    ),
    "version 3": (
        lambda q, kv, **o: flash_attn_interface.flash_attn_func(q, kv, kv, **o),
        lambda n: (torch.randn(2, n, 4, 8), torch.randn(2, n + 3, 2, 8)),
    ),
    "version 3, packed": (
        lambda q, kv, cu, **o: flash_attn_interface.flash_attn_varlen_func(
            q, kv, kv, cu, cu, limit(q), limit(kv), **o
        ),
        lambda n: (torch.randn(n + 5, 4, 8), torch.randn(n + 5, 2, 8), boundaries(n)),
    ),
}


def compiled(call, dynamic):
    return torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)


def results(call, tensors):
    """Outputs, then the gradients through those that have one."""
    leaves = [x for x in tensors if x.is_floating_point()]
    outputs = call(*tensors)
    up = torch.Generator().manual_seed(1)
    total = sum((x * torch.randn(x.shape, generator=up)).sum() for x in outputs if x.requires_grad)
    return (*outputs, *torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("dynamic", [True, False, None])
@pytest.mark.parametrize("name", CALLS)
def test_weights_of_a_function_that_is_differentiated(name, dynamic):
    call, make = CALLS[name]

    def run(*tensors):
        return call(*tensors, **OPTIONS)

    graph = compiled(run, dynamic)
    for seqlen in (9, 140, 150):
        tensors = tuple(x.requires_grad_() if x.is_floating_point() else x for x in make(seqlen))
        torch.testing.assert_close(results(graph, tensors), results(run, tensors))
    if dynamic:
        assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("name", [n for n in CALLS if n.startswith("flash_attn")])
def test_weights_show_what_dropout_dropped(name, dynamic):
    """In the same graph, and other ones in its next run: out is what the positive weights make of the values."""
    call, make = CALLS[name]
    graph = compiled(lambda *x: call(*x, dropout_p=0.4, **OPTIONS), dynamic)
    tensors = make(20)
    values = tensors[len(tensors) - 1 - ("varlen" in name)]  # v, or what it is packed in
    values = values.select(values.dim() - 3, -1) if "packed" in name else values
    found = []
    for _ in range(2):
        out, _, weights = graph(*tensors)
        if "varlen" in name:
            out, weights, v = out[:20][None], weights[:1, :, :20, :20], values[:20][None]
        else:
            v = values
        kept = weights.clamp(min=0) / 0.6
        v = v.repeat_interleave(4 // v.shape[2], 2)
        torch.testing.assert_close(torch.einsum("bhqk,bkhd->bqhd", kept, v), out, rtol=1e-4, atol=1e-5)
        found.append(weights < 0)
    assert found[0].any() and not torch.equal(*found)


@pytest.mark.parametrize("dynamic", [True, False])
def test_weights_of_a_module(dynamic):
    def run(x):
        return LAYER(x, x, x, need_weights=True)

    graph = compiled(run, dynamic)
    for seqlen in (9, 14):
        x = torch.randn(2, seqlen, 32, requires_grad=True)
        torch.testing.assert_close(results(graph, (x,)), results(run, (x,)))


def private(packed):
    """A forward and a backward call of the private entry points; the key of its dropout is drawn within."""

    def run(q, k, v, dout, cu):
        lengths = (cu, cu, q.shape[0], k.shape[0]) if packed else ()
        forward = fa._wrapped_flash_attn_varlen_forward if packed else fa._wrapped_flash_attn_forward
        backward = fa._wrapped_flash_attn_varlen_backward if packed else fa._wrapped_flash_attn_backward
        options = (0.3, 0.4, True, -1, -1, 0.0, None)
        out, lse, weights, rng = forward(q, k, v, *lengths, *options, True)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        delta = backward(dout, q, k, v, out, lse, *grads, *lengths, *options, True, rng)
        return out, lse, weights, rng, *grads, delta

    return run


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_private_entry_points_are_one_graph(packed, dynamic):
    graph = compiled(private(packed), dynamic)
    for seqlen in (9, 14):
        name = "flash_attn_varlen_func" if packed else "flash_attn_func"
        q, k, v, *_ = CALLS[name][1](seqlen)
        dout, cu = torch.randn_like(q), boundaries(seqlen)
        *found, rng, dq, dk, dv, delta = graph(q, k, v, dout, cu)
        assert rng.dtype is torch.int64 and rng.shape == (2,) and rng[0] > 0
        eager = fa._flash_attn_varlen_backward if packed else fa._flash_attn_backward
        lengths = (cu, cu, q.shape[0], k.shape[0]) if packed else ()
        given = [torch.empty_like(x) for x in (q, k, v)]
        options = (0.3, 0.4, True, -1, -1, 0.0, None, True, rng)
        want = eager(dout, q, k, v, *found[:2], *given, *lengths, *options)
        torch.testing.assert_close((dq, dk, dv, delta), (*given, want))
        assert (found[2] < 0).any()
    if dynamic:
        assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("packed", [True, False])
def test_opcheck(packed):
    q, k, *_, cu = (
        CALLS["flash_attn_varlen_func"][1](9) if packed else (*CALLS["flash_attn_func"][1](9), None)
    )
    sizes = (k.shape[0],) * 2 if packed else (q.shape[1], k.shape[1])
    text, ints, _ = spec.write(onchip.window(5, 0), None)
    args = (q, k, cu, cu, None, *sizes, text, ints, 3.0, torch.rand(4), 0.5, 0.3, torch.tensor([7]))
    registry.opcheck(torch.ops.onchip.softmax_weights.default, args)


@pytest.mark.parametrize("backend", ["cpu", "native", "reference"])
def test_an_operator_s_results_share_no_storage(backend):
    """torch refuses them of an operator; a backend that made lse and rest as one tensor could not be compiled."""
    if backend == "native" and native.refuse(onchip.plan(*[(1, 9, 2, 8)] * 3).problem) is not None:
        pytest.skip("no native kernels here")

    def run(q, k, v):
        return onchip.attention(q, k, v, return_lse=True, backend=backend)

    q, k, v = (x.requires_grad_() for x in CALLS["flash_attn_func"][1](9))
    torch.testing.assert_close(results(compiled(run, True), (q, k, v)), results(run, (q, k, v)))
