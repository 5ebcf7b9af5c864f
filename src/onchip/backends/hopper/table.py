"""Configurations of the kernel by head dim. What was tried, and measured, is in benchmarks/hopper-forward.md."""

from typing import NamedTuple

from onchip.problem import Problem


class Config(NamedTuple):
    """`warpgroups` of 64 queries each share blocks of `tile_n` keys, of which `stages` are in flight."""

    warpgroups: int
    tile_n: int
    stages: int
    ping_pong: bool = False  # the warpgroups issue their products in turn
    persistent: bool = False  # a program for each multiprocessor takes tiles in turn

    @property
    def tile_m(self) -> int:
        return 64 * self.warpgroups

    def shared_memory(self, dim: int, dim_v: int) -> int:
        """Bytes of tiles of q, k, v and out at padded dims, in 16-bit numbers."""
        return 2 * (self.tile_m + self.stages * self.tile_n) * (dim + dim_v)

    @property
    def registers(self) -> int:
        """Registers of a thread when the kernel starts; computing warps then take 240 or 160, the loading one 24 or 32.

        65,536 of a multiprocessor, in warpgroups of 128 threads: 168 * 3 or 128 * 4.
        """
        return 168 if self.warpgroups == 2 else 128


# (head dim, kind of problem) -> Config; bf16, H200, best of 2 to 5 candidates over full and causal.
TABLE: dict[tuple[int, str], Config] = {
    # Softmax takes as long as the products at dim 64: three warpgroups hide more of it, and taking turns gave 9 %.
    (64, "long"): Config(3, 128, 3, ping_pong=True, persistent=True),
    # 192 queries would leave more of a short sequence's last tile, and of a causal diagonal, unused.
    (64, "short"): Config(2, 128, 3, ping_pong=True, persistent=True),
    # With 160 registers of a thread, as three warpgroups leave, a modified score spills.
    (64, "modified"): Config(2, 128, 3, persistent=True),
    # Taking turns changed nothing (1 %), nor did a third stage.
    (128, "long"): Config(2, 128, 2, persistent=True),
    (128, "short"): Config(2, 128, 2, persistent=True),
    (128, "modified"): Config(2, 128, 2, persistent=True),
    # 64 keys: 32 KiB of K and 32 of V in each of two stages, and 64 of Q, are all that fit.
    (256, "long"): Config(2, 64, 2, persistent=True),
    (256, "short"): Config(2, 64, 2, persistent=True),
    (256, "modified"): Config(2, 64, 2, persistent=True),
}


def padded(dim: int) -> int:
    """The width of a tile in shared memory: 64, 128 or 256."""
    return max(64, 1 << (dim - 1).bit_length())


def modifies(problem: Problem) -> bool:
    """Whether scores change before the softmax; a scale that is not positive goes the same way."""
    return problem.scale <= 0 or bool(set(problem.score_parts) - {"sink"})


def kind(problem: Problem) -> str:
    if modifies(problem):
        return "modified"
    return "short" if problem.seqlen_q <= (4096 if problem.mask_parts else 1024) else "long"


def config(problem: Problem) -> Config:
    return TABLE[max(padded(problem.dim), padded(problem.dim_v)), kind(problem)]
