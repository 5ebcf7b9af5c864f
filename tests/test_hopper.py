"""What the Hopper backend decides on the host: refusals, its variants, and the keys that nobody sees."""

import dataclasses
import importlib

import pytest
import torch

import onchip
from contract_masks import MASKS, Shape
from onchip import problem as problems, select
from onchip.backends import hopper
from onchip.backends.hopper.table import TABLE, config, kind, padded
from onchip.backends.hopper.unseen import hides, unseen, unseen_now, without_unseen
from onchip.backends.hopper.variant import grain, packs, sections, variant
from onchip.layout import Varlen
from onchip.problem import Operands
from onchip.tiles import Tiles


def state(q_shape=(2, 100, 4, 64), k_shape=None, mask=None, score=None, dtype=torch.bfloat16, **options):
    q = torch.empty(q_shape, dtype=dtype)
    k = torch.empty(k_shape or q_shape, dtype=dtype)
    mask, score = onchip.Mask() if mask is None else mask, onchip.Score() if score is None else score
    return problems.state(q, k, k, problems.dense_layout(q, k, k), "dense", mask, score, **options)


def test_serves_what_it_is_for():
    score = onchip.Score(
        softcap=5.0, alibi=torch.ones(4), sink=torch.ones(4), mod=lambda s, b, h, q, k: s * 0.5
    )
    for options in (
        {},
        {"mask": onchip.causal()},
        {"score": score},
        {"dtype": torch.float16},
        {"scale": -1.0},
    ):
        assert hopper.refuse_shape(state(**options)) is None


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"dtype": torch.float32}, "float32"),
        ({"dtype": torch.float64}, "float64"),
        ({"q_shape": (1, 9, 1, 264)}, "dim 264"),
        ({"q_shape": (1, 9, 1, 20)}, "dim 20"),
        ({"dropout": 0.1}, "dropout"),
        ({"score": onchip.Score(bias=torch.zeros(100, 100))}, "bias"),
        ({"q_shape": (1, 1, 8, 64), "k_shape": (1, 4096, 8, 64)}, "8 tiles of queries for 4096 keys"),
    ],
)
def test_refuses_in_words(options, reason):
    assert reason in hopper.refuse_shape(state(**options))


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"layout": "cache"}, "cache layout"),
        ({"layout": "paged"}, "paged layout"),
        ({"num_splits": 2}, "num_splits"),
    ],
)
def test_refuses_layouts_and_splits(changes, reason):
    assert reason in hopper.refuse_shape(dataclasses.replace(state(), **changes))


def test_refuses_other_devices():
    assert "cpu" in hopper.refuse(state())
    if not torch.cuda.is_available():
        assert "cuda" in hopper.refuse(state())


def test_small_calls_are_left_to_triton_unless_it_is_named(monkeypatch):
    for module in map(select.load, ("hopper", "triton")):
        monkeypatch.setattr(module, "refuse", lambda problem: None)
    small = dataclasses.replace(state((1, 512, 8, 64)), device="cuda")
    large = dataclasses.replace(state((4, 8192, 16, 64)), device="cuda")
    assert select.choose(large) == "hopper" and "hopper" not in select.refusals(large)
    assert select.choose(small) == "triton" and "host time" in select.refusals(small)["hopper"]
    assert select.choose(small, "hopper") == "hopper"


def test_the_backward_pass_is_another_backends():
    assert hasattr(importlib.import_module(f"onchip.backends.{hopper.BACKWARD}"), "backward")
    with pytest.raises(NotImplementedError, match=hopper.BACKWARD):
        hopper.backward(None, None, None, None, None, None)  # type: ignore[arg-type]


def test_every_row_of_the_table_fits():
    for (dim, _), row in TABLE.items():
        for dims in ((dim, dim), (dim, 64), (64, dim)):
            problem = state((1, 300, 1, dims[0]))
            problem = dataclasses.replace(problem, dim_v=dims[1])
            made = variant(problem, row, 1)
            assert row.shared_memory(*dims, made.share_q) + 1024 <= 232448, (dims, row)
            halved = 2 * made.held == made.dim == made.dim_v
            assert not made.share_q or halved, "an output of other halves than the queries"
            assert made.held in (0, made.dim // 2, made.dim)


def test_kinds_of_problems():
    assert [padded(n) for n in (8, 64, 72, 128, 136, 256)] == [64, 64, 128, 128, 256, 256]
    assert kind(state(score=onchip.Score(softcap=1.0))) == kind(state(scale=0.0)) == "modified"
    assert kind(state(score=onchip.Score(sink=torch.ones(4)))) == kind(state()) == "short"
    assert kind(state((1, 8192, 1, 64))) == kind(state((1, 8192, 1, 64), mask=onchip.causal())) == "long"
    assert hopper.tiles(state()).tile_n == config(state()).tile_n


@pytest.mark.parametrize(
    "mask, expected",
    [
        (onchip.Mask(), {"masked": True, "edges": False, "dynamic": False, "band_only": True}),
        (onchip.causal(), {"masked": True, "edges": True, "right": True, "left": False, "dynamic": True}),
        (onchip.window(3, None), {"right": False, "left": True, "band_only": True}),
        (onchip.chunked(8) & onchip.causal(), {"band_only": False, "edges": True}),
        (onchip.where(lambda b, h, q, k: q == k), {"band_only": False, "edges": True, "masked": True}),
    ],
)
def test_variants(mask, expected):
    problem = state(mask=mask)
    made = variant(problem, config(problem), 1)
    assert {name: getattr(made, name) for name in expected} == expected
    whole = state((1, 256, 1, 64))
    assert not variant(whole, config(whole), 1).masked, "no mask and no tail"


@pytest.mark.parametrize(
    "seqlen, dim, mask, from_end",
    [
        (8192, 64, onchip.causal(), True),  # 42 tiles of 192 and 128 queries
        (2048, 64, onchip.causal(), True),
        (1152, 64, onchip.causal(), False),
        (1151, 64, onchip.causal(), False),  # 191 queries need three warpgroups
        (1088, 64, onchip.window(700, 0), True),  # 64 of a tile of 128
        (8192, 64, onchip.Mask(), False),  # all tiles are as long
        (8192, 64, onchip.window(3, None), False),
        (8192, 64, onchip.causal() & onchip.prefix(5), False),
        (1024, 128, onchip.causal(), False),
        (1000, 128, onchip.causal(), False),
        (33, 256, onchip.causal(), True),
    ],
)
def test_where_queries_are_missing(seqlen, dim, mask, from_end):
    """Whole warpgroups, in the first tile, where a band makes it the shortest."""
    problem = state((1, seqlen, 2, dim), mask=mask)
    made = variant(problem, config(problem), 1)
    assert made.from_end == from_end


@pytest.mark.parametrize(
    "seqlen, dim, mask, pack, uneven",
    [
        (8192, 64, onchip.causal(), 1, True),  # 192 queries, 128 keys
        (1024, 64, onchip.causal("top_left"), 1, False),  # 128, 128
        (1024, 128, onchip.causal(), 1, False),
        (1024, 256, onchip.causal(), 1, True),  # 128, 64
        (16, 256, onchip.causal(), 8, False),  # 16 queries of 8 heads
        (1024, 256, onchip.window(5, 9), 1, True),
        (1024, 256, onchip.window(5, None), 1, False),
        (1024, 256, onchip.causal() & onchip.prefix(5), 1, False),
    ],
)
def test_where_warpgroups_of_a_tile_end_at_different_blocks(seqlen, dim, mask, pack, uneven):
    problem = state((1, seqlen, 2, dim), mask=mask)
    assert variant(problem, config(problem), pack).uneven == uneven


@pytest.mark.parametrize("change", [{"layout": "varlen"}, {"scale": -1.0}, {"score_parts": ("mod",)}])
def test_queries_below_0_are_where_nothing_asks_for_them(change):
    """Rows of a packed sequence's neighbour, and a mod that looks up a table by the query."""
    problem = state((1, 33, 2, 256), mask=onchip.causal())
    assert variant(problem, config(problem), 1).from_end
    assert not variant(dataclasses.replace(problem, **change), config(problem), 1).from_end
    assert not variant(problem, config(problem), 2).from_end


def test_what_is_short():
    """A causal mask alone is as none; of others and of packed sequences, tiles of 128 queries compute less in vain."""
    for seqlen, mask, expected in (
        (1024, onchip.causal(), "short"),
        (1025, onchip.causal(), "long"),
        (1025, onchip.Mask(), "long"),
        (4096, onchip.window(100, 0), "short"),
        (4096, onchip.causal() & onchip.prefix(5), "short"),
        (4097, onchip.window(100, 0), "long"),
        (4097, onchip.where(lambda b, h, q, k: k <= q), "short"),
        (8192, onchip.block_sparse(torch.ones(64, 64, dtype=torch.bool), tile=(128, 128)), "short"),
        (8192, onchip.prefix(5), "long"),
    ):
        assert kind(state((1, seqlen, 2, 64), mask=mask)) == expected
    packed = dataclasses.replace(state((1, 4096, 2, 64), mask=onchip.causal()), layout="varlen")
    assert kind(packed) == "short"


@pytest.mark.parametrize(
    "tile, seqlens, others, exact",
    [
        ((128, 128), (1024, 1024), None, True),
        ((256, 128), (1000, 1024), None, True),
        ((128, 128), (1024, 1000), None, False),
        ((64, 128), (1024, 1024), None, False),
        ((128, 64), (1024, 1024), None, False),
        ((256, 128), (1024, 1024), onchip.block_sparse(torch.ones(8, 3, dtype=torch.bool), (128, 384)), True),
        ((128, 128), (1024, 1024), onchip.causal(), False),
        (
            (128, 128),
            (1024, 1024),
            onchip.block_sparse(torch.ones(8, 16, dtype=torch.bool), (128, 64)),
            False,
        ),
    ],
)
def test_blocks_of_whole_tiles_need_no_mask(tile, seqlens, others, exact):
    blocks = torch.ones(-(-seqlens[0] // tile[0]), -(-seqlens[1] // tile[1]), dtype=torch.bool)
    mask = onchip.block_sparse(blocks, tile)
    if others is not None:
        mask = mask & others
    q, k = (torch.zeros(1, n, 4, 128, dtype=torch.float16) for n in seqlens)
    problem = onchip.plan(q, k, k, mask=mask, backend="reference").problem
    assert kind(problem) == "short" and config(problem).tile_m == config(problem).tile_n == 128
    made = variant(problem, config(problem), 1, grain(problem, mask))
    assert (made.exact, made.masked, made.edges) == (exact, not exact, not exact)


def test_heads_are_stacked_where_one_tile_holds_them():
    few = state((1, 16, 8, 64), (1, 50, 2, 64))
    assert packs(few, 128, False) == 4 and packs(few, 128, True) == packs(few, 32, False) == 1
    odd = state((1, 16, 6, 64), (1, 50, 2, 64))
    assert packs(odd, 128, False) == 1 and packs(dataclasses.replace(few, layout="varlen"), 128, False) == 1


@pytest.mark.parametrize("shape", [(3, 16384, 5, 128), (2, 512, 16, 64), (1, 70000, 7, 256)])
def test_sections_divide_the_heads(shape):
    problem = state(shape)
    section = sections(problem, problem.heads_q)
    assert (problem.batch * problem.heads_q) % section == 0
    assert section == 1 or section * shape[1] * 2 * shape[3] * 2 <= 25 << 20


@pytest.mark.parametrize("packed", [False, True])
def test_keys_that_nobody_sees(packed):
    heads, heads_k = 4, 2
    q_lens, k_lens = ((5, 9, 0, 2), (30, 21, 4, 0)) if packed else ((9, 9), (30, 30))
    starts = [sum(k_lens[:b]) for b in range(len(k_lens) + 1)]
    fn = lambda b, h, q, k: ((k + h) % 3 == 0) & (k > 2 * b) & (k < q + 11)  # noqa: E731
    mask = onchip.where(fn)
    shape = (starts[-1], heads_k, 8) if packed else (2, 30, heads_k, 8)
    q, v = torch.randn(*((sum(q_lens),) if packed else (2, 9)), heads, 8), torch.randn(shape)
    if packed:
        cu_q = torch.tensor([sum(q_lens[:b]) for b in range(len(q_lens) + 1)])
        layout, name = Varlen(cu_q, torch.tensor(starts), None, None, 9, 30), "varlen"
    else:
        layout, name = problems.dense_layout(q, v, v), "dense"
    problem = problems.state(q, v, v, layout, name, mask, onchip.Score())
    operands = Operands(q, v, v, layout, mask, onchip.Score())
    hidden = unseen(problem, operands)
    for b, k_len in enumerate(k_lens):
        own = hidden[starts[b] : starts[b + 1]] if packed else hidden[b]
        h, i, k = torch.meshgrid(*(torch.arange(n) for n in (heads, q_lens[b], k_len)), indexing="ij")
        seen = fn(b, h, i, k).any(1).view(heads_k, 2, k_len).any(1)
        assert torch.equal(own, ~seen.mT)
    if not packed:
        assert torch.equal(unseen_now(problem, operands).expand_as(hidden), hidden)
    clean = without_unseen(problem, operands)
    assert torch.equal(clean, v.masked_fill(hidden[..., None], 0)) and clean is not v


@pytest.mark.parametrize("lengths", [(50, 70), (70, 50), (1, 40)])
@pytest.mark.parametrize("name", MASKS)
def test_a_plan_foretells_whether_values_are_copied(name, lengths):
    m, n = lengths
    mask = MASKS[name](Shape((m, m), (n, n), 4, "cpu")).mask
    q, k = torch.empty(2, m, 4, 8), torch.empty(2, n, 2, 8)
    layout = problems.dense_layout(q, k, k)
    problem = problems.state(q, k, k, layout, "dense", mask, onchip.Score())
    operands = Operands(q, k, k, layout, onchip.Mask() if mask is None else mask, onchip.Score())
    assert hides(problem, operands, Tiles(16, 16)) == (unseen(problem, operands) is not None)


def test_values_are_not_copied_where_all_are_seen():
    q = torch.randn(1, 9, 2, 8)
    mask = onchip.where(lambda b, h, q, k: k <= q)
    layout = problems.dense_layout(q, q, q)
    problem = problems.state(q, q, q, layout, "dense", mask, onchip.Score())
    assert without_unseen(problem, Operands(q, q, q, layout, mask, onchip.Score())) is q
