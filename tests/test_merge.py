"""merge: partial results over disjoint key sets give the result over their union."""

from functools import partial

import pytest
import torch

import onchip
import oracle
from checks import qkv

NEG_INF = float("-inf")


def part(*shape, dtype=torch.float32):
    """A random partial result: out (..., seqlen, heads, dim) of `shape` and its lse (..., heads, seqlen)."""
    *lead, seqlen, heads, _ = shape
    lse = torch.randn(*lead, heads, seqlen, dtype=torch.promote_types(dtype, torch.float32))
    return torch.randn(shape).to(dtype), lse


def empty(*shape, dtype=torch.float32):
    """The partial result over no keys."""
    out, lse = part(*shape, dtype=dtype)
    return torch.zeros_like(out), torch.full_like(lse, NEG_INF)


def assert_same(found, expected, tolerance=1e-6):
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (7, 3, 8)])
def test_c15_zero_and_minus_inf_is_the_identity(shape, dtype):
    one, none = part(*shape, dtype=dtype), empty(*shape, dtype=dtype)
    for found in (onchip.merge(*one, *none), onchip.merge(*none, *one), onchip.merge([none, one, none])):
        assert torch.equal(found[0], one[0])
        assert_same(found[1:], one[1:])
    for found in (onchip.merge(*none, *none), onchip.merge([none] * 5)):
        assert torch.equal(found[0], none[0]) and torch.equal(found[1], none[1])


def test_c15_two_empty_results_then_a_finite_one():
    one, none = part(2, 5, 3, 8), empty(2, 5, 3, 8)
    assert_same(onchip.merge(*onchip.merge(*none, *none), *one), one)


def test_c15_rows_that_only_some_parts_see():
    first, second = part(1, 6, 2, 4), part(1, 6, 2, 4)
    for (out, lse), rows in ((first, [0, 1, 2]), (second, [2, 3])):
        out[:, rows], lse[..., rows] = 0, NEG_INF
    out, lse = onchip.merge(*first, *second)
    assert_same((out[:, :2], lse[..., :2]), (second[0][:, :2], second[1][..., :2]))
    assert not out[:, 2].any() and (lse[..., 2] == NEG_INF).all()
    assert_same((out[:, 3], lse[..., 3]), (first[0][:, 3], first[1][..., 3]))
    assert out.isfinite().all()


@pytest.mark.parametrize("high", [200.0, 1e4, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c17_lse_values_far_apart(high, dtype):
    first, second = part(2, 5, 3, 8, dtype=dtype), part(2, 5, 3, 8, dtype=dtype)
    first[1].fill_(0.0)
    second[1].fill_(high)
    for found in (onchip.merge(*first, *second), onchip.merge(*second, *first)):
        assert torch.equal(found[0], second[0]) and torch.equal(found[1], second[1])
    first[1].fill_(-high)
    second[1].fill_(-2 * high)
    for found in (onchip.merge(*first, *second), onchip.merge(*second, *first)):
        assert torch.equal(found[0], first[0]) and torch.equal(found[1], first[1])


def test_two_equal_weights():
    first, second = part(1, 1, 1, 4), part(1, 1, 1, 4)
    second[1].copy_(first[1])
    expected = ((first[0] + second[0]) / 2, first[1] + torch.tensor(2.0).log())
    assert_same(onchip.merge(*first, *second), expected)


def test_order_and_grouping_do_not_matter():
    a, b, c = (part(2, 5, 3, 8, dtype=torch.float64) for _ in range(3))
    expected = onchip.merge([a, b, c])
    for found in (
        onchip.merge([c, a, b]),
        onchip.merge(*onchip.merge(*a, *b), *c),
        onchip.merge(*a, *onchip.merge(*b, *c)),
        onchip.merge(*c, *onchip.merge(*b, *a)),
        onchip.merge([onchip.merge([b]), onchip.merge([c, a])]),
    ):
        assert_same(found, expected, 1e-12)


def test_lists_tuples_and_generators():
    parts = [part(2, 5, 3, 8) for _ in range(4)]
    expected = onchip.merge(parts)
    assert_same(onchip.merge(tuple(parts)), expected)
    assert_same(onchip.merge(p for p in parts), expected)
    assert_same(onchip.merge([list(p) for p in parts]), expected)
    assert_same(onchip.merge(parts[:1]), parts[0])


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("causal", [False, True])
def test_any_number_of_splits_gives_the_one_shot_result(splits, causal):
    q, k, v = qkv(2, 20, 50, 4, 2, dim=8, dtype=torch.float64)
    visible = oracle.band(20, 50, None, 0) if causal else torch.ones(20, 50, dtype=torch.bool)
    parts = []
    for keys in torch.arange(50).chunk(splits):
        mask = onchip.dense(visible[:, keys])
        parts.append(onchip.attention(q, k[:, keys], v[:, keys], mask=mask, return_lse=True))
    assert_same(onchip.merge(parts), oracle.attention(q, k, v, visible=visible), 1e-12)


@pytest.mark.parametrize("cut", [0, 1, 25, 49, 50])
def test_shards_of_any_size_even_none(cut):
    q, k, v = qkv(2, 5, 50, 4, 2, dim=8, dtype=torch.float64)
    call = partial(onchip.attention, q, return_lse=True)
    found = onchip.merge(*call(k[:, :cut], v[:, :cut]), *call(k[:, cut:], v[:, cut:]))
    assert_same(found, oracle.attention(q, k, v), 1e-12)


def test_packed_sequences():
    q, k, v = (t[0] for t in qkv(1, 9, 12, 4, 2, dim=8, dtype=torch.float64))
    cu_q, cu_k = torch.tensor([0, 4, 4, 9]), torch.tensor([0, 6, 8, 12])
    call = partial(onchip.attention_varlen, q, cu_seqlens_q=cu_q, return_lse=True)
    halves = []
    for keys in (torch.arange(12) % 2 == 0, torch.arange(12) % 2 == 1):
        ends = torch.nn.functional.pad(keys.cumsum(0), (1, 0))[cu_k]
        halves.append(call(k[keys], v[keys], cu_seqlens_k=ends))
    out, lse = onchip.merge(halves)
    assert out.shape == (9, 4, 8) and lse.shape == (4, 9)
    assert_same((out, lse), oracle.varlen(q, k, v, cu_q, cu_k), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_are_kept(dtype):
    first, second = part(1, 40, 2, 16, dtype=dtype), part(1, 40, 2, 16, dtype=dtype)
    out, lse = onchip.merge(*first, *second)
    assert (out.dtype, lse.dtype) == (dtype, first[1].dtype)
    wide = onchip.merge(*(t.double() for t in (*first, *second)))
    assert (
        torch.equal(out, wide[0].to(dtype))
        or (out.double() - wide[0]).abs().max() <= torch.finfo(dtype).eps * 4
    )
    torch.testing.assert_close(lse.double(), wide[1], rtol=1e-6, atol=1e-6)


def test_zero_sizes_and_strides():
    for shape in ((0, 5, 3, 8), (2, 0, 3, 8), (2, 5, 3, 0), (0, 3, 8)):
        out, lse = onchip.merge(*part(*shape), *part(*shape))
        assert out.shape == shape and lse.numel() == part(*shape)[1].numel()
    first, second = part(2, 5, 3, 8), part(2, 5, 3, 8)
    strided = [t.transpose(0, 2).contiguous().transpose(0, 2) for t in (*first, *second)]
    assert_same(onchip.merge(*strided), onchip.merge(*first, *second))


def test_inputs_are_not_changed():
    tensors = [*part(2, 5, 3, 8), *empty(2, 5, 3, 8)]
    before = [t.clone() for t in tensors]
    onchip.merge(*tensors)
    onchip.merge([tensors[:2], tensors[2:]])
    assert all(torch.equal(t, old) for t, old in zip(tensors, before, strict=True))


def test_gradients_by_finite_differences():
    for shape in ((1, 3, 2, 2), (4, 2, 3)):
        tensors = [t.requires_grad_() for _ in range(3) for t in part(*shape, dtype=torch.float64)]
        assert torch.autograd.gradcheck(lambda *t: onchip.merge(*t), tensors[:4])
        assert torch.autograd.gradcheck(
            lambda *t: onchip.merge(list(zip(t[::2], t[1::2], strict=True))), tensors
        )


def test_gradients_beside_empty_rows():
    (out, lse), (none, hidden) = part(1, 3, 2, 2, dtype=torch.float64), empty(1, 3, 2, 2, dtype=torch.float64)
    lse[..., 2] = NEG_INF
    out[:, 2] = 0
    leaves = [t.requires_grad_() for t in (out, lse, none, hidden)]
    for pair in (leaves, leaves[2:] + leaves[:2]):
        merged, merged_lse = onchip.merge(*pair)
        dout = torch.randn_like(merged)
        dlse = torch.randn_like(merged_lse)
        grads = torch.autograd.grad([merged, merged_lse], leaves, [dout, dlse])
        assert all(g.isfinite().all() for g in grads)
        torch.testing.assert_close(grads[0][:, :2], dout[:, :2])
        torch.testing.assert_close(grads[1][..., :2], dlse[..., :2])
        for row_of_nothing in (grads[0][:, 2], grads[1][..., 2], grads[2], grads[3]):
            assert not row_of_nothing.any()


def test_gradients_through_attention_and_merge():
    tensors = dict(zip("qkv", qkv(1, 10, 30, 4, 2, dim=8, dtype=torch.float64), strict=True))
    visible = oracle.band(10, 30, 15, 0)

    def split(q, k, v):
        shards = torch.arange(30).chunk(4)
        masks = [onchip.dense(visible[:, keys]) for keys in shards]
        return onchip.merge(
            onchip.attention(q, k[:, keys], v[:, keys], mask=mask, return_lse=True)
            for keys, mask in zip(shards, masks, strict=True)
        )

    dout, dlse = torch.randn(1, 10, 4, 8), torch.randn(1, 4, 10)
    found = oracle.outputs_and_grads(split, tensors, dout, dlse)
    exact = oracle.outputs_and_grads(partial(oracle.attention, visible=visible), tensors, dout, dlse)
    for name, value in found.items():
        torch.testing.assert_close(value, exact[name], rtol=1e-9, atol=1e-9)


GOOD = (torch.zeros(2, 5, 3, 8), torch.zeros(2, 3, 5))


@pytest.mark.parametrize(
    "parts, error, message",
    [
        ([], ValueError, "no partial results"),
        ([GOOD, (torch.zeros(2, 5, 3, 8), torch.zeros(2, 5, 3))], ValueError, r"lse.*\(2, 5, 3\)"),
        (
            [GOOD, (torch.zeros(2, 6, 3, 8), torch.zeros(2, 3, 6))],
            ValueError,
            r"\(2, 6, 3, 8\).*\(2, 5, 3, 8\)",
        ),
        (
            [GOOD, (torch.zeros(2, 5, 3, 4), torch.zeros(2, 3, 5))],
            ValueError,
            r"\(2, 5, 3, 4\).*\(2, 5, 3, 8\)",
        ),
        ([(torch.zeros(3, 8), torch.zeros(3))], ValueError, r"\(3, 8\)"),
        ([(torch.zeros(1, 1, 2, 5, 8), torch.zeros(1, 1, 5, 2))], ValueError, r"\(1, 1, 2, 5, 8\)"),
        ([GOOD, GOOD[0]], TypeError, r"part 1.*Tensor.*\(out, lse\)"),
        ([GOOD, (GOOD[0], 0.0)], TypeError, r"part 1.*tensors"),
        ([GOOD, (GOOD[0].int(), GOOD[1])], TypeError, r"int32.*floating"),
        ([GOOD, (GOOD[0], GOOD[1].long())], TypeError, r"int64.*floating"),
        ([GOOD, (GOOD[0].half(), GOOD[1])], TypeError, r"float16.*float32"),
        ([GOOD, (GOOD[0].to("meta"), GOOD[1].to("meta"))], ValueError, r"meta.*cpu"),
    ],
)
def test_wrong_parts_are_named(parts, error, message):
    with pytest.raises(error, match=rf"merge(?s:.)*{message}"):
        onchip.merge(parts)


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="merge"):
        onchip.merge(*GOOD, GOOD[0])
    with pytest.raises(TypeError, match="merge"):
        onchip.merge(*GOOD)
    with pytest.raises(TypeError, match="merge"):
        onchip.merge([GOOD], *GOOD)
    with pytest.raises(TypeError, match="merge"):
        onchip.merge(3.0)
