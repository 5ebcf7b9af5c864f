"""Tile maps against brute force on the whole matrix; what is kept with a mask; maps of 131072 x 131072."""

import json
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import onchip
from contract_masks import MASKS, Shape, full_truth
from onchip import problem as problems, rules, schedule
from onchip.inputs import varlen_layout
from onchip.layout import Dense
from onchip.mask import Mask, Region
from onchip.problem import Problem
from onchip.schedule import EMPTY, FULL, PARTIAL
from onchip.tiles import Tiles


def state(shape, heads_k=None, masked=None):
    """The problem and layout of these lengths: dense where they are equal, else packed."""
    heads_k = heads_k or shape.heads_q
    mask = onchip.Mask() if masked is None or masked.mask is None else masked.mask
    if len(set(shape.q_lens)) == len(set(shape.k_lens)) == 1:
        q = torch.empty(shape.batch, shape.seqlen_q, shape.heads_q, 8)
        k = torch.empty(shape.batch, shape.seqlen_k, heads_k, 8)
        place = Dense(shape.batch, shape.seqlen_q, shape.seqlen_k)
        return problems.state(q, k, k, place, "dense", mask, None), place, mask
    q, k = torch.empty(sum(shape.q_lens), shape.heads_q, 8), torch.empty(sum(shape.k_lens), heads_k, 8)
    cu = [torch.nn.functional.pad(torch.tensor(n).cumsum(0), (1, 0)) for n in (shape.q_lens, shape.k_lens)]
    place = varlen_layout(q, k, k, *cu, None, None, None, None)
    return problems.state(q, k, k, place, "varlen", mask, None), place, mask


def true_kinds(visible, tiles):
    """Kinds of the tiles of a bool matrix [heads, q_len, k_len] by its elements."""
    heads, q_len, k_len = visible.shape
    m_blocks, n_blocks = -(-q_len // tiles.tile_m), -(-k_len // tiles.tile_n)
    kinds = torch.zeros(heads, m_blocks, n_blocks, dtype=torch.uint8)
    for i in range(m_blocks):
        for j in range(n_blocks):
            tile = visible[
                :, i * tiles.tile_m : (i + 1) * tiles.tile_m, j * tiles.tile_n : (j + 1) * tiles.tile_n
            ]
            some, every = tile.flatten(1).any(1), tile.flatten(1).all(1)
            kinds[:, i, j] = torch.where(every, FULL, torch.where(some, PARTIAL, EMPTY))
    return kinds


def check_schedule(shape, heads_k, masked, tiles):
    problem, place, mask = state(shape, heads_k, masked)
    found = schedule.build(problem, place, mask, tiles)
    truth = full_truth(masked, shape)
    group_size = shape.heads_q // heads_k
    kinds = [true_kinds(visible, tiles) for visible in truth]
    seen = torch.zeros(shape.batch, shape.heads_q, dtype=torch.int64)
    for group in found.groups:
        assert group.head0 % group_size == 0 and group.head1 % group_size == 0
        members = group.batch.tolist()
        seen[members, group.head0 : group.head1] += 1
        exact = torch.stack([kinds[b][group.head0 : group.head1] for b in members])
        assert group.counts == tuple(int((exact == kind).sum()) for kind in (EMPTY, PARTIAL, FULL))
        by_key_head = exact.unflatten(1, (-1, group_size))  # [g, key heads, group_size, m_blocks, n_blocks]
        same = (by_key_head == by_key_head[:, :, :1]).all(2)
        expected = torch.where(same, by_key_head[:, :, 0], PARTIAL)
        assert (group.kinds == expected).all(), f"group of sequences {members}"
        assert [(group.q_len, group.k_len)] * len(members) == [
            (shape.q_lens[b], shape.k_lens[b]) for b in members
        ]
        for m_block, visits in group.rows():
            row = group.kinds[m_block].tolist()
            assert visits == [(n, kind == FULL) for n, kind in enumerate(row) if kind != EMPTY]
    assert (seen == 1).all(), "a sequence and head in no group, or in two"
    for kind in (EMPTY, PARTIAL, FULL):
        assert found.count(kind) == sum(int((k == kind).sum()) for k in kinds)
    assert found.pairs() == sum(int(visible.sum()) for visible in truth)


def draw(low, high):
    return int(torch.randint(low, high + 1, ()))


@pytest.mark.parametrize("name", MASKS)
def test_tile_map_equals_brute_force(name):
    for _ in range(6):
        shape = Shape((draw(1, 70),) * 2, (draw(1, 70),) * 2, heads_q=4)
        tiles = Tiles(draw(1, 40), draw(1, 40))
        for heads_k in (4, 2, 1):
            check_schedule(shape, heads_k, MASKS[name](shape), tiles)


@pytest.mark.parametrize("name", MASKS)
def test_tile_map_of_packed_sequences(name):
    for _ in range(3):
        lens = [(draw(0, 50), draw(0, 50)) for _ in range(4)]
        lens += 2 * [(0, 7), (7, 0), (0, 0), lens[0]]
        shape = Shape(*zip(*lens, strict=True), heads_q=2)
        check_schedule(shape, draw(1, 2), MASKS[name](shape), Tiles(draw(1, 30), draw(1, 30)))


@pytest.mark.parametrize("sizes", [(24, 8, 16), (24, 16, 8), (16, 16, 15)])
def test_a_first_tile_that_lacks_rows(sizes):
    """Kinds, sizes and visible pairs of bands, against the elements."""
    draw, tiles = random.Random(torch.initial_seed()), Tiles(*sizes)
    for _ in range(60):
        q_len, k_len = draw.randint(1, 60), draw.randint(1, 60)
        sides = [draw.choice([None, draw.randint(-50, 50)]) for _ in range(2)]
        band = rules.Band(*sides) if draw.random() < 0.5 else rules.Band(None, None, *sides)
        x, y = (torch.empty(1, n, 1, 8) for n in (q_len, k_len))
        mask, place = Mask(band), Dense(1, q_len, k_len)
        problem = problems.state(x, y, y, place, "dense", mask, None)
        made = schedule.build(problem, place, mask, tiles)
        heights, widths = tiles.heights(q_len), tiles.widths(k_len)
        assert (sum(heights), sum(widths)) == (q_len, k_len) and heights[0] == min(sizes[0] - sizes[2], q_len)
        assert made.groups[0].kinds.shape == tiles.count(q_len, k_len) == (len(heights), len(widths))
        area = Region(torch.tensor([0]), 0, 1, 0, q_len, 0, k_len, q_len, k_len)
        seen = mask.allow(area).expand(1, 1, q_len, k_len)[0, 0]
        for i, rows in enumerate(seen.split(heights)):
            start, stop = tiles.queries(i, q_len)
            assert torch.equal(rows, seen[start:stop])
            for j, part in enumerate(rows.split(widths, 1)):
                truth = FULL if part.all() else PARTIAL if part.any() else EMPTY
                assert made.groups[0].kinds[i, j] == truth, (band, q_len, k_len, i, j)
        assert made.pairs() == int(seen.sum())


def test_tiles_that_lack_rows_are_of_a_band_alone():
    x, place, tiles = torch.empty(1, 40, 1, 8), Dense(1, 40, 40), Tiles(24, 8, 8)
    mask = onchip.causal() & onchip.prefix(5)
    problem = problems.state(x, x, x, place, "dense", mask, None)
    with pytest.raises(ValueError, match="lead is 8, expected 0"):
        schedule.build(problem, place, mask, tiles)


def test_a_tail_tile_is_full_when_all_of_it_that_exists_is_visible():
    shape = Shape((70,), (70,))
    for name, full in (("none", 9), ("causal", 3)):
        problem, place, mask = state(shape, masked=MASKS[name](shape))
        assert schedule.build(problem, place, mask, Tiles(32, 32)).count(FULL) == full


def test_an_and_of_partial_tiles_may_be_empty_or_an_or_full():
    even = onchip.dense(torch.arange(64) % 2 == 0)
    odd = onchip.dense(torch.arange(64) % 2 == 1)
    problem, place, _ = state(Shape((64,), (64,)))
    assert schedule.build(problem, place, even & odd, Tiles(16, 16)).count(EMPTY) == 16
    assert schedule.build(problem, place, even | odd, Tiles(16, 16)).count(FULL) == 16


# What is kept with the mask.


def keys_of(tensor):
    return {
        "dense": lambda: onchip.dense(tensor > 0) if tensor.dtype is not torch.bool else onchip.dense(tensor),
        "padding": lambda: onchip.padding(tensor),
        "prefix": lambda: onchip.prefix(tensor),
        "documents": lambda: onchip.documents(tensor),
        "where": lambda: onchip.where(same_id, tensor),
        "blocks": lambda: onchip.block_sparse(tensor, tile=(16, 16)),
    }


def same_id(batch, head, q, k, ids):
    return ids[batch, q] == ids[batch, k]


CHANGES = {
    "dense": (torch.ones(2, 1, 64, 64, dtype=torch.bool), torch.rand(2, 1, 64, 64) < 0.02),
    "padding": (torch.tensor([64, 30]), torch.tensor([3, 50])),
    "prefix": (torch.tensor([64, 30]), torch.tensor([3, 50])),
    "documents": (torch.zeros(2, 64, dtype=torch.long), torch.arange(64).expand(2, 64) // 20),
    "where": (torch.zeros(2, 64, dtype=torch.long), torch.arange(64).expand(2, 64) // 20),
    "blocks": (torch.ones(4, 4, dtype=torch.bool), torch.eye(4).bool()),
}


@pytest.mark.parametrize("wrap", ["alone", "and", "or"])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_mask_follows_its_tensor_changed_in_place(kind, wrap):
    before, after = CHANGES[kind]
    tensor = before.clone()
    q, k, v = (torch.randn(2, 64, 2, 8) for _ in "qkv")

    def made(tensor):
        mask = keys_of(tensor)[kind]()
        return {"alone": mask, "and": mask & onchip.causal(), "or": mask | onchip.window(0, 0)}[wrap]

    mask = made(tensor)
    assert torch.equal(onchip.attention(q, k, v, mask=mask), onchip.attention(q, k, v, mask=made(before)))
    tensor.copy_(after)
    expected = onchip.attention(q, k, v, mask=made(after.clone()))
    assert torch.equal(onchip.attention(q, k, v, mask=mask), expected)
    assert onchip.plan(q, k, v, mask=mask).pairs == onchip.plan(q, k, v, mask=made(after.clone())).pairs


def test_a_tensor_that_the_function_closes_over_is_followed_or_refused():
    """Its changes carry no version that the mask could see."""
    ids = torch.zeros(64, dtype=torch.long)
    q, k, v = (torch.randn(1, 64, 1, 8) for _ in "qkv")
    try:
        mask = onchip.where(lambda b, h, q, k: ids[q] == ids[k])
    except (TypeError, ValueError) as raised:
        error = raised
    else:
        onchip.attention(q, k, v, mask=mask)
        ids.copy_(torch.arange(64) // 20)
        found, expected = (onchip.attention(q, k, v, mask=m) for m in (mask, onchip.documents(ids[None])))
        torch.testing.assert_close(found, expected)
        return
    assert "ids" in str(error)


def test_a_tensor_of_inference_mode_is_looked_at_each_time():
    with torch.inference_mode():
        keep = torch.ones(64, 64, dtype=torch.bool)
        mask = onchip.dense(keep)
        q, k, v = (torch.randn(1, 64, 1, 8) for _ in "qkv")
        onchip.attention(q, k, v, mask=mask)
        keep.copy_(torch.rand(64, 64) < 0.1)
        expected = onchip.attention(q, k, v, mask=onchip.dense(keep.clone()))
        assert torch.equal(onchip.attention(q, k, v, mask=mask), expected)


def test_a_mask_serves_problems_of_other_sizes_and_heads():
    """One mask over calls whose tile maps differ in everything that a map depends on."""
    keep = torch.rand(1, 4, 64, 64) < 0.5
    keep[:, 2:] = False
    keep[:, 0, :32] = False
    mask = onchip.dense(keep) & onchip.causal()
    for heads_k in (4, 1, 2, 4, 1):
        q, k = torch.randn(1, 64, 4, 8), torch.randn(1, 64, heads_k, 8)
        found = onchip.attention(q, k, k, mask=mask)
        assert torch.equal(found, onchip.attention(q, k, k, mask=onchip.dense(keep) & onchip.causal()))
    causal = onchip.causal()
    for m, n in ((64, 64), (10, 64), (64, 10), (64, 64)):
        q, k = torch.randn(2, m, 4, 8), torch.randn(2, n, 2, 8)
        torch.testing.assert_close(
            onchip.attention(q, k, k, mask=causal),
            onchip.attention(q, k, k, mask=causal, backend="reference"),
        )


def test_maps_are_kept_and_few(monkeypatch):
    mask = onchip.where(lambda b, h, q, k: k <= q)
    problem, place, _ = state(Shape((64,), (64,)))
    first = schedule.build(problem, place, mask, Tiles(16, 16))
    assert schedule.build(problem, place, mask, Tiles(16, 16)) is first
    for n in range(1, 40):
        schedule.build(*state(Shape((n,), (n,)))[:2], mask, Tiles(16, 16))
    assert len(mask.cache) <= schedule._KEEP


# 131072 x 131072 = 1.7e10 elements, of which one core looks at some 0.1 to 0.5e9 a second. Masks that are stated as
# rules need few looks; the others meet a window here, so that all of N x N is classified and 2 % of it looked at.
# ONCHIP_SLOW=1 looks at all of it (minutes).

N = 131_072
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(onchip.__file__).parents[1])}

BIG = {
    "causal": "onchip.causal()",
    "window": "onchip.window(4095, 0)",
    "streaming without a look": "onchip.causal() & onchip.sinks(4) & onchip.window(1023, 0)",
    "chunked": "onchip.chunked(8192) & onchip.causal()",
    "prefix": "onchip.prefix(torch.tensor([50_000])) & onchip.window(None, 0)",
    "documents by cu_seqlens": "onchip.documents(cu_seqlens=torch.arange(0, N + 1, 4096)) & onchip.causal()",
    "padding": "onchip.padding(100_000)",
    "blocks": "onchip.block_sparse(torch.rand(1024, 1024) < 0.2, tile=(128, 128))",
    "blocks and causal": "onchip.block_sparse(torch.rand(1024, 1024) < 0.2, tile=(128, 128)) & onchip.causal()",
    "union": "onchip.causal() & (onchip.window(4095, 0) | onchip.sinks(4))",
    "dense keys": "onchip.dense(torch.rand(N) < 0.5) & onchip.window(2047, 0)",
    "documents by ids": "onchip.documents(torch.arange(N) // 4096) & onchip.window(2047, 0)",
    "where": "onchip.where(lambda b, h, q, k: (q + k) % 2 == 0) & onchip.window(2047, 0)",
}

if os.environ.get("ONCHIP_SLOW"):
    BIG |= {
        "where, whole": "onchip.where(lambda b, h, q, k: (q + k) % 2 == 0)",
        "union, whole": "onchip.dense(torch.rand(N) < 0.5) | onchip.chunked(4096)",
        "dense keys, whole": "onchip.dense(torch.rand(N) < 0.5)",
        "documents, whole": "onchip.documents(torch.arange(N) // 4096)",
    }

# The answer is checked by the elements of some tiles, and memory by the peak of a process of its own.
MEASURE = """
    import json, resource, sys, time
    import torch, onchip
    from onchip import problem as problems, schedule
    from onchip.layout import Dense
    from onchip.mask import Region
    from onchip.schedule import EMPTY, FULL, PARTIAL
    from onchip.tiles import Tiles

    torch.set_num_threads(1)
    N = {n}
    unit = 1 if sys.platform == "darwin" else 1024
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    x = torch.empty(1, N, 1, 8, device="meta")
    place, tiles = Dense(1, N, N), Tiles(512, 512)
    results = {{}}
    for name, text in {masks!r}.items():
        before, start = peak(), time.perf_counter()
        mask = eval(text)
        problem = problems.state(x, x, x, place, "dense", mask, None, device="cpu")
        kinds = schedule.build(problem, place, mask, tiles).groups[0].kinds
        seconds, after = time.perf_counter() - start, peak()
        assert kinds.shape == (N // 512, N // 512)
        for i, j in torch.randint(N // 512, (20, 2)).tolist() + [[i, i] for i in (0, 1, N // 1024, N // 512 - 1)]:
            q, k = i * 512, j * 512
            area = Region(torch.tensor([0]), 0, 1, q, q + 512, k, k + 512, N, N)
            seen = mask.allow(area).expand(1, 1, 512, 512)
            truth = FULL if seen.all() else PARTIAL if seen.any() else EMPTY
            assert kinds[i, j] == truth, (name, i, j, int(kinds[i, j]), truth)
        results[name] = {{"mib": (after - before) / 2**20, "seconds": seconds}}
    print(json.dumps(results))
"""


def test_maps_of_131072_take_under_1_gib():
    script = textwrap.dedent(MEASURE).format(n=N, masks=BIG)
    options = {"env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": 1800}
    run = subprocess.run([sys.executable, "-c", script], **options)
    assert run.returncode == 0, run.stderr[-2000:]
    results = json.loads(run.stdout)
    print(json.dumps(results, indent=1))
    assert results.keys() == BIG.keys()
    for name, result in results.items():
        assert result["mib"] < 1024, (name, result)


def test_problem_is_what_a_map_depends_on():
    """`Problem` holds no tensor and is hashable, so that it may be a key."""
    problem, _, _ = state(Shape((5,), (9,), 2))
    assert isinstance(problem, Problem) and hash(problem) == hash(state(Shape((5,), (9,), 2))[0])
