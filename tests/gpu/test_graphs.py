"""What needs a GPU: captured graphs of both passes, compiled modules, checkpoints; all against eager."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import onchip

BACKENDS = ["triton"]
if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    BACKENDS.append("hopper")
BLOCKS = torch.arange(48).view(4, 3, 4) % 3 > 0
MASKS = {
    "full": lambda: None,
    "causal": onchip.causal,
    "window and sinks": lambda: onchip.causal() & (onchip.window(40, 0) | onchip.sinks(2)),
    "sinks": lambda: onchip.sinks(70),
    "padding": lambda: onchip.padding(333),
    "paddings": lambda: onchip.padding(torch.tensor([400, 111], device="cuda")),
    "prefix": lambda: onchip.prefix(99),
    "chunked": lambda: onchip.causal() & onchip.chunked(90),
    "blocks": lambda: onchip.block_sparse(BLOCKS.cuda(), tile=(100, 100)),
}


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, dtype=dtype, device="cuda")


def qkv(seqlen_q=300, seqlen_k=400, heads=4, heads_k=2, dim=64):
    shapes = (2, seqlen_q, heads, dim), (2, seqlen_k, heads_k, dim), (2, seqlen_k, heads_k, dim)
    return [randn(*shape).requires_grad_() for shape in shapes]


def captured(step):
    """A graph of the step, and the tensors that each replay of it fills."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph, found


def check_replays(step, inputs):
    """Replays on other inputs have the bits of eager calls."""
    graph, found = captured(step)
    for _ in range(3):
        with torch.no_grad():
            for x in inputs:
                x.normal_()
        graph.replay()
        got = [x.detach().clone() for x in found]
        for a, b in zip(got, step(), strict=True):
            torch.testing.assert_close(a, b.detach(), atol=0, rtol=0)


def near(found, expected, room=3e-2):
    """Equal but for the rounding of half precision in another order."""
    found, expected = found.detach().float(), expected.detach().float()
    torch.testing.assert_close(found, expected, atol=room * max(float(expected.abs().max()), 1e-3), rtol=0)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_forward_pass(backend, mask):
    q, k, v = (x.detach() for x in qkv())
    made = MASKS[mask]()

    def step():
        return onchip.attention(q, k, v, mask=made, return_lse=True, backend=backend)

    check_replays(step, (q, k, v))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_captured_gradients(backend, mask):
    leaves, dout, made = qkv(), randn(2, 300, 4, 64), MASKS[mask]()

    def step():
        out, lse = onchip.attention(*leaves, mask=made, return_lse=True, backend=backend)
        return out, *torch.autograd.grad((out, lse.sum()), leaves, (dout, None))

    check_replays(step, (*leaves, dout))


def test_captured_gradients_of_scores():
    leaves = [
        *qkv(),
        *(randn(*shape, dtype=torch.float32).requires_grad_() for shape in ((4, 300, 400), (4,))),
    ]
    *tensors, bias, sink = leaves
    dout = randn(2, 300, 4, 64)

    def step():
        score = onchip.Score(softcap=20.0, bias=bias, sink=sink)
        out = onchip.attention(*tensors, mask=onchip.causal(), score=score, backend="triton")
        return out, *torch.autograd.grad(out, leaves, dout)

    check_replays(step, (*leaves, dout))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_training_step(backend):
    """Forward, loss, backward and the update of what it trains, as one graph."""
    leaves, target = qkv(), randn(2, 300, 4, 64)
    twins = [x.detach().clone().requires_grad_() for x in leaves]

    def step(trained):
        out = onchip.attention(*trained, mask=onchip.causal(), backend=backend)
        loss = (out.float() - target).square().mean()
        loss.backward()
        with torch.no_grad():
            for x in trained:
                x -= 1e4 * x.grad  # of a mean: small
                x.grad = None
        return (loss.detach(),)

    start = [x.detach().clone() for x in leaves]
    graph, (loss,) = captured(lambda: step(leaves))
    with torch.no_grad():
        for x, first in zip(leaves, start, strict=True):
            x.copy_(first)  # the warm-up has trained it
    losses = []
    for _ in range(5):
        target.normal_()
        graph.replay()
        losses.append(loss.item())
        assert step(twins)[0].item() == losses[-1]
        assert all(torch.equal(x, y) for x, y in zip(leaves, twins, strict=True))
    assert all(not torch.equal(x, first) for x, first in zip(leaves, start, strict=True))


def test_a_module_as_graphs_of_both_passes():
    block = Block()
    twin = copy.deepcopy(block)
    graphed = torch.cuda.make_graphed_callables(block, (randn(2, 200, 256).requires_grad_(),))
    for _ in range(3):
        check_module(graphed, twin, randn(2, 200, 256).requires_grad_())


@pytest.mark.parametrize("backend", BACKENDS)
def test_captured_packed_sequences_follow_their_boundaries(backend):
    total, heads = 700, 4
    leaves = [randn(total, h, 64).requires_grad_() for h in (heads, 2, 2)]
    dout = randn(total, heads, 64)
    cu = torch.tensor([0, 300, 300, 450, total], device="cuda", dtype=torch.int32)

    def step():
        out = onchip.attention_varlen(
            *leaves, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=400, max_seqlen_k=400, mask=onchip.causal(),
            backend=backend,
        )  # fmt: skip
        return out, *torch.autograd.grad(out, leaves, dout)

    graph, found = captured(step)
    for ends in ([0, 1, 400, 640, total], [0, 399, 399, 399, total], [0, 175, 350, 525, total]):
        cu.copy_(torch.tensor(ends))
        with torch.no_grad():
            for x in (*leaves, dout):
                x.normal_()
        graph.replay()
        got = [x.detach().clone() for x in found]
        for a, b in zip(got, step(), strict=True):
            torch.testing.assert_close(a, b.detach(), atol=0, rtol=0)


def test_captured_dropout_of_a_given_seed():
    leaves, dout = qkv(), randn(2, 300, 4, 64)

    def step():
        out = onchip.attention(*leaves, dropout=0.4, seed=2**63 + 9, backend="triton")
        return out, *torch.autograd.grad(out, leaves, dout)

    check_replays(step, (*leaves, dout))


def test_captured_dropout_draws_anew():
    """In each replay another mask, and in both passes the same one: what is linear in v has that gradient."""
    leaves, dout = qkv(), randn(2, 300, 4, 64)

    def step():
        out = onchip.attention(*leaves, dropout=0.4, backend="triton")
        return out, torch.autograd.grad(out, leaves[2], dout)[0]

    graph, (out, dv) = captured(step)
    outs = []
    for _ in range(4):
        graph.replay()
        outs.append(out.detach().clone())
        both = (out.double() * dout.double()).sum(), (leaves[2].double() * dv.double()).sum()
        # With another mask they would be about ten times as far from one another.
        assert abs(float(both[0] - both[1])) < 0.1 * float((out.double() * dout.double()).norm())
    assert all(not torch.equal(a, b) for i, a in enumerate(outs) for b in outs[:i])


def test_captured_dropout_repeats_with_the_generator():
    q, k, v = (x.detach() for x in qkv())
    graph, (out,) = captured(lambda: (onchip.attention(q, k, v, dropout=0.4, backend="triton"),))
    outs = []
    for seed in (3, 4, 3):
        torch.cuda.manual_seed(seed)
        graph.replay()
        outs.append(out.clone())
    assert torch.equal(outs[0], outs[2]) and not torch.equal(outs[0], outs[1])


def changing_masks():
    """Masks, and what changes the tensor of each in place."""
    visible = torch.zeros(300, 400, dtype=torch.bool, device="cuda")
    visible[:, :70] = True
    blocks = BLOCKS.cuda().clone()
    ids, table = torch.arange(400, device="cuda") // 150, visible[0] + 0
    lengths = torch.tensor([50, 0], device="cuda")
    rule = onchip.where(lambda b, h, q, k, table: table[k] > 0, table)
    return {
        "dense": (onchip.dense(visible), lambda: visible.fill_(True)),
        "blocks": (onchip.block_sparse(blocks, tile=(100, 100)), blocks.logical_not_),
        "documents": (onchip.documents(ids) & onchip.causal(), lambda: ids.copy_(ids.flip(0) // 2)),
        "padding": (onchip.padding(lengths), lambda: lengths.copy_(torch.tensor([399, 260]))),
        "where": (rule, lambda: table.fill_(1)),
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["dense", "blocks", "documents", "padding", "where"])
def test_a_captured_mask_follows_its_tensor(name, packed):
    leaves, dout = qkv(), randn(2, 300, 4, 64)
    mask, change = changing_masks()[name]
    ends = torch.tensor([0, 300, 600], device="cuda"), torch.tensor([0, 400, 800], device="cuda")

    def step():
        if packed:
            rows = (x.flatten(0, 1) for x in leaves)
            out = onchip.attention_varlen(
                *rows, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], max_seqlen_q=300, max_seqlen_k=400, mask=mask,
                backend="triton",
            ).view(dout.shape)  # fmt: skip
        else:
            out = onchip.attention(*leaves, mask=mask, backend="triton")
        return out, *torch.autograd.grad(out, leaves, dout)

    graph, found = captured(step)
    before = found[0].detach().clone()
    change()
    graph.replay()
    for a, b in zip([x.detach().clone() for x in found], step(), strict=True):
        near(a, b)
    assert not torch.allclose(before, found[0].detach())


class Block(torch.nn.Module):
    """Attention between pointwise operations and products, which the compiler takes around it."""

    def __init__(self, dim=256, heads=4, dropout=0.0):
        super().__init__()
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.qkv, self.out = torch.nn.Linear(dim, 3 * dim, **options), torch.nn.Linear(dim, dim, **options)
        self.heads, self.dropout = heads, dropout

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mask = onchip.causal() & onchip.window(100, 0)
        return x + self.out(torch.sin(onchip.attention(q, k, v, mask=mask, dropout=self.dropout)).flatten(2))


def check_module(found, expected, x):
    """Output and gradients of a module and of another form of it."""
    dout = randn(*x.shape)
    results = []
    for module in (found, expected):
        y = module(x)
        grads = torch.autograd.grad(y, (x, *module.parameters()), dout)
        results.append([t.detach().clone() for t in (y, *grads)])  # a replay writes over its outputs
    for a, b in zip(*results, strict=True):
        near(a, b)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_module_is_compiled_once_for_every_length():
    block = Block()
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for seqlen in (129, 200, 333):
        check_module(compiled, block, randn(2, seqlen, 256).requires_grad_())
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_module_in_graphs():
    block = Block()
    compiled = torch.compile(block, fullgraph=True, dynamic=False, mode="reduce-overhead")
    for _ in range(4):  # as it is, captured, replayed twice
        torch.compiler.cudagraph_mark_step_begin()
        check_module(compiled, block, randn(2, 200, 256).requires_grad_())
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("graphs", [False, True])
def test_compiled_dropout_draws_anew(graphs):
    options = {"triton.cudagraphs": graphs, "fallback_random": True}  # random numbers without a C++ compiler
    block = Block(dropout=0.4)
    compiled = torch.compile(block, fullgraph=True, dynamic=False, options=options)
    x, outs = randn(2, 200, 256), []
    with torch.no_grad():
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            outs.append(compiled(x).clone())
    assert all(not torch.equal(a, b) for i, a in enumerate(outs) for b in outs[:i])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_draws_the_same_mask_again(use_reentrant):
    block = Block(dropout=0.3)
    x, dout = randn(2, 200, 256).requires_grad_(), randn(2, 200, 256)
    found = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=use_reentrant)):
        torch.manual_seed(3)
        block.zero_grad()
        x.grad = None
        run(x).backward(dout)
        found.append([x.grad, *(p.grad for p in block.parameters())])
    for a, b in zip(*found, strict=True):
        near(b, a, 1e-3)


def test_checkpointing_keeps_less_memory():
    block = Block(dim=512)
    x = randn(1, 8192, 512).requires_grad_()

    def kept(run):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = run(x)
        held = torch.cuda.memory_allocated() - before
        y.backward(torch.ones_like(y))
        block.zero_grad()
        x.grad = None
        return held

    kept(block)  # libraries take memory of their own once
    plain, less = kept(block), kept(lambda x: checkpoint(block, x, use_reentrant=False))
    assert less <= 2 * x.numel() * x.element_size() < plain
