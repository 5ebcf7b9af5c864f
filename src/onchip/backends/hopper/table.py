"""Configurations of the kernel by head dim. What was tried, and measured, is in benchmarks/hopper-forward.md."""

from typing import NamedTuple

from onchip.problem import Problem


class Config(NamedTuple):
    """`warpgroups` of 64 queries each share blocks of `tile_n` keys, of which `stages` are in flight.

    `ahead`: a quarter of the softmax is held before the wait for the values.
    """

    warpgroups: int
    tile_n: int
    stages: int
    held: int = 0  # columns of the queries that stay in registers: all, half of them, or none
    ahead: bool = False

    @property
    def tile_m(self) -> int:
        return 64 * self.warpgroups

    def shared_memory(self, dim: int, dim_v: int, share_q: bool = False) -> int:
        """Bytes of tiles at padded dims, in 16-bit numbers: queries, of which those that are not held twice, the ring,
        and the output, unless it leaves through the queries' memory."""
        held = min(self.held, dim)
        queries = self.tile_m * (held + 2 * (dim - held))
        return 2 * (
            queries + self.stages * self.tile_n * (dim + dim_v) + (0 if share_q else self.tile_m * dim_v)
        )

    @property
    def registers(self) -> int:
        """Registers of a thread when the kernel starts; computing warps then take 240 or 160, the loading one 24 or 32.

        65,536 of a multiprocessor, in warpgroups of 128 threads: 168 * 3 or 128 * 4.
        """
        return 168 if self.warpgroups == 2 else 128


# (head dim, kind of problem) -> Config; a kind without a row takes the long one. bf16, H200, 2026-12-01, best of 4 to
# 14 candidates over full and causal.
TABLE: dict[tuple[int, str], Config] = {
    # Softmax takes as long as the products at dim 64: three warpgroups cover for one another. They have 160 registers
    # of a thread, too few to hold anything where the assembler would not put it.
    (64, "long"): Config(3, 128, 4),
    # 192 queries would leave more of a short sequence's last tile, and of a causal diagonal, unused.
    (64, "short"): Config(2, 128, 4, held=64, ahead=True),
    # With 160 registers of a thread, a modified score spills.
    (64, "modified"): Config(2, 128, 4, held=64),
    # Held queries changed nothing (1 %), and would not make room for a third stage.
    (128, "long"): Config(2, 128, 2, ahead=True),
    (128, "modified"): Config(2, 128, 2),
    # 64 keys a block and half of the queries in registers: 2 to 4 %, as shared memory alone cannot keep up.
    (256, "long"): Config(2, 64, 2, held=128, ahead=True),
    # 64 keys would spill in the loop.
    (256, "modified"): Config(2, 32, 4, held=128),
}


# Named barriers. There are 16, of which Triton takes the first five: one for each partition, and one for their start.
_FIRST = 5
NEVER = 15  # stands in an arrival that never happens (`parts.computed`); otherwise it may be a turn's


def all_threads(warpgroups: int) -> int:
    """Of the computing warpgroups and the loading warp, which pass a slot on."""
    return 128 * warpgroups + 32


def keys_free(stages: int) -> int:
    """+ slot: every warpgroup has read the keys there."""
    return _FIRST


def values_free(stages: int) -> int:
    """+ slot: every warpgroup has read the values there."""
    return _FIRST + stages


def turn_of(stages: int) -> int:
    """+ warpgroup: it may issue its products."""
    return _FIRST + 2 * stages


def padded(dim: int) -> int:
    """The width of a tile in shared memory: 64, 128 or 256."""
    return max(64, 1 << (dim - 1).bit_length())


def modifies(problem: Problem) -> bool:
    """Whether scores change before the softmax; a scale that is not positive goes the same way."""
    return problem.scale <= 0 or bool(set(problem.score_parts) - {"sink"})


def kind(problem: Problem) -> str:
    if modifies(problem):
        return "modified"
    # Tiles of 192 queries pay under a causal mask as they do under none, where its first tile takes the rows that are
    # missing (`Variant.from_end`). Packed sequences end anywhere, and of other masks, windows among them, tiles of 192
    # compute more that is hidden. What is asked pair by pair spills in the loop of three warpgroups.
    if set(problem.mask_parts) - {"band", "rows"}:
        return "short"
    causal = problem.mask_parts == ("band",) and problem.layout == "dense" and not problem.bounded[0]
    return "short" if problem.seqlen_q <= (1024 if causal or not problem.mask_parts else 4096) else "long"


def config(problem: Problem) -> Config:
    dim = max(padded(problem.dim), padded(problem.dim_v))
    return TABLE.get((dim, kind(problem))) or TABLE[dim, "long"]
