"""The plain functions that users write: on tensors, differentiated against finite differences, and refused in words."""

import functools
import inspect
import math

import pytest
import torch

import onchip
from onchip.plain import derivative, exp, floor, log, on_tensors, sqrt, tanh, where

SHAPE = (2, 3, 9, 11)
B, H, Q, K = torch.meshgrid(*map(torch.arange, SHAPE), indexing="ij")

SMOOTH = {
    "identity": lambda score, batch, head, q, k: score,
    "polynomial": lambda score, batch, head, q, k: score**3 - 2 * score + 1,
    "power of two": lambda score, batch, head, q, k: 2**score,
    "to the score": lambda score, batch, head, q, k: (score * score + 1) ** (score / 4),
    "reciprocal": lambda score, batch, head, q, k: 1 / (1 + score * score),
    "negative power": lambda score, batch, head, q, k: (score * score + 1) ** -0.5,
    "every function": lambda score, batch, head, q, k: (
        exp(-score * score) + log(1 + score * score) + 3 * tanh(score / 2) + sqrt(score * score + 1)
    ),
    "a constant": lambda score, batch, head, q, k: 1.0,
    "indices alone": lambda score, batch, head, q, k: q - 2 * k,
    "minus": lambda score, batch, head, q, k: -(-score - q),
    "division by an index": lambda score, batch, head, q, k: score / (q + 1),
    "floor division of indices": lambda score, batch, head, q, k: score * (q // 3) + 7 // (k + 1),
    "remainder of indices": lambda score, batch, head, q, k: score * (k % 4) + (q - k) % 3,
    "floor of an index": lambda score, batch, head, q, k: score * floor(q / 2),
    "powers of indices": lambda score, batch, head, q, k: score * q**2 - k**3,
    "a sum in a loop": lambda score, batch, head, q, k: sum(score * i for i in range(4)),
}
KINKED = {
    "min": lambda score, batch, head, q, k: min(score, 1, q - k),
    "max": lambda score, batch, head, q, k: max(score * score, 0.5, score),
    "abs": lambda score, batch, head, q, k: abs(score) + abs(score - q),
    "min of max": lambda score, batch, head, q, k: abs(min(max(score, -1), 1) * score),
    "min of indices": lambda score, batch, head, q, k: score * min(q, k) - max(q, k),
    "where of the score": lambda score, batch, head, q, k: where(score > 0.3, score * score, 0.3 * score),
    "nested where": lambda score, batch, head, q, k: where(
        score > 0, where(score > 1, 2 * score - 1, score), -score * score
    ),
    "where of equality": lambda score, batch, head, q, k: where(q == k, score * 2, score * 3),
    "where of inequality": lambda score, batch, head, q, k: where(q != k, score * 2, -score),
    "where of what always holds": lambda score, batch, head, q, k: where(q >= 0, score, 2 * score),
    "and, or": lambda score, batch, head, q, k: where((q > k) | (head == 1) & (k > 2), score * 4, -score),
    "exclusive or": lambda score, batch, head, q, k: where((q > k) ^ (head == 1), score * 4, -score),
    "not": lambda score, batch, head, q, k: where(~(q == k), score, 0.0),
    "a condition as a number": lambda score, batch, head, q, k: (
        score * (q == k) + score * ((q > k) + 2 * (q < k))
    ),
    "a condition of the score as a number": lambda score, batch, head, q, k: (score > 0) * score * 2,
    "a range": lambda score, batch, head, q, k: where((score >= 0) & (score <= 1), score * score, score),
}
TABLES = {
    "a table": lambda score, batch, head, q, k, t: score * t[head, q] + t[head, k],
    "a table at a computed index": lambda score, batch, head, q, k, t: score * t[head, min(abs(q - k), 8)],
    "a table in a condition": lambda score, batch, head, q, k, t: where(t[head, k] > 0, score * score, score),
    "a table squared": lambda score, batch, head, q, k, t: tanh(score * t[head, q]) * t[head, q] ** 2,
    "two tables": lambda score, batch, head, q, k, t, u: score * t[head, q] * u[batch] + score**2,
}


def run(fn, score, *tensors):
    return torch.as_tensor(on_tensors(fn)(score, B, H, Q, K, *tensors)).to(score.dtype).expand(SHAPE)


def assert_derivative(fn, *tensors):
    """Central differences of step 1e-6 at odd multiples of 1/128, which no kink of these functions is near.

    Their kinks are at whole numbers, 1/2, 0.3 and sqrt(1/2): 0.003 away at least.
    """
    slope, step = derivative(fn, len(tensors)), 1e-6
    score = (2 * (128 * torch.randn(SHAPE, dtype=torch.float64)).floor() + 1) / 128
    up, down = (run(fn, score + d, *tensors) for d in (step, -step))
    found, expected = run(slope, score, *tensors), (up - down) / (2 * step)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    source = inspect.getsource(slope)  # compilers read the source
    assert source.startswith("def ") and source.count("\n") == 2


@pytest.mark.parametrize("name", SMOOTH | KINKED)
def test_derivative(name):
    assert_derivative((SMOOTH | KINKED)[name])


@pytest.mark.parametrize("name", TABLES)
def test_derivative_with_tables(name):
    tables = [torch.randn(3, 11, dtype=torch.float64), torch.randn(2, dtype=torch.float64)]
    fn = TABLES[name]
    assert_derivative(fn, *tables[: fn.__code__.co_argcount - 5])


def test_a_bool_table_is_a_condition():
    flags = torch.rand(2, 11) < 0.5
    for fn in (
        lambda score, batch, head, q, k, t: where(t[batch, k], score * score, 2 * score),
        lambda score, batch, head, q, k, t: where(t[batch, k] & (q > k), score * score, 2 * score),
    ):
        assert_derivative(fn, flags)


def double(score, batch, head, q, k, *, by=2.0):
    return by * score + min(q, k)


def scaled_by(factor, score, batch, head, q, k):
    return factor * score


class Scaled:
    def __call__(self, score, batch, head, q, k):
        return 3.0 * score


def test_functions_of_every_form():
    factor = 1.5

    def closed(score, batch, head, q, k):
        return factor * score

    for fn in (double, closed, functools.partial(scaled_by, 2.0), Scaled()):
        assert_derivative(fn)


def test_the_remainder_of_a_score_is_right_or_refused():
    """Its derivative is 1 between the jumps."""
    for fn in (
        lambda score, batch, head, q, k: score % 3,
        lambda score, batch, head, q, k: score // 2,
        lambda score, batch, head, q, k: floor(score) * score,
    ):
        try:
            derivative(fn, 0)
        except ValueError as raised:
            error = raised
        else:
            assert_derivative(fn)
            continue
        assert "cannot derive" in str(error) and "grad=" in str(error)


def branching(score, batch, head, q, k):
    return score if q > k else -score


REFUSED = {
    "if": (branching, r"branches on a value"),
    "and": (
        lambda score, batch, head, q, k: where(q > k and k > 2, score, 0.0),
        r"branches on a value.*where",
    ),
    "not": (lambda score, batch, head, q, k: where(not q > k, score, 0.0), r"branches on a value"),
    "a chained comparison": (
        lambda score, batch, head, q, k: where(0 < k < q, score, 0.0),
        r"branches on a value",
    ),
    "math.exp": (lambda score, batch, head, q, k: math.exp(score), r"plain's exp"),
    "torch.tanh": (lambda score, batch, head, q, k: torch.tanh(score), r"plain's exp.*tanh"),
    "float": (lambda score, batch, head, q, k: float(score), r"float"),
    "int of an index": (lambda score, batch, head, q, k: score * int(q), r"int"),
    "too few arguments": (lambda score: score, r"argument"),
    "no value": (lambda score, batch, head, q, k: None, r"None"),
    "a missing name": (lambda score, batch, head, q, k: score * missing, r"missing"),  # noqa: F821
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_derived_says_why(name):
    fn, message = REFUSED[name]
    label = getattr(fn, "__name__", "")
    with pytest.raises(
        ValueError, match=f"(?s)mod: cannot derive the derivative of {label}.*{message}.*grad="
    ):
        onchip.mod(fn)


def test_a_given_derivative_is_taken():
    def fn(score, batch, head, q, k):
        return score * torch.ones_like(score)

    def grad(score, batch, head, q, k):
        return 1.0

    assert onchip.mod(fn, grad=grad).grad is grad
    q, k, v = (torch.randn(1, 5, 1, 4, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    call = functools.partial(onchip.attention, score=onchip.Score(mod=onchip.mod(fn, grad=grad)))
    assert torch.autograd.gradcheck(call, (q, k, v))


def test_wrong_arguments_of_mod():
    with pytest.raises(TypeError, match="fn is int"):
        onchip.mod(3)
    with pytest.raises(TypeError, match="grad is str"):
        onchip.mod(double, grad="x")
    with pytest.raises(TypeError, match=r"tensors\[0\] is list"):
        onchip.mod(double, [1.0])
    with pytest.raises(ValueError, match=r"tensors\[1\] requires grad"):
        onchip.mod(double, torch.ones(2), torch.ones(2, requires_grad=True))


def test_a_closed_over_tensor_does_not_lose_its_gradient():
    weight = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(ValueError, match=r"mod: .*weight|mod: .*requires grad"):
        onchip.mod(lambda score, batch, head, q, k: score * weight)


@pytest.mark.parametrize(
    "fn",
    [
        lambda batch, head, q, k: q > k and k > 2,
        lambda batch, head, q, k: 0 < k < q,
        lambda batch, head, q, k: k <= q if q > 2 else k < 1,
    ],
)
def test_a_mask_that_branches_says_so(fn):
    x = torch.randn(1, 8, 1, 4)
    with pytest.raises((TypeError, ValueError), match="where: .*branches"):
        onchip.attention(x, x, x, mask=onchip.where(fn))


# On tensors.


def test_min_and_max_are_element_by_element():
    fn = on_tensors(lambda a, b: (min(a, b, 2), max(a, 0), min(3, 1), max(*[a, b])))
    a, b = torch.tensor([1.0, 5.0, -2.0]), torch.tensor([4.0, 3.0, -7.0])
    low, positive, number, high = fn(a, b)
    assert low.tolist() == [1.0, 2.0, -7.0] and positive.tolist() == [1.0, 5.0, 0.0]
    assert number == 1 and high.tolist() == [4.0, 5.0, -2.0]


def test_numbers_keep_float64():
    """0.1 is not float32's 0.1 where the score is float64."""
    score = torch.zeros(3, dtype=torch.float64)
    for fn in (lambda s: max(s, 0.1), lambda s: where(s == 0, 0.1, s), lambda s: min(0.1, s + 1)):
        assert on_tensors(fn)(score).tolist() == [0.1] * 3


def test_functions_on_numbers_tensors_and_nothing_else():
    for name, fn in (("exp", exp), ("log", log), ("tanh", tanh), ("sqrt", sqrt), ("floor", floor)):
        assert fn(0.7) == getattr(math, name)(0.7)
        torch.testing.assert_close(
            fn(torch.tensor([0.7, 2.0])), getattr(torch, name)(torch.tensor([0.7, 2.0]))
        )
        with pytest.raises(TypeError):
            fn("x")
    assert where(True, 1, 2) == 1 and where(False, 1, 2) == 2
    condition = torch.tensor([True, False])
    assert where(condition, 1, 2).tolist() == [1, 2]
    assert where(condition, torch.tensor([5.0, 6.0]), 0).tolist() == [5.0, 0.0]


def test_the_original_function_is_untouched():
    def fn(a):
        return min(a, 3)

    assert on_tensors(fn) is not fn and on_tensors(fn)(torch.tensor([1, 5])).tolist() == [1, 3]
    assert fn(7) == 3 and fn.__globals__.get("min", min) is min
    assert double(1.0, 0, 0, 1, 2) == 3.0 and on_tensors(double)(1.0, 0, 0, 1, 2, by=1.0) == 2.0
