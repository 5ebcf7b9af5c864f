"""Masks and scores as arguments of the Hopper kernel."""

import torch

import onchip
from onchip import problem as problems
from onchip.backends.compiled import arguments, intervals, lists
from onchip.problem import Operands
from onchip.tiles import Tiles


def operands(mask=None, score=None, seqlen=40):
    q = torch.zeros(2, seqlen, 4, 16)
    layout = problems.dense_layout(q, q, q)
    mask, score = onchip.Mask() if mask is None else mask, onchip.Score() if score is None else score
    problem = problems.state(q, q, q, layout, "dense", mask, score)
    return problem, Operands(q, q, q, layout, mask, score)


def test_kernels_step_through_the_heads_of_sinks_and_slopes():
    table = torch.randn(4, 3)
    _, given = operands(score=onchip.Score(sink=table[:, 1], alibi=table[:, 2].expand(2, 4)))
    made = arguments.scores(given)
    assert made.sink.stride() == (1,) and torch.equal(made.sink, table[:, 1])
    assert made.alibi.is_contiguous() and made.alibi_batch == 4


def test_rows_are_intersected():
    mask = onchip.chunked(8) & onchip.padding(torch.tensor([30, 11]))
    problem, given = operands(mask)
    made = intervals.rows(problem, given)
    q = torch.arange(40)
    lo = torch.as_strided(made.lo, (2, 40), (made.batch, made.row))
    hi = torch.as_strided(made.hi, (2, 40), (made.batch, made.row))
    assert torch.equal(lo, (q // 8 * 8).int().expand(2, 40))
    assert torch.equal(hi, torch.minimum(q // 8 * 8 + 8, torch.tensor([[30], [11]])).int())
    assert intervals.rows(*operands()) == (None, None, 0, 0)


def test_lists_of_rows_on_request():
    problem, given = operands(onchip.chunked(16))
    tiles = Tiles(16, 16)
    assert lists.build(problem, given, tiles, False) == (None, 0)
    made, width = lists.build(problem, given, tiles, False, rows=True)
    assert width == 3
    first = made.tiles.reshape(-1, width)[:3, 0]
    assert first.tolist() == [0, 1, 2] and made.counts.reshape(-1, 2)[:3].sum(1).tolist() == [1, 1, 1]


def test_no_function_where_a_band_says_all():
    assert arguments.mask_function(*operands(onchip.causal())) == (None, None)
    function, args = arguments.mask_function(*operands(onchip.where(lambda b, h, q, k: k <= q)))
    assert function is not None and args is None
    assert arguments.mod(operands()[1]) is None
