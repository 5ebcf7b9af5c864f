"""`plan`: its numbers against brute force, from tensors or shapes alone; what it prints; what it refuses."""

import dataclasses
import json
import re

import pytest
import torch

import onchip
from checks import ON_CPU, qkv
from contract_masks import MASKS, Shape, full_truth
from onchip import devices, select, traffic
from onchip.tiles import Tiles
from test_schedule import true_kinds


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("mask", MASKS)
def test_counts_are_those_of_the_whole_matrix(mask, backend, monkeypatch):
    shape = Shape((45, 45), (70, 70), heads_q=4)
    if backend == "cpu":
        monkeypatch.setattr(select.load(backend), "tiles", lambda problem: Tiles(16, 32))
    masked = MASKS[mask](shape)
    for heads_k in (4, 1):
        plan = onchip.plan(
            (2, 45, 4, 8), (2, 70, heads_k, 8), (2, 70, heads_k, 24), mask=masked.mask, backend=backend
        )
        truth = full_truth(masked, shape)
        kinds = torch.cat([true_kinds(visible, plan.tiles) for visible in truth])
        assert [plan.empty, plan.partial, plan.full] == [int((kinds == kind).sum()) for kind in range(3)]
        assert plan.pairs == sum(int(visible.sum()) for visible in truth)
        assert plan.flops == 2 * plan.pairs * (8 + 24)
        assert plan.backend == backend and backend not in plan.refusals


def test_each_kind_of_tile():
    plan = onchip.plan(*((2, 1024, 4, 64),) * 3, mask=onchip.causal(), backend="cpu")
    side = 1024 // plan.tiles.tile_m
    assert plan.tiles.tile_m == plan.tiles.tile_n
    assert plan.partial == 8 * side and plan.full == plan.empty == 8 * side * (side - 1) // 2
    assert plan.pairs == 8 * 1024 * 1025 // 2


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_shapes_alone_give_what_tensors_give(layout):
    q, k, v = qkv(2, 33, 70, 4, 2, dim=8, dim_v=24, dtype=torch.bfloat16)
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = {
        "mask": onchip.window(9, 3),
        "score": onchip.Score(softcap=2.0),
        "layout": layout,
        "dropout": 0.1,
    }
    by_tensor = onchip.plan(q, k, v, **options)
    shapes = tuple(q.shape), tuple(k.shape), v.shape
    assert onchip.plan(*shapes, dtype=torch.bfloat16, **options) == by_tensor
    assert onchip.plan(*map(list, shapes), dtype=torch.bfloat16, **options) == by_tensor
    assert by_tensor.problem.dtype is torch.bfloat16
    assert onchip.plan(*shapes, **options).problem.dtype is torch.float32


def test_shapes_too_large_for_memory():
    shape = (1, 2**17, 64, 128)
    plan = onchip.plan(shape, shape, shape, mask=onchip.causal(), dtype=torch.bfloat16)
    assert plan.pairs == 64 * 2**17 * (2**17 + 1) // 2
    assert all(0 < extra < 2**33 for extra in plan.extra_memory.values())


def test_a_plan_is_what_the_call_does():
    """Score tiles that the loop loads are those that the plan counts."""
    q, k, v = qkv(2, 700, 900, 4, 2, dim=8)
    for mask in (
        None,
        onchip.causal(),
        onchip.window(100, 0),
        onchip.dense(torch.rand(2, 4, 700, 900) < 1e-5),
    ):
        plan = onchip.plan(q, k, v, mask=mask, backend="cpu")
        with onchip.backends.cpu.trace() as moved:
            onchip.attention(q, k, v, mask=mask, backend="cpu")
        visited = plan.partial + plan.full
        group = 2  # a key head's tile is loaded once for its query heads, where any of them visits it
        loaded = moved.tiles_loaded.get("k", 0)
        assert loaded * group == visited or (mask is not None and visited / group <= loaded <= visited)
        assert moved.tiles_loaded["q"] == 2 * 4 * plan.tiles.count(700, 900)[0]


def test_zero_sizes():
    for q, k in (((0, 4, 2, 8), (0, 5, 2, 8)), ((2, 0, 2, 8), (2, 5, 2, 8)), ((2, 4, 2, 8), (2, 0, 2, 8))):
        for mask in (None, onchip.causal(), onchip.padding(0)):
            plan = onchip.plan(q, k, k, mask=mask)
            assert (plan.pairs, plan.flops, plan.full) == (0, 0, 0)
            assert "0 visible pairs" in str(plan)


def test_what_it_prints():
    plan = onchip.plan(
        (2, 1024, 8, 64), (2, 2048, 2, 64), (2, 2048, 2, 128), mask=onchip.causal(), backend="cpu"
    )
    text = str(plan)
    for part in (
        "batch 2",
        "1024 x 2048",
        "8/2",
        "64/128",
        "float32",
        "cpu",
        f"{plan.empty} empty",
        f"{plan.pairs:,}",
    ):
        assert part in text, part
    assert re.search(rf"{plan.tiles.tile_m} x {plan.tiles.tile_n}", text)
    for name, reason in plan.refusals.items():
        assert f"not {name}: {reason}" in text
    for step, extra in plan.extra_memory.items():
        assert f"memory     {step}: {extra / 2**20:.1f} MiB beyond inputs and results" in text
    assert max(map(len, text.splitlines())) < 160


def test_every_backend_is_chosen_or_says_why_not():
    plan = onchip.plan((1, 8, 1, 8), (1, 8, 1, 8), (1, 8, 1, 8))
    assert plan.backend == ON_CPU
    assert plan.refusals.keys() | {ON_CPU, "cpu"} == select.BACKENDS.keys()
    assert all(isinstance(reason, str) and reason for reason in plan.refusals.values())
    assert "dense" in plan.refusals["reference"] or "N x N" in plan.refusals["reference"]


def test_a_refused_problem():
    shape = (1, 8, 1, 8)
    with pytest.raises(NotImplementedError, match=r"cpu.*meta"):
        onchip.plan(shape, shape, shape, device="meta")
    with pytest.raises(NotImplementedError, match=r"'cpu' refuses.*meta"):
        onchip.plan(shape, shape, shape, device="meta", backend="cpu")
    x = torch.empty(shape, device="meta")
    with pytest.raises(NotImplementedError, match="no backend"):
        onchip.attention(x, x, x)
    with pytest.raises(NotImplementedError, match="'cpu' refuses"):
        onchip.attention(x, x, x, backend="cpu")


def test_a_refusal_is_never_a_fallback(monkeypatch):
    """Forced or not: where a backend says no, the error gives its reason and nothing is computed."""
    for module in map(select.load, ("cpu", "native")):
        monkeypatch.setattr(module, "refuse", lambda problem: "the moon is full")
        monkeypatch.setattr(module, "forward", lambda *a: pytest.fail("a refused backend ran"))
    q, k, v = qkv(1, 5, 5, 1)
    for call in (onchip.attention, onchip.plan):
        with pytest.raises(NotImplementedError, match="the moon is full"):
            call(q, k, v, backend="cpu")
        with pytest.raises(NotImplementedError, match="the moon is full"):
            call(q, k, v)
    assert onchip.plan(q, k, v, backend="reference").refusals["cpu"] == "the moon is full"


def test_errors_are_the_calls_own():
    q, k, v = (1, 8, 4, 8), (1, 8, 2, 8), (1, 8, 2, 8)
    for wrong, message in (
        ({"mask": onchip.padding(9)}, "padding.*9.*8"),
        ({"mask": "causal"}, "mask.*str"),
        ({"score": onchip.Score(sink=torch.zeros(3))}, r"sink.*\(3,\)"),
        ({"dropout": 1.5}, "dropout.*1.5"),
        ({"scale": float("nan")}, "scale"),
        ({"layout": "sbhd"}, "layout.*sbhd"),
        ({"backend": "cuda"}, "backend.*cuda"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            onchip.plan(q, k, v, **wrong)
    with pytest.raises(ValueError, match="heads"):
        onchip.plan((1, 8, 3, 8), k, v)
    with pytest.raises(TypeError, match="k: got"):
        onchip.plan(q, "k", v)
    with pytest.raises((TypeError, ValueError), match="q"):
        onchip.plan((1, -8, 4, 8), k, v)
    with pytest.raises(TypeError, match="int32"):
        onchip.plan(q, k, v, dtype=torch.int32)


def test_a_plan_is_a_plain_record():
    shape = (1, 8, 1, 8)
    plan = onchip.plan(shape, shape, shape)
    assert isinstance(plan, onchip.Plan)
    names = {field.name for field in dataclasses.fields(plan)}
    assert names >= {
        "backend",
        "refusals",
        "tiles",
        "empty",
        "partial",
        "full",
        "pairs",
        "flops",
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.flops = 3
    assert all(type(getattr(plan, n)) is int for n in ("empty", "partial", "full", "pairs", "flops"))
    assert plan.extra_memory == {s: part.extra_memory for s, part in plan.passes().items()}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_extra_memory_grows_as_it_should(backend):
    """Linear in the length for the tiled loop, quadratic for the dense one."""
    plans = [onchip.plan(*((1, n, 8, 64),) * 3, backend=backend).extra_memory for n in (4096, 8192)]
    for step in ("forward", "backward"):
        assert 1.0 <= plans[1][step] / plans[0][step] <= (2.1 if backend == "cpu" else 4.1)


def test_extra_memory_has_the_sums_of_a_bias_gradient():
    """In float32, where the gradient is returned in 16 bits; forward needs none."""
    q = torch.randn(1, 200, 4, 64, dtype=torch.bfloat16)

    def extra(dtype, learned):
        bias = torch.zeros(4, 200, 200, dtype=dtype, requires_grad=learned)
        return onchip.plan(q, q, q, score=onchip.Score(bias=bias), backend="cpu").extra_memory

    plain = extra(torch.float32, False)
    assert extra(torch.bfloat16, False) == extra(torch.float32, True) == plain
    more = extra(torch.bfloat16, True)
    assert more == {"forward": plain["forward"], "backward": plain["backward"] + 4 * 4 * 200 * 200}


def test_extra_memory_of_kernels_that_are_not_here():
    """By hand, for an H200: shares of the keys, each row's lse and delta, what lse lost to rounding (twice, the second
    time as the passes want it), lists of tiles, sums of a bias's gradient."""
    half = {"device": "H200", "dtype": torch.bfloat16}
    cache = (1, 131072, 8, 128)
    decode = onchip.plan((1, 1, 32, 128), cache, cache, cache_seqlens=[131072], **half)
    shares = 132 // 8
    assert decode.backend == "triton" and decode.extra_memory == {"forward": 4 * shares * 32 * (128 + 1)}
    shape, rows = (2, 4096, 16, 128), 4 * 2 * 16 * 4096
    plain = onchip.plan(shape, shape, shape, **half)
    assert plain.backend == "hopper" and plain.extra_memory == {"forward": 0, "backward": 2 * rows}
    small = onchip.plan(shape, shape, shape, backend="triton", **half)
    assert small.extra_memory == {"forward": 0, "backward": 2 * rows}
    bias = torch.zeros(4096, 4096, dtype=torch.bfloat16, requires_grad=True)
    learned = onchip.plan(shape, shape, shape, score=onchip.Score(bias=bias), **half)
    assert learned.extra_memory == {"forward": rows, "backward": 4 * rows + 4 * 4096**2}
    blocks = onchip.block_sparse(torch.eye(32, dtype=torch.bool), tile=(128, 128))
    sparse = onchip.plan(shape, shape, shape, mask=blocks, **half)
    lists = {
        "attend": 32 * (32 + 3),
        "dkdv": 64 * (64 + 3),
        "dq": 32 * (64 + 3),
    }  # tiles; two counts a row, and the rows' order
    tiles = {name: t for part in sparse.passes().values() for name, t in part.tiles.items() if name in lists}
    assert tiles == {"attend": Tiles(128, 128), "dkdv": Tiles(64, 64), "dq": Tiles(128, 64)}
    assert sparse.extra_memory == {
        "forward": 4 * lists["attend"],
        "backward": 2 * rows + 4 * (lists["dkdv"] + lists["dq"]),
    }
    lengths = onchip.padding(
        torch.tensor([4096, 4000])
    )  # nobody sees the last keys: v is copied without them
    hidden = onchip.plan(shape, shape, shape, mask=lengths, **half).extra_memory["forward"]
    keys = 2 * 4096 * 16
    assert hidden == keys + 2 * 128 * keys + 4 * 2 * 32 * (32 + 3) + 4 * 2


def test_traffic_of_a_plan():
    """Its own backend's passes and the other algorithms', which make no schedules for the mask that calls use."""
    mask = onchip.causal()
    shape = (2, 600, 4, 16)
    plan = onchip.plan(shape, (2, 600, 2, 16), (2, 600, 2, 16), mask=mask)
    own = plan.passes()
    assert set(own) == {"forward", "backward"} and own["forward"].flops == plan.flops
    assert own["forward"].tiles["attend"] == plan.tiles
    assert plan.traffic["onchip"] == own and set(plan.traffic) == set(traffic.ALGORITHMS)
    assert plan.dense_memory == 3 * 2 * 4 * 600 * 600 * 4
    assert not mask.cache
    with pytest.raises(ValueError, match="algorithm"):
        plan.passes("flash9")
    cached = onchip.plan((2, 1, 4, 16), shape, shape, cache_seqlens=600)
    for one, step, words in ((plan, "both", "'forward' or 'backward'"), (cached, "backward", "'forward'")):
        with pytest.raises(ValueError, match=f"step: got '{step}', expected {words}$"):
            one.floor(step)


def test_what_it_prints_of_traffic_and_memory():
    plan = onchip.plan(*((1, 1024, 8, 64),) * 3, mask=onchip.causal(), backend="cpu")
    text = str(plan)
    own = plan.passes()
    for part in own.values():
        assert f"{part.read_bytes / 2**20:.1f} MiB read, {part.write_bytes / 2**20:.1f} MiB written" in text
        assert f"{part.flops / 1e9:.3f}" in text
    assert f"standard attention {plan.dense_memory / 2**20:.1f} MiB" in text
    for name in ("flash1", "flash2", "minimum"):
        for part in plan.passes(name).values():
            assert (
                f" {part.bytes / 2**20:.1f} MiB" in text.split("others")[1 if part.step == "forward" else 2]
            )
    numbers = plan.pairs * 64 * 64 / (192 * 1024 / 4)
    assert plan.lower_bound == numbers and f"bound      forward: {4 * numbers / 2**20:.1f} MiB" in text
    assert "floor" not in text  # it would have to measure this CPU
    report = plan.report()
    assert report.startswith(text) and len(report.splitlines()) == len(text.splitlines()) + 2
    assert "on cpu, compute-bound" in report


def test_what_a_score_holds_is_said_beside_the_traffic():
    score = onchip.Score(alibi=torch.rand(8))
    plan = onchip.plan(*((1, 256, 8, 64),) * 3, score=score, backend="cpu")
    rows = str(plan).splitlines()
    (at,) = [n for n, row in enumerate(rows) if "of vectors and tables" in row]
    assert plan.held and rows[at - 1].startswith("traffic    backward")


@pytest.mark.parametrize("name", ["cpu", "this CPU", "This-CPU"])
def test_this_cpu_by_its_names(name):
    shape = (1, 64, 2, 16)
    assert onchip.plan(shape, shape, shape, device=name).problem.device == "cpu"
    assert devices.device(name).name == "cpu"


def test_a_device_that_is_not_here():
    """Named, it takes the place of cuda; its floor is that of its datasheet."""
    shape = (4, 4096, 16, 128)
    options = {"dtype": torch.bfloat16, "backend": "reference"}
    plan = onchip.plan(shape, shape, shape, device="H200", **options)
    assert plan.problem.device == "cuda" and plan.device.name == "H200"
    floor = plan.floor()
    assert floor.bound == "compute" and floor.seconds == pytest.approx(plan.flops / 989.4e12)
    assert "bfloat16 on H200" in str(plan) and "on H200, compute-bound" in plan.report()
    decode = onchip.plan((4, 1, 16, 128), shape, shape, device="a100", **options)
    assert decode.floor().bound == "memory"
    assert decode.floor().seconds == pytest.approx(decode.passes("minimum")["forward"].bytes / 2.039e12)
    for wrong in ("H900", None, 1.5):
        with pytest.raises(ValueError, match=f"device: got {wrong!r}.*A100.*MI300X"):
            onchip.plan(shape, shape, shape, device=wrong)


def test_the_picture():
    picture = onchip.plan(*((1, 64, 1, 8),) * 3, mask=onchip.causal()).picture(4, 4)
    assert picture == ["▒···", "█▒··", "██▒·", "███▒"]
    plan = onchip.plan(*((1, 1000, 2, 8),) * 3, mask=onchip.window(99, 0))
    assert len(plan.picture()) == 12 and {len(row) for row in plan.picture()} == {32}
    for row in plan.picture():
        assert row in str(plan)
    assert onchip.plan((1, 3, 1, 8), (1, 2, 1, 8), (1, 2, 1, 8)).picture() == ["██"] * 3
    assert onchip.plan((1, 0, 1, 8), (1, 2, 1, 8), (1, 2, 1, 8)).picture() == []


def test_copies_are_said(monkeypatch):
    """By a backend that copies what it cannot address, of the tensors as they lie."""
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in "qkv")
    k = torch.randn(1, 8, 16, 2).transpose(2, 3)
    assert onchip.plan(q, k, v, backend="reference").copies == ()
    monkeypatch.setattr(select.load(ON_CPU), "copies", lambda tensor: tensor.stride(-1) != 1, raising=False)
    plan = onchip.plan(q, k, v)
    assert plan.copies == ("k",) and "copies     k: made contiguous" in str(plan)
    assert onchip.plan(q, k.contiguous(), v).copies == ()
    heads_first = onchip.plan(*(x.transpose(1, 2) for x in (q, k, v)), layout="bhsd")
    assert heads_first.copies == ("k",)


def test_json():
    plan = onchip.plan(*((1, 100, 2, 8),) * 3, mask=onchip.causal(), device="H100", backend="reference")
    found = json.loads(json.dumps(plan.to_json()))
    assert found["device"] == "H100" and found["problem"]["dtype"] == "float32"
    assert found["lower_bound"] == plan.lower_bound and not [n for n in found["problem"] if n.startswith("_")]
    assert found["traffic"]["onchip"]["forward"] == plan.passes()["forward"].to_json()
    assert found["floor"]["backward"] == {
        "seconds": plan.floor("backward").seconds,
        "bound": plan.floor("backward").bound,
    }


def test_packed_sequences():
    """As many pairs as one plan a sequence has, and the tiles of all of them."""
    cu_q, cu_k = torch.tensor([0, 70, 70, 200]), torch.tensor([0, 90, 100, 210])
    shapes = (200, 4, 8), (210, 2, 8), (210, 2, 24)
    plan = onchip.plan(*shapes, mask=onchip.causal(), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    alone = [
        onchip.plan((1, m, 4, 8), (1, n, 2, 8), (1, n, 2, 24), mask=onchip.causal())
        for m, n in ((70, 90), (0, 10), (130, 110))
    ]
    assert plan.problem.layout == "varlen" and plan.pairs == sum(one.pairs for one in alone)
    assert set(plan.passes()) == {"forward", "backward"} and "3 packed, longest 130 x 110" in str(plan)
    with pytest.raises(TypeError, match="cu_seqlens_k"):
        onchip.plan(*shapes, cu_seqlens_q=cu_q)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        onchip.plan(*shapes, cu_seqlens_q=cu_q + 1, cu_seqlens_k=cu_k)


def test_a_named_gpu_has_its_own_backend_and_tiles():
    """Hopper's kernel runs on an H100 and an H200; Triton's tiles go by the device's capability."""
    shape = (4, 4096, 16, 128)
    plans = {
        name: onchip.plan(shape, shape, shape, dtype=torch.bfloat16, device=name)
        for name in ("A100", "H100", "H200", "B200", "MI300X")
    }
    assert [plan.backend for plan in plans.values()] == ["triton", "hopper", "hopper", "triton", "triton"]
    assert (
        "A100 is no Hopper GPU" in plans["A100"].refusals["hopper"] and "hopper" not in plans["H200"].refusals
    )
    small = (1, 64, 1, 128)
    assert (
        "host time"
        in onchip.plan(small, small, small, dtype=torch.bfloat16, device="H200").refusals["hopper"]
    )
    from onchip.backends.triton import table

    for name in ("A100", "H100"):
        plan = onchip.plan(shape, shape, shape, dtype=torch.bfloat16, device=name, backend="triton")
        facts = table.Facts(8 if name == "A100" else 9, 1, "")
        sizes = {step: table.config(plan.problem, step, facts)[:2] for step in ("forward", "dkdv", "dq")}
        passes = plan.passes()
        assert plan.tiles == passes["forward"].tiles["attend"] == Tiles(*sizes["forward"])
        assert all(passes["backward"].tiles[step] == Tiles(*sizes[step]) for step in ("dkdv", "dq"))


def test_a_large_picture_is_that_of_its_tiles(monkeypatch):
    """Past one tile a cell it is made of whole tiles: the same where cells are, and no element is looked at anew."""
    from onchip import steps

    shape = (1, 8192, 2, 8)
    plan = onchip.plan(shape, shape, shape, mask=onchip.documents(cu_seqlens=torch.tensor([0, 3000, 8192])))
    rows, columns = 8192 // plan.tiles.tile_m // 2, 8192 // plan.tiles.tile_n // 2
    cells = Tiles(2 * plan.tiles.tile_m, 2 * plan.tiles.tile_n)
    one = dataclasses.replace(plan.problem, heads_q=1, heads_k=1)
    slow = steps.kinds(one, plan.layout, plan.mask, cells)
    monkeypatch.setattr(steps, "kinds", lambda *a: pytest.fail("looked at every element"))
    assert plan.picture(rows, columns) == ["".join("·▒█"[kind] for kind in row) for row in slow]
    assert {len(row) for row in plan.picture(5, 7)} <= {6, 7} and len(plan.picture(5, 7)) <= 5


def test_the_cpu_s_loop_is_named():
    shape = (1, 8, 1, 8)
    assert "backend    cpu (the tiled loop" in str(onchip.plan(shape, shape, shape, backend="cpu"))


def test_figures_have_a_fit_unit():
    from onchip.units import operations, size

    assert [size(n) for n in (0, 1536, 2**20, 2**34)] == ["0.0 MiB", "1.5 KiB", "1.0 MiB", "16.0 GiB"]
    assert [operations(n) for n in (0, 2500, 2.5e6, 2.147e9, 1.7592e13)] == [
        "0 kFLOP", "2.5 kFLOP", "2.5 MFLOP", "2.147 GFLOP", "17.59 TFLOP"
    ]  # fmt: skip


def test_what_a_mask_and_a_score_hold_is_stated_and_read_once():
    """Either in the traffic, by the tile, or beside it, in `held`; the floor has each once."""
    shape, pairs = (2, 64, 4, 16), 64 * 64
    table = torch.zeros(9)
    mod = onchip.mod(lambda s, b, h, q, k, t: s + t[0], table)
    bias = torch.zeros(1, 4, 1, 64, dtype=torch.bfloat16)
    diagonal = onchip.dense(torch.eye(64, dtype=torch.bool))
    ids = onchip.documents(torch.arange(64) // 10)
    vectors = onchip.Score(sink=torch.zeros(4), alibi=torch.zeros(4), mod=mod)
    cases = [  # bytes in the traffic, and held
        (onchip.Mask(), None, 0, 0),
        (onchip.causal(), onchip.Score(softcap=2.0), 0, 0),
        (onchip.dense(torch.ones(64, 64, dtype=torch.bool)), None, 0, 0),  # no tile has to look
        (diagonal, None, pairs, 0),
        (diagonal | onchip.padding(torch.tensor([3, 9])), None, pairs, 2 * 8),
        (ids, None, 2 * 64 * 8, 0),
        (onchip.block_sparse(torch.ones(2, 2, dtype=torch.bool), tile=(32, 32)), None, 0, 4),
        (onchip.Mask(), onchip.Score(bias=bias), 4 * 64 * 2, 0),
        (onchip.Mask(), onchip.Score(bias=bias.expand(2, 4, 64, 64)), 4 * 64 * 2, 0),
        (onchip.Mask(), onchip.Score(bias=torch.zeros(64, 64)), pairs * 4, 0),
        (onchip.Mask(), vectors, 0, 16 + 16 + 36),
    ]
    bare = onchip.plan(shape, shape, shape, device="H200")
    for mask, score, moved, held in cases:
        plan = onchip.plan(shape, shape, shape, mask=mask, score=score, device="H200")
        assert plan.held == held == plan.to_json()["held"]
        assert ("that the mask and the score hold" in str(plan)) == bool(held)
        for step in ("forward", "backward"):
            least = plan.passes("minimum")[step]
            if mask is not cases[1][0]:
                assert least.least == bare.passes("minimum")[step].least + moved
            expected = least.floor(plan.device).memory + held / plan.device.bandwidth
            assert plan.floor(step).memory == pytest.approx(expected)
    assert bare.held == 0


def test_a_learned_bias_has_a_gradient_in_the_plan():
    shape = (1, 64, 2, 16)
    for learned in (False, True):
        score = onchip.Score(bias=torch.zeros(2, 64, 64, requires_grad=learned))
        plan = onchip.plan(shape, shape, shape, score=score)
        for passes in plan.traffic.values():
            assert ("dbias" in passes["backward"].tensors) == learned
            assert "bias" in passes["forward"].tensors


def test_a_function_for_a_gpu_that_is_not_here():
    """Whether it differs between heads is found where its tensors are."""
    shape = (1, 64, 4, 16)
    mask = onchip.where(lambda b, h, q, k: (q + k + h) % 3 != 0)
    plan = onchip.plan(shape, shape, shape, mask=mask, device="H200", dtype=torch.bfloat16)
    assert plan.device_name == "H200" and plan.pairs == onchip.plan(shape, shape, shape, mask=mask).pairs


def test_refusals_speak_of_the_named_device():
    shape = (1, 8, 1, 64)
    for device, reason in (
        ("H200", "hopper: torch.float64"),
        ("MI300X", "hopper: the MI300X is no Hopper GPU"),
    ):
        with pytest.raises(NotImplementedError, match=f"on the {device} .*{reason}.*triton: float64"):
            onchip.plan(shape, shape, shape, dtype=torch.float64, device=device)


def test_tiles_of_hopper_whose_first_one_lacks_rows():
    """4096 queries are 21 tiles of 192 and one of 64, the first: 363 blocks of 128 keys for each head."""
    shape = (4, 4096, 32, 64)
    plan = onchip.plan(shape, shape, shape, mask=onchip.causal(), dtype=torch.bfloat16, device="H200")
    assert plan.backend == "hopper" and plan.tiles == Tiles(192, 128, 128) and plan.to_json()["lead"] == 128
    assert "tiles of 192 x 128, the first of 64 queries" in str(plan)
    assert plan.partial + plan.full == 4 * 32 * 363
    assert plan.passes()["forward"].tensors["k"].loads == 4 * 32 * 363 * 128 * 64
    whole = onchip.plan(shape, shape, shape, dtype=torch.bfloat16, device="H200")
    assert whole.tiles == Tiles(192, 128) and "the first of" not in str(whole)
    few, long = (1, 33, 2, 64), (1, 1024, 2, 64)  # all of them in the one tile that there is
    one = onchip.plan(
        few, long, long, mask=onchip.causal(), dtype=torch.bfloat16, device="H200", backend="hopper"
    )
    assert one.tiles.lead == 64 and "the first of" not in str(one)
