"""Promises at the edges of the API: copies, changed inputs, user code that fails, transforms, sizes."""

import copy
import pickle

import pytest
import torch

import onchip
from onchip.backends.cpu import tiles


def qkv(seqlen=300, heads=2, dim=8):
    return (torch.randn(2, seqlen, heads, dim) for _ in range(3))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copied_mask_learns_its_tiles_anew(copied):
    """Version counters are not copied: a schedule that came along could match another content of the tensor."""
    q, k, v = qkv()
    visible = torch.zeros(300, 300, dtype=torch.bool)
    visible[:, :1] = True
    mask = onchip.dense(visible)
    onchip.attention(q, k, v, mask=mask)
    visible[:] = True
    onchip.attention(q, k, v, mask=mask)
    torch.testing.assert_close(onchip.attention(q, k, v, mask=copied(mask)), onchip.attention(q, k, v))


def test_boundaries_changed_before_backward_raise():
    x = torch.randn(20, 2, 8, requires_grad=True)
    cu = torch.tensor([0, 5, 20])
    out = onchip.attention_varlen(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu)
    cu[1] = 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(
    "rule",
    [
        {"mask": onchip.where(lambda b, h, q, k, t: t[k] > 0, torch.ones(4))},
        {"score": onchip.Score(mod=onchip.mod(lambda s, b, h, q, k, t: s + t[k], torch.zeros(4)))},
    ],
    ids=["where", "mod"],
)
def test_an_error_of_user_code_leaves_the_cache_unchanged(rule):
    cache = torch.zeros(1, 16, 1, 4), torch.zeros(1, 16, 1, 4)
    new = torch.ones(1, 2, 1, 4)
    with pytest.raises(ValueError, match="index 4 is out of bounds"):
        onchip.attention_with_cache(new, *cache, k=new, v=new, cache_seqlens=3, **rule)
    assert not cache[0].any() and not cache[1].any()


@pytest.mark.parametrize(
    "fn",
    [
        lambda b, h, q: q > 0,
        lambda b, h, q, k: None,
        lambda b, h, q, k: q.nothing > 0,
        lambda b, h, q, k: torch.ones(3, dtype=torch.bool),
    ],
)
def test_a_failing_rule_names_where(fn):
    with pytest.raises(ValueError, match=r"where: <lambda>"):
        onchip.attention(*qkv(), mask=onchip.where(fn))


def test_caches_that_cannot_be_appended_to():
    new = torch.ones(2, 1, 1, 4)
    shared = torch.zeros(2, 8, 1, 4)
    with pytest.raises(ValueError, match=r"v_cache: shares its storage"):
        onchip.attention_with_cache(new, shared, shared, k=new, v=new, cache_seqlens=1)
    expanded = torch.zeros(1, 8, 1, 4).expand(2, -1, -1, -1)
    with pytest.raises(ValueError, match=r"k_cache: is expanded"):
        onchip.attention_with_cache(new, expanded, shared, k=new, v=new, cache_seqlens=1)


def test_no_heads():
    x = torch.zeros(2, 4, 0, 4)
    for backend in ("cpu", "reference"):
        out, lse = onchip.attention(x, x, x, backend=backend, return_lse=True)
        assert out.shape == (2, 4, 0, 4) and lse.shape == (2, 0, 4)
    assert onchip.attention(x, x, x).shape == (2, 4, 0, 4)
    assert onchip.plan(x, x, x).pairs == 0


@pytest.mark.parametrize("size", [8192, 3000, 4099])
def test_large_blocks_are_cut_into_tiles(size):
    shape = (1, 8192, 2, 16)
    count = -(-8192 // size)
    mask = onchip.block_sparse(torch.ones(count, count, dtype=torch.bool), tile=(size, size))
    plan = onchip.plan(shape, shape, shape, mask=mask, backend="cpu")
    assert plan.tiles.tile_m <= 512 and plan.tiles.tile_n <= 4096
    assert plan.tiles == tiles(plan.problem) and max(plan.extra_memory.values()) < 64 * 2**20
    assert plan.pairs == 2 * 8192 * 8192


def test_transforms_that_are_not_there_say_so():
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: onchip.attention(q, k, v), (q,), (q,))
    with pytest.raises(NotImplementedError, match="padding: under vmap"):
        torch.func.vmap(lambda n: onchip.attention(q, k, v, mask=onchip.padding(n)))(torch.ones(3, 2).long())
    cache = torch.zeros(3, 2, 8, 2, 8)
    with pytest.raises(NotImplementedError, match="attention_with_cache: vmap"):
        torch.func.vmap(lambda c: onchip.attention_with_cache(q[:, :1], c, c, cache_seqlens=3))(cache)


def test_masks_are_combined_by_operators_alone():
    with pytest.raises(TypeError, match="use & and"):
        onchip.causal() and onchip.padding(3)


def test_huge_counts_are_refused():
    for make in (lambda n: onchip.window(n, 0), onchip.sinks, onchip.chunked, onchip.padding):
        with pytest.raises(ValueError, match=r"below 2\*\*31"):
            make(2**70)


def test_sparse_tensors_and_backends_of_other_types():
    q, k, v = qkv()
    with pytest.raises(TypeError, match="q: has layout torch.sparse_coo"):
        onchip.attention(q.to_sparse(), k, v)
    with pytest.raises(ValueError, match="backend: got"):
        onchip.attention(q, k, v, backend=["cpu"])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_by_name(layout):
    q = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (3, 5)], layout=layout)
    with pytest.raises(TypeError, match="q: is nested"):
        onchip.attention(q, q, q)


def test_a_cache_of_another_dtype_than_autocast():
    cache = torch.zeros(1, 8, 1, 4), torch.zeros(1, 8, 1, 4)
    new = torch.ones(1, 1, 1, 4)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out = onchip.attention_with_cache(new, *cache, k=new, v=new, cache_seqlens=0)
    assert out.dtype is torch.float32 and torch.equal(out, new)


def test_queries_before_the_first_key_turn_backwards():
    """Rotary positions may be negative where there are more queries than keys: scores depend on distance alone."""
    angles = torch.outer(torch.arange(32.0), torch.tensor([1.0, 0.1]))
    rotary = onchip.Rotary(angles.cos(), angles.sin())
    q, k, v = torch.randn(1, 6, 1, 4), torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4)
    found = []
    for pad in (0, 8):  # the same keys, and queries, later in the sequence
        cache = torch.zeros(1, 16, 1, 4), torch.zeros(1, 16, 1, 4)
        seen = onchip.where(lambda b, h, q, k, first: k >= first[0], torch.tensor([pad]))
        args = {"k": k, "v": v, "cache_seqlens": pad, "rotary": rotary, "mask": seen}
        found.append(onchip.attention_with_cache(q, *cache, **args))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
def test_a_negation_that_torch_left_undone(backend):
    """Kernels read memory, where it still has the other sign: the imaginary part of a conjugate, say."""

    def negated(*shape):
        x = torch.complex(torch.zeros(*shape), torch.randn(*shape)).conj().imag
        x = torch._neg_view(x.resolve_neg().neg())  # the same, with its last dim contiguous
        assert x.is_neg()
        return x

    q, k, v, dout = negated(2, 9, 4, 16), negated(2, 7, 2, 16), negated(2, 7, 2, 16), negated(2, 9, 4, 16)
    names, dlse = ("alibi", "bias", "sink"), negated(2, 4, 9)
    scores = [negated(4), torch.complex(torch.zeros(9, 7), torch.randn(9, 7)).conj().imag, negated(4)]

    def run(done):
        given = [x.resolve_neg() if done else x for x in (q, k, v, *scores, dout, dlse)]
        leaves = [x.detach().requires_grad_() for x in given[:6]]
        options = {"return_lse": True, "backend": backend}
        score = onchip.Score(**dict(zip(names, leaves[3:], strict=True)))
        found = onchip.attention(*leaves[:3], score=score, **options)
        with torch.no_grad():
            alone = onchip.attention(*leaves[:3], **options)  # without a score, and without a gradient
            cache = onchip.attention_with_cache(*leaves[:3], cache_seqlens=5, backend=backend)
        return [*found, *torch.autograd.grad(found, leaves, given[6:]), *alone, cache]

    for left, done in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(left, done)


def left_behind(x):
    """x, wrapped for two transforms that have ended."""
    kept = []

    def within(x):
        kept.append(x * 1)
        return x.sum()

    torch.func.grad(lambda x: torch.func.grad(within)(x).sum())(x)
    return kept[0]


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
def test_tensors_that_outlived_a_transform(backend):
    """What a function under torch.func leaves behind has no memory of its own: it is what it wrapped."""
    plain = torch.randn(2, 9, 4, 16)
    k = left_behind(plain)
    assert torch._C._functorch.is_functorch_wrapped_tensor(k)
    sink = torch.randn(4)
    q = torch.randn(2, 7, 4, 16)
    for score, same in ((None, None), (onchip.Score(sink=left_behind(sink)), onchip.Score(sink=sink))):
        leaves = [q.clone().requires_grad_() for _ in range(2)]
        left = onchip.attention(leaves[0], k, k, score=score, backend=backend)
        done = onchip.attention(leaves[1], plain, plain, score=same, backend=backend)
        torch.testing.assert_close(left, done)
        left.sum().backward()
        done.sum().backward()
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
        alone = onchip.attention(q, k, k, score=score, backend=backend)
        torch.testing.assert_close(alone, done.detach())
