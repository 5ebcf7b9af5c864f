"""What autograd, autocast, vmap, torch.func and checkpointing may expect of a call."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import onchip
from checks import qkv
from onchip.backends import cpu

NAMES = ("q", "k", "v", "bias", "alibi", "sink")


def leaves(batch=2, seqlen=33, heads=4, dim=8, dtype=torch.float32):
    return [x.requires_grad_() for x in qkv(batch, seqlen, seqlen, heads, heads // 2, dim, dtype=dtype)]


def test_double_backward_says_no():
    q, k, v = leaves()
    for order in ("out", "lse"):
        out, lse = onchip.attention(q, k, v, return_lse=True)
        first = torch.autograd.grad(
            (out if order == "out" else lse).square().sum(), (q, k), create_graph=True
        )
        with pytest.raises(NotImplementedError, match="double backward"):
            torch.autograd.grad(first[0].sum(), q)
    cu = torch.tensor([0, 20, 33])
    out = onchip.attention_varlen(q[0], k[0], v[0], cu_seqlens_q=cu, cu_seqlens_k=cu)
    (first,) = torch.autograd.grad(out.sum(), v, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        first.sum().backward()


def test_backward_twice_over_one_graph():
    q, k, v = leaves()
    out = onchip.attention(q, k, v, dropout=0.2)
    first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_matmul_does(dtype):
    q, k, v = leaves()
    bias = torch.randn(33, 33, requires_grad=True)
    score = onchip.Score(bias=bias)
    with torch.autocast("cpu", dtype=dtype):
        assert (q @ q.mT).dtype is dtype
        out, lse = onchip.attention(q, k, v, score=score, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    grads = torch.autograd.grad(out.float().sin().sum() + lse.sum(), (q, k, v, bias))
    assert [grad.dtype for grad in grads] == [torch.float32] * 4
    halves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    expected, expected_lse = onchip.attention(*halves, score=score, return_lse=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    truth = torch.autograd.grad(expected.float().sin().sum() + expected_lse.sum(), (*halves, bias))
    for grad, own in zip(grads, truth, strict=True):
        assert torch.equal(grad, own.float())


def test_autocast_of_packed_and_mixed_inputs():
    q, k, v = (x.detach()[0] for x in leaves())
    cu = torch.tensor([0, 33])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = onchip.attention_varlen(q, k.bfloat16(), v, cu_seqlens_q=cu, cu_seqlens_k=cu)
        assert out.dtype is torch.bfloat16
        doubles = [x.double()[None] for x in (q, k, v)]
        assert onchip.attention(*doubles).dtype is torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        assert onchip.attention(q[None], k[None], v[None]).dtype is torch.float32


def test_backward_inside_autocast_is_the_same():
    q, k, v = leaves()
    outside = torch.autograd.grad(onchip.attention(q, k, v).sin().sum(), (q, k, v))
    out = onchip.attention(q, k, v).sin().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(out, (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(name in str(func) for name in ("bmm", "mm.", "matmul"))
        return func(*args, **(kwargs or {}))


# Of the five products of a tile's backward pass: scores, then those that lead to the gradient that is wanted.
WANTED = {"q": 3, "k": 3, "v": 2, "bias": 2, "alibi": 2, "sink": 1, "qk": 4, "kv": 4, "qv": 4, "qkv": 5}


@pytest.mark.parametrize("names", WANTED)
def test_only_what_requires_grad_is_computed(names):
    wanted = [names] if names in NAMES else list(names)
    q, k, v = qkv(1, 64, 64, 2, dim=8)
    tensors = {"q": q, "k": k, "v": v}
    tensors |= {"bias": torch.randn(64, 64), "alibi": torch.rand(2), "sink": torch.randn(2)}
    for name in wanted:
        tensors[name].requires_grad_()
    score = onchip.Score(**{name: tensors[name] for name in NAMES[3:]})
    out = onchip.attention(q, k, v, score=score, backend="cpu")
    with Products() as products, cpu.trace() as moved:
        out.sum().backward()
    assert {name for name, t in tensors.items() if t.grad is not None} == set(wanted)
    visits = max(moved.tiles_loaded.get("k", 0) // 2, 1)
    assert products.count <= WANTED[names] * visits, f"{products.count} products in {visits} visits"
    assert {f"d{n}" for n in "qkv" if n in wanted} == {n for n in moved.stores if n in ("dq", "dk", "dv")}


def test_nothing_is_computed_without_a_gradient():
    q, k, v = (x.detach() for x in leaves())
    out, lse = onchip.attention(q, k, v, return_lse=True)
    assert not out.requires_grad and not lse.requires_grad and out.grad_fn is None
    with torch.no_grad():
        assert onchip.attention(*leaves()).grad_fn is None
    with torch.inference_mode():
        assert onchip.attention(q, k, v).shape == q.shape


def test_upstream_gradients_of_any_strides():
    q, k, v = leaves()
    call = partial(onchip.attention, mask=onchip.causal(), return_lse=True)
    out, lse = call(q, k, v)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)
    strided = {
        "transposed": (dout.transpose(1, 2).contiguous().transpose(1, 2), dlse.mT.contiguous().mT),
        "sliced": (dout.repeat_interleave(2, 3)[..., ::2], dlse.repeat_interleave(3, 2)[..., ::3]),
        "last stride first": (dout.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0), dlse),
    }
    for name, upstream in strided.items():
        found = torch.autograd.grad((out, lse), (q, k, v), upstream, retain_graph=True)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, msg=name)
    found = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v), retain_graph=True)  # expanded, stride 0
    ones = torch.ones_like(out), torch.ones_like(lse)
    for a, b in zip(found, torch.autograd.grad((out, lse), (q, k, v), ones), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_gradients_of_views_of_one_tensor():
    """q, k and v packed in one tensor, as projections give them."""
    packed = torch.randn(2, 20, 3, 2, 8, requires_grad=True)
    out = onchip.attention(*packed.unbind(2), mask=onchip.causal())
    (found,) = torch.autograd.grad(out.sin().sum(), packed)
    apart = [x.detach().clone().requires_grad_() for x in packed.unbind(2)]
    expected = torch.autograd.grad(onchip.attention(*apart, mask=onchip.causal()).sin().sum(), apart)
    torch.testing.assert_close(found, torch.stack(expected, 2))


def test_one_tensor_as_q_k_and_v():
    x = torch.randn(1, 6, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: onchip.attention(x, x, x), x)


# Changes in place between forward and backward.


def test_an_input_changed_before_backward_is_an_error():
    x = torch.randn(1, 9, 1, 4, requires_grad=True)
    y = x * 1
    out = onchip.attention(y, y, y)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("kind", ["mask", "mod"])
def test_a_mask_or_table_changed_before_backward_is_an_error(kind):
    x = torch.randn(1, 9, 1, 4, requires_grad=True)
    table = torch.ones(9, dtype=torch.bool) if kind == "mask" else torch.ones(9)
    if kind == "mask":
        options = {"mask": onchip.dense(table)}
    else:
        options = {"score": onchip.Score(mod=onchip.mod(lambda score, b, h, q, k, t: score * t[k], table))}
    out = onchip.attention(x, x, x, **options).sin().sum()
    torch.autograd.grad(out, x, retain_graph=True)
    table[3:] = 0
    with pytest.raises(RuntimeError, match="modified"):
        torch.autograd.grad(out, x)


# Checkpoints, torch.func and vmap.


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpoint(reentrant, dropout):
    q, k, v = leaves()
    bias = torch.randn(33, 33, requires_grad=True)

    def run(q, k, v, bias):
        return onchip.attention(q, k, v, score=onchip.Score(bias=bias), dropout=dropout)

    found = []
    for call in (run, partial(checkpoint, run, use_reentrant=reentrant)):
        torch.manual_seed(5)
        out = call(q, k, v, bias)
        for x in (q, k, v, bias):
            x.grad = None
        out.sin().sum().backward()
        found.append([out.detach(), *(x.grad for x in (q, k, v, bias))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def loss(q, k, v, bias):
    score = onchip.Score(bias=bias)
    out, lse = onchip.attention(q, k, v, mask=onchip.causal(), score=score, return_lse=True)
    return out.sin().sum() + lse.sum()


def test_func_grad_and_jacrev():
    q, k, v = (x.detach() for x in leaves(seqlen=7))
    bias = torch.randn(7, 7)
    found = torch.func.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, bias)
    own = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    for a, b in zip(found, torch.autograd.grad(loss(*own), own), strict=True):
        assert torch.equal(a, b)
    value, _ = torch.func.vjp(lambda q: onchip.attention(q, k, v), q)
    assert torch.equal(value, onchip.attention(q, k, v))
    small = [x[:1, :3, :2, :2] for x in (q, k, v)]
    jacobian = torch.func.jacrev(lambda q: onchip.attention(q, small[1][:, :, :1], small[2][:, :, :1]))(
        small[0]
    )
    assert jacobian.shape == (1, 3, 2, 2, 1, 3, 2, 2)


@pytest.mark.filterwarnings("ignore:.*jit.script:DeprecationWarning")
def test_forward_mode_says_no():
    q, k, v = (x.detach() for x in leaves(seqlen=5))
    with pytest.raises(NotImplementedError, match="forward"):
        torch.func.jvp(lambda q: onchip.attention(q, k, v), (q,), (q,))


def test_vmap():
    q, k, v = (torch.randn(3, 2, 7, h, 8) for h in (4, 2, 2))
    bias = torch.randn(3, 7, 7)
    slices = [(q[i], k[i], v[i], bias[i]) for i in range(3)]
    expected = torch.stack([loss(*own) for own in slices])
    torch.testing.assert_close(torch.vmap(loss)(q, k, v, bias), expected)
    grads = torch.vmap(torch.func.grad(loss, argnums=(0, 3)))(q, k, v, bias)
    for i, own in enumerate(slices):
        for found, truth in zip(grads, torch.func.grad(loss, argnums=(0, 3))(*own), strict=True):
            torch.testing.assert_close(found[i], truth)


def test_vmap_over_other_axes_and_some_inputs():
    q, k = torch.randn(2, 7, 3, 2, 8), torch.randn(2, 7, 2, 8)
    found = torch.vmap(lambda q: onchip.attention(q, k, k), in_dims=2, out_dims=1)(q)
    for i in range(3):
        torch.testing.assert_close(found[:, i], onchip.attention(q[:, :, i], k, k))
    twice = torch.vmap(torch.vmap(lambda q: onchip.attention(q, k, k)))(q.permute(2, 0, 1, 3, 4)[None])
    torch.testing.assert_close(twice[0].permute(1, 0, 2, 3, 4), found)


def test_gradient_through_vmap():
    q = torch.randn(3, 2, 7, 2, 8, requires_grad=True)
    (found,) = torch.autograd.grad(torch.vmap(lambda q: onchip.attention(q, q, q))(q).sin().sum(), q)
    apart = torch.stack([onchip.attention(x, x, x) for x in q])
    torch.testing.assert_close(found, torch.autograd.grad(apart.sin().sum(), q)[0])


def test_vmap_over_a_mask_is_right_or_an_error():
    q, keep = torch.randn(3, 1, 8, 2, 4), torch.rand(3, 8, 8) < 0.5
    keep[..., 0] = True

    def run(q, keep):
        return onchip.attention(q, q, q, mask=onchip.dense(keep))

    expected = torch.stack([run(*own) for own in zip(q, keep, strict=True)])
    try:
        found = torch.vmap(run)(q, keep)
    except (RuntimeError, NotImplementedError, ValueError):
        return
    torch.testing.assert_close(found, expected)


def test_vmap_with_dropout_says_no_or_draws():
    q = torch.randn(3, 1, 8, 2, 4)
    with pytest.raises(RuntimeError, match="random"):
        torch.vmap(lambda q: onchip.attention(q, q, q, dropout=0.5))(q)
    seeded = torch.vmap(lambda q: onchip.attention(q, q, q, dropout=0.5, seed=3))(q)
    torch.testing.assert_close(seeded[1], onchip.attention(q[1], q[1], q[1], dropout=0.5, seed=3))


def test_what_saved_tensors_hooks_take_away_is_not_kept(backend):
    """Checkpointing and offloading rest on this: nothing but the hooks holds q, k, v or a bias."""
    leaves = [torch.randn(1, 5, 2, 4, requires_grad=True) for _ in range(3)]
    bias = torch.randn(5, 5, requires_grad=True)
    inner = [x * 1 for x in (*leaves, bias)]
    expected = torch.autograd.grad(
        onchip.attention(*inner[:3], score=onchip.Score(bias=inner[3]), backend=backend).square().sum(),
        (*leaves, bias),
    )
    inner = [x * 1 for x in (*leaves, bias)]
    seen = [weakref.ref(x) for x in inner]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().numpy().copy(), torch.from_numpy):
        out = onchip.attention(*inner[:3], score=onchip.Score(bias=inner[3]), backend=backend)
        loss = out.square().sum()
    del inner, out
    gc.collect()
    assert [ref() for ref in seen] == [None] * 4
    torch.testing.assert_close(torch.autograd.grad(loss, (*leaves, bias)), expected)
