"""onchip.plan of a call over a cache, and under autocast."""

import json

import pytest
import torch

import onchip

LENGTHS = [40, 0, 100]


def over_cache(mask=None, new=3, pages=False, **options):
    """The plan of four queries of each of three sequences over a cache, from shapes."""
    k, v = ((24, 16, 2, 8), (24, 16, 2, 24)) if pages else ((3, 128, 2, 8), (3, 128, 2, 24))
    slots = {"page_table": (3, 8)} if pages else {}
    return onchip.plan((3, 4, 4, 8), k, v, mask=mask, cache_seqlens=LENGTHS, new=new, **slots, **options)


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("mask", [None, onchip.causal(), onchip.window(9, 0)])
def test_a_cache(mask, pages):
    """As many pairs and bytes as a plan of each sequence alone has, and what is appended on top."""
    plan = over_cache(mask, pages=pages)
    alone = [
        onchip.plan((1, 4, 4, 8), (1, n + 3, 2, 8), (1, n + 3, 2, 24), mask=mask, backend=plan.backend)
        for n in LENGTHS
    ]
    assert plan.problem.layout == ("paged" if pages else "cache") and set(plan.passes()) == {"forward"}
    assert plan.pairs == sum(one.pairs for one in alone)
    least, parts = plan.passes("minimum")["forward"], [one.passes("minimum")["forward"] for one in alone]
    for name in ("k", "v", "q", "out"):
        assert least.tensors[name].loads == sum(p.tensors[name].loads for p in parts if name in p.tensors)
    assert plan.appended == 3 * 3 * 2 * (8 + 24) * 4 and plan.slots == 3 * 128
    text = str(plan)
    assert "batch 3 over a cache, 4 x 3 to 103" in text and "append     3 to each sequence" in text
    assert ("in pages of 16" in text) == pages
    assert json.loads(json.dumps(plan.to_json()))["cache"]["lengths"] == [43, 3, 103]


def test_a_cache_s_plan_is_what_the_call_does():
    """The tiled loop's loads are those of the plan; tensors and shapes say the same."""
    q, caches, new = torch.randn(3, 4, 4, 8), torch.randn(2, 3, 128, 2, 8), torch.randn(2, 3, 3, 2, 8)
    lengths = torch.tensor(LENGTHS)
    options = {"mask": onchip.causal(), "backend": "cpu"}
    plan = onchip.plan(q, *caches, cache_seqlens=lengths, new=3, **options)
    assert plan == onchip.plan(
        q.shape, caches[0].shape, caches[1].shape, cache_seqlens=LENGTHS, new=3, **options
    )
    with onchip.backends.cpu.trace() as moved:
        onchip.attention_with_cache(q, *caches, cache_seqlens=lengths, k=new[0], v=new[1], **options)
    own = plan.passes()["forward"]
    assert {n: x for n, x in moved.loads.items() if x} == {
        n: t.loads for n, t in own.tensors.items() if t.loads
    }
    rows, pad = torch.tensor([2, 0, 1]), torch.tensor([4, 0, 50])
    left = onchip.plan(q, *caches, cache_seqlens=lengths, cache_batch_idx=rows, cache_leftpad=pad)
    assert left.layout.k_lens == [36, 0, 50]


def test_a_cache_on_a_gpu():
    """Its lengths are on the device, so that the host goes by its capacity; what is appended is read and written."""
    one, none = (over_cache(onchip.causal(), n, True, device="H200", dtype=torch.bfloat16) for n in (3, 0))
    assert one.backend == "triton" and "paged layout" in one.refusals["hopper"]
    assert one.problem.seqlen_k == 128 and one.problem.k_bounded and not over_cache().problem.k_bounded
    assert one.tiles == one.passes()["forward"].tiles["attend"]
    grown = over_cache(onchip.causal(), 0, True, device="H200", dtype=torch.bfloat16)
    assert grown.floor().memory == none.floor().memory
    moved = one.passes("minimum")["forward"].least + 2 * one.appended
    assert one.floor().memory == pytest.approx(moved / one.device.bandwidth)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"cache_seqlens": 127, "new": 2}, "capacity 128"),
        ({"cache_seqlens": [1, 2]}, "cache_seqlens"),
        ({"cache_seqlens": [1, 2, -3]}, "cache_seqlens: got -3"),
        ({"cache_seqlens": 5, "new": -1}, "new: got -1"),
        ({"cache_seqlens": 5, "page_table": (3,)}, "page_table"),
        ({"cache_seqlens": 5, "page_table": (3, 8)}, "page_table: sequence"),
        ({"cache_seqlens": 5, "cache_leftpad": torch.tensor([9, 0, 0])}, "cache_leftpad: got 9"),
        ({"cache_seqlens": 5, "dropout": 0.5}, "dropout: got 0.5"),
        ({"cache_seqlens": 5, "layout": "bhsd"}, "layout"),
        (
            {"cache_seqlens": 5, "cu_seqlens_q": torch.tensor([0, 4])},
            "cu_seqlens_q: given with cache_seqlens",
        ),
        ({"page_table": (3, 8)}, "page_table: needs cache_seqlens"),
        ({"new": 2}, "new: needs cache_seqlens"),
    ],
)
def test_errors_of_a_cache(options, message):
    table = options.get("page_table")
    k = (2, 2, 2, 8) if table == (3, 8) and "cache_seqlens" in options else (3, 128, 2, 8)
    with pytest.raises((ValueError, TypeError), match=message):
        onchip.plan((3, 4, 4, 8), k, k, **options)


def test_under_autocast_it_is_a_plan_of_the_call_there():
    q = torch.randn(1, 64, 2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        plan, out = onchip.plan(q, q, q), onchip.attention(q, q, q)
        same = onchip.plan(*[q.bfloat16()] * 3)
        wide = onchip.plan(*[q.double()] * 3)
        cached = onchip.plan(q, q.bfloat16(), q.bfloat16(), cache_seqlens=5)
        gpu = onchip.plan(*[(1, 64, 2, 16)] * 3, device="H200")
    assert plan.problem.dtype is out.dtype is torch.bfloat16 and plan.cast_from is torch.float32
    assert "cast       float32 to bfloat16 before the call, by autocast" in str(plan)
    assert plan.to_json()["cast_from"] == "float32"
    assert same.problem == plan.problem and same.cast_from is None and "cast " not in str(same)
    assert wide.problem.dtype is torch.float64 and wide.cast_from is None
    assert cached.problem.dtype is torch.bfloat16 and cached.cast_from is torch.float32
    assert gpu.problem.dtype is torch.float32  # autocast is on for the CPU
    assert onchip.plan(q, q, q).problem.dtype is torch.float32
