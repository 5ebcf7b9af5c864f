"""Compile the Hopper kernel without a GPU, for every row of its table, and report each case as a line of JSON.

    python tests/gpu/compile_hopper.py [SHARE SHARES]

What the backend would launch is compiled, by the assembler of the Triton that is installed.
"""

import json
import re
import sys

import torch
from compile_kernels import offline, record
from sass import disassembly, unset

import onchip
from onchip import problem as problems
from onchip.backends.hopper import launch, refuse_shape
from onchip.backends.hopper.table import NEVER, config, kind, padded
from onchip.layout import Varlen
from onchip.problem import Operands

LONG = 8192
SCORE = onchip.Score(
    softcap=20.0, alibi=torch.ones(8), sink=torch.ones(8), mod=lambda s, b, h, q, k: s - 0.1 * (q - k)
)
BLOCKS = onchip.block_sparse(torch.ones(8, 8, dtype=torch.bool), tile=(128, 128))
WHERE = onchip.where(lambda b, h, q, k: (k <= q) | (k % 64 == 0))
# dim, mask, score, (seqlen_q, seqlen_k), heads_k, packed
CASES = {
    "d64 full long": (64, onchip.Mask(), onchip.Score(), (LONG, LONG), 8, False),
    "d64 window long": (64, onchip.window(300, 5), onchip.Score(), (LONG, LONG), 8, False),
    "d64 causal": (64, onchip.causal(), onchip.Score(), (1024, 1024), 8, False),
    "d64 score": (64, onchip.causal(), SCORE, (1024, 1024), 8, False),
    "d128 causal": (128, onchip.causal(), onchip.Score(), (1024, 1024), 8, False),
    "d128 window long": (128, onchip.window(300, 5), onchip.Score(), (LONG, LONG), 8, False),
    "d128 where": (128, WHERE, onchip.Score(), (1024, 1024), 8, False),
    "d128 blocks": (128, BLOCKS, onchip.Score(), (1024, 1024), 8, False),
    "d128 score": (128, onchip.causal(), SCORE, (1024, 1024), 8, False),
    "d128 packed": (128, onchip.causal(), onchip.Score(), (512, 512), 2, True),
    "d128 stacked": (128, onchip.causal(), onchip.Score(), (8, 1000), 1, False),
    "d256 full": (256, onchip.Mask(), onchip.Score(), (LONG, LONG), 8, False),
    "d256 causal": (256, onchip.causal(), onchip.Score(), (1024, 1024), 8, False),
    "d256 score": (256, onchip.causal(), SCORE, (1024, 1024), 8, False),
    "d64 causal long": (64, onchip.causal(), onchip.Score(), (LONG, LONG), 8, False),
}


def loops(sass: str) -> list[str]:
    """The innermost loops: from a label to the nearest branch back to it, without another such pair inside."""
    lines = sass.splitlines()
    labels, found = {}, []
    for n, line in enumerate(lines):
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label.group(1)] = n
        branch = re.search(r"BRA\S* .*`\((\.L_x_\d+)\)", line)
        if branch and branch.group(1) in labels:
            found.append((labels[branch.group(1)], n))
    inner = [(a, b) for a, b in found if not any(a <= c and d <= b for c, d in found if (c, d) != (a, b))]
    return ["\n".join(lines[a : b + 1]) for a, b in inner]


def report(case: str) -> dict:
    dim, mask, score, (seqlen_q, seqlen_k), heads_k, packed = CASES[case]
    lead = () if packed else (2,)
    q = torch.empty(*lead, seqlen_q, 8, dim, dtype=torch.bfloat16)
    k = torch.empty(*lead, seqlen_k, heads_k, dim, dtype=torch.bfloat16)
    place = problems.dense_layout(q, k, k) if not packed else None
    if packed:
        cu = torch.tensor([0, seqlen_q // 2, seqlen_q], dtype=torch.int32)
        place = Varlen(cu, cu, None, None, seqlen_q // 2, seqlen_k // 2)
    problem = problems.state(q, k, k, place, "varlen" if packed else "dense", mask, score)
    assert refuse_shape(problem) is None
    found: list = []
    launch.Step.run = record(found)
    launch.forward(problem, Operands(q, k, k, place, mask, score))
    ((_, compiled, text),) = found
    ptx, sass = compiled.asm["ptx"], disassembly(compiled.asm["cubin"])
    products = [loop for loop in loops(sass) if "HGMMA" in loop]
    return {
        "case": case,
        "config": str(config(problem)),
        "kind": kind(problem),
        "shared": compiled.metadata.shared,
        "spills": int(re.search(r"(\d+) bytes spill stores", text).group(1)),
        "serialized": "serializ" in text,
        "loops": len(products),
        "spills_in_loops": sum(len(re.findall(r"\b(?:LDL|STL)\b", loop)) for loop in products),
        "unset": unset(sass),
        "ahead": config(problem).ahead,
        "exponentials": config(problem).tile_n
        // 2,  # of a thread, 64 rows in 128 threads; besides two factors
        "order": [order(loop) for loop in products],
        "rescaled": [rescaled(loop) for loop in products],
        "outputs": padded(dim) // 2,  # of a thread, of two rows
        "named_barriers": sorted(
            {int(n) for n in re.findall(r"\bbar(?:rier)?\.(?:cta\.)?(?:sync|arrive)\s+(\d+)", ptx)}
        ),
        "kilobytes": round(len(re.findall(r"/\*[0-9a-f]{4,}\*/ ", sass)) * 16 / 1024),
    }


def order(loop: str) -> list[str]:
    """Waits for products, arrivals at barriers, apart from those that never happen, what the softmax is made of, and a
    warp's vote."""
    names = {
        "WARPGROUP.DEPBAR": "wait",
        "BAR.ARV": "arrive",
        "FMNMX": "maxima",
        "MUFU.EX2": "exp",
        "HGMMA": "products",
        "VOTE": "vote",
    }
    apart = loop.replace(f"BAR.ARV {NEVER:#x}, 0xa0", "never")
    return [names.get(word, word) for word in re.findall("|".join(map(re.escape, [*names, "never"])), apart)]


def rescaled(loop: str) -> tuple[dict[str, int], list[str]]:
    """Products behind a warp's vote by the register of their factor; and the registers that the vote is about."""
    before, after = re.split(r"VOTE\S*", loop, maxsplit=1)
    asked = re.findall(r"FSETP\.NEU\S* P\d, PT, (R\d+)\S*, 1, ", before)
    counts: dict[str, int] = {}
    behind = re.split(r"\n\.L_x_\d+:", after.split("BRA", 1)[1], maxsplit=1)[0]
    for product, *terms in re.findall(r"FMUL (R\d+), (R\d+)\S*, (R\d+)", behind):
        if product in terms:
            (factor,) = [x for x in terms if x != product]
            counts[factor] = counts.get(factor, 0) + 1
    return counts, asked


def main(share: int, shares: int) -> None:
    offline("cuda:90")
    launch.multiprocessors = lambda index: 132
    launch.zero = lambda device: torch.zeros(1, dtype=torch.int32)
    for case in list(CASES)[share::shares]:
        print(json.dumps(report(case)), flush=True)


if __name__ == "__main__":
    main(*(map(int, sys.argv[1:]) if len(sys.argv) > 1 else (0, 1)))
