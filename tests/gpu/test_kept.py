"""Calls that repeat: from the second of their facts on, only what may differ is looked at."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings, strategies as st

import onchip
from onchip import kept, observe
from onchip.backends.compiled import launch
from onchip.backends.compiled.relaunch import Descriptors
from onchip.problem import dense

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """How often kernels were launched again. The interpreter gets the same arguments as a kept launch does."""
    launch.forget()
    count = [0]
    plain, again = launch.Step.run, launch.relaunch

    def counted(launched):
        def call(changing):
            count[0] += 1
            launched(changing)

        return call

    def interpreted(step, changing, steady):
        if steady and step.again is not None:
            return step.again(changing)
        if steady:
            descriptors = Descriptors(changing)
            step.again = counted(
                lambda given: step.kernel[step.grid](*descriptors.filled(given), *step.rest, **step.meta)
            )
        return plain(step, changing, False)

    if launch.INTERPRETED:
        monkeypatch.setattr(launch.Step, "run", interpreted)
    monkeypatch.setattr(launch, "relaunch", lambda *args: counted(again(*args)))
    yield count
    launch.forget()


def randn(*shape, dtype=torch.float16):
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def qkv(rows=(17, 20), heads=(2, 1), dims=(32, 32), batch=1, dtype=torch.float16):
    (rows_q, rows_k), (heads_q, heads_k), (dim, dim_v) = rows, heads, dims
    return (
        randn(batch, rows_q, heads_q, dim, dtype=dtype),
        randn(batch, rows_k, heads_k, dim, dtype=dtype),
        randn(batch, rows_k, heads_k, dim_v, dtype=dtype),
    )


def attend(*tensors, **options):
    return onchip.attention(*tensors, backend="triton", return_lse=True, **options)


def check(tensors, **options):
    """Out, lse and gradients of a call, against the reference in float64."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    found = attend(*leaves, **options)
    truth = onchip.attention(*exact, backend="reference", return_lse=True, **options)
    ups = [torch.randn_like(x) for x in found]
    found += torch.autograd.grad(found, leaves, ups)
    truth += torch.autograd.grad(truth, exact, [x.double() for x in ups])
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=2e-2, rtol=2e-2)


PROBLEMS = [
    {},
    {"rows": (70, 70), "dims": (64, 64)},
    {"dims": (32, 16)},  # dim_v of its own
    {"dims": (30, 30)},  # strides that the copy engine cannot take
    {"dtype": torch.float32},
    {"rows": (1, 700), "heads": (4, 1)},  # shares of the keys
]


@pytest.mark.parametrize("shape", PROBLEMS)
@pytest.mark.parametrize("mask", [None, onchip.window(9, 4)])
def test_repeated_calls(shape, mask, launched):
    for _ in range(2):
        check(qkv(**shape), mask=mask)
    assert len(kept._calls) == 1
    assert launched[0] >= 4  # the forward pass, delta, dK and dV, dQ
    (call,) = kept._calls.values()
    assert call.run is not None and call.operands[:3] == (None, None, None)


def test_the_second_call_states_nothing(monkeypatch):
    tensors = qkv()
    first = attend(*tensors, mask=onchip.causal())
    monkeypatch.setattr("onchip.problem.dense", lambda *args: pytest.fail("the problem was stated again"))
    monkeypatch.setattr("onchip.select.choose", lambda *args: pytest.fail("a backend was chosen again"))
    for a, b in zip(attend(*tensors, mask=onchip.causal()), first, strict=True):
        assert torch.equal(a, b)


def misaligned(*shape):
    return randn(torch.Size(shape).numel() + 1)[1:].view(shape)


@pytest.mark.parametrize("which", range(3))
def test_addresses_of_another_alignment(which):
    """Kernels are compiled for addresses that are multiples of 16 bytes."""
    tensors = list(qkv())
    attend(*tensors)
    attend(*tensors)
    tensors[which] = misaligned(*tensors[which].shape)
    check(tensors)


def test_strides_are_facts():
    for make in (
        lambda x: x,
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
        lambda x: x[:1].expand_as(x),
    ):
        for _ in range(2):
            check([make(x) for x in qkv(batch=2)])
    assert len(kept._calls) == 4


def test_values_that_equal_others():
    """1 and True, 0.0 and False, an int and a float: what is kept for one is no answer for the other."""
    tensors = qkv()
    for _ in range(2):
        attend(*tensors, scale=1.0)
        attend(*tensors)
    for error, wrong in (
        (TypeError, {"scale": True}),
        (TypeError, {"dropout": False}),
        (ValueError, {"backend": ["triton"]}),
        (ValueError, {"backend": 3}),
        (TypeError, {"mask": onchip.causal}),
        (TypeError, {"score": 1.0}),
        (ValueError, {"layout": "sbhd"}),
    ):
        with pytest.raises(error, match=next(iter(wrong))):
            onchip.attention(*tensors, **{"backend": "triton", **wrong})
    with pytest.raises(ValueError, match="seed"):
        attend(*tensors, dropout=0.5, seed=-1)
    assert torch.equal(attend(*tensors, scale=1)[0], attend(*tensors, scale=1.0)[0])


def test_what_is_no_plain_tensor():
    tensors = qkv()
    attend(*tensors)
    nested = torch.nested.nested_tensor(list(tensors[0]))
    for wrong in (tensors[0].cpu().numpy(), nested, tensors[0].to_sparse(), None):
        with pytest.raises(TypeError, match="q: "):
            attend(wrong, *tensors[1:])


STATED = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "rows": st.sampled_from([(3, 5), (5, 5), (5, 3)]),
        "heads": st.sampled_from([(2, 1), (2, 2)]),
        "dims": st.sampled_from([(8, 8), (16, 8)]),
        "dtype": st.sampled_from([torch.float16, torch.float32]),
    }
)
OPTIONS = st.fixed_dictionaries(
    {
        "mask": st.sampled_from([None, onchip.causal(), onchip.window(2, 1), onchip.window(2, None)]),
        "scale": st.sampled_from([None, 0.5, 0.0, -1.0]),
        "deterministic": st.booleans(),
    }
)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(STATED, OPTIONS), min_size=2, max_size=4))
def test_a_kept_call_states_its_own_problem(calls):
    """Whatever came before: no two problems share facts."""
    for shape, options in calls:
        tensors, mask, scale = qkv(**shape), options["mask"], options["scale"]
        attend(*tensors, **options)
        facts = mask, None, scale, 0.0, None, options["deterministic"], "triton"
        found = kept.recall(kept.facts(*tensors, *facts), *tensors)
        _, problem = dense(*tensors, mask, None, scale, 0.0, options["deterministic"])
        assert found.problem == problem
        assert found.operands.mask.band == (None if mask is None else mask.band)
        assert all(a is b for a, b in zip(found.operands[:3], tensors, strict=True))


@pytest.mark.parametrize("grad", [False, True])
def test_nothing_is_held(grad):
    """Neither inputs nor outputs live longer than their caller lets them."""
    seen = []
    for _ in range(3):
        tensors = [x.requires_grad_(grad) for x in qkv()]
        out, lse = attend(*tensors)
        if grad:
            out.sum().backward()
        seen += [weakref.ref(x) for x in (*tensors, out, lse)]
        del tensors, out, lse
    gc.collect()
    assert not [ref for ref in seen if ref() is not None]


def test_few_are_kept(monkeypatch):
    monkeypatch.setattr(kept, "_KEEP", 3)
    for rows in range(1, 9):
        attend(*qkv(rows=(rows, 4)))
        assert len(kept._calls) <= 3


def test_another_table_of_tiles_lets_go():
    attend(*qkv())
    launch.forget()
    assert not kept._calls


class Seen:
    def __init__(self):
        self.calls = []

    def called(self, call, out, lse, seconds):
        self.calls.append((call.problem, call.operands.q))


def test_onlookers_see_them():
    tensors = qkv()
    attend(*tensors)
    seen = Seen()
    with observe.observing(seen):
        for _ in range(2):
            attend(*tensors)
    assert [q is tensors[0] for _, q in seen.calls] == [True, True]


def test_transforms_and_signs_are_looked_at():
    """vmap, jvp, a negation that is still to be done, and tensors that outlived a transform."""
    q, k, v = tensors = qkv(dtype=torch.float32)
    expected = attend(*tensors)[0]
    attend(*tensors)
    mapped = torch.func.vmap(lambda q: attend(q, k, v)[0])(torch.stack([q, 2 * q]))
    torch.testing.assert_close(mapped[0], expected)
    torch.testing.assert_close(mapped[1], attend(2 * q, k, v)[0])
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: attend(q, k, v)[0], (q,), (q,))
    torch.testing.assert_close(attend(torch._neg_view(-q), k, v)[0], expected)
    left = []
    torch.func.grad(lambda q: left.append(q) or q.sum())(q)
    torch.testing.assert_close(attend(left[0], k, v)[0], expected)


def test_autocast_comes_first():
    tensors = qkv(dtype=torch.float32)
    attend(*tensors)
    with torch.autocast(DEVICE, torch.float16):
        for _ in range(2):
            assert attend(*tensors)[0].dtype == torch.float16
    assert attend(*tensors)[0].dtype == torch.float32


def test_gradients_are_of_their_own_call():
    """Two calls before either's backward pass, and one whose input changed, which raises."""
    first, second = ([x.requires_grad_() for x in qkv()] for _ in range(2))
    alone = [attend(*x)[0] for x in (first, second)]
    wanted = [torch.autograd.grad(out.sum(), x) for out, x in zip(alone, (first, second), strict=True)]
    outs = [attend(*x)[0] for x in (first, second)]
    for i in (1, 0):
        found = torch.autograd.grad(outs[i].sum(), (first, second)[i])
        assert all(torch.equal(a, b) for a, b in zip(found, wanted[i], strict=True))
    out = attend(*first)[0]
    with torch.no_grad():
        first[1] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_only_other_devices_calls_are_kept():
    """A CPU's own backends count tile loads while asked to, and choose anew for it."""
    tensors = [x.cpu() for x in qkv(dtype=torch.float32)]
    for backend in (None, "cpu", "native"):
        assert kept.facts(*tensors, None, None, None, 0.0, None, True, backend) is None
