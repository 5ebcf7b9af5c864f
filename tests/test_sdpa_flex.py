"""FlexAttention's callables and block masks, run by onchip, against torch's own flex_attention and dense attention."""

import functools
import types

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention as torch_flex,
    or_masks,
)

import onchip
from onchip.integrations.flex import Adapted, Slope, flex_attention, tensors_of, to_mask, to_mod

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile", "ignore:return_lse"
)
IDS = torch.tensor([0] * 20 + [1] * 33 + [2] * 27)
BIAS = torch.randn(4)


def causal(b, h, q, k):
    return q >= k


def distance(s, b, h, q, k):
    return s - 0.1 * abs(q - k)


def same_document(b, h, q, k):
    return IDS[q] == IDS[k]


def near(width, b, h, q, k):
    return (q - k).abs() < width


class Every:
    def __init__(self, step):
        self.step = step

    def __call__(self, b, h, q, k):
        return k % self.step == h % self.step


MASK_MODS = {
    "plain": causal,
    "tensor from outside": same_document,
    "and": and_masks(causal, same_document),
    "or": or_masks(same_document, functools.partial(near, 7)),
    "object": Every(3),
    "per head": lambda b, h, q, k: (q >= k) & (k + h > 4) | (q == k),
}


def inputs(heads_k=4, seqlen=80):
    return (
        torch.randn(2, 4, seqlen, 16),
        torch.randn(2, heads_k, seqlen, 16),
        torch.randn(2, heads_k, seqlen, 16),
    )


def dense(q, k, v, score=None, visible=None):
    s = q @ k.mT / 4
    at = [torch.arange(n).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(s.shape)]
    s = s if score is None else score(s, *at)
    return s.masked_fill(~visible(*at), -torch.inf).softmax(-1) @ v if visible else s.softmax(-1) @ v


@pytest.mark.parametrize("name", MASK_MODS)
def test_block_masks(name):
    mask_mod = MASK_MODS[name]
    block_mask = create_block_mask(mask_mod, 2, 4, 80, 80, device="cpu", BLOCK_SIZE=16)
    q, k, v = inputs()
    want, want_lse = torch_flex(q, k, v, block_mask=block_mask, return_lse=True)
    out, lse = flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
    torch.testing.assert_close((out, lse), (want, want_lse), rtol=1e-4, atol=1e-5)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    up = torch.randn_like(out)
    truth = torch.autograd.grad(dense(q, k, v, visible=mask_mod), leaves, up)
    grads = torch.autograd.grad(flex_attention(q, k, v, block_mask=block_mask), leaves, up)
    torch.testing.assert_close(grads, truth, rtol=1e-4, atol=1e-5)


# torch's uncompiled flex_attention asks mask_mod alone; what follows holds for its compiled kernels.


def expanded(blocks):
    return blocks.repeat_interleave(16, 0).repeat_interleave(16, 1)


def test_block_lists_count_where_there_is_no_mask_mod():
    order = torch.arange(5, dtype=torch.int32).expand(1, 1, 5, 5)
    counts = torch.tensor([1, 2, 3, 2, 1], dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(counts[None, None], order, BLOCK_SIZE=16)
    visible = expanded(torch.arange(5) < counts[:, None])
    q, k, v = inputs()
    want = dense(q, k, v, visible=lambda *at: visible)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=block_mask), want, rtol=1e-4, atol=1e-5)


def test_full_blocks_are_not_asked_again():
    """Full blocks are visible even where mask_mod says no; in partial blocks it decides."""
    order = torch.arange(5, dtype=torch.int32).expand(1, 1, 5, 5)
    one = torch.ones(1, 1, 5, dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(one, order.flip(3), one, order, BLOCK_SIZE=16, mask_mod=causal)
    at = torch.arange(80)
    visible = (at < 16) | (at >= 64) & (at[:, None] >= at)
    q, k, v = inputs()
    want = dense(q, k, v, visible=lambda *at: visible)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=block_mask), want, rtol=1e-4, atol=1e-5)


SCORE_MODS = {
    "plain": lambda s, b, h, q, k: s * 0.5 + 0.01 * (q - k),
    "torch functions": lambda s, b, h, q, k: torch.where(
        q >= k, 3 * torch.tanh(s / 3) - 0.1 * (q - k).abs(), -torch.inf
    ),
    "tensor from outside": lambda s, b, h, q, k: s + BIAS[h] * (q - k),
    "without the score": lambda s, b, h, q, k: (q - k).abs() * 0.1,
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods(name):
    q, k, v = inputs()
    want = torch_flex(q, k, v, score_mod=SCORE_MODS[name])
    torch.testing.assert_close(
        flex_attention(q, k, v, score_mod=SCORE_MODS[name]), want, rtol=1e-4, atol=1e-5
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    up = torch.randn_like(want)
    truth = torch.autograd.grad(dense(q, k, v, SCORE_MODS[name]), leaves, up, allow_unused=True)
    grads = torch.autograd.grad(flex_attention(q, k, v, score_mod=SCORE_MODS[name]), leaves, up)
    for ours, theirs in zip(grads, truth, strict=True):
        theirs = torch.zeros_like(ours) if theirs is None else theirs
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_score_and_mask_with_fewer_key_heads_and_one_key_batch():
    q, k, v = inputs(heads_k=2)
    block_mask = create_block_mask(causal, 2, None, 80, 80, device="cpu", BLOCK_SIZE=16)
    options = {"score_mod": SCORE_MODS["plain"], "block_mask": block_mask, "scale": 0.3, "enable_gqa": True}
    want = torch_flex(q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1), **options)
    torch.testing.assert_close(flex_attention(q, k[:1], v[:1], **options), want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="enable_gqa"):
        flex_attention(q, k, v)


class Unhashable:
    """A score_mod that compares by value, as a dataclass does."""

    def __init__(self, slope):
        self.slope = slope

    def __call__(self, score, b, h, q, k):
        return score - self.slope * abs(q - k)

    def __eq__(self, other):
        return isinstance(other, Unhashable)


def test_score_mods_are_told_apart_by_identity():
    q, k, v = inputs()
    for slope in (0.1, 0.7):
        want = dense(q, k, v, score=Unhashable(slope))
        out = flex_attention(q, k, v, score_mod=Unhashable(slope))
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def test_errors():
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"query: has shape \(4, 80, 16\)"):
        flex_attention(q[0], k[0], v[0])


def test_auxiliary_outputs():
    q, k, v = inputs()
    out, lse = flex_attention(q, k, v, return_lse=True, kernel_options={"BLOCK_M": 64})
    torch.testing.assert_close(lse, (q @ k.mT / 4).logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(out, flex_attention(q, k, v))
    aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))[1]
    torch.testing.assert_close(aux.lse, (q @ k.mT / 4).logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert flex_attention(q, k, v, return_aux=AuxRequest())[1].lse is None
    with pytest.raises(NotImplementedError, match="max_scores"):
        flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))


def test_changes_of_outside_tensors_are_seen():
    ids = torch.zeros(80, dtype=torch.long)
    mask = to_mask(lambda b, h, q, k: ids[q] == ids[k], 80, 80)
    q, k, v = (x.transpose(1, 2) for x in inputs())
    full = onchip.attention(q, k, v, mask=mask)
    ids[40:] = 1
    assert not torch.allclose(onchip.attention(q, k, v, mask=mask), full)


def reads(kind, table):
    """A mask_mod that reads the table by a closure, a partial, an object, a container, or through another function."""

    def by_closure(b, h, q, k):
        return table[q] > 0

    held, listed, named, module = Every(table), [table], {"table": table}, torch.nn.Module()
    module.register_buffer("table", table)
    config = types.SimpleNamespace(table=table)
    return {
        "closure": by_closure,
        "nested": lambda b, h, q, k: by_closure(b, h, q, k) & (k >= 0),
        "partial": functools.partial(lambda t, b, h, q, k: t[q] > 0, table),
        "object": lambda b, h, q, k: held.step[q] > 0,
        "list": lambda b, h, q, k: listed[0][q] > 0,
        "dict": lambda b, h, q, k: named["table"][q] > 0,
        "namespace": lambda b, h, q, k: config.table[q] > 0,
        "module": lambda b, h, q, k: module.table[q] > 0,
        "inner": lambda b, h, q, k: (lambda: module.table[q] > 0)(),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["closure", "nested", "partial", "object", "list", "dict", "namespace", "module", "inner"],
)
def test_adapted_functions_take_their_tensors_as_arguments(kind):
    """As kernels need them: a copy of the function reads what it is given, and the function itself is left alone."""
    table, other = torch.tensor([1, 0, 1]), torch.tensor([0, 0, 1])
    fn = reads(kind, table)
    adapted = Adapted(fn, 4, tuple(tensors_of(fn)))
    at = torch.arange(3)
    assert adapted(0, 0, at, at, table).tolist() == [True, False, True]
    assert adapted(0, 0, at, at, other).tolist() == [False, False, True]
    assert fn(0, 0, at, at).tolist() == [True, False, True]


def test_plain_functions_stay_plain():
    """Their derivative is derived, and torch's combinations become onchip's, so that kernels compile them."""
    assert not isinstance(to_mod(SCORE_MODS["tensor from outside"]).grad, Slope)
    assert isinstance(to_mod(SCORE_MODS["torch functions"]).grad, Slope)
    assert to_mask(causal, 80, 80).elements[0].fn is causal
    both = to_mask(and_masks(causal, or_masks(same_document, causal)), 80, 80)
    assert len(both.elements) == len(both.unions) == 1


def test_what_torch_computes_is_refused_for_kernels_in_words():
    class Symbol:
        pass

    with pytest.raises(TypeError, match="no plain arithmetic"):
        Adapted(lambda s, b, h, q, k: torch.tanh(s), 5)(*[Symbol()] * 5)


def test_adapted_masks_and_mods_are_kept():
    block_mask = create_block_mask(causal, None, None, 80, 80, device="cpu", BLOCK_SIZE=16)
    mask = to_mask(block_mask, 80, 80)
    assert to_mask(block_mask, 80, 80) is mask
    block_mask.kv_num_blocks.zero_()
    assert to_mask(block_mask, 80, 80) is not mask
    mod = to_mod(SCORE_MODS["torch functions"])
    assert to_mod(SCORE_MODS["torch functions"]) is mod


def test_learned_tensors_are_refused():
    slope = torch.randn(4, requires_grad=True)
    q, k, v = inputs()
    module, named = torch.nn.Linear(3, 4), {"slope": slope}
    for score_mod in (
        lambda s, b, h, q, k: s + slope[h],
        lambda s, b, h, q, k: s + named["slope"][h],
        lambda s, b, h, q, k: s + module.bias[h],
    ):
        with pytest.raises(ValueError, match="requires grad"):
            flex_attention(q, k, v, score_mod=score_mod)


def test_parameters_that_a_function_does_not_read_do_not_matter():
    module = torch.nn.Linear(3, 4)
    module.register_buffer("slope", torch.randn(4))
    found = tensors_of(lambda s, b, h, q, k: s + module.slope[h])
    assert len(found) == 1 and found[0] is module.slope


def test_a_function_that_calls_itself_is_searched_once():
    table, other = torch.tensor([1, 0]), torch.tensor([0, 1])

    def again(b, h, q, k, last=False):
        return table[q] > 0 if last else again(b, h, q, k, True)

    assert tensors_of(again) == [table]
    assert Adapted(again, 4, (table,))(0, 0, torch.arange(2), 0, table).tolist() == [True, False]
    assert Adapted(lambda *at: again(*at, True), 4, (table,))(0, 0, torch.arange(2), 0, other).tolist() == [
        False,
        True,
    ]


def test_tensors_are_found_wherever_a_function_reads_them():
    table = torch.zeros(2)
    held = Every(table)
    found = [
        lambda: table,
        functools.partial(near, table),
        held,
        held.__call__,
        and_masks(causal, lambda b, h, q, k: table[q] > 0),
    ]
    assert all(any(t is table for t in tensors_of(fn)) for fn in found)
    assert tensors_of(same_document)[0] is IDS and not tensors_of(causal)


def test_compiled_functions_take_masks_and_mods_from_outside():
    q, k, v = inputs()
    mask, mod = to_mask(create_block_mask(causal, None, None, 80, 80, device="cpu"), 80, 80), to_mod(distance)
    want = flex_attention(q, k, v, distance, create_block_mask(causal, None, None, 80, 80, device="cpu"))
    compiled = torch.compile(
        lambda *qkv: onchip.attention(*qkv, layout="bhsd", mask=mask, score=onchip.Score(mod=mod)),
        backend="aot_eager",
        fullgraph=True,
    )
    torch.testing.assert_close(compiled(q, k, v), want)
    inside = torch.compile(lambda *qkv: flex_attention(*qkv, distance), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="make them outside of one graph"):
        inside(q, k, v)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_model_calls_it_between_two_graphs():
    """With gradients, and without compiling anew for calls like the last."""

    def model(q, k, v, block_mask):
        return flex_attention(q * 2, k, v, score_mod=distance, block_mask=block_mask) * 3

    q, k, v = (x.requires_grad_() for x in inputs())
    block_mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device="cpu")
    compiled = torch.compile(model, backend="aot_eager")
    want, got = model(q, k, v, block_mask), compiled(q, k, v, block_mask)
    torch.testing.assert_close(got, want)
    up = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), up) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b)
    before = counters["stats"]["unique_graphs"]
    compiled(q, k, v, block_mask)
    assert before > 0 and counters["stats"]["unique_graphs"] == before
