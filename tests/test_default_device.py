"""torch's default device is the user's: onchip's own tensors lie where a call's do, whatever it is set to."""

import ast
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import onchip
import onchip.compat.flash_attn as flash_attn
from checks import qkv
from onchip import nn, steps
from onchip.backends.cpu import native
from onchip.bench.cases import Case, parse_mask
from onchip.compat import flash_attn_interface as version3
from onchip.compat.flash_attn import bert_padding, flash_attn_interface as version2
from onchip.traffic import ALGORITHMS
from onchip.verifying import verify
from onchip.watching import watch

B, NQ, NK, HQ, HK = 2, 37, 70, 4, 2
CU_Q, CU_K = (0, 9, 9, 37), (0, 20, 22, 70)
SLOPES = torch.arange(HQ) / HQ
SOURCES = Path(onchip.__file__).parent
# Of lists and numbers from the user, as torch's own functions do.
FOLLOWS = ("online_softmax.py",)


def same(make, generator=0):
    """What `make()` returns gives, bit for bit, the same where torch makes tensors without a memory.

    Made anew for each of the two runs, the first of them elsewhere, so that nothing is kept from the other.
    """
    runs = []
    for _ in range(2):
        torch.manual_seed(generator)
        runs.append(make())
    native._plain.cache_clear()
    torch.manual_seed(generator + 1)
    with torch.device("meta"):
        found = runs[0]()
    torch.manual_seed(generator + 1)
    truth = runs[1]()
    compare(found, truth)
    return truth


def compare(found, truth):
    assert type(found) is type(truth)
    if isinstance(truth, torch.Tensor):
        assert found.device == truth.device and found.dtype is truth.dtype
        assert torch.equal(torch.nan_to_num(found), torch.nan_to_num(truth))
    elif isinstance(truth, tuple | list):
        assert len(found) == len(truth)
        for x, y in zip(found, truth, strict=True):
            compare(x, y)
    else:
        assert found == truth


def made(call, *leaves):
    """A run of the call: out, lse, and the gradients of both."""
    leaves = [x.requires_grad_() for x in leaves]
    q, v = leaves[0], leaves[2]
    packed = q.dim() == 3
    dout = torch.randn(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    dlse = torch.randn(*q.shape[: 0 if packed else 1], q.shape[-2], q.shape[-3])

    def run():
        out, lse = call(*leaves)
        upstream = dout, dlse.to(lse.dtype)
        return (out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, upstream))

    return run


def some(*shape):
    return torch.rand(shape) < 0.6


def near(b, h, q, k, table):
    return (table[h, k] > 0) & ((q + k) % 3 != 0)


def table():
    return torch.randint(0, 4, (HQ, NK))


MASKS = {
    "none": lambda: None,
    "band": lambda: onchip.window(20, 3),
    "causal": lambda: onchip.causal(align="top_left"),
    "padding": lambda: onchip.padding(torch.tensor([NK, 13])),
    "padding of all": lambda: onchip.padding(50) & onchip.causal(),
    "prefix": lambda: onchip.prefix(torch.tensor([40, 5], dtype=torch.int32)) & onchip.padding(60),
    "chunked": lambda: onchip.chunked(16) & onchip.causal(),
    "sinks": lambda: onchip.causal() & (onchip.window(9, 0) | onchip.sinks(4)),
    "documents": lambda: onchip.documents(torch.arange(NK) // 30),
    "documents of each": lambda: onchip.documents(
        torch.randint(0, 3, (B, NQ)), ids_k=torch.randint(0, 3, (1, NK))
    ),
    "boundaries": lambda: onchip.documents(cu_seqlens=torch.tensor([0, 45, NK])),
    "dense": lambda: onchip.dense(some(B, 1, NQ, NK)),
    "dense by head": lambda: onchip.dense(some(HQ, 1, NK)) & onchip.dense(some(B, 1, NQ, 1)),
    "where": lambda: onchip.where(near, table()),
    "blocks": lambda: onchip.block_sparse(some(HQ, 3, 3), tile=(16, 32)),
    "blocks of both": lambda: (
        onchip.block_sparse(some(3, 3), tile=(16, 32)) & onchip.block_sparse(some(B, 1, 1, 2), tile=(64, 64))
    ),
    "union": lambda: (
        (onchip.dense(some(NQ, NK)) & onchip.padding(60)) | onchip.where(near, table()) | onchip.window(2, 2)
    ),
}
# (tensors with a gradient, the Score of them)
SCORES = {
    "softcap": ([], lambda: onchip.Score(softcap=3.0)),
    "alibi": ([(HQ,)], lambda x: onchip.Score(alibi=x)),
    "alibi of each": ([(B, HQ)], lambda x: onchip.Score(alibi=x, softcap=2.0)),
    "bias": ([(B, HQ, NQ, NK)], lambda x: onchip.Score(bias=x)),
    "bias of all": ([(NQ, NK)], lambda x: onchip.Score(bias=x)),
    "bias by query": ([(HQ, NQ, 1)], lambda x: onchip.Score(bias=x)),
    "bias by key": ([(B, 1, 1, NK)], lambda x: onchip.Score(bias=x)),
    "sink": ([(HQ,)], lambda x: onchip.Score(sink=x)),
    "mod": ([], lambda: onchip.Score(mod=onchip.mod(fade, SLOPES))),
    "all": (
        [(HQ,), (B, 1, NQ, NK), (HQ,)],
        lambda a, b, s: onchip.Score(softcap=2.0, alibi=a, bias=b, sink=s),
    ),
}


def fade(score, b, h, q, k, table):
    return onchip.plain.where(q > k, min(score, 2.0), score - 0.01 * abs(q - k) * table[h])


@pytest.mark.parametrize("mask", MASKS)
def test_masks(backend, mask):
    def make():
        call = partial(onchip.attention, mask=MASKS[mask](), return_lse=True, backend=backend)
        return made(call, *qkv(B, NQ, NK, HQ, HK))

    same(make)


@pytest.mark.parametrize("score", SCORES)
def test_scores(backend, score):
    shapes, kind = SCORES[score]

    def make():
        tensors = [torch.rand(shape) for shape in shapes]

        def call(q, k, v, *learned):
            options = {"mask": onchip.window(30, 5), "return_lse": True, "backend": backend}
            return onchip.attention(q, k, v, score=kind(*learned), **options)

        return made(call, *qkv(B, NQ, NK, HQ, HK), *tensors)

    same(make)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("seed", [None, 5])
def test_dropout(backend, dtype, seed):
    def make():
        call = partial(onchip.attention, dropout=0.3, seed=seed, return_lse=True, backend=backend)
        return made(call, *qkv(B, NQ, NK, HQ, HK, dtype=dtype))

    same(make)


def test_the_seed_is_drawn_as_ever(backend):
    q, k, v = qkv(1, 5, 5, 1)
    torch.manual_seed(3)
    drawn = onchip.attention(q, k, v, dropout=0.5, backend=backend)
    torch.manual_seed(3)
    seed = int(torch.randint(0, 2**62, ()))
    assert torch.equal(drawn, onchip.attention(q, k, v, dropout=0.5, seed=seed, backend=backend))


@pytest.mark.parametrize("heads", [(4, 4), (8, 1)])
def test_decoding_without_gradients(backend, heads):
    def make():
        q, k, v = qkv(1, 1, 300, *heads)
        v = v.transpose(1, 3).contiguous().transpose(1, 3)
        return lambda: onchip.attention(q, k, v, return_lse=True, backend=backend)

    same(make)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(
    "mask", ["none", "causal", "chunked", "padding of three", "documents", "where", "dense"]
)
def test_packed(backend, mask, used):
    def make():
        q, k, v = torch.randn(37, HQ, 16), torch.randn(70, HK, 16), torch.randn(70, HK, 24)
        masks = {**MASKS, "padding of three": lambda: onchip.padding(torch.tensor([5, 2, 30]))}
        masks["documents"] = lambda: onchip.documents(torch.arange(48) // 7)
        masks["dense"] = lambda: onchip.dense(some(3, 1, 28, 48))
        options = (
            {"seqused_q": torch.tensor([7, 0, 28]), "seqused_k": torch.tensor([20, 0, 48])} if used else {}
        )
        call = partial(
            onchip.attention_varlen, mask=masks[mask](), return_lse=True, backend=backend, **options,
            cu_seqlens_q=torch.tensor(CU_Q), cu_seqlens_k=torch.tensor(CU_K),
        )  # fmt: skip
        return made(call, q, k, v)

    same(make)


@pytest.mark.parametrize("pads", [None, [3, 0]])
@pytest.mark.parametrize("paged", [False, True])
def test_cache(backend, paged, pads):
    def make():
        q, k, v = qkv(B, 3, 3, HQ, HK)
        options = {"page_table": torch.tensor([[3, 0, 7], [5, 1, 2]])} if paged else {}
        shape = (8, 16) if paged else (B, 48)
        caches = [torch.randn(*shape, HK, 16) for _ in range(2)]
        if pads is not None:
            options["cache_leftpad"] = torch.tensor(pads)
        angle = torch.rand(50, 4)
        options |= {"rotary": onchip.Rotary(angle.cos(), angle.sin()), "mask": onchip.causal()}
        lengths = torch.tensor([30, 11])

        def run():
            out = onchip.attention_with_cache(
                q, *caches, k=k, v=v, cache_seqlens=lengths, return_lse=True, backend=backend, **options
            )
            again = onchip.attention_with_cache(q, *caches, cache_seqlens=14, backend=backend, **options)
            return (*out, again, *caches)

        return run

    same(make)


def test_transforms(backend):
    def make():
        q, k, v = qkv(B, 9, 9, HQ, HK)
        call = partial(onchip.attention, mask=onchip.causal(), backend=backend)
        whole = torch.vmap(lambda q: call(q[None], k[:1], v[:1]))

        def run():
            grads = torch.func.grad(lambda q: call(q, k, v).square().sum())(q)
            return whole(q), grads, call(torch._neg_view(q), k, v)

        return run

    same(make)


def test_merge_and_sdpa():
    def make():
        q, k, v = (x.transpose(1, 2) for x in qkv(B, NQ, NK, HQ))
        parts = [(torch.randn(B, 5, HQ, 8), torch.randn(B, HQ, 5)) for _ in range(3)]
        visible, bias = some(NQ, NK), torch.randn(1, NQ, NK)

        def run():
            found = [onchip.sdpa(q, k, v, attn_mask=x) for x in (visible, bias)]
            found += [onchip.sdpa(q, k, v, is_causal=True, dropout_p=0.2), onchip.sdpa(q[0], k, v)]
            with onchip.replace_sdpa():
                found.append(torch.nn.functional.scaled_dot_product_attention(q, k, v))
            return (*found, *onchip.merge(parts))

        return run

    same(make)


def test_plans():
    def make():
        q, k, v = qkv(B, NQ, NK, HQ, HK)
        masks = [made_mask() for made_mask in MASKS.values()]
        cu = torch.tensor(CU_Q)
        bias = torch.randn(HQ, NQ, NK).requires_grad_()

        def run():
            plans = [onchip.plan(q, k, v, mask=mask, score=onchip.Score(bias=bias)) for mask in masks]
            shapes = [x.shape for x in (q, k, v)]
            plans += [onchip.plan(*shapes, mask=onchip.causal(), device=name) for name in ("cpu", "H200")]
            packed = [(37, HQ, 16)] * 3
            plans.append(onchip.plan(*packed, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=onchip.window(5, 5)))
            cached = (B, 1, HQ, 16), (8, 16, HK, 16), (8, 16, HK, 16)
            for name in ("cpu", "H200"):
                plans.append(onchip.plan(*cached, cache_seqlens=[30, 11], page_table=(B, 3), device=name))
            walked = [event for name in ALGORITHMS for event in walk(plans[1], name)]
            passes = [p.to_json() for plan in plans for both in plan.traffic.values() for p in both.values()]
            return [str(plan) for plan in plans], passes, [plan.picture() for plan in plans], walked

        return run

    same(make)


def walk(plan, algorithm):
    found = steps.walk(plan.problem, plan.layout, plan.mask, algorithm, score=plan.score)
    return [str(event) for event in found]


def test_watch_and_verify():
    def make():
        q, k, v = qkv(B, NQ, NK, HQ, HK)

        def run():
            with watch(every=1) as seen, onchip.record() as recorded:
                out = onchip.attention(q, k, v, mask=onchip.causal(), dropout=0.1)
            cases = [
                Case(seqlen_q=40, heads_q=2, what="both", mask="causal"),
                Case(lengths=(9, 30), heads_q=2),
            ]
            found = [verify(case) for case in cases]
            return out, seen.checks, seen.failures, seen.worst, [str(c) for c in recorded.cases], found

        return run

    same(make)


@pytest.mark.parametrize("text", ["documents(3)", "blocks(0.5)", "butterfly()", "local_global()"])
def test_masks_of_the_command_line(text):
    same(lambda: lambda: [x.clone() for x in parse_mask(text, 256, 256).tensors()])


def test_patterns_are_where_torch_makes_tensors_or_where_they_are_asked_for():
    for pattern in (
        partial(onchip.patterns.local_global, 4, 4, local=1, global_=1),
        partial(onchip.patterns.strided, 4, 4, stride=2, local=1),
        partial(onchip.patterns.butterfly, 4),
    ):
        with torch.device("meta"):
            assert pattern().device.type == "meta" and pattern(device="cpu").device.type == "cpu"
        assert pattern().device.type == "cpu" and pattern(device="meta").device.type == "meta"


def test_modules():
    def make():
        mha, own = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True), nn.SelfAttention(32, 4, 2)
        x, y, prompt = torch.randn(B, 9, 16), torch.randn(B, 9, 32), torch.randn(B, 3, 32)
        padding, cu = some(B, 9), torch.tensor([0, 4, 9])
        attn_mask = torch.randn(9, 9)

        def run():
            with torch.no_grad():
                cache = own.cache(B, 20)
                first = own(prompt, cache=cache), own(prompt[:, :1], cache=cache), cache.k, cache.lengths
            weighed = mha(x, x, x, key_padding_mask=padding, need_weights=True)
            found = (*weighed, mha(x, x, x, attn_mask=attn_mask)[0], own(y), own(y[0], cu_seqlens=cu))
            grads = torch.autograd.grad(sum(f.square().sum() for f in found), [*own.parameters()])
            return first, [f.detach() for f in found], grads

        return run

    same(make)


def test_functions_of_flash_attn():
    def make():
        q, k, v = (x.requires_grad_() for x in qkv(B, 9, 13, HQ, HK))
        packed = [torch.randn(n, h, 16).requires_grad_() for n, h in ((9, HQ), (13, HK), (13, HK))]
        cu_q, cu_k = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 6, 13], dtype=torch.int32)
        caches, lengths = (
            [torch.randn(B, 40, HK, 16) for _ in range(2)],
            torch.tensor([12, 3], dtype=torch.int32),
        )
        slopes, tokens, dout = torch.rand(HQ), some(B, 9), torch.randn(B, 9, HQ, 16)

        def run():
            dense = flash_attn.flash_attn_func(q, k, v, 0.2, alibi_slopes=slopes, return_attn_probs=True)
            varlen = flash_attn.flash_attn_varlen_func(
                *packed, cu_q, cu_k, 5, 7, 0.1, causal=True, return_attn_probs=True
            )
            third = version3.flash_attn_varlen_func(*packed, cu_q, cu_k, 5, 7, seqused_k=lengths.clamp(max=5))
            grads = torch.autograd.grad(
                sum(x.square().sum() for x in (dense[0], varlen[0], third)), (q, k, v, *packed)
            )
            with torch.no_grad():
                new = [x[:, :1].clone() for x in (k, v)]
                cached = flash_attn.flash_attn_with_kvcache(q[:, :1], *caches, *new, cache_seqlens=lengths)
                forward = version2._flash_attn_forward(q, k, v, 0.2, 0.3, True, -1, -1, 0.0, slopes, True)
                out, lse, _, state = forward
                own = [torch.empty_like(x) for x in (q, k, v)]
                options = (0.2, 0.3, True, -1, -1, 0.0, slopes, True, state)
                delta = version2._flash_attn_backward(dout, q, k, v, out, lse, *own, *options)
                rows = bert_padding.unpad_input(dout, tokens)
                back = bert_padding.pad_input(rows[0], rows[1], B, 9)
            values = (*dense, *varlen, third, *grads, cached, *caches, *forward, *own, delta, back)
            return [x.detach() for x in values], list(rows)

        return run

    same(make)


def constructors():
    """(place, name) of every use of torch's constructors that leaves the device to torch's default."""
    names = {function.__name__ for function in _device_constructors()}
    for path in sorted(SOURCES.rglob("*.py")):
        place = path.relative_to(SOURCES).as_posix()
        if place.startswith(FOLLOWS):
            continue
        tree = ast.parse(path.read_text())
        stated = {
            id(node.func)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and any(k.arg in ("device", None) for k in node.keywords)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "torch"
            ):
                if node.attr in names and id(node) not in stated:
                    yield f"{place}:{node.lineno}", node.attr


def test_every_constructor_states_its_device():
    assert list(constructors()) == []
