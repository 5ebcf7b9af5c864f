"""The order of onchip's own kernels: what the animation plays is what their programs do, tile by tile."""

import dataclasses
import random

import pytest
import torch

import onchip
from onchip import orders, own_orders, rules, schedule, steps, traffic
from onchip.backends.compiled import lists
from onchip.backends.hopper import variant
from onchip.layout import Dense
from onchip.problem import Operands, dense_layout, state
from onchip.schedule import EMPTY
from onchip.tiles import Tiles

TILES = Tiles(64, 32)
MASKS = {
    "full": onchip.Mask(),
    "causal": onchip.causal(),
    "top left": onchip.causal(align="top_left"),
    "window": onchip.window(100, 40),
    "left": onchip.window(100, None),
    "prefix": onchip.prefix(70),
    "documents": onchip.causal() & onchip.documents(cu_seqlens=torch.tensor([0, 90, 250])),
    "blocks": onchip.block_sparse(torch.tensor([[1, 0, 1], [0, 1, 1]]).bool(), tile=(128, 100)),
    "where": onchip.window(60, None) & onchip.where(lambda b, h, q, k: (q + k) % 3 != 0),
}


def stated(seqlen_q, seqlen_k, mask, heads=1, heads_k=1, dim=64):
    q, k = (torch.empty(1, n, h, dim, dtype=torch.float16, device="meta")
            for n, h in ((seqlen_q, heads), (seqlen_k, heads_k)))  # fmt: skip
    return state(q, k, k, dense_layout(q, k, k), "dense", mask, None, device="cpu")


def visits(backend, step, name, seqlen_q, seqlen_k, mask):
    """[(outer tile, [inner tiles])] of a sweep, as the animation plays it."""
    problem, found = stated(seqlen_q, seqlen_k, mask), {}
    place = Dense(1, seqlen_q, seqlen_k)
    for s in steps.walk(problem, place, mask, "onchip", step, tiles=TILES, backend=backend):
        if s.phase == name:
            outer, inner = (s.n_block, s.m_block) if name.startswith("dk") else (s.m_block, s.n_block)
            if outer is not None:
                found.setdefault(outer, []).extend([] if inner is None else [inner])
    return list(found.items())


def by_list(problem, mask, place, by_key, rows=False, ordered=True):
    """What a kernel reads off its lists of tiles: partial ones, then full ones."""
    x = torch.empty(0)
    made, _ = lists.build(problem, Operands(x, x, x, place, mask, onchip.Score()), TILES, by_key, rows)
    if made is None:
        return None
    lengths = made.counts[0, 0].sum(-1).tolist()
    order = range(len(lengths))
    if ordered:
        order = sorted(order, key=lambda i: -lengths[i])
    return [(i, made.tiles[0, 0, i, : lengths[i]].tolist()) for i in order]


def by_span(seqlen_q, seqlen_k, band, flipped=False):
    """What a kernel computes from its band, upwards."""
    m, n = (seqlen_k, seqlen_q) if flipped else (seqlen_q, seqlen_k)
    sides = (TILES.tile_n, TILES.tile_m) if flipped else (TILES.tile_m, TILES.tile_n)
    found = []
    for i in range(-(-m // sides[0])):
        lo, _, _, hi = rules.spans(i, *sides, m, n, rules.flip(band) if flipped else band)
        found.append((i, list(range(lo, hi))))
    return found


PASSES = {
    "attend": ("forward", False),
    "dkdv": ("backward", True),
    "dq": ("backward", False),
}  # by keys or queries


@pytest.mark.parametrize("sweep", PASSES)
@pytest.mark.parametrize("name", MASKS)
def test_triton_s_order(name, sweep):
    (step, by_key), mask, place = PASSES[sweep], MASKS[name], Dense(1, 200, 250)
    band = mask.band or rules.Band()
    problem = stated(200, 250, mask)
    elements = "elements" in problem.mask_parts
    left, right = ((band.left, band.top_left) != (None, None)), ((band.right, band.top_right) != (None, None))
    backwards = left and not right if by_key else right
    if mask.rows and not by_key:  # what intervals leave of the band is read in the kernel itself
        wanted = [(i, sorted(tiles)) for i, tiles in by_list(problem, mask, place, False, True, False)]
    else:
        wanted = by_list(problem, mask, place, by_key, ordered=not elements)
        backwards = backwards and (wanted is None or elements)
        wanted = wanted or by_span(200, 250, band, by_key)
    wanted = wanted[::-1] if backwards else wanted
    assert visits("triton", step, sweep, 200, 250, mask) == wanted


@pytest.mark.parametrize("backend, sweep", [*(("triton", s) for s in PASSES), ("hopper", "attend")])
def test_a_stored_mask_is_read_where_a_list_says_partial(backend, sweep):
    """The tiles whose elements a kernel looks at: a last one that is cut off is among them though all of it shows."""
    (step, by_key), place = PASSES[sweep], Dense(1, 200, 250)
    visible = torch.rand(200, 250) < 0.5
    visible[:, 64:] = True
    visible[64:128] = False
    mask = onchip.dense(visible)
    problem, x = stated(200, 250, mask), torch.empty(0)
    operands = Operands(x, x, x, place, mask, onchip.Score())
    made, _ = lists.build(problem, operands, TILES, by_key, rows=backend == "hopper")
    wanted = set()
    for i, (partial, _) in enumerate(made.counts[0, 0].tolist()):
        wanted |= {(j, i) if by_key else (i, j) for j in made.tiles[0, 0, i, :partial].tolist()}
    options = {"tiles": TILES, "backend": backend}
    walked = [s for s in steps.walk(problem, place, mask, "onchip", step, **options) if s.phase == sweep]
    looks = {(s.m_block, s.n_block) for s in walked if "mask" in s.load}
    blind = {(1, 0)} if backend == "hopper" else set()  # its rows see nothing, and visit one block
    assert looks == wanted | blind and len(wanted) > 6
    assert {(3, 7) if by_key else (0, 7)} <= wanted


def hopper(i, seqlen_q, seqlen_k, band):
    """The blocks of keys that a tile of the Hopper kernel visits under a band, or None where it cuts keys off."""
    first = end = 0
    seen, left = seqlen_k, (band.left, band.top_left) != (None, None)
    right = (band.right, band.top_right) != (None, None)
    if left:
        first = rules.first_diagonal(seqlen_q, seqlen_k, band)
        if first > 0:
            return None
    if right:
        end = rules.last_diagonal(seqlen_q, seqlen_k, band)
        seen = max(min(seqlen_k, seqlen_q + end), 0)
    shifted = rules.Band(None, None, -first if left else None, end if right else None)
    lo, _, _, hi = rules.spans(i, TILES.tile_m, TILES.tile_n, seqlen_q, seen, shifted)
    return [max(hi - 1, 0) - position for position in range(max(hi - lo, 1))]


@pytest.mark.parametrize("name", MASKS)
def test_hopper_s_order(name):
    """From the last keys to the first, the longest tiles of a causal mask first; by a list where there is one."""
    draw = random.Random(torch.initial_seed())
    for _ in range(20):
        seqlen_q, seqlen_k = draw.randint(129, 256), draw.randint(201, 300)
        if name == "documents":
            seqlen_q = seqlen_k = 250
        mask = MASKS[name]
        band, place = mask.band or rules.Band(), Dense(1, seqlen_q, seqlen_k)
        found = visits("hopper", "forward", "attend", seqlen_q, seqlen_k, mask)
        wanted = by_list(stated(seqlen_q, seqlen_k, mask), mask, place, False, rows=True)
        listed = wanted is not None
        if not listed:
            wanted = [(i, hopper(i, seqlen_q, seqlen_k, band)) for i in range(-(-seqlen_q // TILES.tile_m))]
        wanted = [(i, tiles or [0]) for i, tiles in wanted if tiles is not None]
        if (band.right, band.top_right) != (None, None) and not listed:
            wanted = wanted[::-1]
        kept = {i for i, _ in wanted}
        assert [(i, tiles) for i, tiles in found if i in kept] == wanted


@pytest.mark.parametrize(
    "seqlen_q, seqlen_k", [(1217, 1217), (1185, 1500), (2048, 2048), (1217, 900), (1300, 1300)]
)
@pytest.mark.parametrize("name", ["causal", "top left"])
def test_hopper_s_first_tile_lacks_rows(name, seqlen_q, seqlen_k):
    """Its own tiles, 192 x 128 here: as `work.tile_at` has it, rows before the first query count as if they were."""
    mask, place = MASKS[name], Dense(1, seqlen_q, seqlen_k)
    problem = stated(seqlen_q, seqlen_k, mask)
    (sweep,) = orders.sweeps(problem, backend="hopper", mask=mask)
    spare = (-seqlen_q % 192) // 64 * 64
    assert sweep.tiles == Tiles(192, 128, spare) and (spare > 0) == (seqlen_q != 1300)
    end = rules.last_diagonal(seqlen_q, seqlen_k, mask.band)
    seen, wanted = max(min(seqlen_k, seqlen_q + end), 0), []
    for i in range(-(-seqlen_q // 192)):
        band = rules.Band(top_right=end - spare)
        lo, _, _, hi = rules.spans(i, 192, 128, seqlen_q + spare, seen, band)
        wanted.append((i, [max(hi - 1, 0) - position for position in range(max(hi - lo, 1))]))
    found = {}
    for s in steps.walk(problem, place, mask, "onchip", "forward", backend="hopper"):
        found.setdefault(s.m_block, []).append(s.n_block)
    assert list(found.items()) == wanted[::-1]
    keys = sum(min(128, seqlen_k - 128 * j) for _, blocks in wanted for j in blocks)
    counted = traffic.count(problem, place, mask, backend="hopper")
    assert counted.tensors["k"].loads == counted.tensors["v"].loads == keys * 64
    assert counted.tensors["q"].loads == seqlen_q * 64


def test_a_tile_of_hopper_s_that_sees_nothing_reads_one_block():
    """Of rows above the first key, under a causal mask with more queries than keys."""
    mask = onchip.causal()
    problem, place = stated(256, 64, mask), Dense(1, 256, 64)
    own, other = (
        traffic.count(problem, place, mask, backend=name, tiles=Tiles(64, 32))
        for name in ("hopper", "triton")
    )
    assert own.tensors["k"].loads == other.tensors["k"].loads + 3 * 32 * 64
    assert own.flops == other.flops and own.least == other.least


@pytest.mark.parametrize(
    "seqlen_q, heads_k, layout, together", [(1, 2, "dense", 4), (30, 2, "dense", 4), (40, 2, "dense", 1),
                                             (1, 8, "dense", 1), (1, 2, "varlen", 1)]
)  # fmt: skip
def test_heads_that_hopper_stacks(seqlen_q, heads_k, layout, together):
    """As many as its kernel does: their keys are read once."""
    problem = dataclasses.replace(stated(seqlen_q, 512, onchip.Mask(), 8, heads_k), layout=layout)
    (sweep,) = orders.sweeps(problem, backend="hopper")
    assert variant.packs(problem, 128, False) == together
    assert sweep.stacked == (together > 1) and sweep.tiles.tile_m == 128 // together
    found = traffic.count(problem, Dense(1, seqlen_q, 512), onchip.Mask(), backend="hopper")
    assert found.tensors["k"].loads == 512 * 64 * 8 // together


def test_over_a_cache_triton_visits_what_its_rules_show():
    """Its lists would need the lengths on the host: a function hides pairs there, but skips no tile."""

    def odd(b, h, q, k):
        return (k // 64) % 2 == 1

    mask, place = onchip.causal() & onchip.where(odd), Dense(1, 4, 1024)
    problem = dataclasses.replace(stated(4, 1024, mask), layout="cache")
    whole = 1024 * 64
    for layout, keys in (("cache", whole), ("dense", whole // 2)):
        one = dataclasses.replace(problem, layout=layout)
        found = traffic.count(one, place, mask, backend="triton", tiles=Tiles(16, 64))
        assert found.tensors["k"].loads == keys and found.pairs == 4 * 512 - (3 + 2 + 1)
    sweep = own_orders.sweeps(problem, "triton", "forward", (), TILES, mask, None)[0]
    assert (
        schedule.build(problem, place, mask, TILES).count(EMPTY) > 0 and sweep.by_rules and not sweep.listed
    )
