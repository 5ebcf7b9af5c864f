"""torch's FlopCounterMode counts the visible pairs of attention's operators."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import onchip
from checks import qkv
from onchip import flops


def counted(run):
    with FlopCounterMode(display=False) as counter:
        result = run()
        torch.mm(torch.ones(3, 4), torch.ones(4, 5))  # what stands beside it is counted as ever
    return counter.get_total_flops() - 120, result


@pytest.mark.parametrize(
    "mask",
    [
        None,
        onchip.causal(),
        onchip.window(5, 2),
        onchip.dense(torch.rand(2, 4, 33, 70) < 0.3),
        onchip.padding(torch.tensor([3, 60])),
    ],
    ids=["full", "causal", "window", "dense", "padding"],
)
def test_forward_and_backward_count_visible_pairs(mask):
    q, k, v = (x.requires_grad_() for x in qkv(2, 33, 70, 4, 2, dim=8, dim_v=24))
    plan = onchip.plan(q, k, v, mask=mask)
    found, out = counted(lambda: onchip.attention(q, k, v, mask=mask))
    assert found == plan.flops == 2 * plan.pairs * 32
    found, _ = counted(lambda: torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
    assert found == plan.passes("onchip")["backward"].flops == 2 * plan.pairs * 72


def test_packed_sequences_count_their_own_lengths():
    q, k = torch.randn(30, 4, 8), torch.randn(40, 2, 8)
    cu_q, cu_k = torch.tensor([0, 10, 10, 30]), torch.tensor([0, 15, 20, 40])
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "seqused_k": torch.tensor([15, 5, 7])}
    assert counted(lambda: onchip.attention_varlen(q, k, k, **lengths))[0] == 2 * 16 * 4 * (10 * 15 + 20 * 7)


@pytest.mark.parametrize("new", [0, 2])
def test_a_cache_counts_the_keys_in_use(new):
    q, k, v = qkv(2, 2, 64, 4, 2, dim=8)
    fresh = {name: torch.randn(2, new, 2, 8) for name in "kv"} if new else {}
    lengths = {"cache_seqlens": torch.tensor([10, 40]), "cache_leftpad": torch.tensor([3, 0])}
    found, _ = counted(lambda: onchip.attention_with_cache(q, k, v, **lengths, **fresh))
    assert found == 2 * 16 * 4 * 2 * (10 - 3 + 40 + 2 * new)


def test_modules_are_told_apart():
    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return onchip.attention(q, k, v)

    with FlopCounterMode(display=False) as counter:
        Attend()(*qkv(1, 16, 16, 2))
    assert sum(counter.get_flop_counts()["Attend"].values()) == counter.get_total_flops() == 4 * 2 * 256 * 16


def test_without_data():
    """A model on the fake device of a size that no memory holds."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q = torch.empty(1, 2**17, 64, 128, dtype=torch.bfloat16)
        onchip.attention(q, q, q, mask=onchip.causal())
    assert counter.get_total_flops() == 4 * 128 * 64 * 2**17 * (2**17 + 1) // 2


def test_a_counter_made_before_the_formulas():
    with FlopCounterMode(display=False) as counter:
        for operator in flops.FORMULAS:
            counter.flop_registry.pop(operator)
        flops.join()
        onchip.attention(*qkv(1, 16, 16, 2))
    assert counter.get_total_flops() == 4 * 2 * 256 * 16


def test_every_operator_has_a_formula():
    names = [name for name in dir(torch.ops.onchip) if name.startswith("attention")]
    assert {"attention", "attention_backward", "attention_over_cache", "attention_with_cache"} <= set(names)
    assert all(getattr(torch.ops.onchip, name) in flops.flop_registry for name in names)
