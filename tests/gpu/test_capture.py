"""Calls while a CUDA graph is captured: nothing on their way waits for a device or is kept, and they mean the same.

Capturing is pretended here, so that the interpreter does it too; graphs themselves are in test_graphs.py.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import onchip
from onchip import autograd, capture, problem as problems
from onchip.backends import reference, triton
from onchip.backends.compiled import launch, lists
from onchip.backends.triton import backward_pass, forward_pass, planning
from onchip.backends.triton.table import Config
from onchip.layout import Cache, Varlen
from onchip.problem import Operands, Saved
from onchip.schedule import EMPTY, FULL, PARTIAL
from onchip.tiles import Tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, Q_LEN, K_LEN = 2, 2, 70, 90
ENDS = (0, 70, 101), (0, 50, 140)  # of packed queries and keys; the longest are Q_LEN and K_LEN


def ints(*values):
    return torch.tensor(values, device=DEVICE)


def chosen(*shape):
    return (torch.rand(shape) < 0.6).to(DEVICE)


def far(b, h, q, k, table):
    return (min(abs(q - k), 7) > 3) & (table[h] >= max(k // 30, 0))


MASKS = {
    "band and none": lambda: onchip.causal(),
    "both alignments": lambda: onchip.window(40, 30) & onchip.causal("top_left") & onchip.padding(80),
    "sinks": lambda: onchip.sinks(5),
    "padding": lambda: onchip.padding(33),
    "paddings": lambda: onchip.padding(ints(33, 90)),
    "prefix": lambda: onchip.prefix(40),
    "prefixes": lambda: onchip.prefix(ints(0, 61)),
    "chunked": lambda: onchip.causal() & onchip.chunked(40),
    "documents": lambda: onchip.documents(ints(*range(K_LEN)) // 30),
    "documents by boundaries": lambda: onchip.documents(cu_seqlens=ints(0, 25, 60, K_LEN)) & onchip.causal(),
    "dense": lambda: onchip.dense(chosen(BATCH, 1, Q_LEN, K_LEN)),
    "blocks": lambda: onchip.block_sparse(chosen(HEADS, 3, 3), tile=(32, 32)),
    "odd blocks": lambda: onchip.block_sparse(chosen(5, 5), tile=(17, 19)) & onchip.causal(),
    "where": lambda: onchip.where(far, torch.arange(HEADS, device=DEVICE)),
    "blocks and where": lambda: (
        onchip.block_sparse(chosen(3, 3), tile=(32, 32)) & onchip.where(lambda b, h, q, k: (q + k) % 3 > 0)
    ),
    "a union": lambda: (
        onchip.causal() & (onchip.window(20, 0) | onchip.sinks(3) | onchip.padding(ints(9, 0)))
    ),
}


@pytest.fixture
def small_tiles(monkeypatch):
    for module in (planning, backward_pass):
        monkeypatch.setattr(module, "config", lambda *given: Config(32, 32, 4, 1))


@pytest.fixture
def captured(monkeypatch):
    monkeypatch.setattr(capture, "capturing", lambda device: True)


def stated(mask, layout, dtype=torch.float32, **options):
    """A problem and its operands; dropout's seed is for the caller to set."""
    shapes = [(BATCH, n, HEADS, 16) for n in (Q_LEN, K_LEN, K_LEN)]
    if layout == "varlen":
        shapes = [(ends[-1], HEADS, 16) for ends in (ENDS[0], ENDS[1], ENDS[1])]
    q, k, v = (torch.randn(*shape, device=DEVICE, dtype=dtype) for shape in shapes)
    place = problems.dense_layout(q, k, v) if layout == "dense" else None
    if place is None:
        place = Varlen(*(ints(*ends).int() for ends in ENDS), None, None, Q_LEN, K_LEN)
    problem = problems.state(q, k, v, place, layout, mask, None, **options)
    return problem, Operands(q, k, v, place, mask, onchip.Score())


def passes(problem, operands, backend=triton):
    tiles = backend.tiles(problem)
    saved = Saved(*backend.forward(problem, operands, tiles), frozenset("qkv"))
    grads = backend.backward(problem, operands, saved, torch.ones_like(saved.out), None, tiles)
    out, lse = saved.out, saved.lse
    return out, lse, grads.q, grads.k, grads.v


class NoWaits(TorchDispatchMode):
    """Raises at what copies from the host, or waits for a device to answer."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        by_mask = "index" in name and any(
            isinstance(x, torch.Tensor) and x.dtype is torch.bool
            for x in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ())
        )
        waits = ("lift_fresh", "_local_scalar_dense", "nonzero", "equal", "unique", "masked_select")
        if by_mask or any(word in name for word in waits):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.usefixtures("small_tiles", "captured")
def test_nothing_waits_for_the_device(name, layout, monkeypatch):
    problem, operands = stated(MASKS[name](), layout)
    monkeypatch.setattr(launch.Step, "run", lambda *given: None)
    monkeypatch.setattr(torch.Tensor, "tolist", None)  # no dispatch mode sees it
    launch.forget()
    with NoWaits():
        passes(problem, operands)


@pytest.mark.parametrize(
    "name",
    ["band and none", "sinks", "padding", "paddings", "prefix", "prefixes", "chunked", "where", "a union"],
)
@pytest.mark.usefixtures("captured")
def test_decoding_waits_for_nothing(name, monkeypatch):
    q, cache = (torch.randn(BATCH, n, HEADS, 16, device=DEVICE) for n in (3, K_LEN))
    place, mask = Cache(3, K_LEN, ints(71, K_LEN), 0, None, None, None, 0), MASKS[name]()
    problem = problems.state(q, cache, cache, place, "cache", mask, None)
    monkeypatch.setattr(launch.Step, "run", lambda *given: None)
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    launch.forget()
    with NoWaits():
        forward_pass.forward(problem, Operands(q, cache, cache, place, mask, onchip.Score()))


@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.usefixtures("small_tiles")
def test_a_captured_call_computes_the_same(name, layout, monkeypatch):
    mask = MASKS[name]()
    problem, operands = stated(mask, layout)
    truth = passes(problem, operands, reference)
    mask.cache.clear()
    monkeypatch.setattr(capture, "capturing", lambda device: True)
    launch.forget()
    for found, expected in zip(passes(problem, operands), truth, strict=True):
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4)
    assert not mask.cache  # what a graph makes lies in memory of its own


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("name", list(MASKS)[1:])
def test_a_captured_list_leaves_out_no_tile(name, by_key):
    """Nor does it call one full that is not; of whole blocks and of intervals it is exact."""
    mask, tiles = MASKS[name](), Tiles(32, 32)
    problem, operands = stated(mask, "dense")
    exact, unseen = (kinds(problem, operands, tiles, by_key) for kinds in (lists._kinds, lists._kinds_unseen))
    exact, unseen = torch.broadcast_tensors(exact, unseen)
    assert not ((exact != EMPTY) & (unseen == EMPTY)).any()
    assert not ((exact != FULL) & (unseen == FULL)).any()
    if name in ("sinks", "padding", "paddings", "prefix", "prefixes", "blocks"):
        assert torch.equal(exact, unseen)
    problem, operands = stated(mask, "varlen")
    exact, unseen = (kinds(problem, operands, tiles, by_key) for kinds in (lists._kinds, lists._packed_kinds))
    assert not ((exact != EMPTY) & (unseen == EMPTY)).any()
    outside = torch.ones_like(unseen, dtype=torch.bool)
    for b in range(BATCH):
        lengths = operands.layout.q_lens[b], operands.layout.k_lens[b]
        outside[b, :, : -(-lengths[0] // 32), : -(-lengths[1] // 32)] = False
    assert not unseen[outside].any() and set(unseen.unique().tolist()) <= {EMPTY, PARTIAL}


def test_what_cannot_be_captured_says_so(captured):
    mask, other = onchip.dense(chosen(Q_LEN, K_LEN)), onchip.chunked(40)
    for made, layout in ((mask, "dense"), (other, "dense"), (other, "varlen")):
        problem, operands = stated(made, layout)
        with pytest.raises(NotImplementedError, match="CUDA graph"):
            onchip.schedule.keep(problem, operands.layout, made, ("x",), lambda: 1)
    if DEVICE == "cuda":
        with pytest.raises(ValueError, match="max_seqlen_q"):
            x, ends = operands.q, operands.layout.cu_seqlens_q
            onchip.attention_varlen(x, x, x, cu_seqlens_q=ends, cu_seqlens_k=ends)


def as_tensor(seed):
    return ints(seed if seed < 2**63 else seed - 2**64)


def call(operands, dropout):
    layout = operands.layout
    problem = problems.state(
        operands.q, operands.k, operands.v, layout, "dense", operands.mask, operands.score, dropout=dropout
    )
    return autograd.Call(problem, operands, triton, triton.tiles(problem))


@pytest.mark.parametrize(
    "seed, layout", [*((seed, "dense") for seed in (0, 2**31, 2**63 - 1, 2**64 - 1)), (2**40 + 5, "varlen")]
)  # either word of it zero, negative or all ones
@pytest.mark.usefixtures("small_tiles")
def test_a_seed_on_the_device_draws_the_same_bits(seed, layout):
    problem, operands = stated(onchip.causal(), layout, dropout=0.4)
    launch.forget()
    of_int = passes(problem, operands._replace(seed=seed))
    for run in range(2):  # the second goes straight to the kernel
        of_tensor = passes(problem, operands._replace(seed=as_tensor(seed)))
        for a, b in zip(of_int, of_tensor, strict=True):
            assert torch.equal(a, b), (seed, run)


def test_a_seed_on_the_device_reaches_the_bias_gradient():
    _, operands = stated(onchip.causal(), "dense")
    found = []
    for seed in (2**63 + 9, as_tensor(2**63 + 9)):
        bias = torch.zeros(HEADS, Q_LEN, K_LEN, device=DEVICE, requires_grad=True)
        own = operands._replace(score=onchip.Score(bias=bias), seed=seed)
        out, _ = autograd.apply(call(own, 0.4))
        found.append(torch.autograd.grad(out.sum(), bias)[0])
    assert torch.equal(*found)


def test_a_seed_that_changed_before_the_backward_pass_is_an_error():
    _, operands = stated(onchip.causal(), "dense")
    seed = as_tensor(7)
    operands.q.requires_grad_()
    out, _ = autograd.apply(call(operands._replace(seed=seed), 0.4))
    seed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
