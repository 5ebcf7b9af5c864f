"""The functions of rules.py in a Triton kernel, on numbers that are in its code.

    python tests/gpu/rules_kernel.py < cases.json

compiles it for a GPU that is not here and reads the results off the assembly: what follows from numbers in the code the
compiler works out itself, as the machine would. A case is {"bounded": 4 bools, "rows": numbers, INPUTS of them each}.
"""

import json
import os
import re
import sys

import triton
import triton.language as tl

from onchip.backends.compiled.rules import allow, dropout_counter, first_diagonal, last_diagonal, spans
from onchip.rules import Band

INPUTS = 13  # i, tile_q, tile_k, q_len, k_len, the band's four, q, k, lo, hi
# Spans, both diagonals or 0, allow without and with an interval, a dropout counter.
OUTPUTS: tl.constexpr = tl.constexpr(12)


@triton.jit
def number(X: tl.constexpr):
    return tl.full((), X, tl.int32)


@triton.jit
def rules_kernel(out, ROWS: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                 TOP_LEFT: tl.constexpr, TOP_RIGHT: tl.constexpr):  # fmt: skip
    for r in tl.static_range(N):
        i, tile_q, tile_k = number(ROWS[r][0]), number(ROWS[r][1]), number(ROWS[r][2])
        q_len, k_len = number(ROWS[r][3]), number(ROWS[r][4])
        q, k, row_lo, row_hi = (
            number(ROWS[r][9]),
            number(ROWS[r][10]),
            number(ROWS[r][11]),
            number(ROWS[r][12]),
        )
        band = Band(
            number(ROWS[r][5]) if LEFT else None,
            number(ROWS[r][6]) if RIGHT else None,
            number(ROWS[r][7]) if TOP_LEFT else None,
            number(ROWS[r][8]) if TOP_RIGHT else None,
        )
        to = out + r * OUTPUTS
        lo, full_lo, full_hi, hi = spans(i, tile_q, tile_k, q_len, k_len, band)
        tl.store(to, lo)
        tl.store(to + 1, full_lo)
        tl.store(to + 2, full_hi)
        tl.store(to + 3, hi)
        tl.store(to + 4, first_diagonal(q_len, k_len, band) if LEFT or TOP_LEFT else 0)
        tl.store(to + 5, last_diagonal(q_len, k_len, band) if RIGHT or TOP_RIGHT else 0)
        tl.store(to + 6, allow(q, k, q_len, k_len, band, None, None).to(tl.int32))
        tl.store(to + 7, allow(q, k, q_len, k_len, band, row_lo, row_hi).to(tl.int32))
        c0, c1, c2, c3 = dropout_counter(i, q, number(7), row_lo, k, number(0))
        tl.store(to + 8, c0)
        tl.store(to + 9, c1)
        tl.store(to + 10, c2)
        tl.store(to + 11, c3)


def stored(ptx: str) -> dict[int, int]:
    """Byte offset in `out` -> the number that is stored there."""
    numbers = {r: int(n) for r, n in re.findall(r"mov\.[bus]32\s+(%r\d+), (-?\d+);", ptx)}
    offsets = {r: (base, int(n)) for r, base, n in re.findall(r"add\.s64\s+(%rd\d+), (%rd\d+), (\d+);", ptx)}
    found = {}
    for pointer, more, register in re.findall(
        r"st\.global\.b32 \[ (%rd\d+) \+ (\d+) \], \{ (%r\d+) \};", ptx
    ):
        assert register in numbers, f"{register} is no number: the compiler left work to the machine"
        offset = int(more)
        while pointer in offsets:
            pointer, n = offsets[pointer]
            offset += n
        found[offset] = (numbers[register] + 2**31) % 2**32 - 2**31
    return found


def main() -> None:
    from compile_kernels import offline
    from triton import knobs
    from triton.compiler import ASTSource, compile

    offline("cuda:90")
    knobs.nvidia.dump_ptxas_log = False
    for case in json.load(sys.stdin):
        rows = tuple(map(tuple, case["rows"]))
        names = ("ROWS", "N", "LEFT", "RIGHT", "TOP_LEFT", "TOP_RIGHT")
        constants = dict(zip(names, (rows, len(rows), *case["bounded"]), strict=True))
        signature = {"out": "*i32"} | dict.fromkeys(constants, "constexpr")
        made = compile(ASTSource(rules_kernel, signature, constants))
        found = stored(made.asm["ptx"])
        assert sorted(found) == [4 * n for n in range(OUTPUTS.value * len(rows))]
        print(json.dumps([found[4 * n] for n in range(len(found))]))


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
