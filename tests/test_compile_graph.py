"""One graph from torch.compile and torch.export, the operators' own checks, and dispatch modes."""

import pytest
import torch
from torch import library as registry
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import onchip
from onchip import nn, spec
from onchip.compat import flash_attn, flash_attn_interface
from onchip.compat.flash_attn import cute
from onchip.integrations.sdpa import replace_sdpa

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CU = torch.tensor([0, 4, 9], dtype=torch.int32)
IDS = torch.tensor([0] * 4 + [1] * 9)
FAR = onchip.where(lambda b, h, q, k: (q + k) % 3 != 0)
LIFTS = torch.arange(52).view(4, 13) % 5


def table(b, h, q, k, t):
    return t[h, k] > 0


TABLE = onchip.where(table, LIFTS)
FADE = onchip.mod(lambda s, b, h, q, k: s - 0.1 * abs(q - k))


def attend(**options):
    return lambda q, k, v: onchip.attention(q, k, v, **options)


CALLS = {
    "plain": attend(),
    "mask made inside": lambda q, k, v: onchip.attention(
        q, k, v, mask=onchip.causal() & (onchip.window(q.shape[1] - 4, 0) | onchip.sinks(2))
    ),
    "score made inside": lambda q, k, v: onchip.attention(
        q, k, v, score=onchip.Score(softcap=3.0, alibi=q[0, 0, :, 0].abs(), sink=k.sum((0, 1, 3)).repeat(2)), scale=0.3
    ),
    "bias": lambda q, k, v: onchip.attention(q, k, v, score=onchip.Score(bias=k[:1, None, None, :, 0, 0])),
    "padding made inside": lambda q, k, v: onchip.attention(
        q, k, v, mask=onchip.padding((k[:, :, 0, 0] > -9).sum(1) // torch.tensor([1, 2]))
    ),
    "where": attend(mask=FAR | onchip.causal()),
    "where made inside": lambda q, k, v: onchip.attention(
        q, k, v, mask=onchip.where(lambda b, h, q, k: (q + k) % 3 != 0) & onchip.where(table, LIFTS)
    ),
    "where with a tensor": attend(mask=TABLE & onchip.causal()),
    "mod": attend(score=onchip.Score(mod=FADE)),
    "mod made inside": lambda q, k, v: onchip.attention(
        q, k, v, score=onchip.Score(mod=onchip.mod(lambda s, b, h, q, k, t: s * t[h], q[0, 0, :, 0].detach()))
    ),
    "documents": attend(mask=onchip.documents(IDS[4:], ids_k=IDS)),
    "dense": attend(mask=onchip.dense(IDS[4:, None] == IDS)),
    "blocks": attend(mask=onchip.block_sparse(torch.tensor([[True, False, True], [False, True, True]]), (6, 5))),
    "rows": attend(mask=onchip.chunked(4) & onchip.prefix(3)),
    "lse": lambda q, k, v: onchip.attention(q, k, v, return_lse=True)[1],
    "out and lse": lambda q, k, v: sum(x.sum() for x in onchip.attention(q, k, v, return_lse=True)),
    "bhsd": lambda q, k, v: onchip.attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), layout="bhsd", mask=onchip.causal()
    ),
    "dropout with a seed": attend(dropout=0.4, seed=2**64 - 3),
    "reference": attend(backend="reference", mask=onchip.causal()),
    "varlen": lambda q, k, v: onchip.attention_varlen(
        q[0], k[0, :9], v[0, :9], cu_seqlens_q=CU, cu_seqlens_k=CU, max_seqlen_q=5, max_seqlen_k=torch.tensor(5),
        seqused_k=CU.diff() - 1, mask=onchip.causal(),
    ),
}  # fmt: skip


def inputs(seqlen_q=9, seqlen_k=13, dtype=torch.float32):
    q = torch.randn(2, seqlen_q, 4, 8, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, seqlen_k, 2, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    return q, k, v


def assert_same(call, compiled, *tensors):
    """Outputs and gradients."""
    outs = call(*tensors), compiled(*tensors)
    torch.testing.assert_close(outs[1], outs[0])
    up = torch.randn_like(outs[0])
    for ours, theirs in zip(
        *(torch.autograd.grad(o, tensors, up, allow_unused=True) for o in outs), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def graphs():
    """How many graphs were compiled since the test began."""
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_equals_eager(name):
    compiled = torch.compile(CALLS[name], backend="aot_eager", fullgraph=True, dynamic=True)
    assert_same(CALLS[name], compiled, *inputs())
    assert graphs() == 1


def test_attention_is_one_node():
    seen = EagerAndRecordGraphs()
    torch.compile(CALLS["mask made inside"], backend=seen, fullgraph=True)(*inputs())
    targets = [str(node.target) for node in seen.graphs[-1].graph.nodes]
    assert [name for name in targets if "onchip" in name] == ["onchip.attention"]


def heads_first(x, heads):
    return x.transpose(1, 2).repeat_interleave(heads // x.shape[2], 1)


STAND_INS = {
    "flash_attn_func": lambda q, k: flash_attn.flash_attn_func(
        q, k, k, causal=True, window_size=(5, 5), softcap=2.0
    ),
    "flash_attn_varlen_func": lambda q, k: flash_attn.flash_attn_varlen_func(
        q[0], k[0, :9], k[0, :9], CU, CU, 5, 5
    ),
    "flash_attn_with_kvcache": lambda q, k: flash_attn.flash_attn_with_kvcache(
        q[:, :1], k, k + 1, cache_seqlens=CU[1:]
    ),
    "version 3": lambda q, k: flash_attn_interface.flash_attn_func(q, k, k, attention_chunk=4),
    "version 4": lambda q, k: cute.flash_attn_func(q, k, k, causal=True)[0],
    "sdpa": lambda q, k: torch.nn.functional.scaled_dot_product_attention(
        heads_first(q, 4), heads_first(k, 4), heads_first(k, 4), is_causal=True
    ),
    "sdpa with a mask": lambda q, k: torch.nn.functional.scaled_dot_product_attention(
        q[:, :, 0], k[:, :, 0], k[:, :, 0], IDS[4:, None] == IDS
    ),
    "sdpa with other heads of keys than of values": lambda q, k: (
        torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), heads_first(k, 4), enable_gqa=True
        )
    ),
    "sdpa of three heads of keys": lambda q, k: torch.nn.functional.scaled_dot_product_attention(
        q.repeat(1, 1, 3, 1).transpose(1, 2),
        k.transpose(1, 2),
        k.repeat(1, 1, 2, 1)[:, :, 1:].transpose(1, 2),
        enable_gqa=True,
    ),
    "MultiheadAttention": lambda q, k: LAYER(q.flatten(2), q.flatten(2), q.flatten(2))[0],
}
LAYER = nn.MultiheadAttention(32, 4, batch_first=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", STAND_INS)
def test_stand_ins_are_one_graph(name):
    q, k, _ = (x.detach() for x in inputs())
    with replace_sdpa(), torch.no_grad():
        seen = EagerAndRecordGraphs()
        out = torch.compile(STAND_INS[name], backend=seen, fullgraph=True, dynamic=True)(q, k)
        assert "onchip.attention" in str(seen.graphs[-1].graph)
        torch.testing.assert_close(out, STAND_INS[name](q, k))


@pytest.mark.parametrize("seqlen_q", [1, 4, 9])
def test_weights_of_few_rows_and_large_scores(seqlen_q):
    """The backward pass computes the scores of the forward pass to the bit, also of tensors made in the graph."""

    def call(x, k, v, weight):
        q = (x @ weight).view(1, seqlen_q, 2, 64)
        return onchip.attention(q, k * 1.0, v * 1.0, scale=3.0)

    x, weight = torch.randn(2 * seqlen_q, 64), torch.randn(64, 64, requires_grad=True)
    k, v = (torch.randn(1, 300, 2, 64, requires_grad=True) for _ in "kv")
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    outs = call(x, k, v, weight), compiled(x, k, v, weight)
    up = torch.randn_like(outs[0])
    eager, graph = (torch.autograd.grad(out, (k, v, weight), up) for out in outs)
    assert all(map(torch.equal, eager, graph))


def test_no_recompilation_for_a_new_length():
    layer = nn.SelfAttention(32, 4, heads_k=2, window=(5, 0))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch, seqlen in ((2, 7), (2, 12), (3, 20), (4, 5)):
        x = torch.randn(batch, seqlen, 32, requires_grad=True)
        assert_same(layer, compiled, x)
    assert graphs() == 1


def test_inductor():
    """The default compiler: our operators are calls between its own kernels."""
    layer = nn.SelfAttention(32, 4)
    x = torch.randn(2, 9, 32, requires_grad=True)
    assert_same(layer, torch.compile(layer, fullgraph=True, dynamic=True), x)


def test_dropout_draws_anew_in_every_run():
    compiled = torch.compile(attend(dropout=0.5), backend="aot_eager", fullgraph=True)
    q, k, v = inputs()
    assert not torch.equal(compiled(q, k, v), compiled(q, k, v))
    out = compiled(q, k, torch.ones_like(v).requires_grad_())
    kept = out.detach() > 0
    assert kept.any()


class Devices(TorchDispatchMode):
    """Those of every tensor that an operation takes or makes."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {x.device.type for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)}
        return out


@pytest.mark.parametrize("seed", [None, 5, 2**64 - 3])
def test_a_graph_for_a_gpu_has_no_tensor_of_the_cpu(seed):
    """torch makes no CUDA graph of one that has."""
    mask = onchip.causal() & (onchip.window(3, 0) | onchip.sinks(2) | onchip.padding(5)) | onchip.prefix(2)
    with FakeTensorMode(), Devices() as devices:
        q, k, v = (torch.empty(2, 9, 4, 8, device="cuda") for _ in "qkv")
        attend(dropout=0.4, seed=seed, mask=mask)(q, k, v)
        flash_attn.flash_attn_func(q, k, v, dropout_p=0.4)
    assert devices.seen == {"cuda"}


def test_autocast():
    def call(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return onchip.attention(q, k, v, mask=onchip.causal())

    q, k, v = inputs()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert compiled(q, k, v).dtype is torch.bfloat16
    assert_same(call, compiled, q, k, v)


def cached(q, k_cache, v_cache, lengths, k=None, v=None, **options):
    return onchip.attention_with_cache(
        q, k_cache, v_cache, cache_seqlens=lengths, k=k, v=v, mask=onchip.causal(), return_lse=True, **options
    )


def cache_inputs(new=2, batch=2):
    q, (k, v) = torch.randn(batch, new, 4, 8), torch.randn(2, batch, new, 2, 8)
    return q, *torch.randn(2, batch, 20, 2, 8), torch.arange(batch, dtype=torch.int32) + 3, k, v


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("append", [False, True])
def test_cache(append, rotary):
    angle = torch.rand(30, 4)
    options = {"rotary": onchip.Rotary(angle.cos(), angle.sin())} if rotary else {}
    compiled = torch.compile(cached, backend="aot_eager", fullgraph=True, dynamic=True)
    q, k_cache, v_cache, lengths, k, v = cache_inputs()
    extra = (k, v) if append else ()
    copies = k_cache.clone(), v_cache.clone()
    got = compiled(q, *copies, lengths, *extra, **options)
    want = cached(q, k_cache, v_cache, lengths, *extra, **options)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(copies, (k_cache, v_cache))


def test_decoding_does_not_recompile():
    compiled = torch.compile(cached, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for new in (5, 2, 3):
            q, k_cache, v_cache, lengths, k, v = cache_inputs(new)
            compiled(q, k_cache, v_cache, lengths, k, v)
    assert graphs() == 1


def test_derivatives_that_torch_takes():
    """Of a score function that is not plain, inside an operator's backward."""
    from onchip.integrations.flex import to_mod

    score = onchip.Score(mod=to_mod(lambda s, b, h, q, k: torch.tanh(s) * 2))
    call = attend(score=score)
    q, k, v = inputs()
    ((_, args),) = operands(call, q, k, v)
    out = torch.ops.onchip.attention(*args)[0]
    want = torch.autograd.grad(call(q, k, v).sum(), (q, k, v))
    torch.testing.assert_close(torch.autograd.grad(out.sum(), (q, k, v)), want)


def operands(call, *tensors, **options):
    """The arguments with which a call reaches its operator."""
    found = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "onchip":
                found.append((func, args))
            return func(*args, **(kwargs or {}))

    with Spy():
        call(*tensors, **options)
    return found


SOME = [
    "plain",
    "score made inside",
    "padding made inside",
    "where with a tensor",
    "dropout with a seed",
    "varlen",
]


@pytest.mark.parametrize("name", SOME)
def test_opcheck(name):
    for func, args in operands(CALLS[name], *inputs()):
        tensors = [
            x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in args
        ]
        registry.opcheck(func, tuple(tensors))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_opcheck_of_the_backward_operator(backend):
    """Gradients take their inputs' strides, whatever a backend makes of them."""
    q, k, v = inputs()
    q = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    bias = torch.randn(13, 9, requires_grad=True)

    def call(q, k, v):
        score = onchip.Score(sink=torch.zeros(4), bias=bias.T)
        onchip.attention(q, k, v, mask=onchip.causal(), score=score, backend=backend).sum().backward()

    (_, _), (func, args) = operands(call, q, k, v)
    assert "backward" in func.name()
    registry.opcheck(func, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("append", [False, True])
def test_opcheck_of_the_cache_operators(append):
    q, k_cache, v_cache, lengths, k, v = cache_inputs()
    ((func, args),) = operands(cached, q, k_cache, v_cache, lengths, *((k, v) if append else ()))
    registry.opcheck(func, args)


def test_export():
    layer = nn.SelfAttention(32, 4, heads_k=2, window=(5, 0)).eval()
    dims = {"x": {0: torch.export.Dim("batch"), 1: torch.export.Dim("seqlen", min=2)}}
    program = torch.export.export(layer, (torch.randn(2, 9, 32),), dynamic_shapes=dims)
    for shape in ((2, 9, 32), (3, 15, 32)):
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), layer(x))
    assert any("onchip.attention" in str(node.target) for node in program.graph.nodes)


def test_export_can_be_saved(tmp_path):
    layer = nn.SelfAttention(32, 4).eval()
    x = torch.randn(2, 9, 32)
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "layer.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "layer.pt2").module()(x), layer(x))


def test_a_saved_graph_with_another_process_s_function_says_so():
    with pytest.raises(RuntimeError, match="user's function"):
        spec.read("( where 0 )", [len(spec._functions)], [])


MASKS = {
    "everything": onchip.Mask(),
    "band": onchip.window(3, None) & onchip.causal(align="top_left"),
    "union": onchip.causal() & (onchip.window(2, 0) | onchip.sinks(3) | (onchip.chunked(4) & FAR)),
    "tensors": onchip.padding(torch.tensor([4, 13])) & TABLE & onchip.documents(IDS),
    "two ids": onchip.documents(IDS[4:], ids_k=IDS),
    "boundaries": onchip.documents(cu_seqlens=torch.tensor([0, 4, 13])),
    "dense or blocks": onchip.dense(IDS[4:, None] == IDS)
    | onchip.block_sparse(torch.eye(3).bool()[:2], (5, 5)),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_come_back_as_they_were_written(name):
    text, ints, tensors = spec.write(MASKS[name], FADE)
    mask, mod = spec.read(text, ints, tensors)
    assert repr(mask) == repr(MASKS[name]) and (mod.fn, mod.slope_fn) == (FADE.fn, FADE.slope_fn)
    q, k, v = inputs()
    want = onchip.attention(q, k, v, mask=MASKS[name], score=onchip.Score(mod=FADE))
    torch.testing.assert_close(onchip.attention(q, k, v, mask=mask, score=onchip.Score(mod=mod)), want)
    assert spec.read(text, ints, tensors)[0] is mask  # its schedules are kept
    if tensors:
        assert spec.read(text, ints, [t.clone() for t in tensors])[0] is not mask
    assert spec.write(None, None) == ("", [], []) and spec.read("", [], []) == (None, None)


def test_fake_tensors():
    with torch._subclasses.FakeTensorMode():
        q, k = torch.empty(2, 9, 4, 8, dtype=torch.bfloat16), torch.empty(2, 13, 2, 8, dtype=torch.bfloat16)
        out, lse = onchip.attention(q, k, k[..., :6], mask=onchip.causal(), dropout=0.1, return_lse=True)
    assert out.shape == (2, 9, 4, 6) and out.dtype is torch.bfloat16
    assert lse.shape == (2, 4, 9) and lse.dtype is torch.float32


@pytest.mark.parametrize(
    "options, named",
    [
        ({"seed": -1, "dropout": 0.1}, "seed: got -1"),
        ({"dropout": 1.5}, "dropout: got 1.5"),
        ({"mask": onchip.padding(torch.tensor([3, 14]))}, "padding: got length 14"),
        ({"backend": "none"}, "backend: got 'none'"),
    ],
)
def test_errors_are_those_of_an_eager_call(options, named):
    """Some are raised when the graph runs, where values are known."""
    compiled = torch.compile(attend(**options), backend="aot_eager")
    for call in (attend(**options), compiled):
        with pytest.raises((ValueError, torch._dynamo.exc.TorchRuntimeError), match=named):
            call(*inputs())


def test_functorch_still_works_under_a_dispatch_mode():
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    q, k, v = (x.detach() for x in inputs())
    want = torch.func.vmap(onchip.attention)(q[None], k[None], v[None])
    with Mode():
        torch.testing.assert_close(torch.func.vmap(onchip.attention)(q[None], k[None], v[None]), want)


def test_a_gradient_of_the_gradient_is_refused():
    q, k, v = inputs()
    compiled = torch.compile(attend(), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError):
        (grad,) = torch.autograd.grad(compiled(q, k, v).sum(), q, create_graph=True)
        grad.sum().backward()
