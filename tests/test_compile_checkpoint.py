"""Activation checkpointing around onchip: plain, selective, and inside a graph; and compiled autograd."""

from functools import partial

import pytest
import torch
from torch._dynamo import compiled_autograd

import onchip
from checks import ON_CPU
from onchip import nn, select
from test_compile_graph import assert_same


@pytest.mark.parametrize("saved", [True, False])
def test_selective_checkpointing(saved, monkeypatch):
    """A policy may keep attention's output and recompute the rest, or recompute attention too."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    module = select.load(ON_CPU)
    runs, forward = [], module.forward
    monkeypatch.setattr(module, "forward", lambda *args: runs.append(1) or forward(*args))

    def policy(ctx, op, *args, **kwargs):
        keep = saved and op is torch.ops.onchip.attention.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    layer = nn.SelfAttention(32, 4, dropout=0.3)
    x = torch.randn(2, 9, 32, requires_grad=True)
    torch.manual_seed(3)
    plain = torch.autograd.grad(layer(x).square().sum(), x)[0]
    runs.clear()
    torch.manual_seed(3)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    y = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], plain)
    assert len(runs) == (1 if saved else 2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_plain_checkpointing(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    layer = nn.SelfAttention(32, 4, dropout=0.3)
    x = torch.randn(2, 9, 32, requires_grad=True)
    torch.manual_seed(3)
    plain = torch.autograd.grad(layer(x).square().sum(), x)[0]
    torch.manual_seed(3)
    y = checkpoint(layer, x, use_reentrant=use_reentrant).square().sum()
    y.backward()
    torch.testing.assert_close(x.grad, plain)


def test_checkpointing_inside_a_graph():
    from torch.utils.checkpoint import checkpoint

    layer = nn.SelfAttention(32, 4)
    compiled = torch.compile(
        lambda x: checkpoint(layer, x, use_reentrant=False), backend="aot_eager", fullgraph=True
    )
    assert_same(layer, compiled, torch.randn(2, 9, 32, requires_grad=True))


@pytest.mark.parametrize("with_score", [False, True])
def test_compiled_autograd(with_score):
    """torch traces the backward pass of a call that ran eagerly."""
    sink = torch.randn(4, requires_grad=True)
    inputs = [torch.randn(1, 9, 4, 16, requires_grad=True) for _ in range(3)]
    score = onchip.Score(sink=sink) if with_score else None
    wanted = [*inputs, sink] if with_score else inputs
    out = onchip.attention(*inputs, mask=onchip.causal(), score=score)
    dout = torch.randn_like(out)
    truth = torch.autograd.grad(out, wanted, dout, retain_graph=True)
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        out.backward(dout)
    for x, gradient in zip(wanted, truth, strict=True):
        torch.testing.assert_close(x.grad, gradient)
