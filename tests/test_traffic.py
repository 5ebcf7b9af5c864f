"""The traffic model: equal to what the CPU loop moves, to visible pairs, and to the papers' figures."""

import dataclasses
import itertools

import pytest
import torch

import onchip
from contract_masks import MASKS, Masked, Shape, full_truth
from onchip import orders, problem as problems, steps, traffic
from onchip.backends.cpu import native, tiled
from onchip.layout import Dense
from onchip.mask import Region
from onchip.schedule import PARTIAL
from onchip.tiles import Tiles
from test_schedule import state, true_kinds


def dense(
    seqlen_q,
    seqlen_k=None,
    batch=1,
    heads=1,
    heads_k=None,
    dim=64,
    dim_v=None,
    dtype=torch.float16,
    mask=None,
):
    """(problem, layout, mask) of these sizes, without storage."""
    seqlen_k, heads_k, dim_v = seqlen_k or seqlen_q, heads_k or heads, dim_v or dim
    q = torch.empty(batch, seqlen_q, heads, dim, dtype=dtype, device="meta")
    k = torch.empty(batch, seqlen_k, heads_k, dim, dtype=dtype, device="meta")
    v = torch.empty(batch, seqlen_k, heads_k, dim_v, dtype=dtype, device="meta")
    place = problems.dense_layout(q, k, v)
    mask = onchip.Mask() if mask is None else mask
    return problems.state(q, k, v, place, "dense", mask, None, device="cpu"), place, mask


def assert_traced(moved, *passes):
    """A trace holds exactly the sum of these Traffics."""
    total = {}
    for part in passes:
        for name, tensor in part.tensors.items():
            total[name] = total.get(name, traffic.Moved()) + tensor
    for field, of in (
        ("loads", moved.loads),
        ("stores", moved.stores),
        ("tiles_loaded", moved.tiles_loaded),
        ("tiles_stored", moved.tiles_stored),
    ):
        expected = {name: getattr(tensor, field) for name, tensor in total.items()}
        assert {n: x for n, x in of.items() if x} == {n: x for n, x in expected.items() if x}, field


@pytest.fixture(autouse=True)
def the_tiled_loop(monkeypatch):
    """The CPU backend's order is the tiled loop's here, which is what a trace sees, whatever else it may run."""
    monkeypatch.delattr("onchip.backends.cpu.sweeps", raising=False)


def traced(problem, operands, tiles, needs):
    """The trace of the tiled loop's forward and backward pass on these operands."""
    with onchip.backends.cpu.trace() as moved:
        output = tiled.forward(problem, operands, tiles)
        saved = problems.Saved(output.out, output.lse, output.rest, frozenset(needs))
        tiled.backward(problem, operands, saved, torch.randn_like(output.out), None, tiles)
    return moved


@pytest.mark.parametrize("name", MASKS)
def test_the_cpu_loop_moves_what_the_model_says(name):
    """Dense and packed layouts, shared key heads, forward and backward, with some gradients or all."""
    for shape in (Shape((45, 45), (70, 70), heads_q=4), Shape((33, 0, 50, 33), (20, 7, 0, 20), heads_q=4)):
        for heads_k, needs in ((4, "qkv"), (2, "qkv"), (1, "v")):
            masked = MASKS[name](shape)
            problem, place, mask = state(shape, heads_k, masked)
            packed = problem.layout == "varlen"
            size = (sum(shape.q_lens), sum(shape.k_lens)) if packed else (shape.seqlen_q, shape.seqlen_k)
            lead = () if packed else (2,)
            q = torch.randn(*lead, size[0], 4, 8)
            k, v = (torch.randn(*lead, size[1], heads_k, 8) for _ in "kv")
            operands = problems.Operands(q, k, v, place, mask, onchip.Score())
            tiles = Tiles(16, 32)
            moved = traced(problem, operands, tiles, needs)
            passes = [
                traffic.count(
                    problem, place, mask, "onchip", step, backend="cpu", needs=tuple(needs), tiles=tiles
                )
                for step in orders.STEPS
            ]
            assert_traced(moved, *passes)


# Which of (batch, heads, queries, keys) a bias or a mask has; the others it repeats.
BROADCASTS = [tuple(bool(i >> dim & 1) for dim in range(4)) for i in range(16)]


def operands_of(shape, heads_k, problem, place, mask, score):
    packed = problem.layout == "varlen"
    size = (sum(shape.q_lens), sum(shape.k_lens)) if packed else (shape.seqlen_q, shape.seqlen_k)
    lead = () if packed else (shape.batch,)
    q = torch.randn(*lead, size[0], shape.heads_q, 8)
    k, v = (torch.randn(*lead, size[1], heads_k, 8) for _ in "kv")
    return problems.Operands(q, k, v, place, mask, score)


def broadcast(shape, has):
    full = shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k
    return tuple(n if own else 1 for n, own in zip(full, has, strict=True))


def modelled(problem, place, mask, score, needs, tiles, backend="cpu"):
    options = {"score": score, "needs": tuple(needs), "tiles": tiles, "backend": backend}
    return [traffic.count(problem, place, mask, "onchip", step, **options) for step in orders.STEPS]


PAIRED = (Shape((45, 45), (70, 70), heads_q=4), Shape((33, 0, 50, 33), (20, 7, 0, 20), heads_q=4))


@pytest.mark.parametrize("has", BROADCASTS)
def test_the_cpu_loop_reads_and_sums_a_bias_as_the_model_says(has):
    """Of any shape, under masks of all kinds, shared key heads, with its gradient or that of others alone."""
    needs = {"all": ["q", "k", "v", "bias"], "bias": ["bias"], "v": ["v"]}
    for shape, name, (heads_k, wanted) in itertools.product(
        PAIRED, ("none", "causal", "dense_BHQK", "documents_cross"), ((4, "all"), (2, "bias"), (1, "v"))
    ):
        problem, place, mask = state(shape, heads_k, MASKS[name](shape))
        problem = dataclasses.replace(problem, score_parts=("bias",))
        score = onchip.Score(bias=torch.randn(broadcast(shape, has), dtype=torch.bfloat16))
        operands, tiles = operands_of(shape, heads_k, problem, place, mask, score), Tiles(16, 32)
        found = modelled(problem, place, mask, score, needs[wanted], tiles)
        assert_traced(traced(problem, operands, tiles, needs[wanted]), *found)
        for part in found:
            assert part.tensors["bias"].read_bytes == 2 * part.tensors["bias"].loads
        if "bias" in needs[wanted]:
            moved = found[1].tensors["dbias"]
            assert moved.loads == moved.stores and moved.write_bytes == 4 * moved.stores


@pytest.mark.parametrize("has", BROADCASTS)
def test_the_cpu_loop_reads_a_stored_mask_as_the_model_says(has):
    """Of any shape, alone, with a band, or among alternatives; full and empty tiles do not read it."""
    for shape, heads_k in itertools.product(PAIRED, (4, 2, 1)):
        visible = torch.rand(broadcast(shape, has)) < 0.9
        if visible.shape[2] > 1:
            visible[:, :, :17] = True
        if visible.shape[3] > 1:
            visible[..., 32:64] = False
        stored = onchip.dense(visible)
        for mask in (stored, stored & onchip.causal(), stored | onchip.window(3, 3), stored & stored):
            problem, place, _ = state(shape, heads_k, Masked(mask, lambda *_: None))
            operands = operands_of(shape, heads_k, problem, place, mask, onchip.Score())
            tiles = Tiles(16, 32)
            found = modelled(problem, place, mask, None, "qkv", tiles)
            assert_traced(traced(problem, operands, tiles, "qkv"), *found)
            assert found[0].tensors.get("mask") == found[1].tensors.get("mask")


def test_what_a_tile_reads_of_a_bias_and_a_mask():
    """In numbers counted by hand: 2 sequences of 4 heads in pairs, 2 x 3 tiles of 32 x 16, the last ones 8 wide."""
    problem, place, mask = dense(64, 40, batch=2, heads=4, heads_k=2, dim=8, dtype=torch.float32)
    tiles = Tiles(32, 16)

    def read(*bias, of=mask, parts=(), backend="cpu"):
        score = onchip.Score(bias=torch.zeros(*bias)) if bias else None
        one = dataclasses.replace(problem, score_parts=("bias",) if bias else (), mask_parts=parts)
        found = traffic.count(one, place, of, score=score, backend=backend, tiles=tiles).tensors
        moved = found.get("bias" if bias else "mask", traffic.Moved())
        return moved.loads, moved.tiles_loaded

    assert read(2, 4, 64, 40) == (2 * 4 * 64 * 40, 2 * 4 * 6)
    assert read(64, 40) == (2 * 2 * 64 * 40, 2 * 2 * 6)  # the heads of a key head are one tile
    assert read(64, 40, backend="hopper") == (2 * 4 * 64 * 40, 2 * 4 * 6)  # and tiles of their own there
    assert read(1, 1, 1, 40) == (2 * 2 * 2 * 40, 2 * 2 * 6)  # each row of tiles reads the keys
    assert read(4, 64, 1) == (2 * 4 * 64 * 3, 2 * 4 * 6)
    assert read(1, 1, 1, 1) == (2 * 2 * 6, 2 * 2 * 6)
    visible = torch.ones(64, 40, dtype=torch.bool)
    assert read(of=onchip.dense(visible), parts=("elements",)) == (0, 0)
    visible[40, 3] = False
    assert read(of=onchip.dense(visible), parts=("elements",)) == (2 * 2 * 32 * 16, 4)
    visible[:32, 16:] = False
    assert read(of=onchip.dense(visible), parts=("elements",)) == (2 * 2 * 32 * 16, 4)


@pytest.mark.parametrize("has", BROADCASTS)
def test_what_is_read_once_is_what_some_tile_reads(has):
    """`least` and the minimum, against marks on the elements of a bias and a stored mask."""
    for shape, name in itertools.product(
        PAIRED, ("none", "causal", "window_both", "dense_BHQK", "blocks_odd")
    ):
        problem, place, mask = state(shape, 2, MASKS[name](shape))
        mask = mask & onchip.dense(torch.rand(broadcast(shape, has)) < 0.99)
        problem = dataclasses.replace(problem, mask_parts=mask.names, score_parts=("bias",))
        score = onchip.Score(bias=torch.zeros(broadcast(shape, has)))
        marks = {what: torch.zeros(broadcast(shape, has), dtype=torch.bool) for what in ("bias", "mask")}
        tiles = Tiles(16, 32)
        for b, (q_len, k_len) in enumerate(zip(shape.q_lens, shape.k_lens, strict=True)):
            region = Region(torch.tensor([b]), 0, 4, 0, q_len, 0, k_len, q_len, k_len)
            if q_len == 0 or k_len == 0:
                continue
            kinds = true_kinds(mask.allow(region)[0].expand(4, q_len, k_len), tiles).view(2, 2, -1)
            both = torch.where(
                kinds[:, :1] == kinds[:, 1:], kinds, PARTIAL
            )  # heads of a key head are one tile
            for h, i, j in both.view(4, *tiles.count(q_len, k_len)).nonzero().tolist():
                place_of = (
                    b,
                    h,
                    slice(16 * i, min(q_len, 16 * i + 16)),
                    slice(32 * j, min(k_len, 32 * j + 32)),
                )
                own = tuple(at if one else slice(None) for at, one in zip(place_of, has, strict=True))
                marks["bias"][own] = True
                if both.view(4, *tiles.count(q_len, k_len))[h, i, j] == PARTIAL:
                    marks["mask"][own] = True
        found = traffic.count(problem, place, mask, "minimum", score=score, tiles=tiles)
        exact = problem.layout == "dense"
        for what, marked in marks.items():
            read, true = found.tensors.get(what, traffic.Moved()).loads, int(marked.sum())
            if what == "mask" and name == "dense_BHQK":  # two of them
                continue
            assert read == true if exact else true <= read <= marked.numel(), (what, name)
        loop = traffic.count(problem, place, mask, backend="cpu", score=score, tiles=tiles)
        bare = traffic.count(
            dataclasses.replace(problem, score_parts=()), place, mask, backend="cpu", tiles=tiles
        )
        assert loop.least - bare.least == found.tensors.get("bias", traffic.Moved()).read_bytes


@pytest.mark.parametrize("backend", ["cpu", "native", "triton", "hopper", "reference"])
@pytest.mark.parametrize("algorithm", traffic.ALGORITHMS)
def test_steps_add_up_with_a_bias_and_a_stored_mask(algorithm, backend):
    if algorithm != "onchip" and backend != "cpu":
        return
    needs = ("q", "k", "v", "bias")
    for has, shape in itertools.product(
        ((False, False, True, True), (False, False, False, True), (False, False, True, False), (False,) * 4),
        (Shape((70,), (70,)), Shape((33,), (61,))),
    ):
        mask = onchip.dense(torch.rand(broadcast(shape, has)) < 0.9)
        for whole in (mask & onchip.window(20, 9), mask | onchip.causal()):
            problem, place, _ = state(shape, 1, None)
            problem = dataclasses.replace(problem, mask_parts=whole.names, score_parts=("bias",))
            given = {"score": onchip.Score(bias=torch.zeros(broadcast(shape, has))), "needs": needs}
            for step in orders.STEPS:
                options = {**given, "backend": backend, "tiles": Tiles(16, 8)}
                total = traffic.count(problem, place, whole, algorithm, step, **options)
                walked = list(steps.walk(problem, place, whole, algorithm, step, **options))
                assert (walked[-1].read, walked[-1].written) == (total.reads, total.writes)
                for tensor, moved in total.tensors.items():
                    assert sum(s.load.get(tensor, 0) for s in walked) == moved.loads, tensor
                    assert sum(s.store.get(tensor, 0) for s in walked) == moved.stores, tensor
                from_p = step == "backward" and (backend == "reference" or algorithm in ("standard", "eager"))
                assert "bias" in total.tensors or from_p
                assert "dbias" in total.tensors or step == "forward"


def test_a_bias_needs_its_score():
    problem, place, mask = dense(64)
    problem = dataclasses.replace(problem, score_parts=("bias",))
    for score in (None, onchip.Score(softcap=1.0)):
        with pytest.raises(ValueError, match="score.*bias"):
            traffic.count(problem, place, mask, score=score)


def test_triton_s_gradient_of_a_bias_is_a_pass_of_its_own():
    """It goes through every tile, and writes the bias once in float32, which is then rounded."""
    problem, place, mask = dense(256, heads=4, heads_k=2, dim=16, mask=onchip.causal())
    problem = dataclasses.replace(problem, score_parts=("bias",))
    score = onchip.Score(bias=torch.zeros(4, 256, 256, dtype=torch.float16))
    tiles, pairs = Tiles(64, 64), 4 * 256 * 256
    bare, own = (
        traffic.count(
            problem,
            place,
            mask,
            "onchip",
            "backward",
            backend="triton",
            score=score,
            needs=needs,
            tiles=tiles,
        )
        for needs in (("q", "k", "v"), ("q", "k", "v", "bias"))
    )
    moved = own.tensors["dbias"]
    assert (moved.loads, moved.stores, moved.write_bytes) == (pairs, 3 * pairs, (4 + 4 + 2) * pairs)
    assert own.tensors["bias"].loads - bare.tensors["bias"].loads == pairs
    assert own.tensors["k"].loads - bare.tensors["k"].loads == 4 * 4 * 256 * 16
    assert own.tile_flops - bare.tile_flops == own.flops - bare.flops == 2 * 2 * 16 * pairs


def test_split_keys_leave_results_that_are_joined():
    """Decoding on an H200: out and lse of each share in float32, written and read; queries are read by each."""
    q, cache = (2, 1, 8, 128), (2, 65536, 2, 128)
    plan = onchip.plan(q, cache, cache, cache_seqlens=[65536, 40000], device="H200", dtype=torch.bfloat16)
    found, rows = plan.passes()["forward"], 2 * 8
    partial, lse = found.tensors["partial"], found.tensors["partial_lse"]
    shares = lse.stores // rows
    assert shares == 132 // 4 and lse.stores == lse.loads == rows * shares
    assert partial.loads == partial.stores == rows * shares * 128
    assert partial.read_bytes == partial.write_bytes == 4 * partial.loads
    assert found.tensors["out"].stores == rows * 128 and found.tensors["lse"].stores == rows
    assert found.tensors["q"].loads == rows * 128 * shares
    single = traffic.count(
        dataclasses.replace(plan.problem, num_splits=1, device="cpu"),
        plan.layout,
        plan.mask,
        backend="triton",
        device="H200",
    )
    assert "partial" not in single.tensors and single.tensors["k"] == found.tensors["k"]
    joined = 2 * (partial.write_bytes + lse.write_bytes)
    assert found.least == single.least + joined  # queries too are found in a cache
    assert set(found.tiles) == {"attend", "read the shares", "join them"}


@pytest.mark.parametrize(
    "seqlen_q, heads, heads_k, seqlen_k", [(1, 8, 2, 9000), (3, 4, 4, 5000), (40, 2, 1, 7000)]
)
def test_the_native_kernels_split_keys_as_the_model_says(seqlen_q, heads, heads_k, seqlen_k):
    """As many shares by name give the same bits as the kernels' own choice, and another number does not."""
    q, k = torch.randn(1, seqlen_q, heads, 16), torch.randn(1, seqlen_k, heads_k, 16)
    lengths = torch.tensor([seqlen_k])

    def run(splits):
        return onchip.attention_with_cache(
            q, k, k, cache_seqlens=lengths, num_splits=splits, backend="native"
        )

    plan = onchip.plan(q, k, k, cache_seqlens=lengths, backend="cpu")
    if native.refuse(plan.problem) is not None:
        pytest.skip("no native kernels here")
    shares = native.shares(plan.problem)
    assert shares > 1 and torch.equal(run(0), run(shares)) and not torch.equal(run(0), run(shares - 1))
    found = traffic.count(plan.problem, plan.layout, plan.mask, backend="native")
    assert found.tensors["partial"].stores == found.tensors["partial"].loads == shares * seqlen_q * heads * 16


def test_what_the_native_kernels_read_of_a_mask():
    """A stored mask in every tile of the bands; other elements are written down first, a byte a pair."""
    shape = (1, 256, 2, 8)
    stored = onchip.dense(torch.rand(256, 256) < 0.5)
    near = onchip.window(0, 63)
    for mask, counted in (
        (stored & near, {"mask": (4 * 64 * 256, 0)}),
        (onchip.causal() | onchip.sinks(4), {"shown": (256 * 256, 256 * 256)}),
        (stored | onchip.causal(), {"mask": (256 * 256, 0), "shown": (256 * 256, 256 * 256)}),
    ):
        plan = onchip.plan(shape, shape, shape, mask=mask, backend="cpu")
        found = traffic.count(plan.problem, plan.layout, mask, backend="native", tiles=Tiles(64, 256)).tensors
        for name in ("mask", "shown"):
            moved = found.get(name, traffic.Moved())
            loads, stores = counted.get(name, (0, 0))
            own = 2 if name == "shown" or "shown" not in counted else 1  # heads read what they share apart
            assert (moved.loads, moved.stores) == (loads * own, stores), (mask, name)


def test_the_cpu_loop_over_a_cache():
    lengths = torch.tensor([40, 0, 100])
    q, k, v = torch.randn(3, 2, 4, 8), torch.randn(3, 128, 2, 8), torch.randn(3, 128, 2, 24)
    from onchip.inputs import cache_layout

    place = cache_layout(q, k, v, 0, lengths, None, None, None)
    for mask in (onchip.Mask(), onchip.causal(), onchip.window(9, 0)):
        problem = problems.state(q, k, v, place, "cache", mask, None)
        operands = problems.Operands(q, k, v, place, mask, onchip.Score())
        with onchip.backends.cpu.trace() as moved:
            tiled.forward(problem, operands, Tiles(2, 32))
        assert_traced(moved, traffic.count(problem, place, mask, "onchip", backend="cpu", tiles=Tiles(2, 32)))
        assert set(traffic.compare(problem, place, mask)["onchip"]) == {"forward"}
    for has in BROADCASTS:
        bias = torch.randn(tuple(n if own else 1 for n, own in zip((3, 4, 2, 100), has, strict=True)))
        mask, score = onchip.causal() & onchip.dense(bias < 1), onchip.Score(bias=bias)
        problem = problems.state(q, k, v, place, "cache", mask, score)
        with onchip.backends.cpu.trace() as moved:
            tiled.forward(problem, problems.Operands(q, k, v, place, mask, score), Tiles(2, 32))
        options = {"score": score, "backend": "cpu", "tiles": Tiles(2, 32)}
        assert_traced(moved, traffic.count(problem, place, mask, "onchip", **options))


@pytest.mark.parametrize("name", MASKS)
def test_flops_are_those_of_the_visible_pairs(name):
    shape = Shape((45, 45), (70, 70), heads_q=4)
    masked = MASKS[name](shape)
    problem, place, mask = state(shape, 2, masked)
    pairs = sum(int(visible.sum()) for visible in full_truth(masked, shape))
    for algorithm in ("onchip", "flash1", "flash2", "minimum"):
        forward, backward = (traffic.count(problem, place, mask, algorithm, step) for step in orders.STEPS)
        assert forward.pairs == backward.pairs == pairs
        assert forward.flops == 2 * pairs * 16
        assert backward.flops == 2 * pairs * 40  # five products; onchip's CPU loop does no more
        assert forward.tile_flops >= forward.flops and backward.tile_flops >= backward.flops
    for step, products in (("forward", 2), ("backward", 4)):
        found = traffic.count(problem, place, mask, "standard", step)
        assert found.flops == 2 * products * 8 * 2 * 4 * 45 * 70  # it computes what the mask hides


# The first paper's figures (arXiv 2205.14135).


def test_theta_ratio():
    """Section 3.2 takes d = 64 and M around 100 KB: M / d^2 is then 24."""
    assert int(traffic.theta_ratio(64, 100_000)) == 24
    problem, _, _ = dense(1024)
    bound = traffic.lower_bound(problem, 1024**2, sram=2 * 100_000)
    assert 1024**2 / bound == pytest.approx(100_000 / 64**2)


def test_score_matrices():
    found = traffic.count(*dense(1024), "standard")
    for name in "SP":
        assert found.tensors[name].stores == found.tensors[name].loads == 1_048_576
        assert found.tensors[name].write_bytes == 2 * 2**20
    found = traffic.count(*dense(16384), "standard")
    assert found.tensors["S"].write_bytes == found.tensors["P"].write_bytes == 512 * 2**20


GPT2 = {"batch": 64, "heads": 16, "dim": 64}  # GPT-2 medium, N = 1024, fp16


def gigabytes(algorithm, **options):
    """Forward and backward."""
    problem = dense(1024, **GPT2)
    return sum(traffic.count(*problem, algorithm, step, **options).bytes for step in orders.STEPS) / 1e9


def test_gpt2_medium_standard_attention():
    """40.3 GB, to all digits given, as PyTorch runs it: forward and backward, fp16, no mask, no dropout.

    18 passes over a 2.147 GB matrix (6 forward: S, scaled S and P written and read; 12 backward, three of them since
    PyTorch's softmax gradient takes two kernels) and 12 over tensors of 0.134 GB. Algorithms 0 and 3 alone, with
    scaling folded into the products and one kernel for the softmax's gradient, move 25.2 GB: 11 and 12 passes.
    """
    assert gigabytes("eager") == pytest.approx(40.27, abs=0.01)
    assert gigabytes("standard") == pytest.approx(25.23, abs=0.01)
    forward = traffic.count(*dense(1024, **GPT2), "eager")
    assert forward.bytes / 1e9 == pytest.approx(
        13.42, abs=0.01
    )  # measured: 14.23, 7.25 of it read, with copies of layout
    assert forward.read_bytes / 1e9 == pytest.approx(6.85, abs=0.01)


def test_gpt2_medium_flash_attention():
    """4.4 GB, to all digits given: Algorithms 1 and 4 with M = 192 KiB of fp16 (blocks of 384 keys), zeros included.

    Line 5 of Algorithm 4 names zeros of dK and dV too, which nothing reads: with them it would be 4.65. The paper does
    not state its kernel's blocks; with 256 keys a block the same algorithms move 5.48 GB.
    """
    assert gigabytes("flash1") == pytest.approx(4.38, abs=0.01)
    assert gigabytes("flash1", tiles=Tiles(64, 256)) == pytest.approx(5.48, abs=0.01)
    ratio = gigabytes("eager") / gigabytes("flash1")
    assert ratio == pytest.approx(40.3 / 4.4, rel=0.01)


def test_gpt2_medium_flops():
    """66.6 and 75.2 GFLOP in the paper cannot be counts of all its 1024 heads' products, which take 825 and 962.

    Their difference is one product of seven, as it should be, at a 16th: 8.6 against 137.4 / 16 = 8.59. With products
    at that rate, 15.1 GFLOP are left in both: 14 for each of the 1.07e9 scores, which is what scaling and the softmax
    take forward and backward. So the paper's figures count a product as a 16th of its FLOPs.
    """
    problem = dense(1024, **GPT2)
    standard, flash = (
        sum(traffic.count(*problem, name, step).flops for step in orders.STEPS) / 1e9
        for name in ("standard", "flash1")
    )
    assert standard == pytest.approx(824.6, abs=0.1) and flash == pytest.approx(962.1, abs=0.1)
    assert (flash - standard) / 16 == pytest.approx(75.2 - 66.6, abs=0.05)
    scores = 1024 * 1024**2 / 1e9
    for paper, products in ((66.6, standard), (75.2, flash)):
        assert (paper - products / 16) / scores == pytest.approx(14.0, abs=0.1)


def test_flash_attention_2_as_ncu_measured_it():
    """H200, the same problem: 0.56 GB forward, 2.86 in all without two copies of layout; a cache catches the rest."""
    found = {step: traffic.count(*dense(1024, **GPT2), "flash2", step) for step in orders.STEPS}
    assert found["forward"].least / 1e9 == pytest.approx(0.56, rel=0.05)
    assert sum(part.least for part in found.values()) / 1e9 == pytest.approx(2.86, rel=0.02)


def test_extra_memory_of_eager_attention():
    """8448 MiB above the inputs were measured on that problem, out and the gradients' 256 MiB among them."""
    found = traffic.count(*dense(1024, **GPT2), "eager", "backward")
    assert found.extra_memory / 2**20 == 8192


def test_algorithm_1_block_sizes():
    assert orders.flash1_tiles(64, 64, 98304) == Tiles(64, 384)
    assert orders.flash1_tiles(64, 64, 1000) == Tiles(4, 4)
    assert orders.flash1_tiles(512, 512, 4) == Tiles(1, 1)
    with pytest.raises(ValueError, match="sram.*3"):
        orders.flash1_tiles(64, 64, 3)
    sizes = [traffic.count(*dense(16384), "flash1", sram=m * 2**10).bytes for m in (48, 96, 192, 384)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] / sizes[3] == pytest.approx(8, rel=0.1)  # Theta(1 / M)


def test_traffic_of_block_sparse_attention_is_in_proportion():
    n, tile = 4096, 64
    side = n // tile
    order = torch.randperm(side * side)
    full = traffic.count(*dense(n), "flash1", tiles=Tiles(tile, tile))
    for share in (0.5, 0.25, 0.125):
        chosen = (order < share * side * side).view(side, side)
        mask = onchip.block_sparse(chosen, tile=(tile, tile))
        found = traffic.count(*dense(n, mask=mask), "flash1", tiles=Tiles(tile, tile))
        assert found.flops == share * full.flops
        visits = lambda x: sum(x.tensors[t].read_bytes for t in ("q", "out", "l", "m"))  # noqa: E731
        assert visits(found) == pytest.approx(share * visits(full))
        zeros = found.write_bytes - sum(found.tensors[t].read_bytes for t in ("out", "l", "m"))
        assert zeros == n * (64 * 2 + 2 * 4)


# Properties of every algorithm.

SHAPES = [
    dense(300, 170, batch=2, heads=4, heads_k=2, dim=16, dim_v=24),
    dense(170, 300, batch=2, heads=4, heads_k=1, dim=16, mask=onchip.causal()),
    dense(256, heads=2, dim=32, mask=onchip.window(40, 0)),
    dense(1, 500, batch=3, heads=8, heads_k=2, dim=16, mask=onchip.causal()),
    dense(200, dim=16, mask=onchip.dense(torch.rand(200, 200) < 0.001)),
]


@pytest.mark.parametrize("case", range(len(SHAPES)))
def test_no_algorithm_beats_the_minimum(case):
    """Of its own tiles: finer ones leave more rows without a key, which nobody reads."""
    found = traffic.compare(*SHAPES[case])
    for step in orders.STEPS:
        for name, passes in found.items():
            part = passes[step]
            assert part.bytes >= part.least, name
            if name in ("standard", "eager"):
                assert part.least == part.bytes
                continue
            finest = Tiles(
                *(min(getattr(t, side) for t in part.tiles.values()) for side in ("tile_m", "tile_n"))
            )
            least = traffic.count(*SHAPES[case], "minimum", step, tiles=finest)
            assert part.least >= least.bytes, name


def test_triton_s_order():
    """Its tiles and passes, from its own table: dK, dV and dQ recompute the scores, so seven products."""
    problem = dense(1024, heads=8, heads_k=2, dim=64, dtype=torch.bfloat16)
    forward, backward = (traffic.count(*problem, step=step, backend="triton") for step in orders.STEPS)
    assert backward.flops == 2 * backward.pairs * 7 * 64
    assert set(backward.tiles) == {"delta", "dkdv", "dq"}
    assert forward.tensors["k"].loads == 8 * (1024 // forward.tiles["attend"].tile_m) * 1024 * 64
    wide = traffic.count(
        *dense(512, heads=2, dim=256, dtype=torch.bfloat16), step="backward", backend="triton"
    )
    assert set(wide.tiles) == {"delta", "dk", "dv", "dq"} and wide.flops == 2 * wide.pairs * 8 * 256
    decode = traffic.count(*dense(1, 4096, heads=8, heads_k=2, dtype=torch.bfloat16), backend="triton")
    assert decode.tensors["k"].loads == 2 * 4096 * 64  # the query heads of a key head read it once


@pytest.mark.parametrize("algorithm", traffic.ALGORITHMS)
def test_steps_add_up_to_the_totals(algorithm):
    """Any mask and lengths, one head: the walk's last step has the model's totals, tensor by tensor."""
    for name in ("none", "causal", "window_both", "documents_cross", "dense_QK", "dense_none", "blocks_odd"):
        for q_len, k_len in ((70, 70), (33, 61), (61, 33)):
            shape = Shape((q_len,), (k_len,))
            problem = state(shape, 1, MASKS[name](shape))
            for step in orders.STEPS:
                for tiles in (None, Tiles(16, 8)):
                    total = traffic.count(*problem, algorithm, step, tiles=tiles)
                    walked = list(steps.walk(*problem, algorithm, step, tiles=tiles))
                    assert (walked[-1].read, walked[-1].written) == (total.reads, total.writes)
                    for tensor, moved in total.tensors.items():
                        assert sum(s.load.get(tensor, 0) for s in walked) == moved.loads, tensor
                        assert sum(s.store.get(tensor, 0) for s in walked) == moved.stores, tensor


def test_the_native_kernels_order():
    """64 queries by 256 keys: rows outside forward, keys outside backward, dQ summed in float32 and then rounded."""
    shape = (1, 512, 2, 8)
    plan = onchip.plan(shape, shape, shape, dtype=torch.bfloat16, device="cpu", backend="reference")
    forward, backward = (
        traffic.count(plan.problem, plan.layout, plan.mask, step=step, backend="native")
        for step in orders.STEPS
    )
    numbers = 2 * 512 * 8
    moved = forward.tensors
    assert (moved["q"].loads, moved["out"].stores, moved["k"].loads) == (numbers, numbers, 8 * numbers)
    moved = backward.tensors
    assert (moved["k"].loads, moved["dk"].stores, moved["dv"].stores) == (numbers,) * 3
    assert moved["dq"].loads == 2 * numbers and moved["dq"].write_bytes == (2 * 4 + 2) * numbers
    assert backward.flops * 2 == 5 * forward.flops


def test_steps_come_in_the_algorithm_s_order():
    problem = dense(128, dim=8)
    tiles = Tiles(64, 64)
    places = lambda name: [(s.m_block, s.n_block) for s in steps.walk(*problem, name, tiles=tiles)]  # noqa: E731
    assert places("flash1") == [(0, None), (1, None), (0, 0), (1, 0), (0, 1), (1, 1)]  # zeros first
    assert places("flash2") == places("onchip") == [(0, 0), (0, 1), (1, 0), (1, 1)]
    first = next(steps.walk(*problem, "flash2", tiles=tiles))
    assert first.load == {"q": 512, "k": 512, "v": 512} and first.store == {}
    phases = [s.phase for s in steps.walk(*problem, "standard", tiles=tiles)]
    assert phases == ["S = QK^T"] * 4 + ["P = softmax(S)"] * 4 + ["O = PV"] * 4


def test_json_of_a_page():
    import json

    problem = dense(256, batch=2, heads=4, mask=onchip.causal())
    found = json.loads(json.dumps(steps.to_json(*problem, tiles=Tiles(64, 64))))
    for name, passes in found["algorithms"].items():
        for step, part in passes.items():
            totals = traffic.count(
                *dense(256, mask=onchip.causal()), name, step, tiles=Tiles(64, 64)
            ).to_json()
            assert part["totals"] == totals
            *_, read, written = part["steps"][-1]
            assert (read, written) == (totals["reads"], totals["writes"])
            for phase in part["phases"]:
                assert phase["kinds"] == [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]]
    assert set(found["algorithms"]) == {"standard", "flash1", "flash2", "onchip"}


def test_json_has_a_limit():
    with pytest.raises(ValueError, match="512 x 512.*at most 100000"):
        steps.to_json(*dense(512), ("flash2",), tiles=Tiles(1, 1))


def test_floor_and_intensity():
    from onchip.devices import device

    found = traffic.count(*dense(8192, heads=16, dim=128), "minimum")
    floor = found.floor(device("H200"))
    assert floor.bound == "compute"
    assert floor.seconds == floor.compute == found.flops / 989.4e12
    assert floor.fraction(2 * floor.seconds) == 0.5
    decode = traffic.count(*dense(1, 8192, batch=16, heads=32, heads_k=8, dim=128), "minimum").floor(
        device("H200")
    )
    assert decode.bound == "memory" and decode.seconds == decode.memory
    with pytest.raises(ValueError, match="seconds"):
        floor.fraction(0)


def test_wrong_names():
    problem = dense(64)
    with pytest.raises(ValueError, match="algorithm.*'flash9'.*flash1"):
        traffic.count(*problem, "flash9")
    with pytest.raises(ValueError, match="step.*'sideways'"):
        traffic.count(*problem, "onchip", "sideways")
    with pytest.raises(ValueError, match="sequence.*1.*0 to 0"):
        list(steps.walk(*problem, sequence=1))
    with pytest.raises(ValueError, match="head.*7"):
        list(steps.walk(*problem, head=7))
    with pytest.raises(ValueError, match="algorithms.*'x'"):
        steps.to_json(*problem, ("x",))


def test_zero_sizes():
    for shape in (Shape((0,), (5,)), Shape((5,), (0,)), Shape((0, 3), (0, 0))):
        problem = state(shape)
        for algorithm in traffic.ALGORITHMS:
            for step in orders.STEPS:
                found = traffic.count(*problem, algorithm, step)
                assert found.flops == found.pairs == 0
                assert list(steps.walk(*problem, algorithm, step)) is not None


def test_one_layout_of_many_lengths():
    assert traffic.lengths(Dense(2, 3, 4)) == [(3, 4), (3, 4)]
