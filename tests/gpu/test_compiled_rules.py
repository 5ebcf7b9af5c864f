"""rules.py compiled by Triton equals CPython's: run here, and as Triton's compilers work it out for a GPU."""

import itertools
import json
import math
import random

import pytest
import rules_kernel as kernel
import torch
import triton
import triton.language as tl
from test_compile import NEWEST, lines_of

from onchip import rules
from onchip.backends.compiled.rules import modify, modify_grad, tanh

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDED = list(itertools.product((False, True), repeat=4))


def rows(draw, count):
    """Numbers for the kernel: small, with edges before and behind either sequence, and some of millions."""
    found = []
    for n in range(count):
        scale = 1_000_000 if n % 4 == 3 else 1
        q_len, k_len, tile_q, tile_k = (
            draw.randint(1, 30),
            draw.randint(0, 30),
            draw.randint(1, 9),
            draw.randint(1, 9),
        )
        edges = [scale * draw.randint(-12, 30) for _ in range(4)]
        q, k, lo, hi = draw.randint(0, 33), draw.randint(0, 33), draw.randint(0, 9), draw.randint(9, 33)
        i = draw.randrange(-(-q_len * scale // tile_q))
        found.append(
            [i, tile_q, tile_k, q_len * scale, k_len * scale, *edges, q * scale, k * scale, lo, hi * scale]
        )
    return found


def by_cpython(row, bounded):
    i, tile_q, tile_k, q_len, k_len, *edges, q, k, lo, hi = row
    band = rules.Band(*(edge if there else None for edge, there in zip(edges, bounded, strict=True)))
    first = rules.first_diagonal(q_len, k_len, band) if bounded[0] or bounded[2] else 0
    last = rules.last_diagonal(q_len, k_len, band) if bounded[1] or bounded[3] else 0
    allowed = rules.allow(q, k, q_len, k_len, band, None, None), rules.allow(q, k, q_len, k_len, band, lo, hi)
    counter = rules.dropout_counter(i, q, 7, lo, k, 0)
    return [*rules.spans(i, tile_q, tile_k, q_len, k_len, band), first, last, *map(int, allowed), *counter]


@pytest.fixture
def cases(fresh_seed):
    draw = random.Random(torch.initial_seed())
    return [{"bounded": bounded, "rows": rows(draw, 12)} for bounded in BOUNDED]


def test_a_kernel_that_runs(cases):
    for case in cases:
        given, bounded = case["rows"], case["bounded"]
        out = torch.empty(len(given) * kernel.OUTPUTS.value, dtype=torch.int32, device=DEVICE)
        kernel.rules_kernel[(1,)](out, tuple(map(tuple, given)), len(given), *bounded)
        assert out.tolist() == [x for row in given for x in by_cpython(row, bounded)], case


@pytest.mark.parametrize("more_path", [(), *([(NEWEST,)] if NEWEST.exists() else [])], ids=str)
def test_what_the_compiler_makes_of_it(cases, more_path):
    found = lines_of("rules_kernel.py", more_path=more_path, given=json.dumps(cases))
    for case, numbers in zip(cases, found, strict=True):
        assert numbers == [x for row in case["rows"] for x in by_cpython(row, case["bounded"])], case


@triton.jit
def modify_kernel(scores, distances, out, softcap, slope, bias, N: tl.constexpr):
    n = tl.arange(0, N)
    s, distance = tl.load(scores + n), tl.load(distances + n)
    tl.store(out + n, modify(s, tanh, softcap, slope, distance, bias))
    tl.store(out + N + n, modify_grad(s, tanh, softcap))


def test_modified_scores(fresh_seed):
    scores, distances = 4 * torch.randn(64, device=DEVICE), torch.randint(0, 50, (64,), device=DEVICE).float()
    out, softcap, slope, bias = torch.empty(2, 64, device=DEVICE), 2.5, 0.125, -0.75
    modify_kernel[(1,)](scores, distances, out, softcap, slope, bias, 64)
    given = list(zip(scores.tolist(), distances.tolist(), strict=True))
    wanted = [[rules.modify(s, math.tanh, softcap, slope, d, bias) for s, d in given],
              [rules.modify_grad(s, math.tanh, softcap) for s, _ in given]]  # fmt: skip
    torch.testing.assert_close(
        out.double().cpu(), torch.tensor(wanted, dtype=torch.float64), atol=2e-6, rtol=2e-6
    )
