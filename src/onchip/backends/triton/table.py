"""Tile sizes by head dim, itemsize, pass and architecture: a short table, each row with its reason.

`Config` counts queries (tile_m) and keys (tile_n) of a tile, warps of a program, and stages of its load pipeline.
"""

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from onchip.problem import Problem


class Config(NamedTuple):
    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


class Facts(NamedTuple):
    """What a choice of tiles asks of a device."""

    major: int  # compute capability; 0 for AMD
    multiprocessors: int
    name: str  # as torch.cuda.get_device_name; empty under the interpreter
    l2: int = 60 << 20  # bytes of L2 cache, as torch states them; where nothing is known, an H200's


# (pass, largest head dim, itemsize) -> Config; the first row that fits is taken.
TABLE: dict[tuple[str, int, int], Config] = {
    # H200, 2026-12-01, bf16, 16384 tokens, N = 2048 and 16384, best of 3 to 10 candidates over full and causal. Small
    # tiles of 4 warps win up to dim 128: by registers two or three programs fit a multiprocessor, and one's softmax can
    # overlap another's products. Dim 512: 2026-12-02, N = 2048, best of 7 or 8.
    ("forward", 64, 2): Config(64, 128, 4, 2),
    ("forward", 128, 2): Config(64, 64, 4, 3),
    ("forward", 256, 2): Config(128, 64, 8, 2),
    ("forward", 512, 2): Config(64, 32, 8, 2),
    ("dkdv", 64, 2): Config(64, 64, 4, 3),
    ("dkdv", 128, 2): Config(64, 64, 4, 2),
    ("dk", 256, 2): Config(32, 128, 8, 3),
    ("dv", 256, 2): Config(32, 128, 8, 3),
    ("dk", 512, 2): Config(64, 32, 8, 1),
    ("dv", 512, 2): Config(32, 64, 8, 1),
    ("dq", 64, 2): Config(64, 64, 4, 3),
    ("dq", 128, 2): Config(128, 64, 8, 3),
    ("dq", 256, 2): Config(128, 32, 8, 3),
    ("dq", 512, 2): Config(64, 32, 8, 1),
    # fp32 runs on the FMA units: small tiles, held in registers. H200, 2026-12-02, 16384 tokens, N = 1024 (512 past dim
    # 128), best of 4 to 18 candidates over full and causal; few warps, so that a thread has more products of what it
    # loads. Either half of dim 64's backward takes 0.53 of what it took in tiles of 32 x 32 by eight warps.
    ("forward", 64, 4): Config(64, 32, 4, 2),
    ("forward", 128, 4): Config(16, 32, 4, 2),
    ("forward", 256, 4): Config(16, 64, 8, 1),
    # 16 x 32 with one stage takes 3 % less, but Triton 3.9 has it spill 40 KB.
    ("forward", 512, 4): Config(16, 16, 4, 2),
    ("dkdv", 64, 4): Config(32, 32, 4, 2),
    ("dkdv", 128, 4): Config(32, 32, 8, 2),
    ("dk", 256, 4): Config(32, 32, 8, 2),
    ("dv", 256, 4): Config(32, 32, 8, 2),  # one stage: 2 % less, but Triton 3.9 has it spill 8 KB
    ("dk", 512, 4): Config(32, 16, 8, 1),
    ("dv", 512, 4): Config(16, 16, 4, 2),
    ("dq", 64, 4): Config(64, 32, 4, 2),
    ("dq", 128, 4): Config(32, 16, 4, 2),
    ("dq", 256, 4): Config(16, 32, 4, 2),
    ("dq", 512, 4): Config(16, 16, 4, 2),
}

DIMS = tuple(sorted({dim for _, dim, _ in TABLE}))

# The same where scores are modified or a mask is a function, which takes registers: with a mod 7.1 ms for 8.9
# (H200, 2026-12-01).
CROWDED: dict[tuple[str, int, int], Config] = {("dkdv", 128, 2): Config(32, 64, 4, 3)}

# Every other device: less shared memory than Hopper's 227 KiB (A100: 163, most others: 99 or less), or, on Blackwell,
# products that want more of it. Compiled for sm_80, sm_100 and gfx942 without a GPU, not measured.
SMALL: dict[tuple[str, int, int], Config] = {
    ("forward", 64, 2): Config(64, 64, 4, 2),
    ("forward", 128, 2): Config(64, 64, 4, 2),
    ("forward", 256, 2): Config(64, 32, 4, 2),
    ("dkdv", 64, 2): Config(32, 64, 4, 2),
    ("dkdv", 128, 2): Config(32, 64, 4, 1),
    ("dk", 256, 2): Config(32, 64, 8, 1),
    ("dv", 256, 2): Config(32, 64, 8, 1),
    ("dq", 64, 2): Config(64, 64, 4, 2),
    ("dq", 128, 2): Config(64, 32, 4, 2),
    ("dq", 256, 2): Config(64, 32, 8, 1),
    ("forward", 512, 2): Config(64, 32, 8, 1),
    ("dk", 512, 2): Config(16, 32, 8, 1),
    ("dv", 512, 2): Config(16, 32, 8, 1),
    ("dq", 512, 2): Config(32, 16, 8, 1),
    **{(step, dim, 4): Config(16, 16, 8, 1) for step in ("forward", "dk", "dv", "dq") for dim in (256, 512)},
}


def l2_share(step: str, dim: int) -> float:
    """Of the L2 cache, for what the tiles of a section of heads read (`planning.sections`).

    H200 (60 MiB), 2026-12-02, bf16, causal, N = 2048, 8192 and 16384, best of 12.5, 25, 37.5 and 50 MiB. Forward at dim
    256, whose tiles have twice the queries for a read, 37.5 takes 2 to 4 % less than 25; backward at dim 128, 12.5
    takes 1 to 3 % less (benchmarks/results/h200-order.json). Shares of 60 make sections of as many heads.
    """
    if step == "forward":
        return 0.75 if dim > 128 else 0.5
    return 0.25 if 64 < dim <= 128 else 0.5


def modifies(problem: Problem) -> bool:
    """Whether scores are more than scaled products."""
    return not {"softcap", "alibi", "bias", "mod"}.isdisjoint(problem.score_parts)


def separate(problem: Problem) -> bool:
    """Whether dK and dV come from passes of their own: past dim 128 their two accumulators leave no registers.

    Two passes compute the scores twice, 10 units of work for 8, but run like dQ's: at dim 256 the one pass took 7.84 ms
    for what dQ does three quarters of in 3.12 (H200, N = 8192).
    """
    return max(problem.dim, problem.dim_v) > 128


def overrides_file() -> Path:
    """Where `onchip tune` keeps what it measured: $ONCHIP_CACHE, or ~/.cache/onchip."""
    folder = os.environ.get("ONCHIP_CACHE")
    return (Path(folder) if folder else Path.home() / ".cache" / "onchip") / "triton-tiles.json"


@lru_cache(maxsize=16)
def overrides(device: str) -> dict[tuple[str, int, int], Config]:
    """The rows that `onchip tune` measured on a device of this name. Read once a process."""
    path = overrides_file()
    if not device or not path.exists():
        return {}
    try:
        rows = json.loads(path.read_text())["devices"].get(device, [])
        return {
            (r["pass"], r["dim"], r["itemsize"]): Config(*(int(r[f]) for f in Config._fields)) for r in rows
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: not the file that `onchip tune` writes ({error!r}); delete it or tune again"
        ) from error


def config(problem: Problem, step: str, facts: Facts, rows: int | None = None) -> Config:
    """The configuration of a pass on a device.

    `rows`: the query rows there are, when fewer than a tile takes.
    """
    dim, size = max(problem.dim, problem.dim_v), problem.dtype.itemsize
    table = TABLE if facts.major == 9 else {**SMALL, **{k: c for k, c in TABLE.items() if k not in SMALL}}
    key, found = next(
        (key, c) for key, c in table.items() if key[0] == step and dim <= key[1] and size == key[2]
    )
    if facts.major == 9 and (modifies(problem) or "elements" in problem.mask_parts):
        found = CROWDED.get(key, found)
    found = overrides(facts.name).get(key, found)
    if "bias" in problem.score_parts or "elements" in problem.mask_parts:
        # Tiles of bias or mask join the load pipeline: with 128 x 128 of them it outgrows shared memory.
        stages = min(found.num_stages, 2 if dim <= 128 else 1)
        warps = (
            4 if dim <= 256 and size == 2 else found.num_warps
        )  # eight on a tile of 64 rows share too little work
        found = Config(min(found.tile_m, 64), min(found.tile_n, 64), warps, stages)
    if rows is not None and rows < found.tile_m:
        found = found._replace(tile_m=max(16, 1 << max(rows - 1, 0).bit_length()))
        if (
            found.tile_m <= 32
        ):  # decoding is bound by the reads of K and V: four warps keep more programs in flight
            found = found._replace(num_warps=4, num_stages=found.num_stages + 1)
    return found


def packs(problem: Problem, mask_by_head: bool) -> int:
    """Query heads of a key head stacked in one tile: all of them where they fit, so that K and V are read once."""
    rows = problem.seqlen_q * problem.group
    return problem.group if problem.group > 1 and rows <= 128 and not mask_by_head else 1
