"""Tile sizes by head dim, itemsize, pass and architecture: a short table, each row with its reason.

`Config` counts queries (tile_m) and keys (tile_n) of a tile, warps of a program, and stages of its load pipeline.
"""

from typing import NamedTuple

from onchip.problem import Problem


class Config(NamedTuple):
    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


# (pass, largest head dim, itemsize) -> Config; the first row that fits is taken.
TABLE: dict[tuple[str, int, int], Config] = {
    # H200, 2026-11-29, bf16, 16384 tokens, N = 8192 or 16384, best of 2 to 7 candidates over full and causal. Small
    # tiles of 4 warps win up to dim 128: by registers two or three programs fit a multiprocessor, and one's softmax can
    # overlap another's products.
    ("forward", 64, 2): Config(64, 128, 4, 3),
    ("forward", 128, 2): Config(64, 64, 4, 3),
    ("forward", 256, 2): Config(128, 64, 8, 2),
    ("forward", 512, 2): Config(64, 32, 8, 1),  # not measured: the largest that fits in shared memory
    ("dkdv", 64, 2): Config(32, 128, 4, 3),
    ("dkdv", 128, 2): Config(32, 64, 4, 3),
    ("dkdv", 256, 2): Config(64, 64, 8, 2),
    ("dkdv", 512, 2): Config(16, 32, 8, 1),  # not measured
    ("dq", 64, 2): Config(64, 64, 4, 3),
    ("dq", 128, 2): Config(128, 64, 8, 3),
    ("dq", 256, 2): Config(128, 64, 8, 1),
    ("dq", 512, 2): Config(32, 16, 8, 1),  # not measured
    # fp32 runs on the FMA units: small tiles, held in registers.
    ("forward", 64, 4): Config(64, 32, 8, 2),
    ("forward", 128, 4): Config(32, 32, 8, 2),
    ("forward", 512, 4): Config(16, 16, 8, 1),
    ("dkdv", 64, 4): Config(32, 32, 8, 1),
    ("dkdv", 128, 4): Config(16, 32, 8, 1),
    ("dkdv", 512, 4): Config(16, 16, 8, 1),
    ("dq", 64, 4): Config(32, 32, 8, 1),
    ("dq", 128, 4): Config(32, 16, 8, 1),
    ("dq", 512, 4): Config(16, 16, 8, 1),
}


# Every other device: less shared memory than Hopper's 227 KiB (A100: 163, most others: 99 or less), or, on Blackwell,
# products that want more of it. Compiled for sm_80, sm_100 and gfx942 without a GPU, not measured.
SMALL: dict[tuple[str, int, int], Config] = {
    ("forward", 64, 2): Config(64, 64, 4, 2),
    ("forward", 128, 2): Config(64, 64, 4, 2),
    ("forward", 256, 2): Config(64, 32, 4, 2),
    ("dkdv", 64, 2): Config(32, 64, 4, 2),
    ("dkdv", 128, 2): Config(32, 64, 4, 1),
    ("dkdv", 256, 2): Config(32, 64, 8, 1),
    ("dq", 64, 2): Config(64, 64, 4, 2),
    ("dq", 128, 2): Config(64, 32, 4, 2),
    ("dq", 256, 2): Config(64, 32, 8, 1),
}


def config(problem: Problem, step: str, major: int, rows: int | None = None) -> Config:
    """The configuration of a pass on a device of this compute capability (0 for AMD).

    `rows`: the query rows there are, when fewer than a tile takes.
    """
    dim, size = max(problem.dim, problem.dim_v), problem.dtype.itemsize
    table = TABLE if major == 9 else {**SMALL, **{key: c for key, c in TABLE.items() if key not in SMALL}}
    found = next(
        c for (name, most, item), c in table.items() if name == step and dim <= most and size == item
    )
    if "bias" in problem.score_parts or "elements" in problem.mask_parts:
        # Tiles of bias or mask join the load pipeline: with 128 x 128 of them it outgrows shared memory.
        stages = min(found.num_stages, 2 if dim <= 128 else 1)
        found = found._replace(tile_m=min(found.tile_m, 64), tile_n=min(found.tile_n, 64), num_stages=stages)
    if rows is not None and rows < found.tile_m:
        found = found._replace(tile_m=max(16, 1 << max(rows - 1, 0).bit_length()))
        if (
            found.tile_m <= 32
        ):  # decoding is bound by the reads of K and V: four warps keep more programs in flight
            found = found._replace(num_warps=4, num_stages=found.num_stages + 1)
    return found
